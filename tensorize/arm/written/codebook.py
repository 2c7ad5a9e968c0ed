"""A span of codes of 3 bits with four codebooks and one row of x on Arm, by `codebook_asm`."""

from __future__ import annotations

from dataclasses import replace

from apq_tvm.tensorize.arm.spans.quads import ORDERS
from apq_tvm.tensorize.arm.spans.span import instruction_name
from apq_tvm.tensorize.arm.written.call import asm_call, call_function
from apq_tvm.tensorize.arm.written.codebook_asm import (
    BITS,
    POINTERS,
    SCRATCH,
    Span,
    Style,
    places,
)
from apq_tvm.tensorize.meaning.codebook_quads import SPAN_QUADS, BookDot
from apq_tvm.tensorize.meaning.spans.lookup import SpanDot, SpanOperands, span_pair
from apq_tvm.tensorize.registry import register

_ARGUMENTS = (*POINTERS[:-1], "table", "y")


def is_written(dot: SpanDot) -> bool:
    """Whether there is an intrinsic here: for whole spans and one row of x."""
    if not isinstance(dot, BookDot) or dot.bits != BITS:
        return False
    return dot.m == 1 and dot.quads == SPAN_QUADS


def written_intrinsic(dot: SpanDot, style: Style) -> str:
    """Register (once) and name the dot product of a whole span with one row of x by ``sdot``.

    Parameters
    ----------
    dot : SpanDot
        Which `is_written`.
    style : Style
        With long vectors a program looks up when it runs how long they are.

    Returns
    -------
    str
        The intrinsic's name. Its `xs` and `extra` are those of
        `spans.codebook_quads.books_intrinsic`.
    """
    names = {"_in_order": style.in_order, "_several": style.several, "_long": style.long}
    kind = "".join(name for name, has in names.items() if has)
    name = f"apq_{instruction_name(True, style.sve)}{kind}_1x4x{dot.k}_s8lut{BITS}b4f32"

    def implement(o: SpanOperands) -> None:
        others = {"scales": o.scales, "x": o.x, "xs": o.xs, "extra": o.extra, "y": o.acc}
        buffers = {**o.arrays, **others}
        call_function(name, _functions(dot, style, name), (buffers[n] for n in _ARGUMENTS))

    return register(name, lambda: span_pair(dot, implement))


def _functions(dot: SpanDot, style: Style, name: str) -> str:
    """LLVM IR of ``void name(codes, subs, index, scales, x, xs, extra, table, y)``."""
    values = places()
    source = f"@{name}_places = linkonce_odr hidden unnamed_addr constant "
    source += f"[{len(values)} x i8] [{', '.join(f'i8 {v}' for v in values)}], align 16\n"
    if style.long:
        short = replace(style, long=False)
        source += _define(dot, short, f"{name}_short", f"{name}_places")
    return source + _define(dot, style, name, f"{name}_places")


def _define(dot: SpanDot, style: Style, name: str, memory: str) -> str:
    """One function, with constants in `memory`; with long vectors it calls one for short ones.

    TVM has both inlined.
    """
    floats = "<4 x float>"
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
    wanted, given = style.constants, style.fixed
    operands = [*(f"ptr %{n}" for n in POINTERS[:-1]), f"ptr @{memory}"]
    kind = _LONG if style.long else _SHORT
    for n, v in wanted.items():
        operands.append(f"{kind} %{n}" if v is None else f"{_SHORT} {_bytes(v)}")
    kinds = ["=w", *["r"] * len(POINTERS)]
    kinds += [f"{{v{given[n]}}}" if n in given else "w" for n in wanted] + ["0"]
    kinds += [f"~{{v{i}}}" for i in range(style.registers)]
    kinds += [f"~{{x{i}}}" for i in (SCRATCH[:1] if style.sve else SCRATCH)]
    kinds += ["~{p0}"] if style.sve else []
    called = asm_call(floats, Span(style).lines(), kinds, [*operands, f"{floats} %a"])
    lines += [f"  %r = {called}", f"  store {floats} %r, ptr %y, align 16", "  ret void", "}", ""]
    if style.long:
        lines += [
            "declare i32 @llvm.vscale.i32()",
            f"declare {_LONG} {_INSERT}({_LONG}, {_PAIR}, i64)",
        ]
    return "\n".join([*lines, ""])


_SHORT, _PAIR, _LONG = "<16 x i8>", "<32 x i8>", "<vscale x 16 x i8>"
_INSERT = "@llvm.vector.insert.nxv16i8.v32i8"


def _table_lines(dot: SpanDot, style: Style) -> list[str]:
    """``%table0`` and on: entries of ``%table`` in their orders, less the offset."""
    vectors = f"<{dot.entries} x i8>"
    lines = [
        f"  %raised = load {vectors}, ptr %table, align 16",
        f"  %centred = sub {vectors} %raised, {_bytes([dot.offset] * dot.entries)}",
    ]
    for i, order in enumerate(_tables(style)):
        name = f"%part{i}" if style.long else f"%table{i}"
        lanes = ", ".join(f"i32 {n}" for n in order)
        pair = f"{vectors} %centred, {vectors} poison"
        lines.append(f"  {name} = shufflevector {pair}, <{len(order)} x i32> <{lanes}>")
        if style.long:
            whole = f"{_LONG} poison, {_PAIR} {name}, i64 0"
            lines.append(f"  %table{i} = call {_LONG} {_INSERT}({whole})")
    return lines


def _tables(style: Style) -> list[list[int]]:
    """Entries of every register."""
    if style.long:
        return list(ORDERS)
    return [order[at : at + 16] for order in ORDERS for at in (0, 16)]


def _bytes(values: list[int]) -> str:
    """A constant of LLVM IR without its type."""
    return "<" + ", ".join(f"i8 {v}" for v in values) + ">"
