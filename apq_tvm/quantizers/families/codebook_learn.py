"""Learning the codebooks of a whole model: two-phase clustering, then alternation.

Algorithm 1 of Gope et al. (sections 5.2, 5.3): groups of weights, each divided by its scale, become
histograms; k-means of the histograms gives as many clusters as there are codebooks; k-means of each
cluster's values gives its centroids. What follows is ours: groups move to the codebook that fits
them with least error at their best scale, and the centroids to the weighted means of what they
stand for, until few rounds later nothing is gained. Codebooks depend little on the model, so those
of one serve another (section 6.5).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.codebook import MAX_CENTROID, codebook_count
from apq_tvm.progress import Progress
from apq_tvm.quantizers.families.codebook_groups import TINY, Groups, Lookup
from apq_tvm.types import F32, Calibration, Scheme

I8 = NDArray[np.int8]

SAMPLE = 60_000
"""Groups to learn from, of the whole model."""

BINS = 16
"""Of the histograms."""

CLUSTERING = 20
"""Rounds of k-means."""

ALTERNATIONS = 16
"""Rounds of assignment and new centroids."""

FINE = 8
"""Centroids are learned on a grid so many times finer than the stored one."""

RATIOS = (1.15, 1.0, 0.88, 0.75)
"""Steps tried in an assignment, as in `apq_tvm.quantizers.families.codebook.RATIOS`."""

SEED = 5
"""Of every random choice: the same model gives the same codebooks."""


def learn(
    weights: Mapping[str, F32],
    scheme: Scheme,
    calibration: Calibration | None,
    progress: Progress,
) -> I8:
    """Codebooks int8 [C, 2^bits] for a model, rows ascending.

    Parameters
    ----------
    weights : mapping of str to float32 [N, K]
    scheme : Scheme
        Of the codebook family.
    calibration : Calibration or None
        Not used: importance belongs to columns, codebooks to all of them.
    progress : Progress
    """
    count, size = codebook_count(scheme), scheme.group_size
    rng = np.random.default_rng(SEED)
    with progress.stage(f"learn codebooks of {scheme}", 2 + ALTERNATIONS):
        progress.advance("sample")
        groups = sample(weights, size, rng)  # [groups, size]
        progress.advance("histograms")
        cluster = _cluster(groups, count, rng)
        books = np.stack(
            [_centroids(groups[cluster == c], groups, scheme.bits) for c in range(count)]
        )
        largest = MAX_CENTROID[scheme.bits]
        columns = np.ascontiguousarray(groups.T)
        for _ in range(ALTERNATIONS):
            progress.advance("alternate")
            books = _alternate(columns, books, largest)
    return stored(books, largest)


def stored(books: F32, largest: int) -> I8:
    """Round codebooks, each stretched to the largest centroid, in a canonical order."""
    peaks = np.maximum(np.abs(books).max(axis=1, keepdims=True), TINY)
    rounded = np.sort(np.rint(books / peaks * largest), axis=1).astype(np.int8)
    return np.ascontiguousarray(rounded[np.lexsort(rounded.T[::-1])])


def sample(weights: Mapping[str, F32], size: int, rng: np.random.Generator) -> F32:
    """Groups of all matrices in proportion to their size, [groups, size].

    Every matrix is divided by its root mean square, so that each weight of the model counts alike.
    Groups of zeros are left out; there is at least one group.
    """
    total = sum(w.size for w in weights.values())
    parts = []
    for w in weights.values():
        whole = w.shape[1] // size
        if not whole:
            continue
        peak = float(np.abs(w).max()) or 1.0
        take = min(w.shape[0] * whole, max(1, round(SAMPLE * w.size / total)))
        at = rng.choice(w.shape[0] * whole, take, replace=False)
        row, group = np.divmod(at, whole)
        picked = w[row[:, None], group[:, None] * size + np.arange(size)].astype(np.float64) / peak
        rms = float(np.sqrt(np.mean(picked**2))) or 1.0
        parts.append((picked / rms).astype(np.float32))
    groups = np.concatenate(parts) if parts else np.zeros((0, size), np.float32)
    groups = groups[np.abs(groups).max(axis=1) > 0] if len(groups) else groups
    if len(groups):
        return groups
    return np.linspace(-1, 1, size, dtype=np.float32)[None]  # nothing to learn from


def _cluster(groups: F32, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Phase 1: cluster of every group by k-means of cumulated histograms.

    Cumulated, so that values in neighbouring bins are near.
    """
    scaled = groups / np.abs(groups).max(axis=1, keepdims=True)
    bins = np.clip(((scaled + 1) * (BINS / 2)).astype(np.intp), 0, BINS - 1)
    histogram = np.zeros((len(groups), BINS), np.float32)
    np.add.at(histogram, (np.arange(len(groups))[:, None], bins), np.float32(1 / groups.shape[1]))
    points = np.cumsum(histogram, axis=1)
    centres = points[rng.choice(len(points), count, replace=len(points) < count)]
    nearest = np.zeros(len(points), np.intp)
    for _ in range(CLUSTERING):
        distance = (centres**2).sum(axis=1) - 2 * points @ centres.T  # [groups, C]
        nearest = distance.argmin(axis=1)
        for c in range(count):
            mine = nearest == c
            centres[c] = (
                points[mine].mean(axis=0) if mine.any() else points[rng.integers(len(points))]
            )
    return nearest


