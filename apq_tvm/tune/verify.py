"""``logs verify``: are the records of a file still right, and still faster?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from apq_tvm.errors import ApqError, DeviceFailed
from apq_tvm.schedules.decide import Recording
from apq_tvm.schedules.recorded import Nearly
from apq_tvm.tune.api import plan_of
from apq_tvm.tune.candidates import Workshop
from apq_tvm.tune.device import Device
from apq_tvm.tune.logs import stale
from apq_tvm.tune.measure import Bench
from apq_tvm.tune.program import Linker
from apq_tvm.tune.ratios import CONFIDENCE, Ratio
from apq_tvm.tune.space import Point
from apq_tvm.tune.tasks import Task, extract
from apq_tvm.tuning_logs.records import Record
from apq_tvm.types import DeviceProfile

SLOWER = 0.98
"""A record below this for sure is to be dropped."""


@dataclass(frozen=True)
class Verdict:
    """What became of one record.

    Parameters
    ----------
    record : Record
    right : bool
        Whether its result still matches the reference.
    ratio : Ratio or None
        Timed today; None where it was not.
    why : str
        What is wrong with it, ``""`` for nothing.
    """

    record: Record
    right: bool
    ratio: Ratio | None
    why: str = ""

    @property
    def good(self) -> bool:
        """Right, and not slower than the default for sure."""
        return self.right and not (self.ratio is not None and self.ratio.high < SLOWER)


def verify(
    records: Sequence[Record], profile: DeviceProfile, device: Device, folder: Path
) -> Iterator[Verdict]:
    """Check records of linear layers again, one after the other.

    Parameters
    ----------
    records : sequence of Record
        Of quantized linear layers.
    profile : DeviceProfile
    device : Device
    folder : Path
        For programs.

    Raises
    ------
    DeviceFailed
        The device cannot be reached.
    """
    from apq_tvm.codegen.build.toolchain import find_toolchain

    device.check(sorted(profile.features))
    linker = Linker(find_toolchain(profile.triple, exact=False), folder)
    passed = {entry.record.line(): entry.why for entry in stale(records, profile)}
    for record in records:
        if record.line() in passed:
            yield Verdict(record, False, None, f"stale: {passed[record.line()]}")
            continue
        try:
            yield _verdict(record, profile, device, linker, folder)
        except DeviceFailed:
            raise
        except ApqError as error:
            yield Verdict(record, False, None, str(error))


def _verdict(
    record: Record, profile: DeviceProfile, device: Device, linker: Linker, folder: Path
) -> Verdict:
    task, point = _task_of(record, profile)
    bench = Bench(Workshop(task, folder, record.threads), linker, device, folder, _default(task))
    (trial,) = bench.trials([point])
    if trial.status != "ok":
        return Verdict(record, False, None, f"{trial.status}: {trial.why}")
    ratio = bench.last(point, CONFIDENCE)
    if not device.speed:
        return Verdict(record, True, None, "emulated: not timed")
    slower = f"slower than the default: {ratio.value:.3f}" if ratio.high < SLOWER else ""
    return Verdict(record, True, ratio, slower)


def _default(task: Task) -> Point:
    return task.space().points[0]


def _task_of(record: Record, profile: DeviceProfile) -> tuple[Task, Point]:
    """A task with random weights of the record's shape, and the record's candidate."""
    (plan,) = plan_of(None, profile.name, record.scheme, [(record.n, record.k)])
    low, high = record.rows
    m = low if high >= 0 else max(low, 128)
    tasks = [t for t in extract(plan, [m]) if t.op == record.op and t.width == record.width]
    if not tasks:
        raise ApqError(f"no kernel is chosen for M={m} of {record.n}x{record.k} {record.scheme}")
    task = tasks[0]
    asked = Recording(Nearly(record.decisions))
    task.kernel_named(record.kernel).ask(task.spec, profile, asked)
    return task, Point(record.kernel, tuple(asked.taken.items()))
