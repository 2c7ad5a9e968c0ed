"""Static figures beside times of the same candidates: how well the ones rank the others."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apq_tvm.errors import BadLog, BuildError, NotApplicable, OutputFailed
from apq_tvm.files import replacing
from apq_tvm.progress import Progress, Silent
from apq_tvm.tune.device import Device
from apq_tvm.tune.functions.graph import AnyTask
from apq_tvm.tune.space import Point
from apq_tvm.tune.static.correlation import kendall, spearman
from apq_tvm.tune.static.figure import StaticFigure
from apq_tvm.tune.static.ranking import (
    LEAST,
    Agreement,
    Judge,
    family_of,
    judge_for,
    parse,
)

LEAST_SPREAD = 1.05
"""The slowest of a group over its fastest: of groups with less the order is the machine's noise."""

LEAST_POINTS = 5
"""Candidates of a group, that differ in their figures, for a correlation to say anything."""

ROUNDS = 25
"""Samples of each candidate, of which the least counts: other programs only ever add to it."""

Times = Callable[[AnyTask, Sequence[Point], Path], Mapping[Point, float]]


@dataclass(frozen=True)
class Group:
    """Candidates of one kernel for one task.

    Parameters
    ----------
    family, task, kernel : str
    static, measured : tuple of float
        Costs and nanoseconds, of the same candidates.
    """

    family: str
    task: str
    kernel: str
    static: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Slowest over fastest."""
        return max(self.measured) / min(self.measured) if self.measured else 1.0

    @property
    def why_not(self) -> str:
        """Why it says nothing; ``""`` if it does."""
        if len(self.static) < LEAST_POINTS:
            return f"{len(self.static)} candidates, fewer than {LEAST_POINTS}"
        if self.spread < LEAST_SPREAD:
            return f"all within {self.spread - 1:.1%}"
        if len(set(self.static)) < 2:
            return "all have one figure"
        return ""

    def described(self) -> dict[str, Any]:
        """For JSON."""
        why = self.why_not
        return {
            "family": self.family,
            "task": self.task,
            "kernel": self.kernel,
            "points": len(self.static),
            "spread": self.spread,
            "spearman": None if why else spearman(self.static, self.measured),
            "kendall": None if why else kendall(self.static, self.measured),
            "picked": None if why else self.picked,
            "why": why,
        }

    @property
    def picked(self) -> float:
        """The best time over that of the candidate with the least figure: 1 is the best pick."""
        return min(self.measured) / self.measured[self.static.index(min(self.static))]


def compare(
    tasks: Sequence[AnyTask],
    device: Device,
    *,
    most: int = 24,
    seed: int = 0,
    mca: str = "",
    progress: Progress | None = None,
    times: Times | None = None,
    judge: Callable[[AnyTask, Path], Judge] | None = None,
) -> list[Group]:
    """Judge and time candidates.

    Parameters
    ----------
    tasks : sequence of Task or GraphTask
    device : Device
        Where they are timed.
    most : int
        Candidates of each kernel: the default and random ones.
    seed : int
    mca : str
        llvm-mca, if not the usual one.
    progress : Progress, optional
    times, judge : callable, optional
        Who times and who judges; for tests.

    Returns
    -------
    list of Group
        One for each task and kernel with a choice. Candidates that are the same code, or whose
        result was wrong, are left out.

    Raises
    ------
    ApqError
        The device failed, or code of the target cannot be judged here.
    """
    progress = progress or Silent()
    measure = times or _Timed(device)
    groups = []
    with progress.stage("compare", len(tasks)):
        for task in tasks:
            progress.advance(task.name)
            with tempfile.TemporaryDirectory(prefix="apq-compare-") as name:
                folder = Path(name)
                judged = judge(task, folder) if judge else judge_for(task, folder, mca)
                for kernel, points in _points(task, most, seed).items():
                    groups.append(_group(task, kernel, points, judged, measure, folder))
    return groups


def _group(
    task: AnyTask, kernel: str, points: Sequence[Point], judge: Judge, measure: Times, folder: Path
) -> Group:
    figures: dict[Point, StaticFigure] = {}
    for point in points:
        try:
            figure = judge.figure(point)
        except (BuildError, NotApplicable):
            continue
        # A judge gives equal code one figure, the same object.
        if not any(figure is other for other in figures.values()):
            figures[point] = figure
    took = measure(task, list(figures), folder)
    both = [(figures[point].cost, took[point]) for point in figures if took.get(point, 0.0) > 0]
    static, measured = zip(*both, strict=True) if both else ((), ())
    return Group(family_of(task, kernel), task.key, kernel, tuple(static), tuple(measured))


def _points(task: AnyTask, most: int, seed: int) -> dict[str, list[Point]]:
    """By kernel the default and some others, where there are any."""
    by_kernel: dict[str, list[Point]] = {}
    for point in task.space().points:
        by_kernel.setdefault(point.kernel, []).append(point)
    chosen = {}
    for kernel, points in by_kernel.items():
        first, *others = points
        some = random.Random(seed).sample(others, min(most - 1, len(others)))
        if some:
            chosen[kernel] = [first, *some]
    return chosen


class _Timed:
    """Times candidates as the tuner does: checked, in turns, weights out of the caches."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __call__(
        self, task: AnyTask, points: Sequence[Point], folder: Path
    ) -> Mapping[Point, float]:
        """Nanoseconds of those whose results are right."""
        from apq_tvm.codegen.build.toolchain import find_toolchain
        from apq_tvm.tune.measure import OK, Bench
        from apq_tvm.tune.program import Linker
        from apq_tvm.tune.session import workshop_of

        tools = find_toolchain(task.profile.triple, exact=False)
        workshop = workshop_of(task, folder, 1)
        default = task.space().points[0]
        bench = Bench(workshop, Linker(tools, folder), self._device, folder, default)
        return {t.point: t.ns for t in bench.trials(points, ROUNDS) if t.status == OK}


