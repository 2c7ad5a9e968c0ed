"""The instructions of `apq_tvm.tensorize.arm_in_order`, in order."""

from __future__ import annotations

from apq_tvm.tensorize.arm_loads import TARGET
from apq_tvm.tensorize.fold import Fold

STREAMS = 4
"""Row blocks of one product."""

_BLOCKS = range(STREAMS)
_X, _MASK, _CLOBBERED = 24, 26, 28

# General registers: codes of each block; x, starts, starts + 64, factors; scales; offsets; chunks
# left; steps of codes and x, which are 0 once the last chunk has begun: what is loaded for the next
# one is then the last one again.
_CODES, _INPUTS, _SCALES, _OFFSETS, _SCALE_OFFSETS, _LEFT = 2, 6, 10, 11, 14, 17
_CODE_STEP, _X_STEP = 20, 21
_GENERAL = (*range(_CODES, _LEFT + 1), _CODE_STEP, _X_STEP)


def function(fold: Fold, chunks: int, name: str) -> str:
    """LLVM IR of ``void name(codes, x, starts, factors, scales, y)``, to be inlined.

    The sums of y are in memory for LLVM, which keeps them in registers.
    """
    vector = "<4 x float>"
    four = "{" + ", ".join([vector] * STREAMS) + "}"
    clobbers = [f"~{{v{i}}}" for i in range(_CLOBBERED)]
    clobbers += [f"~{{x{i}}}" for i in _GENERAL] + ["~{cc}", "~{memory}"]
    constraints = ",".join(["=w"] * 4 + ["r"] * 5 + ["0", "1", "2", "3"] + clobbers)
    assembly = "\\0A".join(_program(fold, chunks))
    names = ("codes", "x", "starts", "factors", "scales")
    arguments = ", ".join([f"ptr %{n}" for n in names] + [f"{vector} %a{s}" for s in _BLOCKS])
    lines = [
        f"define linkonce_odr void @{name}({', '.join(f'ptr %{n}' for n in names)}, ptr %y)",
        "alwaysinline {",
    ]
    for s in _BLOCKS:
        lines.append(f"  %p{s} = getelementptr i8, ptr %y, i64 {16 * s}")
        lines.append(f"  %a{s} = load {vector}, ptr %p{s}, align 16")
    lines.append(f'  %r = call {four} asm sideeffect "{assembly}", "{constraints}"({arguments})')
    for s in _BLOCKS:
        lines.append(f"  %b{s} = extractvalue {four} %r, {s}")
        lines.append(f"  store {vector} %b{s}, ptr %p{s}, align 16")
    return TARGET + "\n".join([*lines, "  ret void", "}", ""])


def _program(fold: Fold, chunks: int) -> list[str]:
    """$0 to $3 are the sums of y, $4 to $8 the pointers."""
    stride = chunks * fold.unit.nbytes
    lines = [f"mov x{_CODES}, $4", *_set(_LEFT, stride)]
    lines += [f"add x{_CODES + s}, x{_CODES + s - 1}, x{_LEFT}" for s in _BLOCKS[1:]]
    for i, source in enumerate(("$5", "$6", "$6", "$7")):
        lines.append(f"mov x{_INPUTS + i}, {source}")
    lines.append(f"add x{_INPUTS + 2}, x{_INPUTS + 2}, #64")
    lines.append(f"mov x{_SCALES}, $8")
    lines += [f"mov x{_OFFSETS + i}, #{16 * (i + 1)}" for i in range(3)]
    for s in _BLOCKS[1:]:
        lines += _set(_SCALE_OFFSETS + s - 1, s * chunks * 8)
    lines += [*_set(_LEFT, chunks), f"mov x{_CODE_STEP}, #{fold.unit.nbytes}"]
    lines += [f"mov x{_X_STEP}, #32", f"movi v{_MASK}.16b, #{(1 << fold.width) - 1}"]
    begin, body = _high_first() if fold.parts == 2 else _low_first()
    return [*lines, *begin, *_count(), "1:", *body, "b.cs 1b"]


def _set(register: int, value: int) -> list[str]:
    low, high = value & 0xFFFF, value >> 16
    return [f"mov x{register}, #{low}"] + ([f"movk x{register}, #{high}, lsl #16"] if high else [])


def _high_first() -> tuple[list[str], list[str]]:
    """Two parts: 16 vectors of codes 0-15, sums of the high part 16-19, of the low one 20-23.

    What comes before the loop, and the loop.
    """
    raw = [(i, s) for i in range(4) for s in _BLOCKS]
    loads = [_load(STREAMS * i + s, _CODES + s, i) for i, s in raw]
    first = [*loads[:4], _load(_X + 1, _INPUTS, 1)]
    high = [_product(16, 4 * i + s, 4 + i) for i, s in raw]
    low = [_product(20, 4 * i + s, i) for i, s in raw]
    low_starts = [_start(20 + s, s, 0) for s in _BLOCKS]
    zeros = [f"movi v{16 + s}.2d, #0" for s in _BLOCKS]
    lines = [*zeros[:3], *_alternate(zeros[3:], loads[4:5])]
    lines += _alternate(high, [*loads[5:], _load(_X, _INPUTS, 0), *low_starts])
    lines += _next_chunk()
    lines += [f"and v{n}.16b, v{n}.16b, v{_MASK}.16b" for n in range(16)]
    late = first[-1:] + first[:4] + [_start(4 + s, s, 1) for s in _BLOCKS]
    late += [_scale(8 + s, s) for s in _BLOCKS]
    lines += low[:3] + _alternate(low[3:], late)
    total = [f"mla v{16 + s}.4s, v{20 + s}.4s, v{_MASK + 1}.4s" for s in _BLOCKS]
    lines += _alternate(total, [_load(12, _INPUTS + 3, 0)])
    lines += [f"fcvtl v{8 + s}.4s, v{8 + s}.4h" for s in _BLOCKS]
    lines += [f"fmla v{4 + s}.4s, v{16 + s}.4s, v12.4s" for s in _BLOCKS]
    starts, scales = _advance()
    count = _count()
    lines += count[:1] + starts + scales + count[1:]
    lines += [f"fmla ${s}.4s, v{8 + s}.4s, v{4 + s}.4s" for s in _BLOCKS]
    return [*first, f"movi v{_MASK + 1}.4s, #16"], lines


