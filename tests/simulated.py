"""What a quantized layer computes by the simulation, and how near its kernels come to that.

The simulation is that of ``apq-tvm eval --scheme`` and of calibration: activations rounded as
`apq_tvm.quantizers.torch.round` has it, times decoded weights. Most kernels do the same with whole
numbers, so that the order of sums is all that is left (2e-7 of the result); what some round beyond
that has a bound of its own, about twice what was found.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.types import Array, Scheme

SUMS = 1e-6
"""Sums of float32 in another order, relative as everything here. Found: 4e-7."""

CENTROIDS = 5e-4
"""Any-precision's tables in int8. Found: 2.7e-4."""

OUTLIERS = 2e-3
"""mixed24's outliers multiply x before it is rounded. Found: 1e-3."""

TABLES = 0.02
"""Sums of x, for bcq, in tables of int8, instead of rounded x. Found: 0.012."""


def rounds(kernel: str) -> bool:
    """Whether a kernel, by its name, rounds activations where the scheme says so."""
    return not kernel.startswith(("generic_", "gemm_decoded"))


def limit(scheme: Scheme | None, rounded: bool = True) -> float:
    """The largest relative error that a layer's kernels may have; see `relative`.

    Parameters
    ----------
    scheme : Scheme or None
        None is float.
    rounded : bool
        The kernel rounds activations where the scheme says so (`rounds`).
    """
    if scheme is None or not scheme.integer_acts:
        return SUMS
    if scheme.family == "anyprec":
        return CENTROIDS
    if rounded and scheme.family == "mixed" and not scheme.weights.endswith("o0"):
        return OUTLIERS
    return TABLES if rounded and scheme.family == "bcq" else SUMS


def relative(found: Array, wanted: Array) -> float:
    """Root of the mean squared error over that of `wanted`; NaN and infinity where they are."""
    error = np.asarray(found, np.float64) - wanted
    return float(np.sqrt((error**2).mean() / (wanted**2).mean()))


def product(x: Array, weight: Array, scheme: Scheme | None, rounded: bool = True) -> Array:
    """``x · weightᵀ`` as simulated, float64.

    Parameters
    ----------
    x : float32 [M, K]
    weight : float32 [N, K]
        Decoded.
    scheme : Scheme or None
    rounded : bool
        As of `limit`.
    """
    if scheme is not None and scheme.integer_acts and rounded:
        x = _signs(x, scheme) if scheme.act_bits == 1 else _rounded(x, scheme)
    result: Array = x.astype(np.float64) @ weight.T.astype(np.float64)
    return result


def _rounded(x: Array, scheme: Scheme) -> Array:
    import torch  # slow to load

    from apq_tvm.quantizers.torch.round import round_activations

    result: Array = round_activations(torch.from_numpy(x), scheme).numpy()
    return result


def _signs(x: Array, scheme: Scheme) -> Array:
    """Of 1 bit, which the simulation refuses: each group's mean magnitude, with signs."""
    k = x.shape[1]
    size = k if scheme.act_group == -1 else scheme.act_group
    parts = [x[:, at : at + size] for at in range(0, k, size)]
    signed = [np.where(p < 0, -1, 1) * np.abs(p).mean(1, keepdims=True) for p in parts]
    return np.concatenate(signed, axis=1)
