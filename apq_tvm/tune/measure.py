"""Trials: candidates built, checked and timed on a device, in batches of one program each.

Every trial ends, whatever its candidate does: one that crashes or hangs takes its program with it,
which runs again without it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from apq_tvm.errors import ApqError, BuildError, DeviceFailed
from apq_tvm.tune.candidates import Built, Workshop
from apq_tvm.tune.device import TIMED_OUT, Device, Job, Outcome
from apq_tvm.tune.functions.graph import FunctionWorkshop
from apq_tvm.tune.program import Linker, Report, read_report
from apq_tvm.tune.ratios import Ratio, ratio_of, rough_ratio
from apq_tvm.tune.space import Point

OK, WRONG, FAILED, REFUSED, CRASHED, LATE, LOST = (
    "ok", "wrong", "failed", "refused", "crashed", "late", "lost",
)  # fmt: skip
"""What becomes of a trial."""

FIRST_ROUNDS, SECOND_ROUNDS, LAST_ROUNDS = 5, 15, 25
"""Samples: of every candidate, of the few best, and of the one that may become a record, in each of
`LAST_RUNS` programs."""

LAST_RUNS = 2
"""Programs that the last candidate is timed in: memory lies elsewhere in each."""

LIMIT_S = 20
"""Seconds that a candidate may take for its results or for a sample."""

SAMPLE_NS = 1_000_000
"""A sample is at least so long, and one pass."""

GIVE_UP = 3
"""Times in a row that a device may be lost."""


class DefaultFailed(ApqError):
    """The default itself is wrong or does not run: there is nothing to compare with."""


@dataclass(frozen=True)
class Trial:
    """What one candidate came to.

    Parameters
    ----------
    point : Point
    status : str
        `OK`, or what went wrong.
    ratio : float
        The default's time over its, by minima: roughly, 0 without one.
    ns : float
        Its time: the least of its samples.
    why : str
        What went wrong, for people.
    """

    point: Point
    status: str
    ratio: float = 0.0
    ns: float = 0.0
    why: str = ""


Tell = Callable[[Trial], None]
"""Told a trial as soon as its first sample says something of it, and again if more changes it."""


@dataclass
class _Runs:
    """What the programs of one batch said, together.

    `tell` hears of a candidate, by its number, when something is known of it.
    """

    report: Report
    ended: dict[int, tuple[str, str]]
    tell: Callable[[int, Report], None] | None = None
    told: set[int] = field(default_factory=set)

    def known(self, number: int, report: Report) -> None:
        """Something is known of a candidate."""
        if self.tell is not None and number not in self.told:
            self.told.add(number)
            self.tell(number, report)


class Bench:
    """Times candidates of one task beside its default.

    Parameters
    ----------
    workshop : Workshop or FunctionWorkshop
    linker : Linker
    device : Device
    folder : Path
        For programs and data.
    default : Point
    weights : int
        Bytes of weights that calls take in turns, at most the device's `cold_bytes`; 0 for those.

    Raises
    ------
    DefaultFailed
        The default cannot be built.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        workshop: Workshop | FunctionWorkshop,
        linker: Linker,
        device: Device,
        folder: Path,
        default: Point,
        weights: int = 0,
    ) -> None:
        self._workshop, self._linker = workshop, linker
        self._device, self._folder, self.default = device, folder, default
        self._cold_bytes = min(weights or device.cold_bytes, device.cold_bytes)
        ((_, built),) = workshop.build([default])
        if isinstance(built, str):
            raise DefaultFailed(f"{workshop.task.name}: the default {built}")
        self._default = built
        self.fingerprint = built.text
        self._built: dict[Point, Built] = {}
        self._lost = 0
        self.odd = 0

    def noise(self, rounds: int = 20) -> Ratio:
        """The default beside itself: what ratios of equal code look like."""
        runs = self._run([self._default, self._default], rounds, checked=True)
        return ratio_of(runs.report.pairs.get(1, []))

    def trials(
        self, points: Sequence[Point], rounds: int = FIRST_ROUNDS, told: Tell | None = None
    ) -> list[Trial]:
        """Build, check and time candidates, which take turns, in the order of `points`.

        Parameters
        ----------
        points : sequence of Point
        rounds : int
            Samples of each.
        told : callable, optional
            Told every trial as soon as its first sample is known, and again at the end of its batch
            if it came to something else. Where a device tells nothing before a program ends,
            each candidate has one of its own then.
        """
        trials: dict[Point, Trial] = {}
        built: list[Built] = []

        def over(trial: Trial) -> None:
            changed = trials.get(trial.point) != trial
            trials[trial.point] = trial
            if told is not None and changed:
                told(trial)

        for point, made in self._workshop.build(points):
            if isinstance(made, str):
                over(Trial(point, REFUSED, why=made))
            else:
                built.append(made)
                self._built[point] = made
        if built:
            points_of = {number: each.point for number, each in enumerate(built, 1)}

            def known(number: int, report: Report) -> None:
                over(_trial(points_of[number], number, report))

            tell = None if told is None else known
            runs = self._run([self._default, *built], rounds, checked=True, tell=tell)
            for number, point in points_of.items():
                over(_trial(point, number, runs.report, runs.ended.get(number)))
        return [trials[point] for point in points]

    def last(self, point: Point, confidence: float) -> Ratio:
        """Samples of a candidate that did not choose it, checked again, in several programs."""
        pairs: list[tuple[float, float]] = []
        for _ in range(LAST_RUNS):
            runs = self._run([self._default, self._built_of(point)], LAST_ROUNDS, checked=True)
            if not runs.report.errors.get(1, math.inf) <= 1 or runs.ended:
                return ratio_of([])
            pairs += runs.report.pairs.get(1, [])
        return ratio_of(pairs, confidence)

    def _built_of(self, point: Point) -> Built:
        if point not in self._built:
            ((_, made),) = self._workshop.build([point])
            if isinstance(made, str):
                raise DefaultFailed(f"{self._workshop.task.name}: {point.text()} {made}")
            self._built[point] = made
        return self._built[point]

    def _run(
        self,
        candidates: Sequence[Built],
        rounds: int,
        checked: bool,
        tell: Callable[[int, Report], None] | None = None,
    ) -> _Runs:
        """Run the program of a batch until every candidate has had its turn."""
        batch, kernels = self._workshop.batch(candidates)
        name = f"batch{next(self._numbers)}"
        program, objects = self._linker.link(name, batch.functions(), kernels)
        data = self._folder / f"{name}.data"
        batch.write(data, self._cold_bytes)
        runs = _Runs(Report(), {}, tell)
        left = list(range(1, len(candidates)))
        try:
            while left:
                now = left if tell is None or self._device.streams else left[:1]
                only = ",".join(map(str, now))
                arguments = [f"only={only}", f"rounds={rounds}", f"sample_ns={SAMPLE_NS}"]
                arguments += [f"limit={LIMIT_S}", f"loose={self._workshop.loose:g}"]
                arguments += ["check=1"] if checked else []
                seconds = 30.0 + LIMIT_S + len(now) * (2 + 0.2 * rounds)
                job = Job(program, data, tuple(arguments), seconds, objects, self._linker.tools)
                left = [*self._once(job, now, runs), *left[len(now) :]]
        finally:
            self._device.forget(data)
            for path in (program, data):
                path.unlink(missing_ok=True)
        self.odd += runs.report.odd
        return runs

    def _once(self, job: Job, left: list[int], runs: _Runs) -> list[int]:
        """Run a program; candidates that have to run again, without the one that ended it."""
        said = Report()

        def hear(line: str) -> None:
            number = None
            with suppress(BuildError):  # a line that was torn; of a whole one more is said below
                number = said.hear(line)
            if number:
                runs.known(number, said)

        try:
            outcome = self._device.run(job, hear)
            self._lost = 0
        except DeviceFailed as error:
            self._lost += 1
            if self._lost >= GIVE_UP:
                raise
            culprit = said.at if said.at in left else next(iter(left), 0)
            runs.ended[culprit] = (LOST, f"the device was lost: {error}")
            return [number for number in left if number != culprit]
        report = read_report(outcome.lines)
        _join(runs.report, report)
        if report.done:
            self._check_default(report)
            return []
        ended, why = report.at, _why(outcome)
        if not ended:
            name = self._workshop.task.name
            text = outcome.errors.strip() or "no message"
            raise DefaultFailed(f"{name}: the default {why} on {self._device.name} ({text})")
        runs.ended[ended] = (LATE if _is_late(outcome) else CRASHED, why)
        return [number for number in left if number != ended]

    def _check_default(self, report: Report) -> None:
        error, name = report.errors.get(0, 0.0), self._workshop.task.name
        if 0 in report.failed:
            raise DefaultFailed(f"{name}: the default's kernel failed: {report.failed[0]}")
        if not error <= 1:
            raise DefaultFailed(
                f"{name}: the default's result is {error:.3g} times as far from the reference as "
                "it may be: a bug of apq-tvm, or a device that computes otherwise; not tuned"
            )


