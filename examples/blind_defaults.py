"""What the tuner finds where nobody has measured before: defaults that are every second choice.

A schedule's choices come in the order that was best where it was written. Here the default of every
task takes the second of each instead, as a machine unlike those would meet it; the tuner knows no
order and searches the same space::

    python examples/blind_defaults.py --shapes 1536x576,4096x4096 --scheme W4A8g32 --rows 1,4,16,128
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, TypeVar

from apq_tvm.cli.bench import parse_counts, parse_shapes
from apq_tvm.errors import NotApplicable
from apq_tvm.tune.api import Request, prepare
from apq_tvm.tune.budget import Planned
from apq_tvm.tune.local import Local
from apq_tvm.tune.session import tune_tasks
from apq_tvm.tuning_logs.records import LINEAR

T = TypeVar("T")


def second(name: str, choices: Sequence[T]) -> T:
    """The choice that would come first if the first had never been measured."""
    return choices[min(1, len(choices) - 1)]


def blind(planned: Planned) -> Planned | None:
    """The task with another default; None where its kernel refuses those choices together."""
    try:
        default: Any = planned.task.point(planned.task.kernel, second)
    except NotApplicable:
        return None
    others = tuple(point for point in planned.space.points if point != default)
    space = replace(planned.space, points=(default, *others))
    return replace(planned, space=space, trials=min(planned.trials, len(others)))


def main() -> None:
    """Print a line for each task, and the geometric mean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=parse_shapes, required=True)
    parser.add_argument("--scheme", default="W4A8g32")
    parser.add_argument("--rows", default="1,4,16,128")
    parser.add_argument("--trials", type=int, help="Of all tasks together; by default 64 of each.")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    rows = parse_counts(asked.rows, "--rows")
    with tempfile.TemporaryDirectory() as folder:
        session = prepare(Request(
            None, "host", asked.scheme, asked.shapes, rows, asked.trials, None, {}, None,
            Path(folder) / "blind.json", asked.threads, 0, functions=False,
        ))  # fmt: skip
        linear = [each for each in session.planned if each.task.op == LINEAR]
        planned = [made for made in map(blind, linear) if made is not None]
        ratios = []
        for each in planned:
            (found,) = tune_tasks([each], session.profile, session.settings, [Local()])
            ratios.append(found.record.ratio if found.record else 1.0)
            task, best = each.task, found.best.text() if found.best else found.why
            print(f"{task.name} M={task.m}: {ratios[-1]:.2f}x {best}", flush=True)
    above = [ratio for ratio in ratios if ratio > 1]
    print(
        f"geometric mean {geometric_mean(ratios):.3f} of {len(ratios)} tasks, "
        f"{geometric_mean(above) if above else 1:.3f} of {len(above)} records; "
        f"{len(linear) - len(planned)} tasks refuse their second choices"
    )


if __name__ == "__main__":
    main()
