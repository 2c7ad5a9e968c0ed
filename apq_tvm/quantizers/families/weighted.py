"""Integer scales of least weighted error: some input channels matter more than others.

Searching scales for the plain squared error clips the largest weights of a group. Where they meet
the largest activations, or were scaled up for that reason (AWQ), that is the worst to do: SmolLM2's
second key layer loses six times as much at W3g128 as without a search. So where E[x²] is known
every weight's error counts by it.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.formats.integer import (
    MAX_SCALE,
    IntegerFormat,
    check_scale,
    encode,
    format_of,
    round_scale,
)
from apq_tvm.quantizers.families import rtn
from apq_tvm.types import F32, QuantizedTensor, Scheme

RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.64, 0.58, 0.52, 0.46, 0.4, 0.3)
"""Steps tried, relative to the one that covers a group's whole range."""

REFITS = 2
"""Rounds of fitting the step to its codes."""

CHUNK = 1 << 18
"""Weights worked on at a time."""


def quantize_weighted(
    w: F32, scheme: Scheme, importance: F32, name: str = "weight"
) -> QuantizedTensor:
    """Integers whose scales are searched for least ``Σ importance[k] (w - ŵ)²``.

    Parameters
    ----------
    w : float32 [N, K]
    scheme : Scheme
        Of family ``"int"``.
    importance : float32 [K]
        Not negative; E[x²] of the layer's input.
    name : str
        For errors.

    Returns
    -------
    QuantizedTensor
        Never worse, so weighted, than plain rounding or than the unweighted search.

    Raises
    ------
    UnsupportedModel, BadScheme
        See `rtn.quantize_tensor`.
    """
    plain = rtn.quantize_tensor(w, scheme, name, search=False)
    searched = rtn.quantize_tensor(w, scheme, name, search=True)
    fmt = format_of(scheme)
    n, k = w.shape
    size = k if scheme.group_size == -1 else min(scheme.group_size, k)
    pad = -k % size
    weigh = np.maximum(np.pad(importance.astype(np.float32), (0, pad)), 0).reshape(-1, size)
    scales, codes = plain.scales.copy(), plain.codes.copy()
    zeros = None if plain.zeros is None else plain.zeros.copy()
    rows = max(1, CHUNK // k)
    for first in range(0, n, rows):
        at = slice(first, min(first + rows, n))
        part = np.pad(w[at], ((0, 0), (0, pad))).reshape(at.stop - first, -1, size)
        starts = [_start(t, at, fmt) for t in (searched, plain)]
        code, scale, zero = _search(part, weigh, fmt, starts)
        check_scale(scale, name, fmt)
        codes[at] = code.reshape(at.stop - first, -1)[:, :k]
        scales[at] = scale[..., 0]
        if zeros is not None:
            zeros[at] = zero[..., 0]
    return QuantizedTensor(codes, scales, zeros, scheme)


def _start(tensor: QuantizedTensor, rows: slice, fmt: IntegerFormat) -> tuple[F32, F32]:
    """Step (positive) and zero point [R, G, 1] of a tensor, as `encode` takes them."""
    scale = tensor.scales[rows].astype(np.float32)
    if tensor.zeros is not None:
        return scale[..., None], tensor.zeros[rows].astype(np.float32)[..., None]
    zero = np.where(scale < 0, np.float32(fmt.zero - 1), np.float32(fmt.zero))
    return np.abs(scale)[..., None], zero[..., None]


def _search(
    w: F32, weigh: F32, fmt: IntegerFormat, starts: list[tuple[F32, F32]]
) -> tuple[F32, F32, F32]:
    """Codes [R, G, size], signed scales and zero points [R, G, 1] of least weighted error."""
    if fmt.signs_only:
        total = np.maximum(weigh.sum(-1, keepdims=True), np.float32(1e-30))
        step = round_scale(np.asarray((np.abs(w) * weigh).sum(-1, keepdims=True) / total))
        return (w > 0).astype(np.float32), step, np.zeros_like(step)
    (step, zero), plain = starts
    least = _error(w, weigh, step, zero, fmt)[0]
    candidates = [plain] + [(plain[0] * np.float32(r), plain[1]) for r in RATIOS[1:]]
    if fmt.zero_points:
        # A clipped range keeps its middle.
        middle = np.float32(fmt.max_code / 2)
        candidates = [plain] + [
            (s, np.clip(np.rint(middle + (z - middle) / np.float32(r)), 0, fmt.max_code))
            for (s, z), r in zip(candidates[1:], RATIOS[1:], strict=True)
        ]
    for trial_step, trial_zero in candidates:
        step, zero, least = _keep(w, weigh, fmt, (step, zero, least), trial_step, trial_zero)
    for _ in range(REFITS):
        u = _error(w, weigh, step, zero, fmt)[1]
        fit = (weigh * w * u).sum(-1, keepdims=True)
        fit = fit / np.maximum((weigh * u * u).sum(-1, keepdims=True), np.float32(1e-30))
        fit = np.where(fit > 0, fit, step)
        step, zero, least = _keep(w, weigh, fmt, (step, zero, least), fit, zero)
    code, scale = encode(w, step, zero, fmt)
    return code, scale, zero


def _keep(
    w: F32,
    weigh: F32,
    fmt: IntegerFormat,
    best: tuple[F32, F32, F32],
    step: F32,
    zero: F32,
) -> tuple[F32, F32, F32]:
    """The better of the best and a trial, group by group."""
    step = np.minimum(round_scale(np.asarray(step, np.float32)), np.float32(MAX_SCALE))
    error, _ = _error(w, weigh, step, zero, fmt)
    better = error < best[2]
    return (
        np.where(better, step, best[0]),
        np.where(better, zero, best[1]),
        np.where(better, error, best[2]),
    )


def _error(w: F32, weigh: F32, step: F32, zero: F32, fmt: IntegerFormat) -> tuple[F32, F32]:
    """Weighted squared error [R, G, 1], and what multiplies the step."""
    u = np.rint(np.divide(w, step, out=np.zeros_like(w), where=step > 0))
    u = np.clip(u, -zero, fmt.max_code - zero)
    rest = w - step * u
    return np.asarray((weigh * rest * rest).sum(-1, keepdims=True)), np.asarray(u)
