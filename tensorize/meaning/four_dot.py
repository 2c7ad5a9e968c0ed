"""Products of four columns of int8 keys with four of a query, for every key of a vector at once.

What an instruction computes and what has to be taken back from its sums; the devices' own are in
`apq_tvm.tensorize.x86.four_dot` and `apq_tvm.tensorize.arm.four_dot`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from apq_tvm.tensorize.exprs import Expr


@dataclass(frozen=True)
class FourDot:
    """One instruction, or a few.

    Parameters
    ----------
    name : str
    lanes : int
        Keys of a vector: 16 or a divisor.
    ready : callable
        int8 [4 lanes], four columns of each key → vectors that `add` takes, shared by all queries.
    add : callable
        ``(int32 [lanes], those vectors, int32)`` → the sums with the products of every key with the
        four codes of a query, which the last holds.
    offset : int
        What `ready` added to every code of keys: sums are too large by so many times the sum of the
        query's codes.
    plain : FourDot or None
        Of keys from 0 to 127: the same sums without an offset.
    """

    name: str
    lanes: int
    ready: Callable[[Expr], tuple[Expr, ...]]
    add: Callable[[Expr, tuple[Expr, ...], Expr], Expr]
    offset: int = 0
    plain: FourDot | None = None
