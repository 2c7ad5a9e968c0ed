"""Records without a device: the candidate that should cost the least, where such an order is known.

Such records say ``static`` and lose to any that was timed. What they name was run and is right: on
this machine where it can run the code, else under the emulator, whose times nobody looks at.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from apq_tvm.bench.arm.layer import emulated_cpu
from apq_tvm.errors import ApqError
from apq_tvm.tune.budget import Planned
from apq_tvm.tune.device import Device
from apq_tvm.tune.functions.graph import AnyTask
from apq_tvm.tune.journal import add_records
from apq_tvm.tune.ratios import FASTER
from apq_tvm.tune.scratch import scratch_folder
from apq_tvm.tune.session import Finding, Observer, Settings, record_of, workshop_of
from apq_tvm.tune.space import Point
from apq_tvm.tune.static.ranking import NotRanked, rank
from apq_tvm.tuning_logs.records import STATIC
from apq_tvm.types import DeviceProfile

CHECKED = 4
"""Candidates, the best first, of which one has to be right."""

Rank = Callable[[AnyTask, Sequence[Point]], list[float]]
Right = Callable[[AnyTask, Point, Path], bool]


def tune_static(
    planned: Sequence[Planned],
    profile: DeviceProfile,
    settings: Settings,
    observer: Observer,
    *,
    costs: Rank = rank,
    right: Right | None = None,
) -> list[Finding]:
    """Record candidates that should be faster, of families where static figures may choose.

    Parameters
    ----------
    planned : sequence of Planned
        As for `apq_tvm.tune.session.tune_tasks`; of each task the default kernel's candidates alone
        are ranked: figures of different kernels do not compare.
    profile : DeviceProfile
        Of the target, which need not be here.
    settings : Settings
    observer : Observer
    costs, right : callable, optional
        Who ranks, and who says that a result is right; for tests.

    Returns
    -------
    list of Finding
        In the order of `planned`; those without a record say why.

    Raises
    ------
    DeviceFailed
        Candidates cannot be checked on this machine: there is no emulator of the target.
    """
    findings = []
    with scratch_folder() as folder:
        check = right or Checker(profile).right
        for each in planned:
            observer.begin(each, 0)
            try:
                finding = _one(each, profile, settings, folder, costs, check)
            except NotRanked as error:
                finding = Finding(each, why=str(error))
            except ApqError as error:
                observer.remark(f"{each.task.name}: {error}")
                finding = Finding(each, why=str(error))
            observer.end(finding)
            findings.append(finding)
    return findings


def _one(
    planned: Planned,
    profile: DeviceProfile,
    settings: Settings,
    folder: Path,
    costs: Rank,
    right: Right,
) -> Finding:
    task, default = planned.task, planned.space.points[0]
    others = [p for p in planned.space.points[1:] if p.kernel == default.kernel]
    drawn = random.Random(settings.seed).sample(others, min(planned.trials, len(others)))
    first, *figures = costs(task, [default, *drawn])
    ordered = sorted(range(len(drawn)), key=lambda i: figures[i])
    better = [(drawn[i], first / figures[i]) for i in ordered if 0 < figures[i] * FASTER < first]
    if not better:
        return Finding(planned, why="no candidate should be faster, by its code")
    for point, ratio in better[:CHECKED]:
        if right(task, point, folder):
            record = record_of(
                task, point, settings, f"judged for {profile.name}",
                ratio=ratio, interval=(1.0, ratio), how=STATIC,
            )  # fmt: skip
            add_records(settings.log, [record])
            return Finding(planned, best=point, record=record)
    return Finding(planned, why=f"none of the best {len(better[:CHECKED])} candidates was right")


class Checker:
    """Runs candidates where that is possible without the device.

    Parameters
    ----------
    profile : DeviceProfile
    """

    def __init__(self, profile: DeviceProfile) -> None:
        from apq_tvm.tune.devices.address import parse_device
        from apq_tvm.tune.devices.remote import RemoteDevice

        native = os.uname().machine == profile.host_arch
        address = parse_device("local" if native else f"qemu://{emulated_cpu(profile)}")
        self._device: Device = RemoteDevice(address, profile)

    def right(self, task: AnyTask, point: Point, folder: Path) -> bool:
        """Whether a candidate's results are what they should be."""
        from apq_tvm.codegen.build.toolchain import find_toolchain
        from apq_tvm.tune.measure import OK, Bench
        from apq_tvm.tune.program import Linker

        tools = find_toolchain(task.profile.triple, exact=False)
        work = Path(tempfile.mkdtemp(dir=folder))
        workshop, default = workshop_of(task, work, 1), task.space().points[0]
        bench = Bench(workshop, Linker(tools, work), self._device, work, default)
        (trial,) = bench.trials([point], 1)
        return trial.status == OK
