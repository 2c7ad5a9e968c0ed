"""The instructions of `apq_tvm.tensorize.arm.written.in_order`, in order."""

from __future__ import annotations

from apq_tvm.tensorize.arm.written.call import asm_call
from apq_tvm.tensorize.meaning.fold import Fold

STREAMS = 4
"""Row blocks of one product."""

_BLOCKS = range(STREAMS)
_X, _MASK, _CLOBBERED = 24, 26, 28

# General registers: codes of each block; x, starts, factors; scales of each block; offsets 16 to
# 112; chunks left, as a negative number, by which factors and scales are indexed from the last one;
# the step of codes, which is 0 once the last chunks have begun: what is loaded for the next ones is
# then the last ones again.
_CODES, _X_AT, _STARTS, _FACTORS, _SCALES = 2, 6, 7, 8, 9
_OFFSETS, _LEFT, _STEP = (*range(13, 18), 20, 21), 22, 23
_GENERAL = (*range(_CODES, 18), *range(20, _STEP + 1))


def function(fold: Fold, chunks: int, name: str, units: int = 1) -> str:
    """LLVM IR of ``void name(codes, x, starts, factors, scales, y)``, to be inlined.

    The sums of y are in memory for LLVM, which keeps them in registers.
    """
    vector = "<4 x float>"
    four = "{" + ", ".join([vector] * STREAMS) + "}"
    clobbers = [f"~{{v{i}}}" for i in range(_CLOBBERED)]
    clobbers += [f"~{{x{i}}}" for i in _GENERAL] + ["~{cc}", "~{memory}"]
    kinds = ["=w"] * 4 + ["r"] * 5 + ["0", "1", "2", "3"] + clobbers
    program = _program(fold, chunks, units)
    names = ("codes", "x", "starts", "factors", "scales")
    arguments = [f"ptr %{n}" for n in names] + [f"{vector} %a{s}" for s in _BLOCKS]
    lines = [
        f"define linkonce_odr void @{name}({', '.join(f'ptr %{n}' for n in names)}, ptr %y)",
        "alwaysinline {",
    ]
    for s in _BLOCKS:
        lines.append(f"  %p{s} = getelementptr i8, ptr %y, i64 {16 * s}")
        lines.append(f"  %a{s} = load {vector}, ptr %p{s}, align 16")
    lines.append(f"  %r = {asm_call(four, program, kinds, arguments, 'sideeffect ')}")
    for s in _BLOCKS:
        lines.append(f"  %b{s} = extractvalue {four} %r, {s}")
        lines.append(f"  store {vector} %b{s}, ptr %p{s}, align 16")
    return "\n".join([*lines, "  ret void", "}", ""])


def _program(fold: Fold, chunks: int, units: int) -> list[str]:
    """$0 to $3 are the sums of y, $4 to $8 the pointers."""
    unroll = 2 if fold.parts == 2 and chunks % 2 == 0 and units == 1 else 1
    stride = chunks * units * fold.unit.nbytes
    lines = [f"mov x{_CODES}, $4", *_set(_LEFT, stride)]
    lines += [f"add x{_CODES + s}, x{_CODES + s - 1}, x{_LEFT}" for s in _BLOCKS[1:]]
    lines += [f"mov x{_X_AT}, $5", f"mov x{_STARTS}, $6"]
    lines += [*_set(_LEFT, (chunks - unroll) * 16), f"add x{_FACTORS}, $7, x{_LEFT}"]
    lines += [*_set(_LEFT, (chunks - unroll) * 8), f"add x{_SCALES}, $8, x{_LEFT}"]
    lines += _set(_LEFT, chunks * 8)
    lines += [f"add x{_SCALES + s}, x{_SCALES + s - 1}, x{_LEFT}" for s in _BLOCKS[1:]]
    lines += [f"mov x{r}, #{16 * (i + 1)}" for i, r in enumerate(_OFFSETS)]
    lines += [*_set(_LEFT, chunks), f"neg x{_LEFT}, x{_LEFT}"]
    lines.append(f"mov x{_STEP}, #{min(2, unroll * units) * fold.unit.nbytes}")
    lines.append(f"movi v{_MASK}.16b, #{(1 << fold.width) - 1}")
    begin, body = _high_first(unroll, units) if fold.parts == 2 else _low_first()
    return [*lines, *begin, *_count(unroll), "1:", *body, "b.le 1b"]


def _set(register: int, value: int) -> list[str]:
    low, high = value & 0xFFFF, value >> 16
    return [f"mov x{register}, #{low}"] + ([f"movk x{register}, #{high}, lsl #16"] if high else [])


