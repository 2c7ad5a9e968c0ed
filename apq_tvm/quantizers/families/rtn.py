"""Rounding to nearest: codes from a group's maximum, or with scales searched for least error.

The search looks, for every group, for the step s and zero point z that minimise the squared error
of ``s * u``, ``u = clip(round(w / s), -z, 2^bits - 1 - z)``:

1. a grid of clip ratios, each with its candidates for z; every candidate is judged by the error
   that remains after a least-squares refit of s to the codes it gives;
2. finer grids around the best;
3. a few rounds of refitting s to the codes, rounding s to float16 and choosing the codes again;
4. plain rounding is one of the candidates, so the result is never worse.

A symmetric group with a negative scale is the same problem with z = 2^(bits-1) - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.arrays import group_count
from apq_tvm.formats.integer import (
    MAX_SCALE,
    IntegerFormat,
    check_scale,
    check_weight,
    encode,
    format_of,
    mean_magnitude,
    round_scale,
)
from apq_tvm.formats.scheme import check_scheme
from apq_tvm.types import F32, QuantizedTensor, Scheme

CHUNK = 1 << 16
"""Weights quantized at a time: float32 work arrays stay in a second-level cache."""

LONG_GROUP = 512
"""From here on a group lies along the last axis of a work array; below, groups lie side by side,
so that vector instructions always run along the longer axis."""

COARSE = (1.15, 1.05, 0.95, 0.85, 0.75, 0.64, 0.52, 0.4, 0.28, 0.16)
"""Steps tried first, relative to the step that covers a group's whole range."""

FINE = (-3, -2, -1, 1, 2, 3)
"""Steps tried next: so many parts away from the best."""

FINE_PARTS = (0.025, 0.006)
"""What a part is, relative to the best step. The second grid is for codes of 5 bits and more: their
error goes up and down between steps that differ by little."""

FLOOR = np.float32(1e-30)
"""Smallest step to divide by: no real step is below `MIN_SCALE`, that of an all-zero group is 0."""

REFITS = 3
"""Rounds of refit and re-rounding at the end. More change nothing measurable."""


