"""Horizontal reductions of as many vectors as each has lanes, for any target.

``Y[g] = op over lanes of X[g]``: neighbours are combined by the shuffles of 32 and 64 bits that
stay within 128, then by those of 128, each of which is one instruction where vectors are wider. Of
integers, whose sums have no order.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, member
from apq_tvm.tensorize.meaning.rounding import combine, tree_loops
from apq_tvm.tensorize.registry import register


def tree_of_rows(operation: str, lanes: int) -> str:
    """Register (once) and name ``apq_rows{operation}_{lanes}x1x{lanes}_s32s32``.

    Parameters
    ----------
    operation : {"max", "add"}
    lanes : int
        A power of two from 4 on.
    """
    name = f"apq_rows{operation}_{lanes}x1x{lanes}_s32s32"
    return register(name, lambda: _tree(operation, lanes))


def _tree(operation: str, lanes: int) -> tuple[PrimFunc, PrimFunc]:
    def plain(x: Buffer, y: Buffer) -> None:
        tree_loops("tree", operation, x, lambda g: y[g])

    def implement(x: Buffer, y: Buffer) -> None:
        vectors = [x.vload([row, 0], f"int32x{lanes}") for row in range(lanes)]
        stages = [_within(lanes, 1), _within(lanes, 2)]
        while len(vectors) > 1:
            orders = stages.pop(0) if stages else _across(lanes)
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [_joined(operation, a, c, orders, lanes) for a, c in pairs]
        b.buffer_store(y, vectors[0], [tirx.Ramp(0, 1, lanes)])

    operands = ("x", (lanes, lanes), "int32", 64), ("y", (lanes,), "int32", 64)
    return member(operands, plain), member(operands, implement)


def _joined(operation: str, a: Any, c: Any, orders: tuple[list[int], ...], lanes: int) -> Expr:
    """Two vectors as one, by two orders of their lanes."""
    parts = [tirx.Shuffle([a, c], [tirx.const(i, "int32") for i in order]) for order in orders]
    return combine(operation, *parts)


def _within(lanes: int, size: int) -> tuple[list[int], ...]:
    """The low and the high half of every four lanes of both, `size` lanes of each in turns."""
    halves = []
    for half in (0, 2):
        places = [half + i for i in range(2)]
        units = [places[i : i + size] for i in range(0, 2, size)]
        quad = [at + of for unit in units for of in (0, lanes) for at in unit]
        halves.append([4 * q + at for q in range(lanes // 4) for at in quad])
    return tuple(halves)


def _across(lanes: int) -> tuple[list[int], ...]:
    """The even and the odd fours of both, one after the other."""
    fours = [list(range(start, start + 4)) for start in range(0, 2 * lanes, 4)]
    return tuple([lane for four in fours[odd::2] for lane in four] for odd in (0, 1))
