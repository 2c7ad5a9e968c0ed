"""What the kernel knows of a process and those it started (proc(5))."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Of a process, of all that it started and that still run, and of those it waited for."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        own = int(folder.name)
        children.setdefault(int(words[1]), []).append(own)
        ticks[own] = sum(map(int, words[11:15]))
    total, left = 0, [pid]
    while left:
        one = left.pop()
        total += ticks.get(one, 0)
        left += children.get(one, [])
    return total / os.sysconf("SC_CLK_TCK")
