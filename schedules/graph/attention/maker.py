"""Functions that compute one of their arguments themselves, of what another function makes it of.

The other one, unscheduled, is an attribute: what it reads is still known
(`apq_tvm.codegen.graph.bounds`), and so is the shape of what it makes.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from apq_tvm.ops.graph.shapes import substituted, symbols_of
from apq_tvm.tensorize.exprs import Expr, PrimFunc

MAKER, PLACE = "apq.maker", "apq.made"


def with_maker(func: PrimFunc, place: int, maker: PrimFunc, body: Any = None) -> PrimFunc:
    """The function with the inputs of `maker`, which has one result, for argument `place`."""
    params = [*func.params[:place], *maker.params[:-1], *func.params[place + 1 :]]
    made = tirx.PrimFunc(params, func.body if body is None else body, func.ret_type, func.attrs)
    return made.with_attrs({MAKER: maker, PLACE: place})


def maker_of(func: PrimFunc) -> tuple[PrimFunc, int] | None:
    """The function that makes an argument, and which that would be; None where all are given."""
    attrs = func.attrs or {}
    return (attrs[MAKER], int(attrs[PLACE])) if MAKER in attrs else None


def shape_at(func: PrimFunc, place: int) -> list[Expr]:
    """The shape of argument `place`, of the symbols of what there is instead if it is made."""
    made = maker_of(func)
    if made is None or made[1] != place:
        return list(func.params[place].shape)
    *inputs, result = made[0].params
    symbols = symbols_of(inputs, func.params[place : place + len(inputs)])
    return [substituted(extent, symbols) for extent in result.shape]