def agreements(groups: Sequence[Group]) -> dict[str, Agreement]:
    """By family, the mean of its groups' correlations, weighted by candidates."""
    found: dict[str, Agreement] = {}
    for family in sorted({group.family for group in groups}):
        mine = [group for group in groups if group.family == family and not group.why_not]
        points = sum(len(group.static) for group in mine)
        if points:
            found[family] = Agreement(
                _mean(spearman, mine), _mean(kendall, mine), points, len(mine)
            )
    return found


def _mean(how: Callable[[Sequence[float], Sequence[float]], float], groups: list[Group]) -> float:
    """Of groups, weighted by their candidates."""
    points = sum(len(group.static) for group in groups)
    return sum(len(g.static) * how(g.static, g.measured) for g in groups) / points


def write_log(path: Path, measured: str, families: Mapping[str, Agreement]) -> None:
    """Write ``static.json`` (`apq_tvm.tune.static.ranking`); families that are not in it stay.

    Raises
    ------
    BadLog
        The file that is there is none.
    OutputFailed
        It cannot be written.
    """
    known: dict[str, Any] = {}
    if path.is_file():
        try:
            text = path.read_text()
            parse(json.loads(text))
            known = json.loads(text)["families"]
        except ValueError as error:
            raise BadLog(f"{path}: {error}; mend it or take the file away") from error
    for name, found in families.items():
        if not math.isnan(found.spearman):
            known[name] = {
                "spearman": round(found.spearman, 3),
                "kendall": round(found.kendall, 3),
                "points": found.points,
                "tasks": found.tasks,
            }
    document = {"measured": measured, "families": dict(sorted(known.items()))}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise OutputFailed(f"{path}: {error.strerror}") from error


def verdict(found: Agreement) -> str:
    """Whether a family may be ranked without a device."""
    return "used" if found.spearman > LEAST else f"not used: at most {LEAST}"