# After which of 16 products (and 4 sums, in the second list) each load of `_high_first` stands,
# as a search with llvm-mca found it.
_HIGH_PLACES = (1, 4, 2, 3, 7, 4, 3, 3, 10, 0, 14, 13, 12, 15, 13)
_LOW_PLACES = (9, 4, 11, 2, 5, 8, 9, 18, 17, 10, 13, 14, 15, 16)


def _high_first(unroll: int, units: int) -> tuple[list[str], list[str]]:
    """Two parts: 16 vectors of codes 0-15, sums of the high part 16-19, of the low one 20-23.

    What comes before the loop, and the loop over chunks of one unit or of several, with two units
    between steps of the pointers. Some codes are loaded in pairs, for fewer instructions: a pair
    takes two cycles more than two loads.
    """
    first = [_load(s, _CODES + s, 0) for s in _BLOCKS]
    begin = [*first, _load(_X + 1, _X_AT, 1), f"movi v{_MASK + 1}.4s, #16"]
    count, body = unroll * units, []
    for i in range(count):
        last = i + 1 == count
        step = _next_chunk(1) if last else _next_pair() if i % 2 else []
        body += _high_of_unit(i % 2, i % units == 0) + step
        body += _low_of_unit(not step, (i + 1) % units == 0)
        if (i + 1) % units == 0:
            body += _scaled_sums(last)
    return begin, body


def _high_of_unit(index: int, starts: bool) -> list[str]:
    """Products with codes as they lie; the first ones of a chunk start its sums."""
    raw, code = [(i, s) for i in range(4) for s in _BLOCKS], 4 * index
    loads = [_load(4 + s, _CODES + s, code + 1) for s in _BLOCKS]
    loads += [f"ldp q{8 + s}, q{12 + s}, [x{_CODES + s}, #{16 * (code + 2)}]" for s in range(2)]
    loads += [_load(4 * i + s, _CODES + s, code + i) for i in (2, 3) for s in (2, 3)]
    loads.append(_load(_X, _X_AT, 2 * index))
    loads += [_start(20 + s, s, 0) for s in _BLOCKS] if starts else []
    zeros = [f"movi v{16 + s}.2d, #0" for s in _BLOCKS] if starts else []
    products = [_product(16, 4 * i + s, 4 + i) for i, s in raw]
    return zeros + _placed(products, loads, _HIGH_PLACES)


def _low_of_unit(same_step: bool, ends: bool) -> list[str]:
    """Products with masked codes, and the first loads of the next unit; sums of a whole chunk."""
    code, x = (4, 3) if same_step else (0, 1)
    lines = [f"and v{n}.16b, v{n}.16b, v{_MASK}.16b" for n in range(16)]
    loads = [_load(_X + 1, _X_AT, x), *(_load(s, _CODES + s, code) for s in _BLOCKS)]
    products = [_product(20, 4 * i + s, i) for i in range(4) for s in _BLOCKS]
    if ends:
        loads += [_start(4 + s, s, 1) for s in _BLOCKS]
        loads += [*(_scale(8 + s, s) for s in _BLOCKS), _factor(12)]
        products += [f"mla v{16 + s}.4s, v{20 + s}.4s, v{_MASK + 1}.4s" for s in _BLOCKS]
    return lines + _placed(products, loads, _LOW_PLACES)


def _scaled_sums(last: bool) -> list[str]:
    """Sums of a chunk times its scales, and the step to the next one."""
    lines = [f"fcvtl v{8 + s}.4s, v{8 + s}.4h" for s in _BLOCKS]
    lines += [f"fmla v{4 + s}.4s, v{16 + s}.4s, v12.4s" for s in _BLOCKS]
    count = _count()
    lines += [count[0], f"add x{_STARTS}, x{_STARTS}, #128", *(count[1:] if last else [])]
    return lines + [f"fmla ${s}.4s, v{8 + s}.4s, v{4 + s}.4s" for s in _BLOCKS]


