"""A tuner that is ended by SIGKILL loses the trial in flight at most, whenever that happens."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_device import FakeDevice
from fake_workshop import symbol

from apq_tvm.errors import DeviceFailed, OutputFailed
from apq_tvm.schedules.devices import find_profile
from apq_tvm.tune import journal as journals
from apq_tvm.tune import session as sessions
from apq_tvm.tune.budget import Planned
from apq_tvm.tune.device import Outcome
from apq_tvm.tune.journal import Journal
from apq_tvm.tune.measure import CRASHED, OK, WRONG, Trial
from apq_tvm.tune.program import Report
from apq_tvm.tune.session import Quiet, Settings, tune_tasks
from apq_tvm.tune.space import Point

PROFILE = find_profile("znver4")


pytestmark = pytest.mark.usefixtures("fakes")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dying(FakeDevice):
    """Keeps every line in a file before it is told, and dies when so many were told."""

    def __init__(self, lines: Path, until: int, **others: Any) -> None:
        super().__init__(**others)
        self._lines, self._left = lines, until

    def run(self, job: Any, on_line: Callable[[str], None] | None = None) -> Outcome:
        def tell(line: str) -> None:
            with self._lines.open("a") as file:
                file.write(line + "\n")
            if on_line is not None:
                on_line(line)
            self._left -= 1
            if self._left == 0:
                die()

        return super().run(job, tell)


class Heard(Quiet):
    def __init__(self) -> None:
        self.tries: list[Trial] = []

    def tried(self, planned: Any, trials: Sequence[Trial], best: float) -> None:
        self.tries += trials


def killed(work: Callable[[], Any]) -> None:
    """Do it in a process that must end by SIGKILL."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def known(lines: Path) -> int:
    """Candidates that were found wrong or had a sample, until a task is decided."""
    found, report, program = set[tuple[int, int]](), Report(), 0
    for line in lines.read_text().splitlines() if lines.exists() else []:
        if line == "at check 0":
            report, program = Report(), program + 1
        number = report.hear(line)
        if number and program > 1:  # the first measures the machine's noise
            found.add((program, number))
    return len(found)


def written(log: Path) -> set[str]:
    """Candidates of which there is a line."""
    lines = Journal(log)._lines()
    return {json.dumps([line["kernel"], line["decisions"]]) for line in lines if "kernel" in line}


def goes_on(planned: list[Planned], log: Path, device: FakeDevice) -> None:
    """Started again, a tuner makes what is left and repeats nothing."""
    made, heard = written(log), Heard()
    tune_tasks(planned, PROFILE, Settings(log), [device], heard)
    again = [json.dumps([t.point.kernel, t.point.decisions]) for t in heard.tries]
    assert not made & set(again) and len(set(again)) == len(again)
    assert len(made) + len(again) == len(planned[0].space.points) - 1


# The noise of the machine is measured first, in 66 lines; a candidate's first sample is known by 6,
# a batch is through by 356.
@pytest.mark.parametrize("lines", [1, 66, 69, 73, 74, 75, 100, 157, 250, 355, 356, 365, 420])
def test_whenever_it_dies_what_was_told_is_kept(
    lines: int, planned: list[Planned], tmp_path: Path
) -> None:
    log, said = tmp_path / "log.json", tmp_path / "lines"
    wrong = {symbol(planned[0].space.points[n]) for n in (2, 9)}
    device = Dying(said, lines, wrong=wrong)
    killed(lambda: tune_tasks(planned, PROFILE, Settings(log), [device]))
    kept = list(Journal(log)._lines())
    assert len(written(log)) == known(said)
    assert all(line["status"] in (OK, WRONG) for line in kept)
    goes_on(planned, log, FakeDevice(wrong=wrong))


@pytest.mark.parametrize("appended", [1, 9, 17, 33])
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_dying_while_a_trial_is_written_loses_that_one(
    appended: int, part: float, planned: list[Planned], tmp_path: Path, monkeypatch: Any
) -> None:
    log, said, count = tmp_path / "log.json", tmp_path / "lines", [0]
    write = os.write

    def torn(file: int, text: bytes) -> int:
        count[0] += 1
        if count[0] == appended:
            write(file, text[: int(part * len(text))])
            die()
        return write(file, text)

    def work() -> None:
        monkeypatch.setattr(journals.os, "write", torn)
        tune_tasks(planned, PROFILE, Settings(log), [Dying(said, -1)])

    killed(work)
    again = 16 < appended <= 32  # of candidates of the first batch, of which more is known then
    assert len(written(log)) == known(said) - (part < 1 and not again)
    goes_on(planned, log, FakeDevice())


