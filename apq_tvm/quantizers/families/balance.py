"""Codes and scales of ``W2*``: five levels -2..2, the scale of every group searched.

A grid of steps below the one that covers a group's range; each is judged by the (weighted) squared
error that remains after its least-squares refit to the codes it gives. The best is refined by
refitting and rounding again with float16 steps. Rounding from the maximum is one of the
candidates, so the result is never worse than that. ABQ-LLM learns the clipping by gradients
instead (section 3.1); `apq_tvm.quantizers.torch.graph` is where that starts from.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.errors import BadScheme
from apq_tvm.formats.arrays import group_count
from apq_tvm.formats.balance import CENTRE
from apq_tvm.formats.families import check_tensor
from apq_tvm.formats.integer import MAX_SCALE, round_scale
from apq_tvm.quantizers.quantizer import QuantContext
from apq_tvm.types import F32, F64, QuantizedTensor, Scheme

RATIOS = tuple(map(np.float32, (1.0, 0.9, 0.8, 0.72, 0.64, 0.57, 0.5, 0.44, 0.38, 0.32, 0.26)))
"""Steps tried, relative to the one that covers a group's largest magnitude."""

REFITS = 4
"""Rounds of refit and re-rounding at the end."""

CHUNK = 1 << 18
"""Weights quantized at a time."""

FLOOR = np.float32(1e-30)
"""Smallest step to divide by."""


def quantize_tensor(w: F32, scheme: Scheme, name: str, context: QuantContext) -> QuantizedTensor:
    """Quantize one weight matrix.

    Parameters
    ----------
    w : float32 [N, K]
    scheme : Scheme
        Of the family ``balance``.
    name : str
        For errors.
    context : QuantContext
        Errors are weighted by ``stats.mean_square`` where the layer was calibrated.

    Returns
    -------
    QuantizedTensor

    Raises
    ------
    BadScheme
        A scale overflows float16.
    """
    n, k = w.shape
    width = k if scheme.group_size == -1 else min(scheme.group_size, k)
    groups = group_count(k, scheme.group_size)
    codes = np.empty((n, k), np.uint8)
    scales = np.empty((n, groups), np.float16)
    importance = _importance(context, k)
    rows = max(1, CHUNK // k)
    for start in range(0, n, rows):
        at = slice(start, min(start + rows, n))
        padded = _grouped(w[at], groups, width)
        step, u = _quantize(padded, _grouped(importance, groups, width), context.search, name)
        scales[at] = step[..., 0].astype(np.float16)
        codes[at] = (u + CENTRE).reshape(len(padded), -1)[:, :k].astype(np.uint8)
    tensor = QuantizedTensor(codes, scales, None, scheme)
    check_tensor(tensor, name)
    return tensor


def _importance(context: QuantContext, k: int) -> F32:
    """float32 [1, K]: what an error of each input channel counts, 1 on average."""
    if context.stats is None:
        return np.ones((1, k), np.float32)
    weight = np.maximum(context.stats.mean_square.astype(np.float64), 0)
    mean = weight.mean()
    if not np.isfinite(mean) or mean <= 0:
        return np.ones((1, k), np.float32)
    # A channel that calibration never saw keeps a little weight: its codes must not be arbitrary.
    return np.asarray(np.maximum(weight / mean, 1e-3), np.float32)[None]


def _grouped(values: F32, groups: int, width: int) -> F32:
    """[R, K] -> [R, G, width]; a short last group is filled with zeros."""
    rows, k = values.shape
    if groups * width == k:
        return values.reshape(rows, groups, width)
    padded = np.zeros((rows, groups * width), np.float32)
    padded[:, :k] = values
    return padded.reshape(rows, groups, width)


def _round(w: F32, step: F32) -> F32:
    """The nearest of -2..2 times `step`."""
    u = w / np.maximum(step, FLOOR)
    np.rint(u, out=u)
    limit = np.float32(CENTRE)
    return np.asarray(np.clip(u, -limit, limit), np.float32)


def _error(w: F32, importance: F32, step: F32, u: F32) -> F64:
    rest = (w - step * u).astype(np.float64)
    return np.asarray((importance * rest * rest).sum(-1, keepdims=True))


def _refit(w: F32, importance: F32, u: F32, step: F32) -> F32:
    """Least-squares step of codes `u`; `step` where all of them are 0."""
    weighted = importance * u
    above = np.einsum("rgk,rgk->rg", weighted, w)[..., None]
    below = np.einsum("rgk,rgk->rg", weighted, u)[..., None]
    fits = (below > 0) & (above > 0)
    return np.where(fits, np.divide(above, below, out=np.zeros_like(above), where=fits), step)


def _quantize(w: F32, importance: F32, search: bool, name: str) -> tuple[F32, F32]:
    """float16 steps [R, G, 1] and codes -2..2 [R, G, width] of groups w [R, G, width]."""
    widest = np.abs(w).max(-1, keepdims=True) / np.float32(CENTRE)
    plain = round_scale(widest)
    if not np.isfinite(plain).all():
        raise BadScheme(
            f"{name}: a scale of W2* exceeds {MAX_SCALE:.0f}, the largest float16, because its "
            "weights are too large; keep this tensor float (--tensor-type NAME=float)"
        )
    if not search:
        return plain, _round(w, plain)
    # Squares of tiny weights would vanish: work on weights of magnitude 1.
    unit = np.maximum(widest, FLOOR)
    scaled = w / unit
    best = np.ones_like(unit)
    least = np.full(unit.shape, np.inf)
    for ratio in RATIOS:
        u = _round(scaled, ratio * np.ones_like(unit))
        step = _refit(scaled, importance, u, ratio * np.ones_like(unit))
        error = _error(scaled, importance, step, u)
        better = error < least
        np.copyto(least, error, where=better)
        np.copyto(best, step, where=better)
    chosen, trial = plain.copy(), np.minimum(round_scale(best * unit), np.float32(MAX_SCALE))
    least = _error(scaled, importance, plain / unit, _round(scaled, plain / unit))
    for _ in range(REFITS):
        u = _round(scaled, trial / unit)
        error = _error(scaled, importance, trial / unit, u)
        better = error < least
        np.copyto(least, error, where=better)
        np.copyto(chosen, trial, where=better)
        fit = _refit(scaled, importance, u, trial / unit) * unit
        trial = np.minimum(round_scale(fit), np.float32(MAX_SCALE))
    return chosen, _round(w, chosen)