def _low_first() -> tuple[list[str], list[str]]:
    """Four parts: 8 vectors of codes 0-7, masked 8-15, sums 16-19, constants 20-23.

    One register of masks holds 3, 63 and then the factor, the other one 15.
    """
    raw = [(i, s) for i in range(2) for s in _BLOCKS]
    loads = [_load(STREAMS * i + s, _CODES + s, i) for i, s in raw]
    begin = [_start(16 + s, s, 0) for s in _BLOCKS]
    first = [*loads, _load(_X, _X_AT, 0), *begin, f"movi v{_MASK + 1}.16b, #15"]
    constants = [_start(20 + s, s, 1) for s in _BLOCKS]
    late = [[_load(_X + 1, _X_AT, 1), *constants[:3]], constants[3:], [_factor(_MASK)]]
    count = _count()
    lines: list[str] = []
    starts = f"add x{_STARTS}, x{_STARTS}, x{_STEP}, lsl #2"
    for part, gap in enumerate(([], _next_chunk(0), [starts])):
        mask = _MASK + 1 if part == 1 else _MASK
        lines += gap + [f"and v{8 + n}.16b, v{n}.16b, v{mask}.16b" for n in range(8)]
        lines += _shifts() if part else [f"movi v{_MASK}.16b, #63"]
        sums = [_product(16, 8 + 4 * i + s, 2 * part + i) for i, s in raw]
        if part == 2:
            lines += _alternate(sums[:4], late[2])
            lines += _alternate(sums[4:], [_scale(8 + s, s) for s in _BLOCKS])
        else:
            lines += _alternate(sums, late[part])
    lines += count + _shifts()
    sums = [_product(16, 4 * i + s, 6 + i) for i, s in raw]
    lines += _alternate(sums, loads)
    lines += _alternate([f"fcvtl v{8 + s}.4s, v{8 + s}.4h" for s in _BLOCKS], first[8:9])
    lines += [f"fmla v{20 + s}.4s, v{16 + s}.4s, v{_MASK}.4s" for s in _BLOCKS]
    lines.append(f"movi v{_MASK}.16b, #3")
    sums = [f"fmla ${s}.4s, v{8 + s}.4s, v{20 + s}.4s" for s in _BLOCKS]
    return first, lines + _alternate(sums, begin)


def _shifts() -> list[str]:
    return [f"shl v{16 + s}.4s, v{16 + s}.4s, #2" for s in _BLOCKS]


def _count(chunks: int = 1) -> list[str]:
    """Are the next chunks the last ones, or (greater than 0) are there none?"""
    return [f"adds x{_LEFT}, x{_LEFT}, #{chunks}", f"csel x{_STEP}, x{_STEP}, xzr, ne"]


def _next_chunk(shift: int) -> list[str]:
    """Codes and x of the next chunk; of this one again if it is the last.

    A unit of codes has ``2^shift`` times the 32 bytes of x.
    """
    lines = [f"add x{_CODES + s}, x{_CODES + s}, x{_STEP}" for s in _BLOCKS]
    return [*lines, f"add x{_X_AT}, x{_X_AT}, x{_STEP}" + (f", lsr #{shift}" if shift else "")]


def _next_pair() -> list[str]:
    """Codes and x of the next two units of a chunk."""
    lines = [f"add x{_CODES + s}, x{_CODES + s}, #128" for s in _BLOCKS]
    return [*lines, f"add x{_X_AT}, x{_X_AT}, #64"]


def _load(vector: int, base: int, sixteens: int) -> str:
    offset = f"x{_OFFSETS[sixteens - 1]}" if sixteens else "xzr"
    return f"ldr q{vector}, [x{base}, {offset}]"


def _start(vector: int, block: int, index: int) -> str:
    """What a block's sum (0) or product with the scale of x (1) starts from."""
    return _load(vector, _STARTS, 2 * block + index)


def _factor(vector: int) -> str:
    return f"ldr q{vector}, [x{_FACTORS}, x{_LEFT}, lsl #4]"


def _scale(vector: int, block: int) -> str:
    return f"ldr d{vector}, [x{_SCALES + block}, x{_LEFT}, lsl #3]"


def _product(sums: int, codes: int, vector: int) -> str:
    four = f"v{_X + vector // 4}.4b[{vector % 4}]"
    return f"sdot v{sums + codes % STREAMS}.4s, v{codes}.16b, {four}"


def _placed(lines: list[str], loads: list[str], places: tuple[int, ...]) -> list[str]:
    """Every load after the line of its place; there may be fewer loads than places."""
    result = []
    for i, line in enumerate(lines):
        result += [line, *(x for x, place in zip(loads, places, strict=False) if place == i)]
    return result


def _alternate(first: list[str], second: list[str]) -> list[str]:
    """One of each in turn, then what is left."""
    n = min(len(first), len(second))
    both = [line for pair in zip(first[:n], second[:n], strict=True) for line in pair]
    return both + first[n:] + second[n:]
