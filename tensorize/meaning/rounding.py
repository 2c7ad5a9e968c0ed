"""The float at which integers are floats, rounding of activations by it, and reductions.

Adding `MAGIC` rounds: the sum's unit is 1, so its low bits are the nearest integer, ties to even,
in two's complement. And integers below 2^22 that are added to the *bits* are added to the float.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from apq_tvm.tensorize.exprs import MAGIC, Expr

SUM_LIMIT = 1 << 22
"""A sum of integers below this is the difference of two such floats."""

CODES = 16
"""Codes of one vector of 16 bytes."""


def tree(join: Callable[[Expr, Expr], Expr], terms: list[Expr]) -> Expr:
    """Neighbours combined, then neighbours of those, as pairwise instructions do."""
    while len(terms) > 1:
        terms = [join(a, c) for a, c in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def round_value(x: Expr, inverse: Expr, bits: int) -> Expr:
    """int8 expression of the code of one activation.

    Parameters
    ----------
    x, inverse : PrimExpr
        float32; ``|x * inverse| < 2^22`` or NaN.
    bits : int
        2..8: codes lie in [-(2^(bits-1) - 1), 2^(bits-1) - 1].
    """
    from tvm import tirx

    pattern = tirx.reinterpret("int32", x * inverse + tirx.const(MAGIC, "float32"))
    return bounded(pattern.astype("int8"), bits, lambda v: tirx.const(v, "int8"))


def bounded(code: Expr, bits: int, constant: Callable[[int], Expr]) -> Expr:
    """A code within its bounds: of numbers only a NaN's low bits are out of range."""
    from tvm import tirx

    most = (1 << (bits - 1)) - 1
    code = tirx.max(code, constant(-most))
    return code if bits == 8 else tirx.min(code, constant(most))


def round_loops(
    name: str, x: Callable[[Expr], Expr], inverse: Expr, codes: Callable[[Expr], Expr], bits: int
) -> None:
    """``codes(e) = round_value(x(e), inverse)`` for a vector, in block `name`."""
    from tvm.tirx.script.builder import ir as b

    with b.serial(0, CODES) as e0, b.sblock(name):
        e = b.axis.spatial(CODES, e0)
        b.reads(x(e), inverse)
        b.writes(codes(e))
        store(codes(e), round_value(x(e), inverse, bits))


def sum_loops(name: str, codes: Callable[[Expr, Expr], Expr], sums: Callable[[Expr], Expr]) -> None:
    """``sums(l) += codes(l, 0) + .. + codes(l, 3)``, four lanes of four codes."""
    from tvm.tirx.script.builder import ir as b

    with b.grid(4, 4) as (l0, e0), b.sblock(name):
        lane, e = b.axis.remap("SR", [l0, e0])
        b.reads(sums(lane), codes(lane, e))
        b.writes(sums(lane))
        store(sums(lane), sums(lane) + codes(lane, e).astype("int32"))


def tree_loops(name: str, operation: str, x: Any, y: Callable[[Expr], Expr]) -> None:
    """``y(g) = tree of x[g, :]``."""
    from tvm.tirx.script.builder import ir as b

    many, lanes = (int(extent) for extent in x.shape)
    with b.serial(0, many) as g0, b.sblock(name):
        g = b.axis.spatial(many, g0)
        b.reads(x[g, 0:lanes])
        b.writes(y(g))
        store(y(g), tree(partial(combine, operation), [x[g, e] for e in range(lanes)]))


def combine(operation: str, a: Expr, b: Expr) -> Expr:
    """The larger of two values for ``max``, their sum for ``add``."""
    from tvm import tirx

    return tirx.max(a, b) if operation == "max" else a + b


def reduce_loop(
    name: str,
    operation: str,
    lanes: int,
    x: Callable[[Expr], Expr],
    y: Expr,
    start: bool = True,
) -> None:
    """``y = op(y, x(0), ..., x(lanes - 1))``, an element that starts from 0 or what is there."""
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    with b.serial(0, lanes) as e0, b.sblock(name):
        e = b.axis.reduce(lanes, e0)
        b.reads(*([] if start else [y]), x(e))
        b.writes(y)
        if start:
            with b.init():
                store(y, tirx.const(0, y.source.dtype))
        store(y, combine(operation, y, x(e)))


def store(at: Expr, value: Expr) -> None:
    """Store to an element of a buffer."""
    from tvm.tirx.script.builder import ir as b

    b.buffer_store(at.source, value, list(at.indices))
