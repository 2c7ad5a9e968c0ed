"""A cache of keys or values with those of one step put behind what is there."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx


def append_cache(*args: Any) -> Any:
    """``past[b, :, j]`` before position ``start[b]``, from there on ``new``, behind that 0.

    Parameters
    ----------
    past : te.Tensor float32 [B, N, P, H], optional
    new : te.Tensor float32 [B, S, N, H]
        As projections leave it: no transpose is needed before.
    start : te.Tensor int64 [B]
    shape : sequence
        Extents of the result [B, N, T, H]; T may be less than ``start[b] + S``, which cuts off.

    Returns
    -------
    te.Tensor
        Float32 of `shape`.
    """
    *past, new, start, shape = args
    zero = tirx.const(0.0, "float32")

    def element(b: Any, n: Any, j: Any, d: Any) -> Any:
        at = j - start[b]
        fresh = tirx.if_then_else(at < new.shape[1], new[b, at, n, d], zero)
        if not past:
            return tirx.if_then_else(at < 0, zero, fresh)
        old = tirx.if_then_else(j < past[0].shape[2], past[0][b, n, j, d], zero)
        return tirx.if_then_else(at < 0, old, fresh)

    return te.compute(shape, element, "cache")
