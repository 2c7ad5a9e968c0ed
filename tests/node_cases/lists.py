"""The committed list of cases that pass, which only grows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.node_cases.worker import Outcome

PASSING = Path(__file__).parent / "passing.txt"


def passing() -> list[str]:
    """Names of cases that pass."""
    return PASSING.read_text().split()


def write(outcomes: Mapping[str, Outcome]) -> None:
    """Write the list from a run of every case."""
    names = sorted(name for name, (kind, _) in outcomes.items() if kind == "passes")
    PASSING.write_text("".join(f"{name}\n" for name in names))
