"""From how many rows of x on, and up to how many, each kernel is to be chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Shares = Mapping[str, Mapping[int, float]]
"""Kernel → rows of x → time of the fastest kernel over its own, at most 1; what it was not timed
with is left out."""

MUST = 1e6
"""Outweighs all gains: of rows that no other kernel serves."""


def best_ranges(order: Sequence[str], rows: Sequence[int], shares: Shares) -> dict[str, list[int]]:
    """The rows that each kernel serves best, all of one kernel side by side.

    Parameters
    ----------
    order : sequence of str
        Kernels, in the order in which they are preferred where several are chosen.
    rows : sequence of int
        That were timed, rising.
    shares : mapping

    Returns
    -------
    dict of str to list of int
        Kernel → some of `rows`, none of another's. Of all ways to choose them one after the other,
        as `apq_tvm.select.choose` does, each with the best of those behind it for the rest.
    """
    left, found = list(rows), {}
    for at, kernel in enumerate(order):
        rest = [shares[other] for other in order[at + 1 :]]
        gains = [_gain(shares[kernel].get(m), [other.get(m) for other in rest]) for m in left]
        first, last = _best_slice(gains)
        found[kernel] = left[first:last]
        left = left[:first] + left[last:]
    return found


def _gain(mine: float | None, others: Sequence[float | None]) -> float:
    """Logarithm of what a kernel gains over the best of others."""
    known = [share for share in others if share is not None]
    if mine is None:
        return -MUST
    return math.log(mine / max(known)) if known else MUST


def _best_slice(gains: Sequence[float]) -> tuple[int, int]:
    """Ends of the slice of the largest sum, an empty one where all lose."""
    best, found = 0.0, (0, 0)
    for first in range(len(gains)):
        total = 0.0
        for last in range(first, len(gains)):
            total += gains[last]
            if total > best:
                best, found = total, (first, last + 1)
    return found


def limits(serves: Sequence[int], rows: Sequence[int]) -> tuple[int, int]:
    """Fewest and most rows of x (-1: no limit) of a kernel that serves some that were timed.

    Between two that were timed the middle decides, by ratio. A kernel that serves none is for 0 at
    the most.
    """
    if not serves:
        return 1, 0
    first, last = rows.index(serves[0]), rows.index(serves[-1])
    least = math.isqrt(rows[first - 1] * rows[first]) + 1 if first else 1
    most = math.isqrt(rows[last] * rows[last + 1]) if last + 1 < len(rows) else -1
    return least, most
