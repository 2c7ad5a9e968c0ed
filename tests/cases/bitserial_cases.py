"""References of bit-serial layers in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np


def codes_reference(x: Any, bits: int, k: int, width: int) -> tuple[Any, Any]:
    """Codes int64 [M, Kp] and scales float64 [M, Kp / width] of padded activations."""
    m = len(x)
    grouped = x.reshape(m, -1, width).astype(np.float64)
    if bits == 1:
        columns = np.clip(k - np.arange(grouped.shape[1]) * width, 1, width)
        codes = np.where(grouped >= 0, 1, -1).reshape(m, -1)
        codes[:, k:] = 0
        return codes, np.abs(grouped).sum(-1) / columns
    most = 2 ** (bits - 1) - 1
    scale = np.abs(grouped).max(-1) / most
    # In float32, as the kernels: a tie may fall on another side in float64.
    inverse = np.float32(most) / np.abs(x.reshape(grouped.shape)).max(-1)
    codes = np.rint(x.reshape(grouped.shape) * inverse[..., None])
    return np.clip(codes, -most, most).astype(np.int64).reshape(m, -1), scale


def unpacked(planes: Any) -> Any:
    """Codes int64 [M, Kp] of planes int32 [M, p, Kp / 32]; signs are 0 and 1."""
    m, p, words = planes.shape
    codes = np.zeros((m, words * 32), np.int64)
    for column in range(32):
        place = 8 * (column % 4) + column // 4
        for t in range(p):
            bit = planes[:, t].astype(np.uint32) >> np.uint32(place) & 1
            weight = -(1 << t) if t == p - 1 and p > 1 else 1 << t
            codes[:, column::32] += bit.astype(np.int64) * weight
    return codes
