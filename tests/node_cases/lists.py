"""The committed lists of cases that pass, which only grow: for processors, and for GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from apq_tvm.schedules.devices import find_profile
from tests.node_cases.worker import Outcome

HERE = Path(__file__).parent


def _path(target: str) -> Path:
    return HERE / ("passing_gpu.txt" if find_profile(target).gpu else "passing.txt")


def passing(target: str = "host") -> list[str]:
    """Names of cases that pass."""
    return _path(target).read_text().split()


def write(outcomes: Mapping[str, Outcome], target: str = "host") -> None:
    """Write the list from a run of every case."""
    names = sorted(name for name, (kind, _) in outcomes.items() if kind == "passes")
    _path(target).write_text("".join(f"{name}\n" for name in names))
