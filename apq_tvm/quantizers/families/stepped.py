"""Codes with float minima, and k-quants: step and minimum of every group by least squares.

Every group tries a grid of steps from its least weight up; of the codes that gives, least squares
has the best step and minimum, and the pair of least error stays. K-quants then make the largest
step and minimum of a super-block the largest sub-scale, and round the others to integers (the
search is that of llama.cpp's make_qkx2_quants, ggml-quants.c, in spirit). Codes are the nearest to
what is stored. Without minima, steps are those of `apq_tvm.quantizers.families.levels`.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.formats.arrays import group_count
from apq_tvm.formats.kquant import KINDS, SUPER, Kind
from apq_tvm.quantizers.families.codebook import round_scales
from apq_tvm.quantizers.families.codebook_groups import TINY, Chunk, Lookup, chunks, importance
from apq_tvm.quantizers.families.levels import search_steps
from apq_tvm.quantizers.quantizer import QuantContext
from apq_tvm.types import F32, U8, Array, QuantizedTensor, Scheme

SHIFTS = (0.0, -0.6, -0.35, 0.3, 0.65, 1.1)
"""Steps tried: the range of a group is so many codes longer than the largest code."""


def quantize_minima(w: F32, scheme: Scheme, name: str, context: QuantContext) -> QuantizedTensor:
    """Quantize one matrix to codes with a float minimum per group (`apq_tvm.formats.minimum`).

    Raises
    ------
    UnsupportedModel
        If a weight is NaN or infinite.
    BadScheme
        If a scale overflows float16.
    """
    n, k = w.shape
    size, top = scheme.group_size, (1 << scheme.bits) - 1
    per_row = group_count(k, size)
    codes = np.empty((n, k), np.uint8)
    scales, mins = (np.empty((n, per_row), np.float16) for _ in range(2))
    h = importance(context.stats, (n, k)) if context.search else None
    for chunk in chunks(w, h, size, per_row, name):
        found = _lines(chunk, top, SHIFTS if context.search else SHIFTS[:1], signed=True)
        stored = []
        for target, values in zip((scales, mins), found, strict=True):
            target[chunk.rows] = round_scales(values.reshape(chunk.count, -1), chunk.norm, name)
            stored.append(_back(target[chunk.rows], chunk).ravel())
        codes[chunk.rows] = chunk.put(_codes(chunk.groups.w, stored[0], stored[1], top), k)
    return QuantizedTensor(codes, scales, None, scheme, {"mins": mins})


def quantize_kquant(w: F32, scheme: Scheme, name: str, context: QuantContext) -> QuantizedTensor:
    """Quantize one matrix to k-quants (`apq_tvm.formats.kquant`); errors as `quantize_minima`."""
    n, k = w.shape
    kind, top = KINDS[scheme.bits], (1 << scheme.bits) - 1
    groups, supers = group_count(k, kind.group), group_count(k, SUPER)
    codes = np.empty((n, k), np.uint8)
    names = ("scales", "min_scales")[: 1 + kind.minima], ("subs", "mins")[: 1 + kind.minima]
    wide = {key: np.empty((n, supers), np.float16) for key in names[0]}
    small = {key: np.empty((n, groups), kind.sub_type) for key in names[1]}
    h = importance(context.stats, (n, k)) if context.search else None
    for chunk in chunks(w, h, kind.group, supers * kind.per_super, name):
        stored = []
        for scale, sub, values in zip(*names, _wanted(chunk, kind, top, context), strict=True):
            each = values.reshape(chunk.count, supers, kind.per_super)
            at = np.abs(each).argmax(axis=2)[..., None]
            most = np.take_along_axis(each, at, axis=2)[..., 0] / np.float32(kind.most)
            wide[scale][chunk.rows] = round_scales(most, chunk.norm, name)
            unit = _back(wide[scale][chunk.rows], chunk)[..., None]
            parts = np.rint(np.divide(each, unit, out=np.zeros_like(each), where=unit != 0))
            parts = np.clip(parts, 0 if kind.minima else -kind.most - 1, kind.most)
            small[sub][chunk.rows] = parts.reshape(chunk.count, -1)[:, :groups]
            stored.append((parts * unit).ravel())
        middle = 0 if kind.minima else (top + 1) // 2
        least = stored[1] if kind.minima else stored[0] * np.float32(middle)
        codes[chunk.rows] = chunk.put(_codes(chunk.groups.w, stored[0], least, top), k)
    tables: dict[str, Array] = {**wide, **small}
    return QuantizedTensor(codes, tables.pop("scales"), None, scheme, tables)


def _wanted(chunk: Chunk, kind: Kind, top: int, context: QuantContext) -> tuple[F32, ...]:
    """Steps of all groups, and minima where there are any."""
    if kind.minima:
        return _lines(chunk, top, SHIFTS if context.search else SHIFTS[:1], signed=False)
    half = (top + 1) // 2
    if context.search:
        return (search_steps(chunk.groups, Lookup.of(np.arange(-half, half, dtype=np.int32))),)
    w = chunk.groups.w
    extreme = np.take_along_axis(w, np.abs(w).argmax(axis=0)[None], axis=0)[0]
    return (np.asarray(extreme / np.float32(-half)),)


def _back(stored: Array, chunk: Chunk) -> F32:
    """Scales as stored, relative to a chunk's norm."""
    return np.asarray(stored.astype(np.float64) / chunk.norm, np.float32)


