"""The committed lists: cases that pass (it only grows), and those that are refused and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.node_cases.worker import Outcome

FOLDER = Path(__file__).parent


def passing() -> list[str]:
    """Names of cases that pass."""
    return (FOLDER / "passing.txt").read_text().split()


def write(outcomes: Mapping[str, Outcome]) -> None:
    """Write both lists from a run of every case."""
    names = sorted(name for name, (kind, _) in outcomes.items() if kind == "passes")
    (FOLDER / "passing.txt").write_text("".join(f"{name}\n" for name in names))
    refused = sorted(
        f"{name}: {why}\n" for name, (kind, why) in outcomes.items() if kind == "refused"
    )
    (FOLDER / "refused.txt").write_text("".join(refused))
