"""How fast a device's kernels are, by their defaults and with one decision changed.

Layers of several shapes take part, each with its weights out of the caches, as a large model has
them, and with as few as stay in them: what is faster with one may be slower with the other.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apq_tvm.schedules.decide import Recorded
from apq_tvm.tune.candidates import Workshop
from apq_tvm.tune.device import Device
from apq_tvm.tune.measure import OK, SECOND_ROUNDS, Bench, DefaultFailed
from apq_tvm.tune.program import Linker
from apq_tvm.tune.space import Point, unshared
from apq_tvm.tune.tasks import Task

FEW = 4 << 20
"""Bytes of weights of a small model, which a second or third level of caches holds."""

Change = tuple[str, Any]
"""A decision and its answer."""


@dataclass(frozen=True)
class Survey:
    """Times kernels of linear layers.

    Parameters
    ----------
    device : Device
    linker : Linker
    folder : Path
        For programs.
    threads : int
    rounds : int
        Samples of each candidate, in turns with the default.
    told : callable
        Told what is timed next, and what could not be.
    """

    device: Device
    linker: Linker
    folder: Path
    threads: int = 1
    rounds: int = SECOND_ROUNDS
    told: Callable[[str], None] = field(default=lambda text: None, compare=False)

    def kernels(self, tasks: Sequence[Task]) -> dict[str, dict[int, float]]:
        """Kernel → rows of x → time of the fastest over its own, the geometric mean over `tasks`.

        Left out is what was wrong, or could not be timed, in any of them.
        """
        shares: dict[int, list[dict[str, float]]] = {}
        for task in tasks:
            points = [task.point(name, Recorded({})) for name in task.kernels]
            for ratios in self._both(task, points):
                top = max(ratios.values())
                mine = {point.kernel: ratio / top for point, ratio in ratios.items()}
                shares.setdefault(task.m, []).append(mine)
        found: dict[str, dict[int, float]] = {}
        for m, samples in shares.items():
            for kernel in set.intersection(*(set(sample) for sample in samples)):
                found.setdefault(kernel, {})[m] = mean([sample[kernel] for sample in samples])
        return found

    def changes(
        self, tasks: Sequence[Task], kernel: str, base: Mapping[str, Any]
    ) -> dict[Change, list[float]]:
        """Time of a kernel as it is by default over that with one decision changed.

        Parameters
        ----------
        tasks : sequence of Task
        kernel : str
        base : mapping of str to object
            What is decided already.

        Returns
        -------
        dict of (str, object) to list of float
            In each task, and with weights in both places; 1 where a layer has no such choice.
        """
        parts: list[dict[Change, float]] = []
        for task in tasks:
            begin = task.point(kernel, Recorded(base))
            space = unshared(task.space()).points
            near = {p: c for p in space if (c := _one_change(begin, p)) is not None}
            for ratios in self._both(task, [begin, *near]):
                parts.append({near[p]: ratio for p, ratio in ratios.items() if p in near})
        seen = {change for part in parts for change in part}
        return {change: [part.get(change, 1.0) for part in parts] for change in seen}

    def _both(self, task: Task, points: Sequence[Point]) -> Iterator[dict[Point, float]]:
        """Time of the first point over each, out of the caches and in them."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            workshop = Workshop(task, folder, self.threads)  # builds each point once
            for weights in (0, FEW):
                where = "in caches" if weights else "out of caches"
                self.told(f"{task.name} M={task.m}, weights {where}")
                bench = Bench(workshop, self.linker, self.device, folder, points[0], weights)
                trials = bench.trials(points[1:], self.rounds)
                yield {points[0]: 1.0, **{t.point: t.ratio for t in trials if t.status == OK}}
        except DefaultFailed as error:
            self.told(f"remark: {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _one_change(begin: Point, other: Point) -> Change | None:
    """The decision in which two points of one kernel differ, where it is one."""
    mine, its = dict(begin.decisions), dict(other.decisions)
    if begin.kernel != other.kernel or mine.keys() != its.keys():
        return None
    differ = [(name, value) for name, value in its.items() if mine[name] != value]
    return differ[0] if len(differ) == 1 else None


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(math.log(value) for value in values) / len(values))
