"""``logs verify``: are the records of a file still right, and still faster?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from apq_tvm.errors import ApqError, DeviceFailed
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.recorded import Nearly
from apq_tvm.tune.api import plan_of
from apq_tvm.tune.device import Device
from apq_tvm.tune.functions.graph import AnyTask, extract_functions
from apq_tvm.tune.logs import stale
from apq_tvm.tune.measure import Bench
from apq_tvm.tune.program import Linker
from apq_tvm.tune.ratios import CONFIDENCE, Ratio
from apq_tvm.tune.session import workshop_of
from apq_tvm.tune.space import Point
from apq_tvm.tune.tasks import Task, extract
from apq_tvm.tuning_logs.records import FUNCTION, Record
from apq_tvm.types import AnyPath, DeviceProfile, DimSizes

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
        What is wrong with it, or why it was not checked; ``""`` for nothing.
    checked : bool
        Whether anything is known of it.
    """

    record: Record
    right: bool
    ratio: Ratio | None
    why: str = ""
    checked: bool = True

    @property
    def good(self) -> bool:
        """Right, and not slower than the default for sure."""
        return self.right and not (self.ratio is not None and self.ratio.high < SLOWER)

    @property
    def bad(self) -> bool:
        """Checked, and not good."""
        return self.checked and not self.good


def functions_of(
    model: AnyPath, target: str, scheme: str, dims: DimSizes | None = None
) -> list[AnyTask]:
    """What records of functions may be of in a model.

    Parameters
    ----------
    model : str or path
    target, scheme : str
        As the records were made.
    dims : mapping, optional
        Sizes of symbolic dimensions.

    Raises
    ------
    ApqError
        The model cannot be read.
    """
    (plan,) = plan_of(model, target, scheme, dims=dims)
    sizes = {name: size for name, size in (dims or {}).items() if isinstance(size, int)}
    prepared = [task for task in extract(plan) if task.op == FUNCTION]
    return [*prepared, *extract_functions(plan, sizes)]


def verify(
    records: Sequence[Record],
    profile: DeviceProfile,
    device: Device,
    folder: Path,
    functions: Sequence[AnyTask] = (),
) -> Iterator[Verdict]:
    """Check records again, one after the other.

    Parameters
    ----------
    records : sequence of Record
        Those of functions that are not among `functions` cannot be checked.
    profile : DeviceProfile
    device : Device
    folder : Path
        For programs.
    functions : sequence of Task or GraphTask
        `functions_of` a model.

    Raises
    ------
    DeviceFailed
        The device cannot be reached.
    """
    from apq_tvm.codegen.build.toolchain import find_toolchain

    device.check(sorted(profile.features))
    linker = Linker(find_toolchain(profile.triple, exact=False), folder)
    passed = {entry.record.line(): entry.why for entry in stale(records, profile)}
    known = {(task.default, task.schedule_of(_default(task))): task for task in functions}
    for record in records:
        if record.line() in passed:
            yield Verdict(record, False, None, f"stale: {passed[record.line()]}")
            continue
        task = known.get((record.kernel, record.schedule))
        if record.op == FUNCTION and task is None:
            yield Verdict(record, False, None, _unknown(record, functions), checked=False)
            continue
        try:
            yield _verdict(record, task or _linear_task(record, profile), device, linker, folder)
        except DeviceFailed:
            raise
        except ApqError as error:
            yield Verdict(record, False, None, str(error))


def _unknown(record: Record, functions: Sequence[AnyTask]) -> str:
    if not functions:
        return "only a model tells which function it is of: name it with --model"
    return f"no {record.kernel} of the model has its schedule: another model's, or an old one"


def _default(task: AnyTask) -> Point:
    return task.point(task.default, Defaults())


def _verdict(
    record: Record, task: AnyTask, device: Device, linker: Linker, folder: Path
) -> Verdict:
    point = task.point(record.kernel, Nearly(record.decisions))
    workshop = workshop_of(task, folder, record.threads)
    bench = Bench(workshop, linker, device, folder, _default(task), record.weights)
    (trial,) = bench.trials([point])
    if trial.status != "ok":
        return Verdict(record, False, None, f"{trial.status}: {trial.why}")
    if not device.speed:
        return Verdict(record, True, None, "emulated: not timed")
    if record.is_default:
        return Verdict(record, True, None, "the default")
    ratio = bench.last(point, CONFIDENCE)
    slower = f"slower than the default: {ratio.value:.3f}" if ratio.high < SLOWER else ""
    return Verdict(record, True, ratio, slower)


def _linear_task(record: Record, profile: DeviceProfile) -> Task:
    """A task with random weights of the record's shape."""
    (plan,) = plan_of(None, profile.name, record.scheme, [(record.n, record.k)])
    low, high = record.rows
    m = low if high >= 0 else max(low, 128)
    tasks = [t for t in extract(plan, [m]) if t.op == record.op and t.width == record.width]
    if not tasks:
        raise ApqError(f"no kernel is chosen for M={m} of {record.n}x{record.k} {record.scheme}")
    return tasks[0]
