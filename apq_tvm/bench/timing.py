"""Timing several candidates fairly: interleaved rounds in one process, minima of many repeats.

A machine that is shared or changes its clock slows everything for a while. Candidates that take
turns are slowed alike, and the minimum of many rounds is the time without disturbance; how far the
median lies above it says how noisy the run was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

COLD_BYTES = 256 * 1024 * 1024
"""Weights read between two uses of the same one in a cold run: more than any last-level cache
of a desktop or of one server socket that is not shared with others."""

SETTLE_S = 5e-3
"""Pause before every sample: a rival's idle threads spin for about a millisecond after a run, and
would take a core from whatever is measured next."""

MIN_SAMPLE_S = 2e-3
"""Shortest sample: long beside the clock's resolution and the cost of asking it."""


@dataclass(frozen=True)
class Candidate:
    """Something to time.

    Parameters
    ----------
    run : callable
        ``run(repeats)`` does the work `repeats` times.
    calls : int
        Operations in one repeat, e.g. the weight copies that a cold pass rotates through.
    """

    run: Callable[[int], None]
    calls: int = 1


def repeated(work: Callable[[], Any]) -> Candidate:
    """`work` as a candidate; each result is dropped before the next, whose memory it may be."""

    def run(repeats: int) -> None:
        for _ in range(repeats):
            work()

    return Candidate(run)


@dataclass(frozen=True)
class Timing:
    """One candidate's result.

    Parameters
    ----------
    us : float
        Microseconds per operation: the minimum over rounds.
    noise : float
        Median over minimum, less 1: 0.02 means that the median round took 2 % longer.
    rounds : int
        Samples taken.
    """

    us: float
    noise: float
    rounds: int


def cold_copies(weight_bytes: int) -> int:
    """How many copies of a weight a cold run rotates through, at least 2."""
    return max(2, -(-COLD_BYTES // max(weight_bytes, 1)))


def interleave(
    candidates: Mapping[str, Candidate],
    *,
    budget_s: float = 4.0,
    min_rounds: int = 5,
    max_rounds: int = 200,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time candidates in turns.

    Parameters
    ----------
    candidates : mapping of str to Candidate
        Each runs once untimed first, which also tells how many repeats make a sample.
    budget_s : float
        Seconds for all rounds together; `min_rounds` are done in any case.
    min_rounds, max_rounds : int
        Bounds on the samples per candidate.
    clock : callable
        Seconds, for tests.

    Returns
    -------
    dict of str to Timing
    """
    repeats = {}
    for name, candidate in candidates.items():
        candidate.run(1)
        start = clock()
        candidate.run(1)
        once = max(clock() - start, 1e-9)
        repeats[name] = max(1, round(MIN_SAMPLE_S / once))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    started = clock()
    for index in range(max_rounds):
        if index >= min_rounds and clock() - started > budget_s:
            break
        for name, candidate in candidates.items():
            time.sleep(SETTLE_S)
            if repeats[name] > 1:
                candidate.run(1)  # wakes threads and fills caches after the pause
            start = clock()
            candidate.run(repeats[name])
            elapsed = clock() - start
            samples[name].append(elapsed / (repeats[name] * candidate.calls))
    return {
        name: Timing(
            us=min(times) * 1e6, noise=median(times) / max(min(times), 1e-12) - 1, rounds=len(times)
        )
        for name, times in samples.items()
    }
