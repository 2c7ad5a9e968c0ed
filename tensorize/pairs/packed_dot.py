"""Pairs of `apq_tvm.tensorize.meaning.packed_dot`: an instruction gives what one group needs."""

from __future__ import annotations

from collections.abc import Callable

from apq_tvm.tensorize.exprs import Buffer, Expr, i64, moved_bytes, prefetch
from apq_tvm.tensorize.meaning.interleaved import Unit
from apq_tvm.tensorize.meaning.packed_dot import UnitDot
from apq_tvm.tensorize.meaning.scaffold import Bound, bound_pair
from apq_tvm.tensorize.registry import register


def unit_dot_intrinsic(
    instruction: str, dot: UnitDot, implement: Callable[[Bound, int], None], ahead: int = 0
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

    def instructions(o: Bound) -> None:
        prefetch(o.codes, dot.unit.nbytes, ahead)
        for group in range(dot.unit.groups):
            implement(o, group)

    name = f"apq_{instruction}_{dot}" + (f"_pf{ahead}" if ahead else "")
    return register(name, lambda: bound_pair(dot, dot.meaning, instructions))


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
            part = moved_bytes(part, shift - vector // width * width, size)
            mask = tirx.const(((1 << width) - 1) << shift, "uint8")
            part = tirx.bitwise_and(part, tirx.Broadcast(mask, size))
        result = part if result is None else tirx.bitwise_or(result, part)
    return result
