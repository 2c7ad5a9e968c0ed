"""Rows of x as integer kernels see them, in numpy: the exact answer that a kernel is held against.

Rules and constants are those of `apq_tvm.ops.activations.quantize`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apq_tvm.types import F32, F64, Scheme

MARGIN = 1 / 64
"""How far codes stay from the middle between two, where rounding may go either way."""

_ASYMMETRIC = 126.5
"""Steps from the middle of a row's range to its ends."""

_WIDER = 1 + 1 / 500
"""Moves the middle of a row's range by a part of a step."""


def round_rows(x: F32, scheme: Scheme) -> tuple[F32, F64]:
    """Round rows to the codes of a scheme.

    Parameters
    ----------
    x : float32 [M, K]
        Random figures: no group is all zeros.
    scheme : Scheme
        Of integer activations.

    Returns
    -------
    float32 [M, K], float64 [M, K]
        The rows, moved a little where codes were near the middle between two; and what their codes
        mean.
    """
    m, k = x.shape
    size = k if scheme.act_group == -1 else scheme.act_group
    groups = np.pad(x, ((0, 0), (0, -k % size))).reshape(m, -1, size).astype(np.float64)
    if scheme.act_bits == 1:
        columns = np.minimum(size, k - size * np.arange(groups.shape[1]))
        scale = np.abs(groups).sum(-1, keepdims=True) / columns[:, None]
        return x, (np.where(groups >= 0, 1.0, -1.0) * scale).reshape(m, -1)[:, :k]
    if scheme.asymmetric_acts:
        scale, middle = _range(groups)
        most = 127.0
    else:
        most = float(2 ** (scheme.act_bits - 1) - 1)
        scale = np.abs(groups).max(-1, keepdims=True) / most
        middle = np.zeros_like(scale)
    codes = groups / scale - middle
    nearest = np.rint(codes)
    codes = np.where(_between(codes), nearest, codes)
    # None past the ends of its group, whose codes are the same then: they make the scale.
    ends = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    moved = np.clip((codes + middle) * scale, *ends).reshape(m, -1)[:, :k].astype(np.float32)
    exact = (np.clip(nearest, -most, most) + middle) * scale
    return moved, exact.reshape(m, -1)[:, :k]


def _between(codes: F64) -> NDArray[np.bool_]:
    """Where codes are near the middle between two."""
    return np.abs(codes - np.floor(codes) - 0.5) < MARGIN


def _range(groups: F64) -> tuple[F64, F64]:
    """Scales and middles of rows; moves a row's least value until both ends have clear codes."""
    for _ in range(16):
        top = np.maximum(groups.max(-1, keepdims=True), 0)
        low = np.minimum(groups.min(-1, keepdims=True), 0)
        scale = (top - low) / (2 * _ASYMMETRIC)
        middle = np.rint((top + low) / 2 / scale)
        unclear = _between(top / scale - middle) | _between(low / scale - middle)
        if not unclear.any():
            break
        groups[...] = np.where(unclear & (groups == low), groups * _WIDER, groups)
    return scale, middle
