"""Scales, zero points and second-order scales of ``mixed24``, chosen for least weighted error.

Everything works on stacks of groups, [N, J, 16]: J groups of 16 input channels at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadScheme
from apq_tvm.formats.integer import round_scale
from apq_tvm.formats.mixed import SUPER
from apq_tvm.types import F32

NARROW_FACTORS = (1.1, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""2-bit steps tried, relative to the one that covers a group's range."""

WIDE_FACTORS = (1.0, 0.94, 0.88, 0.82, 0.76, 0.7, 0.62, 0.54)
"""4-bit steps tried, relative to the one that covers a row's range."""

SHRINK = (1.0, 0.9, 0.8, 0.7)
"""Largest second-order level tried, relative to the largest step of the 16 output channels."""

CHUNK = 1 << 16
"""Weights worked on at a time: float32 work arrays stay in a second-level cache."""


@dataclass(frozen=True)
class NarrowScales:
    """What the 2-bit groups of [N, J, 16] weights decode with.

    Parameters
    ----------
    sub_scales, sub_zeros : uint8 [N, J]
    super_scales : float16 [B, J]
    super_zeros : uint8 [B, J]
        B = ceil(N / 16).
    """

    sub_scales: NDArray[np.uint8]
    sub_zeros: NDArray[np.uint8]
    super_scales: NDArray[np.float16]
    super_zeros: NDArray[np.uint8]

    @property
    def steps(self) -> F32:
        """float32 [N, J]."""
        n = len(self.sub_scales)
        scale = np.repeat(self.super_scales.astype(np.float32), SUPER, axis=0)[:n]
        zero = np.repeat(self.super_zeros, SUPER, axis=0)[:n]
        return (self.sub_scales + zero).astype(np.float32) * scale


