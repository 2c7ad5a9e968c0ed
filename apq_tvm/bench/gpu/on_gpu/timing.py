"""Timing by the host's clock: graphs of milliseconds, in turns, medians.

What a graph's launch and the wait for its end cost is taken off: a sample is the difference between
several graphs behind each other and one. Candidates that take turns are slowed alike where a GPU
changes its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

GRAPH_S = 2e-3
"""What one graph should take."""

MOST_CALLS = 2000
"""Of a graph."""

MORE = 3
"""Graphs of a sample behind the first."""

LEAST_TURNS, MOST_TURNS = 5, 40


Name = TypeVar("Name", str, int)


@dataclass(frozen=True)
class Candidate:
    """Something to time.

    Parameters
    ----------
    run : callable
        ``run(times)`` launches a graph so often and waits for the last.
    calls : int
        How often a graph does what is asked for.
    """

    run: Callable[[int], None]
    calls: int


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call: the median, and the middle half of all turns over it."""

    us: float
    noise: float


def rounds_of(seconds: float, calls: int) -> int:
    """How often a graph should do what took `seconds` for `calls` calls."""
    return max(1, min(round(GRAPH_S / max(seconds, 1e-9)), MOST_CALLS // calls))


def seconds_of(run: Callable[[int], None], times: int = 1) -> float:
    """Seconds of ``run(times)``."""
    begun = time.perf_counter()
    run(times)
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
    return {name: _timing(us) for name, us in samples(candidates, budget_s, turns).items()}


def samples(
    candidates: Mapping[Name, Candidate], budget_s: float, turns: int = MOST_TURNS
) -> dict[Name, list[float]]:
    """Microseconds of a call of each candidate, in every turn of `measure`."""
    for candidate in candidates.values():
        candidate.run(1)
    begun = time.perf_counter()
    found: dict[Name, list[float]] = {name: [] for name in candidates}
    for turn in range(turns):
        if turn >= LEAST_TURNS and time.perf_counter() - begun > budget_s:
            break
        for name, candidate in candidates.items():
            more, one = seconds_of(candidate.run, 1 + MORE), seconds_of(candidate.run)
            found[name].append(_of_one(more, one) / candidate.calls * 1e6)
    return found


def _of_one(more: float, one: float) -> float:
    """Seconds of a graph; of so few that it is no difference at all, those of all over their
    count."""
    return (more - one) / MORE if more > one else more / (1 + MORE)


def _timing(us: list[float]) -> Timing:
    low, middle, high = np.quantile(us, (0.25, 0.5, 0.75))
    return Timing(float(middle), float((high - low) / middle))
