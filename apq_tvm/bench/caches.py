"""This machine's caches: what they hold, and how fast they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from apq_tvm.bench.clib import aligned_empty
from apq_tvm.bench.roofline import Limits, best_seconds, library

CPU = Path("/sys/devices/system/cpu/cpu0/cache")

PASSED_BYTES = 256 * 1024 * 1024
"""Read in one sample of a cache: many passes, some milliseconds."""


@dataclass(frozen=True)
class Level:
    """A cache or, the last one, memory.

    Parameters
    ----------
    name : str
        ``"L2"``, ``"L3"``, ``"DRAM"``.
    nbytes : float
        What the cores of all threads together have of it; infinite for memory.
    gbs : float
        Bytes that all threads together read from it, 1e9 per second.
    """

    name: str
    nbytes: float
    gbs: float


def cache_sizes(threads: int, cpu: Path = CPU) -> dict[str, int]:
    """Bytes of the caches behind the first that `threads` cores have, as Linux tells them.

    Parameters
    ----------
    threads : int
    cpu : Path
        Of the first processor; it has ``index*/level``, ``type``, ``size`` and
        ``shared_cpu_list``.

    Returns
    -------
    dict of str to int
        By ``"L2"`` and so on, the nearest first; empty where Linux says nothing.
    """
    sizes = {}
    for index in sorted(cpu.glob("index*")):
        try:
            level, kind, size, shared = (
                (index / name).read_text().strip()
                for name in ("level", "type", "size", "shared_cpu_list")
            )
        except OSError:
            continue
        if kind == "Instruction" or level == "1" or not size.endswith("K"):
            continue
        alone = int(size[:-1]) * 1024
        sizes[f"L{level}"] = alone * math.ceil(threads / max(_count(shared), 1))
    return sizes


def _count(processors: str) -> int:
    """How many a list such as ``0-3,8`` names."""
    total = 0
    for part in processors.split(","):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total


_best: dict[tuple[int, str], float] = {}


def measure_levels(limits: Limits) -> tuple[Level, ...]:
    """Every cache's reading speed on the threads of `limits`, and memory's, the nearest first.

    A cache is read as half of it is held: hardware keeps other things too. As with `Limits`, the
    best that this process has seen counts; a nearer cache is no slower than what is behind it.
    """
    levels = [Level("DRAM", math.inf, limits.read_gbs)]
    for name, nbytes in reversed(cache_sizes(limits.threads).items()):
        key, held = (limits.threads, name), nbytes // 2
        counts = {1, limits.threads}  # more threads read no slower than one
        now = max(_read_gbs(held // limits.threads * count, count) for count in counts)
        _best[key] = max(_best.get(key, 0.0), now)
        levels.insert(0, Level(name, nbytes, max(_best[key], levels[0].gbs)))
    return tuple(levels)


def _read_gbs(nbytes: int, threads: int) -> float:
    buffer = aligned_empty((nbytes,), np.uint8)
    buffer[:] = 1
    times = max(1, PASSED_BYTES // nbytes)
    work = partial(library().apq_read_again, buffer.ctypes.data, nbytes, threads, times)
    return nbytes * times / best_seconds(work) / 1e9


def level_of(distance: float, levels: Sequence[Level]) -> int:
    """Number of the nearest level that still holds what was used `distance` bytes ago."""
    return next(i for i, level in enumerate(levels) if distance <= level.nbytes)