def encode(w: F32, step: F32, zero: NDArray[np.uint8] | F32, most: int) -> F32:
    """Codes to nearest of weights [..., C] whose steps and zero points are [...]; float32."""
    usable = step > 0
    inverse = np.divide(1, step, out=np.zeros_like(step), where=usable)[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        code = np.rint(w * inverse) + zero[..., None]
    return np.asarray(np.clip(np.nan_to_num(code, nan=0.0), 0, most), np.float32)


def row_scales(w: F32, importance: F32, search: bool, name: str) -> tuple[F32, F32]:
    """Step and zero point of every row's 4-bit codes.

    Parameters
    ----------
    w : float32 [N, C]
    importance : float32 [C]
    search : bool
        False takes the step that covers the row's range.
    name : str

    Returns
    -------
    float32 [N], float32 [N]
        Steps are float16 values; zero points are whole, 0..15.

    Raises
    ------
    BadScheme
        If a step overflows float16.
    """
    n, c = w.shape
    steps, zeros = np.zeros(n, np.float32), np.zeros(n, np.float32)
    rows = max(1, CHUNK // max(c, 1))
    for start in range(0, n if c else 0, rows):
        at = slice(start, start + rows)
        tried = _best(w[at], importance, 15, WIDE_FACTORS if search else (1.0,), search)
        steps[at], zeros[at] = _check(round_scale(tried[0]), name), tried[1]
        if search:
            q = encode(w[at], steps[at], zeros[at], 15) - zeros[at, None]
            weight = importance * q
            size = np.einsum("nc,nc->n", weight, q)
            fit = np.divide(
                np.einsum("nc,nc->n", weight, w[at]), size, out=steps[at].copy(), where=size > 0
            )
            steps[at] = _check(round_scale(np.maximum(fit, 0)), name)
    return steps, zeros


def narrow_scales(
    w: F32, importance: F32, bits: NDArray[np.int64], search: bool, name: str
) -> NarrowScales:
    """Both orders of scales of 2-bit groups.

    Parameters
    ----------
    w : float32 [N, J, 16]
    importance : float32 [J, 16]
    bits : int [J]
        Of every group's sub-scales.
    search : bool
    name : str

    Raises
    ------
    BadScheme
        If a second-order scale overflows float16.
    """
    n, j, _ = w.shape
    blocks = -(-n // SUPER)
    found = NarrowScales(
        np.empty((n, j), np.uint8),
        np.empty((n, j), np.uint8),
        np.empty((blocks, j), np.float16),
        np.empty((blocks, j), np.uint8),
    )
    rows = max(1, CHUNK // (16 * SUPER * max(j, 1))) * SUPER
    for start in range(0, n if j else 0, rows):
        at, of = slice(start, start + rows), slice(start // SUPER, (start + rows) // SUPER)
        part = _narrow(w[at], importance, ((1 << bits) - 1).astype(np.float32), search, name)
        found.sub_scales[at], found.sub_zeros[at] = part.sub_scales, part.sub_zeros
        found.super_scales[of], found.super_zeros[of] = part.super_scales, part.super_zeros
    return found


def _narrow(w: F32, importance: F32, most: F32, search: bool, name: str) -> NarrowScales:
    n = len(w)
    factors = NARROW_FACTORS if search else (1.0,)
    steps, zeros, curve = _best_with_curve(w, importance, 3, factors, search)
    scale, zero = _second_order(_blocks(steps), _blocks(curve), most, search)
    scale = _check(round_scale(scale), name)

    def of_rows(values: F32) -> F32:
        return np.repeat(values, SUPER, axis=0)[:n]

    wide_scale, wide_zero = of_rows(scale), of_rows(zero)
    level = np.divide(steps, wide_scale, out=np.zeros_like(steps), where=wide_scale > 0) - wide_zero
    sub = np.clip(np.rint(level), 0, most)
    if search:
        sub, zeros = _refine(w, importance, wide_scale, wide_zero, sub, zeros, most)
        scale = _check(round_scale(_refit(w, importance, scale, sub + wide_zero, zeros)), name)
    small = np.uint8
    return NarrowScales(
        sub.astype(small), zeros.astype(small), scale.astype(np.float16), zero.astype(small)
    )


def _best(
    w: F32, importance: F32, most: int, factors: tuple[float, ...], search: bool
) -> tuple[F32, F32]:
    """Step and zero point [...] of groups [..., C] with the least weighted error."""
    steps, zeros, _ = _best_with_curve(w, importance, most, factors, search)
    return steps, zeros


def _best_with_curve(
    w: F32, importance: F32, most: int, factors: tuple[float, ...], search: bool
) -> tuple[F32, F32, F32]:
    """As `_best`, and how fast the error grows with the step: Σ importance (code - zero)²."""
    low, high = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
    span = (high - low) / np.float32(most)
    best = np.full(span.shape, np.inf, np.float32)
    steps, zeros, curve = span.copy(), np.zeros_like(span), np.zeros_like(span)
    for factor in factors:
        step = span * np.float32(factor)
        middle = np.divide(-low * factor, step, out=np.zeros_like(step), where=step > 0)
        for zero in _zeros(middle, most, search):
            q = encode(w, step, zero, most) - zero[..., None]
            left = w - q * step[..., None]
            error = (left * left * importance).sum(-1)
            better = error < best
            best = np.where(better, error, best)
            steps, zeros = np.where(better, step, steps), np.where(better, zero, zeros)
            curve = np.where(better, (q * q * importance).sum(-1), curve)
    return steps, zeros, curve


def _zeros(middle: F32, most: int, search: bool) -> list[F32]:
    """Zero points worth trying: all of 2-bit codes, those near the range's own of 4-bit codes."""
    if not search:
        return [np.clip(np.rint(middle), 0, most)]
    if most <= 3:
        return [np.full_like(middle, z) for z in range(most + 1)]
    base = np.rint(middle)
    return [np.clip(base + shift, 0, most) for shift in (-1, 0, 1)]


def _blocks(values: F32) -> F32:
    """[N, J] -> [B, 16, J], rows past N are 0."""
    n, j = values.shape
    padded = np.zeros((-(-n // SUPER) * SUPER, j), np.float32)
    padded[:n] = values
    return padded.reshape(-1, SUPER, j)


def _second_order(steps: F32, curve: F32, most: F32, search: bool) -> tuple[F32, F32]:
    """Scale and zero [B, J] of the grid ``scale * (sub + zero)`` nearest to steps [B, 16, J]."""
    largest = steps.max(1)
    best = np.full(largest.shape, np.inf, np.float32)
    scale, zero = largest / most, np.zeros_like(largest)
    for shrink in SHRINK if search else (1.0,):
        for z in range(16):
            unit = largest * np.float32(shrink) / (most + z)
            level = np.divide(
                steps, unit[:, None], out=np.zeros_like(steps), where=unit[:, None] > 0
            )
            sub = np.clip(np.rint(level) - z, 0, most)
            left = steps - (sub + z) * unit[:, None]
            error = (left * left * curve).sum(1)
            better = error < best
            best = np.where(better, error, best)
            scale, zero = np.where(better, unit, scale), np.where(better, np.float32(z), zero)
    return scale, zero


def _refine(
    w: F32, importance: F32, scale: F32, plus: F32, sub: F32, zeros: F32, most: F32
) -> tuple[F32, F32]:
    """The sub-scale next to `sub` and the zero point with the least error."""
    best = np.full(sub.shape, np.inf, np.float32)
    chosen, zero = sub, zeros
    for shift in (0, -1, 1):
        tried = np.clip(sub + shift, 0, most)
        step = (tried + plus) * scale
        for z in range(4):
            at = np.full_like(sub, z)
            left = w - (encode(w, step, at, 3) - np.float32(z)) * step[..., None]
            error = (left * left * importance).sum(-1)
            better = error < best
            best = np.where(better, error, best)
            chosen, zero = np.where(better, tried, chosen), np.where(better, at, zero)
    return chosen, zero


def _refit(w: F32, importance: F32, scale: F32, levels: F32, zeros: F32) -> F32:
    """Second-order scales [B, J] that suit the codes best, by least squares."""
    n = len(w)
    step = levels * np.repeat(scale, SUPER, axis=0)[:n]
    q = (encode(w, step, zeros, 3) - zeros[..., None]) * levels[..., None]
    top = _blocks((q * w * importance).sum(-1)).sum(1)
    size = _blocks((q * q * importance).sum(-1)).sum(1)
    fit = np.divide(top, size, out=scale.copy(), where=(size > 0) & (top > 0))
    return np.asarray(fit, np.float32)


def _check(scale: F32, name: str) -> F32:
    if not np.isfinite(scale).all():
        raise BadScheme(
            f"{name}: a scale of mixed24 exceeds 65504, the largest float16, because its weights "
            "are too large; keep this tensor float (--tensor-type NAME=float)"
        )
    return scale
