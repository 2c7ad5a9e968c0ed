"""How many trials each task gets, and how long they take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apq_tvm.tune.functions.graph import AnyTask
from apq_tvm.tune.space import Space

PER_TASK = 64
"""Trials of a task where the user says nothing."""

MOST_PER_TASK = 512
"""Where time is given instead: later ones seldom find more."""

LEAST = 8
"""Fewer say nothing of a task."""

TRIAL_S, TASK_S = 0.4, 6.0
"""Rough seconds: of a trial, and of what else a task needs (its program, its last candidates)."""


@dataclass(frozen=True)
class Planned:
    """A task with what it gets.

    Parameters
    ----------
    task : Task or GraphTask
    space : Space
    trials : int
        At most.
    part : float
        Of all the time, where it is limited.
    """

    task: AnyTask
    space: Space
    trials: int
    part: float

    @property
    def seconds(self) -> float:
        """Roughly how long it takes."""
        return TASK_S + self.trials * TRIAL_S


def share_out(
    spaces: Mapping[AnyTask, Space],
    trials: int | None = None,
    minutes: float | None = None,
) -> list[Planned]:
    """Give each task its trials, by the root of its share of the model's time.

    Parameters
    ----------
    spaces : mapping of Task or GraphTask to Space
    trials : int, optional
        Of all tasks together.
    minutes : float, optional
        For all tasks together; then each has up to `MOST_PER_TASK` trials.
    """
    tasks = [task for task, space in spaces.items() if len(space.points) > 1]
    weights = {task: math.sqrt(task.share) for task in tasks}
    whole = sum(weights.values()) or 1.0
    planned = []
    for task in tasks:
        part, size = weights[task] / whole, len(spaces[task].points) - 1
        if trials is not None:
            wanted = max(LEAST, round(trials * part))
        else:
            wanted = PER_TASK if minutes is None else MOST_PER_TASK
        planned.append(Planned(task, spaces[task], min(wanted, size), part))
    return planned


def seconds_of(planned: Sequence[Planned], minutes: float | None = None) -> float:
    """Roughly how long all of it takes."""
    needed = sum(each.seconds for each in planned)
    return needed if minutes is None else min(needed, 60 * minutes)