def _trial(
    point: Point, number: int, report: Report, ended: tuple[str, str] | None = None
) -> Trial:
    """What a candidate came to, by what its program said or how that ended."""
    if ended is not None:
        status, why = ended
        return Trial(point, status, why=why)
    if number in report.failed:
        return Trial(point, FAILED, why=report.failed[number])
    error = report.errors.get(number, math.inf)
    if not error <= 1:
        why = f"its result is {error:.3g} times as far from the reference as it may be"
        return Trial(point, WRONG, why=why)
    pairs = report.pairs.get(number, [])
    if not pairs:
        return Trial(point, LOST, why="no sample of it came back")
    return Trial(point, OK, rough_ratio(pairs), min(mine for _, mine in pairs))


def _join(whole: Report, part: Report) -> None:
    whole.errors |= part.errors
    whole.failed |= part.failed
    whole.pairs |= {n: whole.pairs.get(n, []) + pairs for n, pairs in part.pairs.items()}
    whole.odd += part.odd


_ALARM = 14


def _is_late(outcome: Outcome) -> bool:
    return outcome.code in (TIMED_OUT, -_ALARM, 128 + _ALARM)


def _why(outcome: Outcome) -> str:
    if _is_late(outcome):
        return "took too long"
    if outcome.code < 0:
        return f"was ended by signal {-outcome.code}"
    return f"ended with {outcome.code}"
