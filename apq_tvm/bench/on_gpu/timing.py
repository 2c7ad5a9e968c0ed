"""Timing by the host's clock: graphs of milliseconds, in turns, medians.

A graph is long beside what its launch and the wait for it cost, some ten microseconds. Candidates
that take turns are slowed alike where a GPU changes its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

GRAPH_S = 4e-3
"""What one graph should take."""

MOST_CALLS = 2000
"""Of a graph."""

LEAST_TURNS, MOST_TURNS = 5, 40


@dataclass(frozen=True)
class Candidate:
    """Something to time.

    Parameters
    ----------
    run : callable
        Does it and waits until it is done.
    calls : int
        How often that does what is asked for.
    """

    run: Callable[[], None]
    calls: int


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call: the median, and the middle half of all turns over it."""

    us: float
    noise: float


def rounds_of(seconds: float, calls: int) -> int:
    """How often a graph should do what took `seconds` for `calls` calls."""
    return max(1, min(round(GRAPH_S / max(seconds, 1e-9)), MOST_CALLS // calls))


def once(run: Callable[[], None]) -> float:
    """Seconds of one run."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def measure(
    candidates: Mapping[str, Candidate], budget_s: float, turns: int = MOST_TURNS
) -> dict[str, Timing]:
    """Time candidates in turns.

    Parameters
    ----------
    candidates : mapping of str to Candidate
    budget_s : float
        After so many seconds no further turn begins, but for the first `LEAST_TURNS`.
    turns : int
        At most.

    Returns
    -------
    dict of str to Timing
    """
    for candidate in candidates.values():
        candidate.run()
    begun = time.perf_counter()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(turns):
        if turn >= LEAST_TURNS and time.perf_counter() - begun > budget_s:
            break
        for name, candidate in candidates.items():
            seconds[name].append(once(candidate.run))
    return {name: _timing(seconds[name], c.calls) for name, c in candidates.items()}


def _timing(seconds: list[float], calls: int) -> Timing:
    low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75))
    return Timing(float(middle) / calls * 1e6, float((high - low) / middle))
