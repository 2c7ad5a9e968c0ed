"""Where judging code without a device may choose: where its order was found to be the measured one.

``tuning_logs/<device>/static.json`` (`apq_tvm.tune.static.compare` finds it) has for each family of
kernels how well static figures ranked what was then timed. A family without figures, or below
`LEAST`, is not ranked: nothing would be known of the order.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from apq_tvm.errors import ApqError, BuildError, NotApplicable
from apq_tvm.tuning_logs import read_log
from apq_tvm.tuning_logs.records import FUNCTION

if TYPE_CHECKING:
    from apq_tvm.tune.functions.graph import AnyTask
    from apq_tvm.tune.space import Point
    from apq_tvm.tune.static.figure import StaticFigure
    from apq_tvm.types import DeviceProfile

LOG = "static"

LEAST = 0.6
"""Rank correlation from which on an order is used."""


class NotRanked(ApqError):
    """Static figures of a family do not tell which candidate is faster, or nobody knows."""


class Judge(Protocol):
    """Judges candidates of one task."""

    def figure(self, point: Point) -> StaticFigure:
        """What one should cost."""


@dataclass(frozen=True)
class Agreement:
    """How static figures of a family ranked what was timed.

    Parameters
    ----------
    spearman, kendall : float
    points : int
        Candidates, of all tasks.
    tasks : int
        Groups of them, each of one kernel on one shape.
    """

    spearman: float
    kendall: float
    points: int
    tasks: int


class Agreements(NamedTuple):
    """One device's log."""

    measured: str
    families: dict[str, Agreement]


def family_of(task: AnyTask, kernel: str) -> str:
    """What candidates of a kernel are called together.

    ``"gemv int"`` of linear layers, ``"preparation"`` or ``"windows"`` of what is done to their
    activations, of other functions their operation, such as ``"softmax"``.
    """
    from apq_tvm.tune.functions.graph import GraphTask
    from apq_tvm.tune.functions.windows import WindowsTask

    if isinstance(task, GraphTask):
        return task.kernel
    if task.op == FUNCTION:
        return "windows" if isinstance(task, WindowsTask) else "preparation"
    found = task.kernel_named(kernel)
    return f"{found.kind} {found.family or 'any'}"


def parse(log: Any) -> Agreements:
    """Read what the file holds.

    Raises
    ------
    ValueError
        Names the key that is missing or wrong.
    """
    if not isinstance(log, dict) or not isinstance(log.get("measured"), str):
        raise ValueError("measured: says where and when")
    if not isinstance(log.get("families"), dict):
        raise ValueError("families: an object of families")
    families = {}
    for name, words in log["families"].items():
        try:
            families[name] = Agreement(
                float(words["spearman"]),
                float(words["kendall"]),
                int(words["points"]),
                int(words["tasks"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"families.{name}: {error}") from error
    return Agreements(log["measured"], families)


def usable(profile: DeviceProfile, family: str) -> tuple[bool, str]:
    """Whether static figures may choose among candidates of a family, and why (not).

    Parameters
    ----------
    profile : DeviceProfile
        What it has no figures of, it borrows as thresholds are (`DeviceProfile.measured_as`).
    family : str
        `family_of`.
    """
    for device in (profile.name, *profile.measured_as):
        log = read_log(device, LOG, parse)
        if log is None or family not in log.families:
            continue
        found = log.families[family]
        borrowed = "" if device == profile.name else f"{profile.name} borrows it of {device}: "
        of = f"{found.points} candidates of {found.tasks} kernels and shapes"
        text = (
            f"rank correlation {found.spearman:.2f} over {of} ({borrowed}{log.measured}); "
            f"more than {LEAST} is wanted"
        )
        return found.spearman > LEAST, text
    return False, f"nobody compared static figures of {family} kernels with times on {profile.name}"


def judge_for(task: AnyTask, folder: Path, mca: str = "") -> Judge:
    """Who judges candidates of a task.

    Raises
    ------
    BadTarget
        Code of the target cannot be judged here.
    BadInput
        llvm-mca is missing.
    """
    if task.profile.gpu is not None:
        from apq_tvm.tune.static.gpu import GpuJudge

        return GpuJudge(task)
    from apq_tvm.tune.session import workshop_of
    from apq_tvm.tune.static.figure import CpuJudge

    return CpuJudge(task.profile, workshop_of(task, folder, 1), folder, mca)


def rank(task: AnyTask, points: Sequence[Point], mca: str = "", force: bool = False) -> list[float]:
    """What candidates should cost; infinity for those that cannot be built.

    Parameters
    ----------
    task : Task or GraphTask
    points : sequence of Point
        Candidates of it.
    mca : str
        llvm-mca, if not the usual one.
    force : bool
        Rank families whose order nobody found to be the measured one, too.

    Returns
    -------
    list of float
        Smaller is faster. Only figures of one kernel are comparable.

    Raises
    ------
    NotRanked
        Static figures of a family may not choose; with the reason.
    ApqError
        They cannot be had on this machine.
    """
    for kernel in dict.fromkeys(point.kernel for point in points):
        fine, why = usable(task.profile, family_of(task, kernel))
        if not fine and not force:
            raise NotRanked(f"{task.name}, {kernel}: not ranked without a device: {why}")
    with tempfile.TemporaryDirectory(prefix="apq-static-") as name:
        judge = judge_for(task, Path(name), mca)
        return [_cost(judge, point) for point in points]


def _cost(judge: Judge, point: Point) -> float:
    try:
        return judge.figure(point).cost
    except (BuildError, NotApplicable):
        return math.inf