def quantize_tensor(
    w: F32,
    scheme: Scheme,
    name: str = "weight",
    search: bool = True,
) -> QuantizedTensor:
    """Quantize one weight matrix.

    Parameters
    ----------
    w : float32 [N, K]
    scheme : Scheme
    name : str
        For errors.
    search : bool
        False rounds plainly, from each group's maximum.

    Returns
    -------
    QuantizedTensor

    Raises
    ------
    UnsupportedModel
        If `w` is no float32 matrix or holds NaN or infinity.
    BadScheme
        If the scheme does not exist or a scale overflows float16.
    """
    check_scheme(scheme, name)
    check_weight(w, name)
    fmt = format_of(scheme)
    n, k = w.shape
    size = k if scheme.group_size == -1 else min(scheme.group_size, k)
    whole = k // size * size  # the columns of full groups; the rest is one short group
    groups = group_count(k, scheme.group_size)
    codes = np.empty((n, k), np.uint8)
    scales = np.empty((n, groups), np.float16)
    zeros = np.empty((n, groups), np.uint8)
    rows = max(1, CHUNK // k)
    for start in range(0, n, rows):
        at = slice(start, min(start + rows, n))
        parts = [(slice(0, whole), size)]
        if whole < k:
            parts.append((slice(whole, k), k - whole))
        for columns, width in parts:
            work = _Groups.take(w[at, columns], width)
            code, scale, zero = _quantize_groups(work, fmt, search, name)
            codes[at, columns] = work.put(code)
            first = columns.start // size
            span = slice(first, first + (columns.stop - columns.start) // width)
            scales[at, span] = scale.reshape(at.stop - at.start, -1)
            zeros[at, span] = zero.reshape(at.stop - at.start, -1)
    return QuantizedTensor(codes, scales, zeros if fmt.zero_points else None, scheme)


@dataclass(frozen=True)
class _Groups:
    """Groups of some rows as one array.

    ``w`` is [group, code] (axis 1) for long groups, else [code, group] (axis 0); `axis` runs along
    a group's codes.
    """

    w: F32
    axis: int
    shape: tuple[int, int]

    @staticmethod
    def take(part: F32, width: int) -> _Groups:
        """Rows [R, G * width] -> [R * G, width], transposed if groups are short."""
        flat = part.reshape(-1, width)
        if width >= LONG_GROUP:
            return _Groups(np.ascontiguousarray(flat), 1, part.shape)
        return _Groups(np.ascontiguousarray(flat.T), 0, part.shape)

    def put(self, values: F32) -> F32:
        """Inverse of `take` for an array like ``w``."""
        return (values if self.axis == 1 else values.T).reshape(self.shape)

    def dot(self, a: F32, b: F32) -> F32:
        """Sum of the products in each group, the axis kept with length 1."""
        sums = np.einsum("gk,gk->g" if self.axis == 1 else "kg,kg->g", a, b)
        return np.asarray(np.expand_dims(sums, self.axis))

    def squares(self, a: F32) -> NDArray[np.float64]:
        """Like ``dot(a, a)``, in float64."""
        wide = a.astype(np.float64)
        sums = np.einsum("gk,gk->g" if self.axis == 1 else "kg,kg->g", wide, wide)
        return np.asarray(np.expand_dims(sums, self.axis))


@dataclass
class _Best:
    """The best candidate of every group so far: error after a refit, the refitted step, zero."""

    error: F32
    step: F32
    zero: F32


def _quantize_groups(
    work: _Groups, fmt: IntegerFormat, search: bool, name: str
) -> tuple[F32, F32, F32]:
    """Codes like ``work.w``, and scale and zero point of each group."""
    if fmt.signs_only:
        scale = round_scale(mean_magnitude(work.w, work.axis))
        check_scale(scale, name, fmt)
        return (work.w > 0).astype(np.float32), scale, np.zeros_like(scale)
    lo = work.w.min(axis=work.axis, keepdims=True)
    hi = work.w.max(axis=work.axis, keepdims=True)
    step, zero = fmt.plain_parameters(lo, hi)
    check_scale(step, name, fmt)
    if search:
        step, zero = _search(work, fmt, lo, hi, step, zero)
    code, scale = encode(work.w, step, zero, fmt)
    return code, scale, zero


def _search(
    work: _Groups, fmt: IntegerFormat, lo: F32, hi: F32, plain_step: F32, plain_zero: F32
) -> tuple[F32, F32]:
    """Step (a float16 value) and zero point of least squared error."""
    full = np.maximum(plain_step, FLOOR)
    best = _Best(np.full_like(full, np.inf), full.copy(), plain_zero.copy())
    scratch = np.empty_like(work.w), np.empty_like(work.w)
    for ratio in COARSE:
        step = full * np.float32(ratio)
        for zero in _zeros(fmt, lo, hi, step, plain_zero):
            _try(work, fmt, step, zero, best, scratch)
    for part in FINE_PARTS[: 1 if fmt.bits <= 4 else 2]:
        centre, zero = best.step.copy(), best.zero.copy()
        for parts in FINE:
            _try(work, fmt, centre * np.float32(1 + parts * part), zero, best, scratch)
    if fmt.zero_points:
        for shift in (-1, 1):
            moved = np.clip(best.zero + np.float32(shift), 0, fmt.max_code)
            _try(work, fmt, best.step.copy(), moved, best, scratch)
    return _refine(work, fmt, best, plain_step, plain_zero, scratch)


def _zeros(fmt: IntegerFormat, lo: F32, hi: F32, step: F32, plain_zero: F32) -> list[F32]:
    """Zero points worth trying with a step."""
    if not fmt.zero_points:
        return [plain_zero, np.float32(fmt.max_code) - plain_zero]
    # The two that centre the codes on the group's range.
    middle = np.float32(fmt.max_code / 2) - (lo + hi) / (2 * step)
    return [np.clip(z, 0, fmt.max_code) for z in (np.floor(middle), np.ceil(middle))]


def _round(
    work: _Groups, fmt: IntegerFormat, step: F32, zero: F32, scratch: tuple[F32, F32]
) -> tuple[F32, F32]:
    """``u`` of every weight, as `encode` rounds it, and what is left of it, ``w - step * u``."""
    u, rest = scratch
    np.divide(work.w, np.maximum(step, FLOOR), out=u)
    np.rint(u, out=u)
    np.maximum(u, -zero, out=u)
    np.minimum(u, np.float32(fmt.max_code) - zero, out=u)
    np.multiply(u, step, out=rest)
    np.subtract(work.w, rest, out=rest)
    return u, rest


def _try(
    work: _Groups, fmt: IntegerFormat, step: F32, zero: F32, best: _Best, scratch: tuple[F32, F32]
) -> None:
    """Round with a step, refit it to the codes, keep it where it beats the best.

    The sums are of what is left, not of the weights: at 8 bits the candidates' errors differ by
    less than the float32 rounding of sum(w^2).
    """
    u, rest = _round(work, fmt, step, zero, scratch)
    ru = work.dot(rest, u)
    uu = np.maximum(work.dot(u, u), np.float32(1))
    correction = ru / uu
    error = work.dot(rest, rest) - ru * correction
    fit = step + correction
    better = (error < best.error) & (fit > 0)
    np.copyto(best.error, error, where=better)
    np.copyto(best.step, fit, where=better)
    np.copyto(best.zero, zero, where=better)


def _refine(
    work: _Groups,
    fmt: IntegerFormat,
    best: _Best,
    plain_step: F32,
    plain_zero: F32,
    scratch: tuple[F32, F32],
) -> tuple[F32, F32]:
    """Refit and round again with float16 steps; compare exact errors, plain rounding's first."""
    step, zero = plain_step.copy(), plain_zero.copy()
    _, rest = _round(work, fmt, step, zero, scratch)
    least = work.squares(rest)
    trial = best.step
    for _ in range(REFITS):
        trial = np.minimum(round_scale(trial), np.float32(MAX_SCALE))
        u, rest = _round(work, fmt, trial, best.zero, scratch)
        error = work.squares(rest)
        better = error < least
        np.copyto(least, error, where=better)
        np.copyto(step, trial, where=better)
        np.copyto(zero, best.zero, where=better)
        fit = trial + work.dot(rest, u) / np.maximum(work.dot(u, u), np.float32(1))
        trial = np.where(fit > 0, fit, trial)
    return step, zero
