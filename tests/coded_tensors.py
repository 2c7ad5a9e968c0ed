"""Quantized tensors with random codes, of families whose codes are integers."""

from __future__ import annotations

import numpy as np

from apq_tvm.formats.balance import LEVELS
from apq_tvm.types import QuantizedTensor, Scheme


def tensor_of(scheme: Scheme, n: int, k: int) -> QuantizedTensor:
    rng = np.random.default_rng(n + k)
    groups = 1 if scheme.group_size == -1 else -(-k // scheme.group_size)
    top = LEVELS if scheme.family == "balance" else 1 << scheme.bits
    codes = rng.integers(0, top, (n, k), dtype=np.uint8)
    zeros = rng.integers(0, top, (n, groups), dtype=np.uint8) if scheme.zero_points else None
    return QuantizedTensor(codes, rng.random((n, groups)).astype(np.float16), zeros, scheme)
