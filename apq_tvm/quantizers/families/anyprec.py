"""Any-precision codes: a weighted k-means seed, and clusters that split in two bit by bit.

Park et al., "Any-Precision LLM" (ICML 2024), section 3.3, "Incremental upscaling": the narrowest
model is SqueezeLLM's weighted 1-D k-means of every output channel; each further bit splits every
cluster into the two that least raise the weighted squared error. There parents never change; here
all widths settle together after each split (`_Clusters.settled`). At its optimum the narrowest
model loses nearly nothing by a small move, which the wider ones gain from: on layers of SmolLM2 3
bits lose 0.4 % more than alone, 4 bits 2 to 3 % (5 to 8 % without) and wider ones less than alone.

In one dimension clusters are intervals of the sorted weights, and prefix sums of w and w v give
every interval's error at once: the seed is found by dynamic programming (`anyprec_seeds`), Lloyd's
iteration moves the interval's ends by binary search, and a split looks at every place between two
weights, which makes it the exact optimum.

Where cells of 5 bits are divided uniformly, clusters end there (`anyprec_uniform`).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.anyprec import choose_channels, settled, table_name
from apq_tvm.formats.anyprec_cells import CELL_BITS, has_cells
from apq_tvm.formats.integer import check_scale, format_of, round_scale
from apq_tvm.quantizers.families.anyprec_seeds import optimal_ends
from apq_tvm.quantizers.families.anyprec_uniform import divided
from apq_tvm.quantizers.quantizer import QuantContext
from apq_tvm.types import F32, F64, QuantizedTensor, Scheme

Ints = NDArray[np.int64]

CHUNK = 1 << 17
"""Weights that one thread works on at a time."""

SEED_BITS = 4
"""Widest seed by dynamic programming. Wider ones have so many clusters that Lloyd's iteration from
its splits finds nearly as good ones."""

LLOYD_ROUNDS = 40
"""Most iterations of wider seeds; nearly all blocks stop moving before."""

SETTLE_ROUNDS = 10
"""Most iterations of all widths together, after each split."""

WIDTH_WEIGHT = 2.0
"""How much more the error of each width counts than that of the width before. 4 would make relative
errors count alike; the widest, with the most ends, would then decide."""

SPREADS = (1 / 3, 0.7)
"""Wide seeds tried besides splits: clusters hold equal shares of the density to this power. A third
is optimal for many clusters (Panter and Dite, "Quantization distortion in pulse-count modulation",
1951)."""

BINS = 128
"""Of the histogram that seeds are taken from."""


def quantize_anyprec(w: F32, scheme: Scheme, name: str, context: QuantContext) -> QuantizedTensor:
    """Choose codes and centroids of every width of one matrix.

    Parameters
    ----------
    w : float32 [N, K]
    scheme : Scheme
        Of family ``anyprec``.
    name : str
        For errors.
    context : QuantContext
        The importance of a weight is its Fisher information, or E[x^2] of its input, or 1.

    Returns
    -------
    QuantizedTensor

    Raises
    ------
    BadScheme
        A scale overflows float16.
    """
    n, k = w.shape
    channels = choose_channels(n, k, scheme)
    scales = round_scale(np.abs(w).max(axis=1, keepdims=True))
    check_scale(scales, name, format_of(Scheme(8)))
    divisor = np.where(scales > 0, scales, np.float32(1))
    # Errors count in the weights' own units: a block's rows are scaled differently.
    importance = np.asarray(_importance(w, context) * divisor**2, np.float32)
    codes = np.empty((n, k), np.uint8)
    blocks = -(-n // channels)
    widths: tuple[int, ...] = scheme.widths
    if has_cells(scheme) and scheme.bits > CELL_BITS:
        widths = tuple(range(min(scheme.min_bits, CELL_BITS), CELL_BITS + 1))
    tables = {b: np.empty((blocks, 1 << b), np.float16) for b in widths}
    step = max(1, CHUNK // (channels * k))

    def work(first: int) -> None:
        last = min(first + step, blocks)
        rows = slice(first * channels, min(last * channels, n))
        values = np.asarray(w[rows] / divisor[rows], np.float32)
        clusters = _Clusters.of(values, importance[rows], channels)
        for bits in widths:
            if bits == widths[0]:
                clusters = clusters.seeded(bits)
            else:
                clusters = clusters.split().settled(bits - widths[0])
        for bits in widths:
            tables[bits][first:last] = clusters.merged(widths[-1] - bits).centroids()
        codes[rows] = clusters.labels().reshape(-1, k)[: rows.stop - rows.start]

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in [pool.submit(work, first) for first in range(0, blocks, step)]:
            done.result()
    finished = {table_name(b): settled(table, scheme) for b, table in tables.items()}
    tensor = QuantizedTensor(codes, scales.astype(np.float16), None, scheme, finished)
    return divided(w, tensor, importance) if widths != scheme.widths else tensor


def _importance(w: F32, context: QuantContext) -> F32:
    """What an error of each weight counts, float32 [N, K] or broadcast to it; none is 0."""
    stats = context.stats
    if stats is None:
        return np.ones((1, 1), np.float32)
    known = stats.mean_square[None, :] if stats.fisher is None else stats.fisher
    # Zero would let a cluster of channels that calibration never saw go anywhere.
    floor = np.float32(1e-3) * known.mean() or np.float32(1)
    return np.maximum(known, floor).astype(np.float32)


@dataclass(frozen=True)
class _Clusters:
    """Clusters of blocks of sorted values, as intervals.

    Parameters
    ----------
    values : float64 [B, S]
        Sorted along S.
    order : int [B, S]
        Where each sorted value was.
    mass, moment : float64 [B, S + 1]
        Sums of the weights, and of weight times value, of all values before.
    ends : int [B, k + 1]
        Cluster j of a block holds its values from ``ends[j]`` up to ``ends[j + 1]``.
    """

    values: F64
    order: Ints
    mass: F64
    moment: F64
    ends: Ints

    @classmethod
    def of(cls, values: F32, weights: F32, channels: int) -> _Clusters:
        """Sort the values of each block of `channels` rows; rows that lack count nothing."""
        rows, k = values.shape
        missing = -rows % channels
        weights = np.broadcast_to(weights, values.shape)
        padded = np.pad(values, ((0, missing), (0, 0))).reshape(-1, channels * k)
        counted = np.pad(weights, ((0, missing), (0, 0))).reshape(-1, channels * k)
        order = np.argsort(padded, axis=1)
        ordered = np.take_along_axis(padded, order, axis=1).astype(np.float64)
        weight = np.take_along_axis(counted, order, axis=1).astype(np.float64)
        ends = np.tile([0, channels * k], (len(ordered), 1))
        return cls(ordered, order, _before(weight), _before(weight * ordered), ends)

    def seeded(self, bits: int) -> _Clusters:
        """2^bits clusters of least weighted squared error: by dynamic programming up to
        `SEED_BITS`, by k-means from several seeds above."""
        few = 1 << min(bits, SEED_BITS)
        best_few = replace(self, ends=optimal_ends(self.values, self.mass, self.moment, few))
        if bits <= SEED_BITS:
            return best_few
        halves = best_few
        for _ in range(bits - SEED_BITS):
            halves = halves.split()
        starts = [self._positions(self._seed(1 << bits, spread)) for spread in SPREADS]
        found = [self._lloyd(ends) for ends in (halves.ends, *starts)]
        best = np.argmax([replace(self, ends=ends)._explained() for ends in found], axis=0)
        return replace(self, ends=np.stack(found)[best, np.arange(len(best))])

    def _lloyd(self, ends: Ints) -> Ints:
        """Ends that Lloyd's iteration arrives at: every value is in the cluster of its mean."""
        for _ in range(LLOYD_ROUNDS):
            means = replace(self, ends=ends)._means()
            moved = self._positions((means[:, 1:] + means[:, :-1]) / 2)
            if np.array_equal(moved, ends):
                break
            ends = moved
        return ends

    def split(self) -> _Clusters:
        """Every cluster as the two that explain most."""
        blocks, size = self.values.shape
        lengths = np.diff(self.ends).reshape(-1)
        mass, moment = self._sums()

        def spread(values: NDArray[np.float64]) -> F64:
            """A value per cluster, repeated for its members."""
            return np.repeat(values.reshape(-1), lengths).reshape(blocks, size)

        # What lies below each value in its cluster, and above or at it.
        low_mass = self.mass[:, :-1] - spread(np.take_along_axis(self.mass, self.ends[:, :-1], 1))
        low = self.moment[:, :-1] - spread(np.take_along_axis(self.moment, self.ends[:, :-1], 1))
        high_mass, high = spread(mass) - low_mass, spread(moment) - low
        gain = _ratio(low * low, low_mass) + _ratio(high * high, high_mass)
        middle = self._largest(gain, lengths)
        ends = np.empty((blocks, 2 * self.ends.shape[1] - 1), np.int64)
        ends[:, ::2], ends[:, 1::2] = self.ends, middle
        return replace(self, ends=ends)

    def merged(self, times: int) -> _Clusters:
        """Pairs of neighbours as one cluster, so many times: a narrower model."""
        return replace(self, ends=self.ends[:, :: 1 << times])

    def settled(self, splits: int) -> _Clusters:
        """Move the ends of all widths, from `splits` splits ago on, to where they suit all best.

        An end of one width is one of every wider width too. Two clusters with means a < b cost a
        value v alike where ``2 v (b - a) = b^2 - a^2``; summed over widths with their weights, that
        says where all of them together do.
        """
        clusters, count = self, self.ends.shape[1] - 1
        last = self.values.shape[1] - 1
        for _ in range(SETTLE_ROUNDS):
            squares = np.zeros((len(self.values), count - 1))
            gaps = np.zeros_like(squares)
            for times in range(splits + 1):
                means, step = clusters.merged(times)._means(), 1 << times
                low, high = means[:, :-1], means[:, 1:]
                weight = WIDTH_WEIGHT**-times
                squares[:, step - 1 :: step] += weight * (high * high - low * low)
                gaps[:, step - 1 :: step] += 2 * weight * (high - low)
            now = np.take_along_axis(self.values, np.clip(clusters.ends[:, 1:-1], 0, last), 1)
            wanted = np.divide(squares, gaps, out=now, where=gaps > 0)
            ends = self._positions(np.maximum.accumulate(wanted, axis=1))
            if np.array_equal(ends, clusters.ends):
                break
            clusters = replace(self, ends=ends)
        return clusters

    def centroids(self) -> NDArray[np.float16]:
        """Weighted mean of each cluster, [B, k]; where it is empty, the value at its place."""
        return self._means().astype(np.float16)

    def labels(self) -> NDArray[np.uint8]:
        """Number of each value's cluster, uint8 [B, S], in the values' own order."""
        clusters = np.tile(np.arange(self.ends.shape[1] - 1, dtype=np.uint8), len(self.ends))
        ordered = np.repeat(clusters, np.diff(self.ends).reshape(-1)).reshape(self.order.shape)
        labels = np.empty_like(ordered)
        np.put_along_axis(labels, self.order, ordered, axis=1)
        return labels

    def _sums(self) -> tuple[F64, F64]:
        """Mass and moment of each cluster, [B, k]."""
        mass = np.diff(np.take_along_axis(self.mass, self.ends, 1))
        return mass, np.diff(np.take_along_axis(self.moment, self.ends, 1))

    def _means(self) -> F64:
        mass, moment = self._sums()
        last = self.values.shape[1] - 1
        least = np.take_along_axis(self.values, np.minimum(self.ends[:, :-1], last), 1)
        most = np.take_along_axis(self.values, np.clip(self.ends[:, 1:] - 1, 0, last), 1)
        means = np.divide(moment, mass, out=least.copy(), where=mass > 0)
        # Next to very important values the sums of others are rounding errors.
        return np.asarray(np.clip(means, least, np.maximum(least, most)))

    def _explained(self) -> F64:
        """Sum over clusters of moment^2 / mass, [B]: what k-means makes as large as it can."""
        mass, moment = self._sums()
        return np.asarray(_ratio(moment * moment, mass).sum(axis=1))

    def _seed(self, clusters: int, power: float) -> F64:
        """Ends that give each cluster an equal share of the density's power, [B, k - 1]."""
        edges = np.linspace(-1, 1, BINS + 1) * self._reach()  # [B, BINS + 1]
        at = self._positions(edges[:, 1:-1])
        share = np.diff(np.take_along_axis(self.mass, at, 1)) ** power
        total = np.cumsum(share, axis=1)
        total /= np.maximum(total[:, -1:], 1e-300)
        wanted = np.arange(1, clusters) / clusters
        found = (total[:, None, :] < wanted[None, :, None]).sum(axis=2)  # [B, k - 1]
        return np.take_along_axis(edges, np.minimum(found + 1, BINS), 1)

    def _reach(self) -> F64:
        """Largest magnitude of each block, [B, 1]; 1 where all values are 0."""
        largest = np.maximum(-self.values[:, :1], self.values[:, -1:])
        return np.asarray(np.where(largest > 0, largest, 1.0))

    def _positions(self, thresholds: F64) -> Ints:
        """Cluster ends at thresholds [B, k - 1], by one binary search over all blocks."""
        blocks, size = self.values.shape
        # Block b's values, as shares of its largest, go to 4 b + value: one sorted array.
        offset, reach = 4.0 * np.arange(blocks)[:, None], self._reach()
        keys = (self.values / reach + offset).reshape(-1)
        wanted = np.clip(thresholds / reach, -1.5, 1.5) + offset
        inner = np.searchsorted(keys, wanted.reshape(-1)).reshape(thresholds.shape)
        inner -= size * np.arange(blocks)[:, None]
        whole = np.full((blocks, 1), size)
        return np.concatenate([np.zeros_like(whole), np.clip(inner, 0, size), whole], axis=1)

    def _largest(self, gain: F64, lengths: Ints) -> Ints:
        """Where in each cluster `gain` is largest, [B, k]; the start of an empty one."""
        starts = self.ends[:, :-1]
        flat_starts = (starts + gain.shape[1] * np.arange(len(gain))[:, None]).reshape(-1)
        filled = lengths > 0
        flat = gain.reshape(-1)
        largest = np.zeros(len(lengths))
        largest[filled] = np.maximum.reduceat(flat, flat_starts[filled])
        hits = np.flatnonzero(flat == np.repeat(largest, lengths))
        places = flat_starts.copy()
        places[filled] = hits[np.searchsorted(hits, flat_starts[filled])]
        inside = places.reshape(starts.shape) - gain.shape[1] * np.arange(len(gain))[:, None]
        return np.asarray(inside)


def _before(values: F64) -> F64:
    """Sum of all values before each place, [B, S + 1]."""
    sums = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums


def _ratio(a: F64, b: F64) -> F64:
    """a / b, 0 where b is not positive."""
    return np.asarray(np.divide(a, b, out=np.zeros_like(a), where=b > 0))
