"""A session: tasks one after the other on devices, from trials to records."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from apq_tvm import __version__
from apq_tvm.errors import ApqError, DeviceFailed
from apq_tvm.extras import require
from apq_tvm.tune.budget import Planned
from apq_tvm.tune.candidates import Workshop
from apq_tvm.tune.device import Device
from apq_tvm.tune.functions.graph import AnyTask, FunctionWorkshop, GraphTask
from apq_tvm.tune.functions.windows import WindowsTask, WindowsWorkshop
from apq_tvm.tune.journal import Journal, add_records
from apq_tvm.tune.measure import OK, SECOND_ROUNDS, Bench, DefaultFailed, Trial
from apq_tvm.tune.program import Linker
from apq_tvm.tune.ratios import CONFIDENCE, Ratio
from apq_tvm.tune.scratch import scratch_folder
from apq_tvm.tune.search import BATCH, best_of, needs_trees, search_for
from apq_tvm.tune.space import Point, Space
from apq_tvm.tune.tasks import Task
from apq_tvm.tuning_logs.records import DEFAULT, LINEAR, Record, read_records
from apq_tvm.types import DeviceProfile

FINALISTS = 6
"""Candidates that are timed again before one is chosen."""

LAST = 2
"""Of those, how many may be timed for a record; each must be the surer for it (Bonferroni)."""

TOO_NOISY = 0.05
"""Half of the interval of a ratio of equal code, from which on little can be decided."""


@dataclass(frozen=True)
class Finding:
    """What a task came to.

    Parameters
    ----------
    planned : Planned
    trials : tuple of Trial
        All there are, earlier ones too, in order.
    best : Point or None
        Of the largest ratio that was sure; None where the default stays.
    ratio : Ratio or None
        Of the last candidate, whether or not it became a record.
    record : Record or None
    why : str
        Why there is no record, or why the task was passed over.
    resumed : bool
        Nothing was done: it had been finished before.
    """

    planned: Planned
    trials: tuple[Trial, ...] = ()
    best: Point | None = None
    ratio: Ratio | None = None
    record: Record | None = None
    why: str = ""
    resumed: bool = False


class Observer(Protocol):
    """Told how it goes; from several threads where there are several devices."""

    def noise(self, ratio: Ratio) -> None:
        """Of the machine: equal code beside itself."""

    def begin(self, planned: Planned, known: int) -> None:
        """A task begins, `known` of whose trials were made before."""

    def tried(self, planned: Planned, trials: Sequence[Trial], best: float) -> None:
        """Something is known of so many more candidates, or of none but more of those before;
        `best` is the largest ratio of the task so far."""

    def end(self, finding: Finding) -> None:
        """A task ended."""

    def remark(self, text: str) -> None:
        """Something that does not stop the run."""


class Quiet:
    """Shows nothing."""

    def noise(self, ratio: Ratio) -> None:
        """Show nothing."""

    def begin(self, planned: Planned, known: int) -> None:
        """Show nothing."""

    def tried(self, planned: Planned, trials: Sequence[Trial], best: float) -> None:
        """Show nothing."""

    def end(self, finding: Finding) -> None:
        """Show nothing."""

    def remark(self, text: str) -> None:
        """Show nothing."""


@dataclass(frozen=True)
class Settings:
    """How a session tunes.

    Parameters
    ----------
    log : Path
        Where records go; trials go beside it.
    threads : int
        That candidates are timed with.
    weights : int
        Bytes of the model's weights, which calls take in turns as it does; 0: they come from behind
        all caches.
    seed : int
        Of what is drawn at random.
    deadline : float or None
        When to stop, by `clock`.
    clock : callable
        Seconds.
    """

    log: Path
    threads: int = 1
    weights: int = 0
    seed: int = 0
    deadline: float | None = None
    clock: Callable[[], float] = field(default=time.monotonic, compare=False)


def tune_tasks(
    planned: Sequence[Planned],
    profile: DeviceProfile,
    settings: Settings,
    devices: Sequence[Device],
    observer: Observer | None = None,
) -> list[Finding]:
    """Tune several tasks, one on each device at a time.

    Raises
    ------
    MissingPackage
        A space is larger than its trials, and xgboost, which searches such, is not installed.
    DeviceFailed
        No device is left.
    """
    from apq_tvm.codegen.build.toolchain import find_toolchain

    observer = observer or Quiet()
    check_ready(planned, profile, settings, devices)
    findings: dict[int, Finding] = {}
    waiting: SimpleQueue[tuple[int, Planned]] = SimpleQueue()
    for entry in enumerate(planned):
        waiting.put(entry)
    with scratch_folder() as folder:
        linker = Linker(find_toolchain(profile.triple, exact=False), folder)

        def work(device: Device) -> None:
            tuner = Tuner(profile, settings, device, linker, folder, observer)
            while True:
                try:
                    number, each = waiting.get_nowait()
                except Empty:
                    return
                try:
                    findings[number] = tuner.tune(each, planned[number:])
                except DeviceFailed:
                    waiting.put((number, each))  # for another device
                    raise

        if len(devices) == 1:
            work(devices[0])
        else:
            left = list(devices)
            while left and not waiting.empty():  # what a device left may come after others ended
                left = _side_by_side(work, left, observer)
    if len(findings) < len(planned):
        raise DeviceFailed(f"{len(planned) - len(findings)} tasks are left, and no device")
    return [findings[number] for number in range(len(planned))]


def check_ready(
    planned: Sequence[Planned],
    profile: DeviceProfile,
    settings: Settings,
    devices: Sequence[Device],
) -> None:
    """See before any work that all is there: xgboost if need be, a log to write, the devices.

    Raises
    ------
    MissingPackage, BadLog, OutputFailed, DeviceFailed
    """
    if any(needs_trees(Space(each.space.points[1:]), each.trials) for each in planned):
        require("xgboost")
    for device in devices:
        device.check(sorted(profile.features))
    add_records(settings.log, [])


def _side_by_side(
    work: Callable[[Device], None], devices: Sequence[Device], observer: Observer
) -> list[Device]:
    """A thread for each device; those that are lost leave their tasks to the others, given back."""
    alive = []
    with ThreadPoolExecutor(len(devices)) as pool:
        jobs = [(device, pool.submit(work, device)) for device in devices]
        for device, job in jobs:
            try:
                job.result()
                alive.append(device)
            except DeviceFailed as error:
                observer.remark(f"{device.name} is lost: {error}")
    return alive


class Tuner:
    """Tunes one task after the other on a device.

    Parameters
    ----------
    profile : DeviceProfile
    settings : Settings
    device : Device
    linker : Linker
    folder : Path
    observer : Observer
    """

    def __init__(
        self,
        profile: DeviceProfile,
        settings: Settings,
        device: Device,
        linker: Linker,
        folder: Path,
        observer: Observer,
    ) -> None:
        self._profile, self._settings, self._device = profile, settings, device
        self._linker, self._folder, self._observer = linker, folder, observer
        self._journal = Journal(settings.log)
        machine = device.describe()
        self._machine = machine if device.speed else f"{machine} (emulated)"
        among = f", {settings.weights} bytes of weights" if settings.weights else ""
        self._where = f"{self._machine}, {settings.threads} threads{among}"
        self._noise: Ratio | None = None

    def tune(self, planned: Planned, left: Sequence[Planned]) -> Finding:
        """Tune a task; `left` are those that share the rest of the time, itself the first."""
        try:
            finding = self._tune(planned, self._until(left))
        except DefaultFailed as error:
            self._observer.remark(str(error))
            finding = Finding(planned, why=str(error))
        except DeviceFailed:
            raise
        except ApqError as error:
            self._observer.remark(f"{planned.task.name}: {error}")
            finding = Finding(planned, why=str(error))
        self._observer.end(finding)
        return finding

    def _until(self, left: Sequence[Planned]) -> float | None:
        """When the first of these tasks has had its part of the time that is left."""
        settings = self._settings
        if settings.deadline is None:
            return None
        now = settings.clock()
        whole = sum(each.part for each in left) or 1.0
        return now + max(0.0, settings.deadline - now) * left[0].part / whole

    def _tune(self, planned: Planned, until: float | None) -> Finding:
        task, space = planned.task, planned.space
        default = space.points[0]
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            workshop = workshop_of(task, folder, self._settings.threads)
            weights = self._settings.weights
            bench = Bench(workshop, self._linker, self._device, folder, default, weights)
            known = self._journal.trials(task.key, bench.fingerprint, self._where)
            trials = {trial.point: trial for trial in known if trial.point in set(space.points)}
            self._observer.begin(planned, len(trials))
            done = self._journal.finished(task.key, bench.fingerprint, self._where)
            if done is not None and len(trials) >= planned.trials:
                why, made = str(done.get("why", "")), tuple(trials.values())
                record = self._recorded(task, default)
                if why:
                    if record is None:
                        self._keep_default(task, default)
                    return Finding(planned, made, why=why, resumed=True)
                if record is not None:
                    return Finding(planned, made, record=record, resumed=True)
            if self._noise is None:
                self._measure_noise(bench)
            self._search(planned, bench, trials, until)
            return self._decide(planned, bench, tuple(trials.values()))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _recorded(self, task: AnyTask, point: Point) -> Record | None:
        """What the log holds of a task: somebody may have taken it out since."""
        wanted = record_of(task, point, self._settings, self._machine).identity
        found = read_records(self._settings.log).records
        return next((record for record in found if record.identity == wanted), None)

    def _keep_default(self, task: AnyTask, default: Point) -> None:
        """Record that nothing is faster: else the record of a shape that is near would decide."""
        if task.op == LINEAR and self._device.speed:
            made = record_of(
                task, default, self._settings, self._machine, ratio=1.0, interval=DEFAULT
            )
            add_records(self._settings.log, [made])

    def _measure_noise(self, bench: Bench) -> None:
        self._noise = bench.noise()
        self._observer.noise(self._noise)
        half = (self._noise.high - self._noise.low) / 2
        if half > TOO_NOISY:
            self._observer.remark(
                f"{self._device.name} is noisy: the same code beside itself differs by up to "
                f"{half:.0%}; less than that cannot be decided here. End other programs, or time "
                "with --threads 1"
            )

    def _search(
        self,
        planned: Planned,
        bench: Bench,
        trials: dict[Point, Trial],
        until: float | None,
    ) -> None:
        """Make trials until there are enough, or the time is over."""
        task, default, clock = planned.task, planned.space.points[0], self._settings.clock
        others = Space(planned.space.points[1:], whole=planned.space.whole)
        search = search_for(others, planned.trials, self._settings.seed)

        def over(trial: Trial) -> None:
            self._journal.add(task.key, bench.fingerprint, self._where, [trial], sync=False)
            fresh = [] if trial.point in trials else [trial]
            trials[trial.point] = trial
            best = max(t.ratio for t in trials.values())
            self._observer.tried(planned, fresh, best)

        while len(trials) < planned.trials and (until is None or clock() < until):
            tried = {point: trial.ratio for point, trial in trials.items() if point != default}
            points = search.propose(min(BATCH, planned.trials - len(trials)), tried)
            if not points:
                return
            bench.trials(points, told=over)
            self._journal.sync()
        if bench.odd:
            self._observer.remark(f"{task.name}: the clock jumped; {bench.odd} samples left out")

    def _decide(self, planned: Planned, bench: Bench, trials: tuple[Trial, ...]) -> Finding:
        """Time the best again, and the best of those for a record."""
        ratios = {trial.point: trial.ratio for trial in trials if trial.status == OK}
        finalists = [point for point in best_of(ratios, FINALISTS) if ratios[point] > 1]
        ratio: Ratio | None = None
        found: tuple[Point, Ratio] | None = None
        why = "no candidate is faster"
        if finalists and not self._device.speed:
            why, finalists = "emulated times say nothing: nothing is recorded", []
        if finalists:
            again = bench.trials(finalists, SECOND_ROUNDS)
            second = {trial.point: trial.ratio for trial in again if trial.status == OK}
            for point in best_of(second, LAST):
                if second[point] <= 1:
                    break
                last = bench.last(point, 1 - (1 - CONFIDENCE) / LAST)
                ratio = ratio or last
                if last.is_faster and (found is None or last.low > found[1].low):
                    found = point, last
            why = "" if found else _not_sure(ratio)
        record = None
        if found is not None:
            ratio = found[1]
            record = record_of(
                planned.task, found[0], self._settings, self._machine,
                ratio=ratio.value, interval=(ratio.low, ratio.high),
            )  # fmt: skip
            add_records(self._settings.log, [record])
        elif len(trials) >= planned.trials:
            self._keep_default(planned.task, planned.space.points[0])
        task = planned.task
        told = {"why": why, "ratio": round(ratio.value, 4) if ratio else 0}
        self._journal.end(task.key, bench.fingerprint, self._where, **told)
        best = found[0] if found else None
        return Finding(planned, trials, best, ratio, record, why)


def record_of(
    task: AnyTask, point: Point, settings: Settings, machine: str, **found: Any
) -> Record:
    """A record of a candidate; `found` is its ratio, interval and how that was."""
    shape = task.layer if isinstance(task, Task) and task.op == LINEAR else {}
    return Record(
        task.op, point.kernel, task.answers(point), task.schedule_of(point), **shape, **found,
        threads=settings.threads, weights=settings.weights, machine=machine,
        date=date.today().isoformat(), versions=versions(),
    )  # fmt: skip


def workshop_of(task: AnyTask, folder: Path, threads: int) -> Workshop | FunctionWorkshop:
    """That of a task's kind."""
    if isinstance(task, GraphTask):
        return FunctionWorkshop(task, folder, threads)
    make = WindowsWorkshop if isinstance(task, WindowsTask) else Workshop
    return make(task, folder, threads)  # type: ignore[arg-type]


def _not_sure(ratio: Ratio | None) -> str:
    if ratio is None:
        return "no candidate is faster"
    if not ratio.samples:
        return "the best candidate was wrong, or did not end, when it was checked again"
    return (
        f"the best candidate's ratio is {ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f}): "
        "not above 1.02 for sure"
    )


def versions() -> dict[str, str]:
    """Of what makes code: for people, records of other versions hold too."""
    import tvm

    llvm = tvm.target.codegen.llvm_version_major()
    return {"apq_tvm": __version__, "tvm": str(tvm.__version__), "llvm": str(llvm)}