def _low_first() -> tuple[list[str], list[str]]:
    """Four parts: 8 vectors of codes 0-7, masked 8-15, sums 16-19, constants 20-23.

    One register of masks holds 3, 63 and then the factor, the other one 15.
    """
    raw = [(i, s) for i in range(2) for s in _BLOCKS]
    loads = [_load(STREAMS * i + s, _CODES + s, i) for i, s in raw]
    begin = [_start(16 + s, s, 0) for s in _BLOCKS]
    first = [*loads, _load(_X, _INPUTS, 0), *begin, f"movi v{_MASK + 1}.16b, #15"]
    constants = [_start(20 + s, s, 1) for s in _BLOCKS]
    late = [[_load(_X + 1, _INPUTS, 1), *constants[:3]], constants[3:]]
    late.append([_load(_MASK, _INPUTS + 3, 0)])
    starts, rest = _advance()
    count = _count()
    lines: list[str] = []
    for part, gap in enumerate(([], _next_chunk() + count[:1], starts)):
        mask = _MASK + 1 if part == 1 else _MASK
        lines += gap + [f"and v{8 + n}.16b, v{n}.16b, v{mask}.16b" for n in range(8)]
        lines += _shifts() if part else [f"movi v{_MASK}.16b, #63"]
        sums = [_product(16, 8 + 4 * i + s, 2 * part + i) for i, s in raw]
        if part == 2:
            lines += _alternate(sums[:4], late[2])
            lines += _alternate(sums[4:], [_scale(8 + s, s) for s in _BLOCKS])
        else:
            lines += _alternate(sums, late[part])
    lines += rest + count[1:] + _shifts()
    sums = [_product(16, 4 * i + s, 6 + i) for i, s in raw]
    lines += _alternate(sums, loads)
    lines += _alternate([f"fcvtl v{8 + s}.4s, v{8 + s}.4h" for s in _BLOCKS], first[8:9])
    lines += [f"fmla v{20 + s}.4s, v{16 + s}.4s, v{_MASK}.4s" for s in _BLOCKS]
    lines.append(f"movi v{_MASK}.16b, #3")
    sums = [f"fmla ${s}.4s, v{8 + s}.4s, v{20 + s}.4s" for s in _BLOCKS]
    return first, lines + _alternate(sums, begin)


def _shifts() -> list[str]:
    return [f"shl v{16 + s}.4s, v{16 + s}.4s, #2" for s in _BLOCKS]


def _count() -> list[str]:
    """Is the next chunk the last one, or (no carry) is there none?"""
    lines = [f"subs x{_LEFT}, x{_LEFT}, #1"]
    return lines + [f"csel x{r}, x{r}, xzr, ne" for r in (_CODE_STEP, _X_STEP)]


def _next_chunk() -> list[str]:
    """Codes and x of the next chunk; of this one again if it is the last."""
    lines = [f"add x{_CODES + s}, x{_CODES + s}, x{_CODE_STEP}" for s in _BLOCKS]
    return [*lines, f"add x{_INPUTS}, x{_INPUTS}, x{_X_STEP}"]


def _load(vector: int, base: int, sixteens: int) -> str:
    offset = f"x{_OFFSETS + sixteens - 1}" if sixteens else "xzr"
    return f"ldr q{vector}, [x{base}, {offset}]"


def _start(vector: int, block: int, index: int) -> str:
    """What a block's sum (0) or product with the scale of x (1) starts from."""
    at = 2 * block + index
    return _load(vector, _INPUTS + 1 + at // 4, at % 4)


def _scale(vector: int, block: int) -> str:
    offset = f"x{_SCALE_OFFSETS + block - 1}" if block else "xzr"
    return f"ldr d{vector}, [x{_SCALES}, {offset}]"


def _product(sums: int, codes: int, vector: int) -> str:
    four = f"v{_X + vector // 4}.4b[{vector % 4}]"
    return f"sdot v{sums + codes % STREAMS}.4s, v{codes}.16b, {four}"


def _advance() -> tuple[list[str], list[str]]:
    """The other pointers: of starts, and of factors and scales."""
    starts = [f"add x{r}, x{r}, x{_X_STEP}, lsl #2" for r in (_INPUTS + 1, _INPUTS + 2)]
    rest = ((_INPUTS + 3, 16), (_SCALES, 8))
    return starts, [f"add x{register}, x{register}, #{step}" for register, step in rest]


def _alternate(first: list[str], second: list[str]) -> list[str]:
    """One of each in turn, then what is left."""
    n = min(len(first), len(second))
    both = [line for pair in zip(first[:n], second[:n], strict=True) for line in pair]
    return both + first[n:] + second[n:]