def test_dying_in_the_middle_of_a_log_leaves_it_whole(
    planned: list[Planned], tmp_path: Path, monkeypatch: Any
) -> None:
    """All trials are there, a record is about to be: it is found again without any of them."""
    log, best = tmp_path / "log.json", planned[0].space.points[5]

    def cost(name: str) -> float:
        return 800.0 if name == symbol(best) else 1000.0

    def dies(path: Path, records: Any) -> None:
        path.with_name("half").write_text("{")
        if records:
            die()

    def work() -> None:
        monkeypatch.setattr(sessions, "add_records", dies)
        tune_tasks(planned, PROFILE, Settings(log), [FakeDevice(cost)])

    killed(work)
    heard = Heard()
    (finding,) = tune_tasks(planned, PROFILE, Settings(log), [FakeDevice(cost)], heard)
    assert not heard.tries and finding.record is not None and finding.best == best


def test_one_of_two_tuners_dies(planned: list[Planned], tmp_path: Path) -> None:
    """The lock goes with it, and its torn line takes no other with it."""
    log, said = tmp_path / "log.json", tmp_path / "lines"
    journal = Journal(log)
    point = Point("another", ())

    def work() -> None:
        with journals.locked(journal.path):
            with journal.path.open("a") as file:
                file.write('{"task": "torn, \\u00')
            die()

    journal.add("t", "s", "here", [Trial(point, OK, 1.0)])
    killed(work)
    killed(lambda: tune_tasks(planned, PROFILE, Settings(log), [Dying(said, 200)]))
    journal.add("t", "s", "here", [Trial(point, OK, 2.0)])
    assert [trial.ratio for trial in journal.trials("t", "s", "here")] == [2.0]
    assert len(journal.path.read_text().splitlines()) == known(said) + 3


def test_a_device_that_tells_nothing_before_the_end_runs_one_at_a_time(
    planned: list[Planned], tmp_path: Path
) -> None:
    class Late(FakeDevice):
        def run(self, job: Any, on_line: Any = None) -> Outcome:
            if self.runs == 4:
                die()
            made = super().run(job)
            for line in made.lines:
                on_line(line)
            return made

    log = tmp_path / "log.json"
    killed(lambda: tune_tasks(planned, PROFILE, Settings(log), [Late(streams=False)]))
    assert len(written(log)) == 3


def test_a_loss_and_a_crash_cost_one_trial_each(planned: list[Planned], tmp_path: Path) -> None:
    points = planned[0].space.points

    class Lost(FakeDevice):
        def run(self, job: Any, on_line: Any = None) -> Outcome:
            def tell(line: str) -> None:
                on_line(line)
                if self.runs == 2 and line.startswith("at time 4"):
                    raise DeviceFailed("gone")

            return super().run(job, tell)

    heard = Heard()
    device = Lost(crashing={symbol(points[7])})
    log = tmp_path / "log.json"
    tune_tasks(planned, PROFILE, Settings(log), [device], heard)
    status = {trial.point: trial.status for trial in heard.tries}
    assert len(status) == len(heard.tries) == len(points) - 1
    assert status[points[4]] == "lost" and status[points[7]] == CRASHED
    assert set(status.values()) == {OK, "lost", CRASHED}
    assert len(written(log)) == len(points) - 1


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "log.json")
    journal.add("t", "s", "here", [Trial(Point("k", (("a", (1, 2)),)), OK, 1.5)])
    (line,) = journal.path.read_text().splitlines()
    for old, new in (
        ('"ratio": 1.5', '"ratio": null'), ('"ratio": 1.5', '"ratio": NaN'),
        ('[["a", [1, 2]]]', "7"), ('[["a", [1, 2]]]', '[["a", {"b": 1}]]'),
        ('"kernel": "k", ', ""), ('"ratio": 1.5', '"ratio": -1'),
    ):  # fmt: skip
        assert old in line
        with journal.path.open("a") as file:
            file.write(line.replace(old, new) + "\n[1]\n\x00\n")
    assert len(journal.trials("t", "s", "here")) == 1


def test_a_full_disk_is_an_error_of_ours(tmp_path: Path, monkeypatch: Any) -> None:
    def full(file: int, text: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journals.os, "write", full)
    with pytest.raises(OutputFailed, match=r"No space left on device; make room"):
        Journal(tmp_path / "log.json").add("t", "s", "here", [Trial(Point("k", ()), OK, 1.5)])
