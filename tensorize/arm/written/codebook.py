"""A span of codes with four codebooks and one row of x on Arm, by `arm_books_asm`.

The instructions come into the module as a function of LLVM IR (TVM's ``pragma_import_llvm``) around
inline assembly, whose constants LLVM keeps in registers from span to span.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from apq_tvm.tensorize.arm.quads import ORDERS
from apq_tvm.tensorize.arm.span import instruction_name
from apq_tvm.tensorize.arm.written.codebook_asm import (
    POINTERS,
    SCRATCH,
    Span,
    Style,
    constants,
    fixed,
    places,
    pointers,
    registers,
)
from apq_tvm.tensorize.arm.written.codebook_quads_asm import Quads3
from apq_tvm.tensorize.arm.written.loads import TARGET
from apq_tvm.tensorize.meaning.codebook_quads import QUAD, SPAN_QUADS, BookDot
from apq_tvm.tensorize.meaning.lookup_span import SpanDot, SpanOperands, span_pair
from apq_tvm.tensorize.meaning.unit_spans import BookUnitsDot
from apq_tvm.tensorize.registry import register

SPAN = QUAD * SPAN_QUADS
"""k of a span."""

_ARGUMENTS = (*POINTERS, "table", "y")


def is_written(dot: SpanDot) -> bool:
    """Whether there is an intrinsic here."""
    if dot.m != 1 or dot.k != SPAN:
        return False
    if isinstance(dot, BookDot):
        return True
    return isinstance(dot, BookUnitsDot) and (dot.bits, dot.books, dot.group) == (4, 4, 16)


def written_intrinsic(dot: SpanDot, style: Style) -> str:
    """Register (once) and name the dot product of a whole span with one row of x by ``sdot``.

    Parameters
    ----------
    dot : SpanDot
        Which `is_written`.
    style : Style
        Without SVE where codes have 4 bits; with long vectors only where they have 3. Which
        vectors there are is looked up then when the program runs.

    Returns
    -------
    str
        The intrinsic's name. Its `xs` and `extra` are those of `arm_lookup.books_intrinsic`.
    """
    assert isinstance(dot, BookDot | BookUnitsDot)
    names = {"_in_order": style.in_order, "_slots": style.slots, "_long": style.long}
    kind = "".join(name for name, has in names.items() if has)
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

    return register(name, lambda: span_pair(dot, implement))


def _function(dot: BookDot | BookUnitsDot, style: Style, name: str) -> str:
    """LLVM IR of ``void name(codes, subs, index, scales, x, xs, extra, table, y)``."""
    module = TARGET
    if places(dot.bits):
        values = places(dot.bits)
        module += f"@{name}_places = linkonce_odr hidden unnamed_addr constant "
        module += f"[{len(values)} x i8] [{', '.join(f'i8 {v}' for v in values)}], align 16\n"
    if not style.long:
        return module + _define(dot, style, name, f"{name}_places")
    # How long vectors are a program knows only when it runs.
    short = replace(style, long=False)
    module += _define(dot, short, f"{name}_short", f"{name}_places")
    return module + _define(dot, style, name, f"{name}_places")


def _define(dot: BookDot | BookUnitsDot, style: Style, name: str, memory: str) -> str:
    """One function, with constants in `memory`; with long vectors it calls one for short ones.

    TVM has both inlined.
    """
    bits, floats, span = dot.bits, "<4 x float>", Quads3 if dot.bits == 3 else Span
    arguments = ", ".join(f"ptr %{n}" for n in _ARGUMENTS)
    lines = [f"define linkonce_odr void @{name}({arguments}) alwaysinline {{"]
    lines += _table_lines(dot, style)
    if style.long:
        lines += [
            "  %vscale = call i32 @llvm.vscale.i32()",
            "  %is = icmp ugt i32 %vscale, 1",
            "  br i1 %is, label %long, label %short",
            "short:",
            f"  call void @{name}_short({arguments})",
            "  ret void",
            "long:",
        ]
    lines.append(f"  %a = load {floats}, ptr %y, align 16")
    wanted, given = constants(bits, style), fixed(bits, style)
    operands = [f"ptr %{n}" if n in POINTERS else f"ptr @{memory}" for n in pointers(bits)]
    kind = _LONG if style.long else _SHORT
    for n, v in wanted.items():
        operands.append(f"{kind} %{n}" if v is None else f"{_SHORT} {_bytes(v)}")
    kinds = ["=w", *["r"] * len(pointers(bits))]
    kinds += [f"{{v{given[n]}}}" if n in given else "w" for n in wanted] + ["0"]
    kinds += [f"~{{v{i}}}" for i in range(registers(bits, style))]
    kinds += [f"~{{x{i}}}" for i in (SCRATCH[:1] if style.sve else SCRATCH)]
    kinds += ["~{p0}"] if style.sve else []
    text = "\\0A".join(span(bits, style).lines())
    call = f'call {floats} asm "{text}", "{",".join(kinds)}"'
    lines.append(f"  %r = {call}({', '.join([*operands, f'{floats} %a'])})")
    lines += [f"  store {floats} %r, ptr %y, align 16", "  ret void", "}", ""]
    if style.long:
        lines += [
            "declare i32 @llvm.vscale.i32()",
            f"declare {_LONG} {_INSERT}({_LONG}, {_PAIR}, i64)",
        ]
    return "\n".join([*lines, ""])


_SHORT, _PAIR, _LONG = "<16 x i8>", "<32 x i8>", "<vscale x 16 x i8>"
_INSERT = "@llvm.vector.insert.nxv16i8.v32i8"


def _table_lines(dot: BookDot | BookUnitsDot, style: Style) -> list[str]:
    """``%table0`` and on: entries of ``%table`` in their orders, less the offset."""
    vectors = f"<{dot.entries} x i8>"
    lines = [
        f"  %raised = load {vectors}, ptr %table, align 16",
        f"  %centred = sub {vectors} %raised, {_bytes([dot.offset] * dot.entries)}",
    ]
    for i, order in enumerate(_tables(dot.bits, style)):
        name = f"%part{i}" if style.long else f"%table{i}"
        lanes = ", ".join(f"i32 {n}" for n in order)
        pair = f"{vectors} %centred, {vectors} poison"
        lines.append(f"  {name} = shufflevector {pair}, <{len(order)} x i32> <{lanes}>")
        if style.long:
            whole = f"{_LONG} poison, {_PAIR} {name}, i64 0"
            lines.append(f"  %table{i} = call {_LONG} {_INSERT}({whole})")
    return lines


def _tables(bits: int, style: Style) -> list[list[int]]:
    """Entries of every register: with 2 and 3 bits by book and code, then by code and book."""
    if bits == 2:
        return [list(range(16)), [i % 4 * 4 + i // 4 for i in range(16)]]
    if bits == 3 and style.long:
        return list(ORDERS)
    orders = ORDERS if bits == 3 else [list(range(64))]
    return [order[at : at + 16] for order in orders for at in range(0, len(order), 16)]


def _bytes(values: list[int]) -> str:
    """A constant of LLVM IR without its type."""
    return "<" + ", ".join(f"i8 {v}" for v in values) + ">"
