"""Ratios of times that were taken in turns, and how sure they are.

A machine that slows down slows neighbours alike, so each sample of a candidate is divided into the
samples of the default beside it. The median of such ratios has an interval that supposes nothing of
their distribution: the number of ratios below the true median is binomial (Conover, Practical
Nonparametric Statistics, 1999, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

FASTER = 1.02
"""A record's ratio is above this for sure: less is not worth a schedule of its own."""

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """The default's time over another's.

    Parameters
    ----------
    value : float
        Median over samples.
    low, high : float
        Its interval; 0 and infinity where samples are too few to say.
    samples : int
    """

    value: float
    low: float
    high: float
    samples: int

    @property
    def is_faster(self) -> bool:
        """Whether it is worth a record for sure."""
        return self.low > FASTER


def ratio_of(pairs: Sequence[tuple[float, float]], confidence: float = CONFIDENCE) -> Ratio:
    """The ratio of (default, candidate) times.

    Parameters
    ----------
    pairs : sequence of (float, float)
        Nanoseconds, of samples beside each other.
    confidence : float
        Of the interval.
    """
    ratios = sorted(default / mine for default, mine in pairs)
    if not ratios:
        return Ratio(0.0, 0.0, math.inf, 0)
    count = len(ratios)
    below = _rank(count, (1 - confidence) / 2)
    if below == 0:
        return Ratio(median(ratios), 0.0, math.inf, count)
    return Ratio(median(ratios), ratios[below - 1], ratios[count - below], count)


def rough_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """The ratio of the least times: of few samples it is the steadiest, but without an interval."""
    return min(default for default, _ in pairs) / min(mine for _, mine in pairs)


def _rank(count: int, tail: float) -> int:
    """The largest r for which fewer than r of `count` fair coins show heads with at most `tail`."""
    total, rank = 0.0, 0
    for heads in range(count):
        total += math.comb(count, heads) / 2.0**count
        if total > tail:
            break
        rank = heads + 1
    return rank