def _centroids(mine: F32, groups: F32, bits: int) -> F32:
    """Phase 2: 2^bits centroids of a cluster's values, relative to each group's largest."""
    source = mine if len(mine) else groups
    peak = np.abs(source).max(axis=1, keepdims=True)
    order = np.argsort((source / peak).ravel())
    values, mass = (source / peak).ravel()[order], np.repeat(peak**2, source.shape[1])[order]
    spread = (np.arange(1 << bits) + 0.5) / (1 << bits)
    centres = np.interp(spread, np.cumsum(mass) / mass.sum(), values)
    for _ in range(CLUSTERING):
        code = np.searchsorted((centres[1:] + centres[:-1]) / 2, values)
        weight = np.bincount(code, mass, 1 << bits)
        moved = np.bincount(code, mass * values, 1 << bits) / np.maximum(weight, TINY)
        centres = np.sort(np.where(weight > 0, moved, centres))
    return np.asarray(centres, np.float32)


def _alternate(columns: F32, books: F32, largest: int) -> F32:
    """One round: best codebook and step of every group, then the centroids of least error."""
    entries = books.shape[1]
    fine = largest * FINE
    peaks = np.maximum(np.abs(books).max(axis=1, keepdims=True), TINY)
    tables = [Lookup.of(np.rint(row).astype(np.int32)) for row in books / peaks * fine]
    work = Groups.of(columns, None)
    peak = np.abs(columns).max(axis=0)
    gain, step = np.zeros_like(peak), np.zeros_like(peak)
    chosen = np.zeros(peak.shape, np.intp)
    for j, table in enumerate(tables):
        for ratio in RATIOS:
            wc, cc = work.sums(peak * np.float32(ratio / fine), table)
            drop = wc * wc / np.maximum(cc, TINY)
            better = drop > gain
            np.copyto(gain, drop, where=better)
            np.copyto(step, wc / np.maximum(cc, TINY), where=better)
            np.copyto(chosen, j, where=better)
    left = np.einsum("kg,kg->g", columns, columns) - gain
    out = np.empty_like(books)
    for j, table in enumerate(tables):
        mine = chosen == j
        if not mine.any():  # start anew from the group that is served worst
            out[j] = np.quantile(columns[:, int(left.argmax())], np.linspace(0, 1, entries))
            left[int(left.argmax())] = 0
            continue
        part, size = np.ascontiguousarray(columns[:, mine]), step[mine]
        codes = Groups.of(part, None).codes(size, table).ravel()
        mass = np.bincount(codes, np.broadcast_to(size * size, part.shape).ravel(), entries)
        total = np.bincount(codes, (part * size).ravel(), entries)
        kept = np.rint(books[j] / peaks[j] * fine)
        out[j] = np.sort(np.where(mass > 0, total / np.maximum(mass, TINY), kept))
    return out
