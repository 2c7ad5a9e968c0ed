"""The committed lists of cases that pass, which only grow: for processors, and for GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from apq_tvm.schedules.devices import find_profile
from tests.node_cases.worker import Outcome

HERE = Path(__file__).parent


def _path(target: str, of_types: bool) -> Path:
    gpu = "_gpu" if find_profile(target).gpu else ""
    return HERE / f"passing{'_types' if of_types else ''}{gpu}.txt"


def passing(target: str = "host", of_types: bool = False) -> list[str]:
    """Names of cases that pass: of ONNX's own, or of those at every type (`typed`)."""
    return _path(target, of_types).read_text().split()


def write(outcomes: Mapping[str, Outcome], target: str = "host", of_types: bool = False) -> None:
    """Write the list from a run of every case."""
    names = sorted(name for name, (kind, _) in outcomes.items() if kind == "passes")
    _path(target, of_types).write_text("".join(f"{name}\n" for name in names))
