"""A span of codes with four codebooks and one row of x on Arm, by `arm_books_asm`.

The instructions come into the module as a function of LLVM IR (TVM's ``pragma_import_llvm``) around
inline assembly, whose constants LLVM keeps in registers from span to span.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.tensorize.arm_books_asm import (
    POINTERS,
    SCRATCH,
    TABLES,
    Style,
    constants,
    fixed,
    program,
    registers,
)
from apq_tvm.tensorize.arm_loads import TARGET
from apq_tvm.tensorize.arm_lookup import instruction_name
from apq_tvm.tensorize.lookup_book_units import BookUnitsDot
from apq_tvm.tensorize.lookup_books import QUAD, SPAN_QUADS, BookDot
from apq_tvm.tensorize.lookup_span import SpanDot, SpanOperands, make_pair
from apq_tvm.tensorize.registry import register

SPAN = QUAD * SPAN_QUADS
"""k of a span."""

_ARGUMENTS = (*POINTERS, "table", "y")


def is_written(dot: SpanDot, in_order: bool) -> bool:
    """Whether there is an intrinsic here, and it is not slower than LLVM's order."""
    if dot.m != 1 or dot.k != SPAN:
        return False
    if isinstance(dot, BookDot):
        return dot.bits == 2 or in_order
    return isinstance(dot, BookUnitsDot) and (dot.bits, dot.books, dot.group) == (4, 4, 16)


def written_intrinsic(dot: SpanDot, style: Style) -> str:
    """Register (once) and name the dot product of a whole span with one row of x by ``sdot``.

    Parameters
    ----------
    dot : SpanDot
        Which `is_written`.
    style : Style
        Without SVE where codes have 4 bits.

    Returns
    -------
    str
        The intrinsic's name. Its `xs` and `extra` are those of `arm_lookup.books_intrinsic`.
    """
    assert isinstance(dot, BookDot | BookUnitsDot)
    kind = "_in_order" if style.in_order else "_slots" if style.slots else ""
    name = f"apq_{instruction_name(True, style.sve)}{kind}_1x4x{dot.k}_s8lut{dot.bits}b4f32"

    def implement(o: SpanOperands) -> None:
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        def address(buffer: Any) -> Any:
            return tirx.address_of(buffer[tuple(tirx.const(0, "int64") for _ in buffer.shape)])

        buffers = {**o.arrays, "scales": o.scales, "x": o.x, "xs": o.xs, "extra": o.extra}
        pointers = [address(buffers[n]) for n in _ARGUMENTS[:-1]] + [address(o.acc)]
        with b.attr(tirx.const(0, "int32"), "pragma_import_llvm", _function(dot, style, name)):
            b.evaluate(tirx.call_extern("void", name, *pointers))

    return register(name, lambda: make_pair(dot, implement))


def _function(dot: BookDot | BookUnitsDot, style: Style, name: str) -> str:
    """LLVM IR of ``void name(codes, subs, index, scales, x, xs, extra, table, y)``."""
    vectors, floats = f"<{dot.entries} x i8>", "<4 x float>"
    lines = [
        f"define linkonce_odr void @{name}({', '.join(f'ptr %{n}' for n in _ARGUMENTS)})",
        "alwaysinline {",
        f"  %raised = load {vectors}, ptr %table, align 16",
        f"  %centred = sub {vectors} %raised, {_bytes([dot.offset] * dot.entries)}",
    ]
    for i, order in enumerate(_tables(dot.bits)):
        places = ", ".join(f"i32 {n}" for n in order)
        pair = f"{vectors} %centred, {vectors} poison"
        lines.append(f"  %table{i} = shufflevector {pair}, <16 x i32> <{places}>")
    lines.append(f"  %a = load {floats}, ptr %y, align 16")
    wanted, given = constants(dot.bits, style), fixed(dot.bits)
    operands = [f"ptr %{n}" for n in POINTERS]
    operands += [f"<16 x i8> {f'%{n}' if v is None else _bytes(v)}" for n, v in wanted.items()]
    kinds = ["=w", *["r"] * len(POINTERS)]
    kinds += [f"{{v{given[n]}}}" if n in given else "w" for n in wanted] + ["0"]
    kinds += [f"~{{v{i}}}" for i in range(registers(dot.bits, style))]
    kinds += [f"~{{x{i}}}" for i in (SCRATCH if style.in_order else SCRATCH[:1])]
    text = "\\0A".join(program(dot.bits, style))
    call = f'call {floats} asm "{text}", "{",".join(kinds)}"'
    lines.append(f"  %r = {call}({', '.join([*operands, f'{floats} %a'])})")
    lines += [f"  store {floats} %r, ptr %y, align 16", "  ret void", "}", ""]
    return TARGET + "\n".join(lines)


def _tables(bits: int) -> list[list[int]]:
    """Entries of every register: with 2 bits by book and code and by code and book."""
    if bits == 2:
        return [list(range(16)), [i % 4 * 4 + i // 4 for i in range(16)]]
    return [list(range(16 * i, 16 * i + 16)) for i in range(TABLES[bits])]


def _bytes(values: list[int]) -> str:
    """A constant of LLVM IR without its type."""
    return "<" + ", ".join(f"i8 {v}" for v in values) + ">"
