"""Tensorization by the intrinsic's own loops."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.s_tir import TensorIntrin


def tensorize(sch: Any, block: str, intrinsic: str) -> None:
    """Put an intrinsic in the place of a block's innermost loops, as many as its meaning has.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
    block : str
    intrinsic : str
        Registered name.
    """
    loops, inner = 0, TensorIntrin.get(intrinsic).desc.body.block.body
    while isinstance(inner, tirx.For):
        loops, inner = loops + 1, inner.body
    sch.tensorize(sch.get_loops(sch.get_sblock(block))[-loops], intrinsic)
