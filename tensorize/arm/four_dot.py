"""Four columns of int8 keys and of a query by sdot.

Source: Arm Architecture Reference Manual, DDI 0487: SDOT (vector).
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx

from apq_tvm.tensorize.exprs import Expr, neon
from apq_tvm.tensorize.meaning.four_dot import FourDot


def _sdot(total: Expr, ready: tuple[Expr, ...], four: Expr) -> Expr:
    query = tirx.reinterpret("int8x16", tirx.Broadcast(four, 4))
    return neon("int32x4", "sdot.v4i32.v16i8", total, ready[0], query)


_PLAIN = FourDot("sdot", 4, lambda keys: (keys,), _sdot)
SDOT = replace(_PLAIN, plain=_PLAIN)
