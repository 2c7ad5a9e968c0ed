"""Pairs of `apq_tvm.tensorize.meaning.unit_dot`: an instruction set gives what one group needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import i64, operand, prefetch, whole
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit
from apq_tvm.tensorize.meaning.unit_dot import UnitDot
from apq_tvm.tensorize.registry import register

Expr = Any  # tvm is untyped
Buffer = Any


@dataclass(frozen=True)
class DotBuffers:
    """Buffers of one pair member: codes uint8 [bytes], x [m, 32] or [32], zeros, sums."""

    dot: UnitDot
    codes: Buffer
    x: Buffer
    zeros: Buffer | None
    acc: Buffer

    def sums_at(self, group: int, row: int) -> list[Expr]:
        """Index of all lanes of one group and row of x."""
        from tvm import tirx

        unit = self.dot.unit
        lead = ([i64(group)] if unit.groups > 1 else []) + ([i64(row)] if self.dot.m > 1 else [])
        return [*lead, tirx.Ramp(i64(0), i64(1), unit.rows)]

    def x_at(self, row: int, k: int) -> list[Expr]:
        """Index of one activation."""
        return [i64(row), i64(k)] if self.dot.m > 1 else [i64(k)]


def unit_dot_intrinsic(
    instruction: str, dot: UnitDot, implement: Callable[[DotBuffers, int], None], ahead: int = 0
) -> str:
    """Register (once) and name the dot product of one unit by an instruction.

    Parameters
    ----------
    instruction : str
        First part of the name.
    dot : UnitDot
    implement : callable
        Emits the instructions for one group of the unit.
    ahead : int
        Bytes ahead of the unit to prefetch, 0 for none.

    Returns
    -------
    str
        ``apq_<instr>_<m>x<n>x<k>_<lhs><rhs><acc>...``; operands are codes, x, [zeros,] sums.
    """

    def instructions(o: DotBuffers) -> None:
        prefetch(o.codes, dot.unit.nbytes, ahead)
        for group in range(dot.unit.groups):
            implement(o, group)

    name = f"apq_{instruction}_{dot}" + (f"_pf{ahead}" if ahead else "")
    return register(name, lambda: (_member(dot, _plain_loops), _member(dot, instructions)))


def _member(dot: UnitDot, body: Callable[[DotBuffers], None]) -> Any:
    """PrimFunc (codes, x, [zeros,] acc) whose block holds `body`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    unit = dot.unit
    x_shape = (dot.m, UNIT_K) if dot.m > 1 else (UNIT_K,)
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("dot")
        codes = operand("codes", (unit.nbytes,), "uint8", unit.vector_bytes, None)
        row_stride = ["row_stride", i64(1)] if dot.m > 1 else None
        x = operand("x", x_shape, dot.x_dtype, 4, row_stride)
        zeros_shape = (unit.groups, unit.rows) if unit.groups > 1 else (unit.rows,)
        zeros = operand("zeros", zeros_shape, "uint8", unit.rows, None) if dot.zeros else None
        acc = operand("acc", dot.spatial, dot.acc_dtype, unit.vector_bytes, None)
        with b.sblock("root"):
            inputs = [codes, x] if zeros is None else [codes, x, zeros]
            b.reads(*(whole(buffer) for buffer in (acc, *inputs)))
            b.writes(whole(acc))
            body(DotBuffers(dot, codes, x, zeros, acc))
    return builder.get()


def _plain_loops(o: DotBuffers) -> None:
    from tvm.tirx.script.builder import ir as b

    dot = o.dot
    extents = [i64(e) for e in (*dot.spatial, *dot.reduced)]
    with b.grid(*extents) as loops, b.sblock("dot"):
        axes = b.axis.remap("S" * len(dot.spatial) + "RR", loops)
        at, within = tuple(axes[:-2]), axes[-2:]
        row = at[-2:-1] if dot.m > 1 else ()
        zero = None
        if o.zeros is not None:
            zero = o.zeros[(*at[: len(o.zeros.shape) - 1], at[-1])]
        b.reads(
            o.acc[at],
            whole(o.codes),
            o.x[(*row, slice(0, UNIT_K))],
            *([] if zero is None else [zero]),
        )
        b.writes(o.acc[at])
        dot.store(
            o.acc,
            at,
            within,
            lambda byte: o.codes[byte],
            lambda four, k: o.x[(*row, four * i64(4) + k)],
            zero,
        )


def decoded(unit: Unit, codes: Buffer, vector: int) -> Expr:
    """uint8 [4R]: codes of one vector, from each field by at most a shift and a mask."""
    from tvm import tirx

    size = unit.vector_bytes
    result: Expr = None
    for width, shift in unit.fields:
        part = codes.vload([i64(size * (shift + vector % width))], f"uint8x{size}")
        if unit.inverted and (width == 8 or vector // width * width + width == 8):
            part = tirx.bitwise_xor(part, tirx.Broadcast(tirx.const(0x80, "uint8"), size))
        if width < 8:
            # Shifted in 16-bit lanes: x86 has no 8-bit shift, and the mask drops what crosses over.
            down = vector // width * width - shift
            words = tirx.reinterpret(f"uint16x{size // 2}", part)
            if down:
                move = tirx.shift_right if down > 0 else tirx.shift_left
                amount = tirx.Broadcast(tirx.const(abs(down), "uint16"), size // 2)
                part = tirx.reinterpret(f"uint8x{size}", move(words, amount))
            mask = tirx.const(((1 << width) - 1) << shift, "uint8")
            part = tirx.bitwise_and(part, tirx.Broadcast(mask, size))
        result = part if result is None else tirx.bitwise_or(result, part)
    return result