def _codes(w: F32, step: F32, least: F32, top: int) -> U8:
    """Nearest codes of weights [size, groups] to ``step * code - least``."""
    usable = step != 0
    code = np.divide(w + least, step, out=np.zeros_like(w), where=usable)
    return np.asarray(np.clip(np.rint(code), 0, top), np.uint8)


def _lines(chunk: Chunk, top: int, shifts: tuple[float, ...], signed: bool) -> tuple[F32, F32]:
    """Step and minimum of every group, of any sign or neither negative."""
    w = chunk.groups.w
    ones = np.ones_like(w) if chunk.groups.h is None else chunk.groups.h
    low, high = _range(w, chunk.groups.h)
    if not signed:
        low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
    # A group of one value has no step: the minimum says it all.
    step, least = np.zeros_like(low), -low
    best = np.full_like(low, np.inf)
    total, mean = ones.sum(axis=0), np.einsum("kg,kg->g", ones, w)
    for shift in shifts:
        trial = (high - low) / np.float32(top + shift)
        codes = _codes(w, trial, -low, top).astype(np.float32)
        c, wc = np.einsum("kg,kg->g", ones, codes), np.einsum("kg,kg,kg->g", ones, codes, w)
        cc = np.einsum("kg,kg,kg->g", ones, codes, codes)
        det = cc * total - c * c
        usable = det > 1e-6 * cc * total
        inverse = np.where(usable, 1 / np.maximum(det, TINY), 0)
        fit, offset = (wc * total - c * mean) * inverse, (c * wc - cc * mean) * inverse
        if not signed:
            usable &= (fit > 0) & (offset >= 0)
        fit = np.where(usable, fit, trial).astype(np.float32)
        offset = np.where(usable, offset, -low).astype(np.float32)
        error = np.einsum("kg,kg->g", ones, np.square(fit * codes - offset - w))
        better = error < best
        for target, value in ((best, error), (step, fit), (least, offset)):
            np.copyto(target, value, where=better)
    return step, least


def _range(w: F32, h: F32 | None) -> tuple[F32, F32]:
    """Least and largest weight of every group; padding, which weighs nothing, does not count."""
    if h is None:
        return w.min(axis=0), w.max(axis=0)
    there = h > 0
    low = np.where(there, w, np.float32(np.inf)).min(axis=0)
    high = np.where(there, w, np.float32(-np.inf)).max(axis=0)
    empty = ~there.any(axis=0)
    return np.where(empty, 0, low).astype(np.float32), np.where(empty, 0, high).astype(np.float32)
