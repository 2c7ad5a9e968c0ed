"""Rounding that keeps what a layer answers to the means that its inputs may have.

`kept_sums` does so where all columns are alike. Where means are estimated
(`apq_tvm.quantizers.inputs.expected`), every weight is rounded together with what the errors before
it did along them and along the sum: error feedback (`apq_tvm.quantizers.feedback`) with
H = 1 + Σ a g gᵀ over those directions g, as if inputs were numbers that are independent but for
them. Its inverse is known in closed form, so that K steps of small products do, and estimates that
are wrong cost little, since the squared error hardly grows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apq_tvm.quantizers.families.kept_sums import Room, room_of, row_parts
from apq_tvm.types import F32, QuantizedTensor

SUM, ESTIMATED = 1.0, 0.3
"""The factors a of the sum and of each estimated mean. Layers of EfficientNet-B0 and -Lite0 had the
least errors with 0.3 or 1 for the sum, and with 0.3 rather than 0.1 or 1 for the others."""

CHUNK = 1 << 22
"""Weights looked at together."""


def keep_means(
    w: F32, tensor: QuantizedTensor, means: F32, room: Room | None = None
) -> QuantizedTensor:
    """Round again so that products with some vectors are nearly those of the weights.

    Parameters
    ----------
    w : float32 [N, K]
    tensor : QuantizedTensor
        Uniform integers with one scale per row.
    means : float32 [S, K]
        What inputs may be on average; their size does not matter.
    room : Room, optional
        What codes may become.

    Returns
    -------
    QuantizedTensor
        With the same scales and zero points.
    """
    order, directions, back = _feedback(means)
    codes, (low, high) = np.empty_like(tensor.codes), room or room_of(tensor)
    for part, scale, zeros in row_parts(tensor, CHUNK):
        zero = zeros[:, 0]
        exact = np.ascontiguousarray((w[part] / scale).T[order])
        due = np.zeros((directions.shape[1], exact.shape[1]), np.float32)
        made = np.empty(exact.shape, np.uint8)
        for at, column in enumerate(exact):
            code = np.rint(column - back[at] @ due + zero)
            np.clip(code, low[part, order[at]], high[part, order[at]], out=code)
            made[at] = code
            due += directions[at, :, None] * (code - zero - column)
        codes[part, order] = made.T
    return replace(tensor, codes=codes)


def _feedback(means: F32) -> tuple[np.ndarray, F32, F32]:
    """Order of the columns; in it g [K, D], and by how much errors along g move a column [K, D].

    With D columns left whose g are the rows of G, the least of |δ|² + Σ a (r + Gᵀδ)² over what is
    added to them is δ = -G (1/a + GᵀG)⁻¹ r.
    """
    rows, weights = [np.ones(means.shape[1])], [SUM]
    for mean in means.astype(np.float64):
        if 0 < (size := np.sqrt(np.square(mean).mean())) < np.inf:
            rows.append(mean / size)
            weights.append(ESTIMATED)
    g = np.stack(rows, 1)
    order = np.argsort(-(np.square(g) @ weights), kind="stable")  # the finest corrections come last
    g = g[order]
    left = np.cumsum((g[:, :, None] * g[:, None])[::-1], 0)[::-1] + np.diag(1 / np.array(weights))
    back = np.linalg.solve(left, g[:, :, None])[..., 0]
    return order, g.astype(np.float32), back.astype(np.float32)
