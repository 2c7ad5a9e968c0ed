"""Records without a device: the candidate that should cost the least, where such an order is known.

Such records say ``static`` and lose to any that was timed. What they name was run and is right: on
this machine where it can run the code, else under the emulator, whose times nobody looks at.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from apq_tvm.bench.arm.layer import emulated_cpu
from apq_tvm.errors import ApqError
from apq_tvm.schedules.recorded import default_of_kernel, fingerprint
from apq_tvm.tune.budget import Planned
from apq_tvm.tune.device import Device
from apq_tvm.tune.journal import add_records
from apq_tvm.tune.ratios import FASTER
from apq_tvm.tune.scratch import scratch_folder
from apq_tvm.tune.session import Finding, Observer, Settings, versions
from apq_tvm.tune.space import Point
from apq_tvm.tune.static.ranking import NotRanked, rank
from apq_tvm.tune.tasks import Task
from apq_tvm.tune.windows import WindowsTask
from apq_tvm.tuning_logs.records import FUNCTION, STATIC, Record
from apq_tvm.types import DeviceProfile

CHECKED = 4
"""Candidates, the best first, of which one has to be right."""

Rank = Callable[[Task, Sequence[Point]], list[float]]
Right = Callable[[Task, Point, Path], bool]


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
    if not isinstance(task, Task) or isinstance(task, WindowsTask):
        return Finding(planned, why="only layers of matrices are judged without a device")
    others = [p for p in planned.space.points[1:] if p.kernel == default.kernel]
    drawn = random.Random(settings.seed).sample(others, min(planned.trials, len(others)))
    first, *figures = costs(task, [default, *drawn])
    ordered = sorted(range(len(drawn)), key=lambda i: figures[i])
    better = [(drawn[i], first / figures[i]) for i in ordered if 0 < figures[i] * FASTER < first]
    if not better:
        return Finding(planned, why="no candidate should be faster, by its code")
    for point, ratio in better[:CHECKED]:
        if right(task, point, folder):
            record = _record(task, profile, settings, point, ratio)
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

    def right(self, task: Task, point: Point, folder: Path) -> bool:
        """Whether a candidate's results are what they should be."""
        from apq_tvm.codegen.build.toolchain import find_toolchain
        from apq_tvm.tune.candidates import Workshop
        from apq_tvm.tune.measure import OK, Bench
        from apq_tvm.tune.program import Linker

        tools = find_toolchain(task.profile.triple, exact=False)
        work = Path(tempfile.mkdtemp(dir=folder))
        bench = Bench(
            Workshop(task, work, 1), Linker(tools, work), self._device, work, task.space().points[0]
        )
        (trial,) = bench.trials([point], 1)
        return trial.status == OK


def _record(
    task: Task, profile: DeviceProfile, settings: Settings, point: Point, ratio: float
) -> Record:
    import tvm

    shape: dict[str, Any] = {}
    if task.op == FUNCTION:
        from apq_tvm.schedules.decide import Defaults

        kernel = task.kernel_named(task.kernel)
        made = task.preparation(kernel)
        assert made is not None
        with tvm.target.Target(dict(profile.target)):
            schedule = fingerprint(task.prepared(made, Defaults())[0])
    else:
        schedule = default_of_kernel(task.spec, task.kernel_named(point.kernel), profile)
        shape = task.layer
    return Record(
        task.op, point.kernel, task.answers(point), schedule, **shape,
        ratio=ratio, interval=(1.0, ratio), threads=settings.threads, how=STATIC,
        machine=f"judged for {profile.name}", date=date.today().isoformat(), versions=versions(),
    )  # fmt: skip
