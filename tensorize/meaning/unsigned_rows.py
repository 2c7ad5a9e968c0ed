"""What rows of activations come to mean as unsigned codes, in numpy.

As `apq_tvm.ops.activations.quantize` computes it, operation by operation in float32: a kernel that
reads them multiplies these values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from apq_tvm.formats.integer import PAIR_INPUT
from apq_tvm.tensorize.meaning.spans.folded_rows import TINY


@dataclass(frozen=True)
class UnsignedRows:
    """Rows with zero points."""

    asymmetric = True
    rounds = False

    def values(self, x: Any) -> tuple[Any, Any]:
        """What is multiplied, and the scales.

        Parameters
        ----------
        x : float32 [M, K]

        Returns
        -------
        float64 [M, K], float64 [M, 1]
        """
        steps, half = np.float32((PAIR_INPUT - 2) / 2), np.float32(0.5)
        top = np.maximum(x.max(1, keepdims=True), 0) * half
        low = np.minimum(x.min(1, keepdims=True), 0) * half
        size = top - low
        none = size < TINY
        scale = np.where(none, 0, size * np.float32(1 / steps)).astype(np.float64)
        inverse = np.where(none, np.float32(0), steps / np.where(none, np.float32(1), size))
        middle = np.rint((top + low) * inverse)
        codes = np.rint(x * inverse - middle).astype(np.float64)
        return (codes + middle) * scale, scale
