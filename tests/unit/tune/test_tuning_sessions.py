"""A session with a fake device: what enters a log, what is repeated, what survives a kill."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from fake_device import FakeDevice
from fake_workshop import symbol

from apq_tvm.schedules.devices import find_profile
from apq_tvm.tune.api import plan_of, weights_read
from apq_tvm.tune.budget import Planned, share_out
from apq_tvm.tune.journal import Journal, add_records
from apq_tvm.tune.measure import OK, Trial
from apq_tvm.tune.session import Finding, Quiet, Settings, tune_tasks
from apq_tvm.tune.space import Point
from apq_tvm.tune.tasks import extract
from apq_tvm.tuning_logs.records import Record, parse_record, read_records

PROFILE = find_profile("znver4")


pytestmark = pytest.mark.usefixtures("fakes")


class Heard(Quiet):
    """Keeps what was tried and remarked."""

    def __init__(self) -> None:
        self.tries: list[Trial] = []
        self.remarks: list[str] = []

    def tried(self, planned: Any, trials: Any, best: float) -> None:
        self.tries += trials

    def remark(self, text: str) -> None:
        self.remarks.append(text)


def run(
    planned: list[Planned], log: Path, device: FakeDevice, observer: Any = None
) -> list[Finding]:
    return tune_tasks(planned, PROFILE, Settings(log), [device], observer)


def one_is_faster(best: Point) -> FakeDevice:
    return FakeDevice(lambda name: 800.0 if name == symbol(best) else 1000.0)


def test_a_faster_one_becomes_a_record(planned: list[Planned], tmp_path: Path) -> None:
    best = planned[0].space.points[5]
    (finding,) = run(planned, tmp_path / "log.json", one_is_faster(best))
    assert finding.best == best and finding.record is not None
    (record,) = read_records(tmp_path / "log.json").records
    assert record.line() == finding.record.line()
    assert 1.2 < record.ratio < 1.3 and record.interval[0] > 1.02
    assert record.machine == "a fake" and record.versions["tvm"]


def test_wrong_and_slower_ones_never_do(planned: list[Planned], tmp_path: Path) -> None:
    """The fastest is wrong; all others are 5 % slower, on a noisy machine."""
    points = planned[0].space.points
    fast = symbol(points[3])

    def cost(name: str) -> float:
        return 100.0 if name == fast else 1000.0 if name == symbol(points[0]) else 1050.0

    for seed in range(50):
        log = tmp_path / f"{seed}.json"
        device = FakeDevice(cost, wrong={fast}, noise=0.08, seed=seed)
        (finding,) = run(planned, log, device)
        assert finding.record is None and finding.why
        assert all(record.is_default for record in read_records(log).records)
        assert fast not in device.timed


def test_a_finished_session_repeats_nothing(planned: list[Planned], tmp_path: Path) -> None:
    log, again, heard = tmp_path / "log.json", FakeDevice(), Heard()
    for first in (FakeDevice(), one_is_faster(planned[0].space.points[5])):
        run(planned, log, first)
        (finding,) = run(planned, log, again, heard)
        assert finding.resumed and again.runs == 0 and not heard.tries
        (record,) = read_records(log).records
        assert record == finding.record if finding.record else record.is_default
        log, again = tmp_path / "other.json", FakeDevice()
    assert finding.record


def test_a_record_that_was_taken_out_is_found_again(planned: list[Planned], tmp_path: Path) -> None:
    log, heard = tmp_path / "log.json", Heard()
    fast = planned[0].space.points[5]
    run(planned, log, one_is_faster(fast))
    log.unlink()
    (finding,) = run(planned, log, one_is_faster(fast), heard)
    assert not finding.resumed and not heard.tries and finding.best == fast
    assert len(read_records(log).records) == 1


def test_a_session_goes_on_where_it_was_killed(planned: list[Planned], tmp_path: Path) -> None:
    log, heard = tmp_path / "log.json", Heard()

    class Killed(FakeDevice):
        def run(self, job: Any, on_line: Any = None) -> Any:
            if self.runs == 2:  # the machine's noise and a batch are through
                raise KeyboardInterrupt
            return super().run(job, on_line)

    with pytest.raises(KeyboardInterrupt):
        run(planned, log, Killed(), heard)
    before = {trial.point for trial in heard.tries}
    assert before
    journal = Journal(log)
    journal.path.write_text(journal.path.read_text() + '{"task": "torn')
    again = Heard()
    run(planned, log, FakeDevice(), again)
    after = {trial.point for trial in again.tries}
    assert not before & after
    assert len(before | after) == len(planned[0].space.points) - 1


def test_an_emulator_records_nothing(planned: list[Planned], tmp_path: Path) -> None:
    device = FakeDevice(lambda name: 1000.0 if "unroll=1" in name else 100.0, speed=False)
    (finding,) = run(planned, tmp_path / "log.json", device)
    assert finding.record is None and "emulated" in finding.why


def test_a_noisy_machine_is_told(planned: list[Planned], tmp_path: Path) -> None:
    heard = Heard()
    (finding,) = run(planned, tmp_path / "log.json", FakeDevice(noise=0.8), heard)
    assert finding.record is None
    assert any("fake is noisy" in remark for remark in heard.remarks)


def test_a_broken_default_is_a_remark(planned: list[Planned], tmp_path: Path) -> None:
    heard = Heard()
    device = FakeDevice(crashing=set())
    device.run = lambda job, on_line=None: sessions_outcome()  # type: ignore[method-assign]
    (finding,) = run(planned, tmp_path / "log.json", device, heard)
    assert "the default" in finding.why and heard.remarks == [finding.why]


def sessions_outcome() -> Any:
    from apq_tvm.tune.device import Outcome

    return Outcome(("apq-tune 1 2", "at check 0"), -4)


def test_time_is_shared_and_ends(planned: list[Planned], tmp_path: Path) -> None:
    settings = Settings(tmp_path / "log.json", deadline=0.0, clock=lambda: 1.0)
    (finding,) = tune_tasks(planned, PROFILE, settings, [FakeDevice()])
    assert not finding.trials


def test_several_devices_share_the_tasks(tmp_path: Path) -> None:
    plans = plan_of(None, "znver4", "W4A8g32", [(256, 256), (512, 256)])
    tasks = [task for plan in plans for task in extract(plan, [1])]
    planned = share_out({task: task.space() for task in tasks})
    devices = [FakeDevice(seed=1), FakeDevice(seed=2, lost=99)]
    heard = Heard()
    findings = tune_tasks(planned, PROFILE, Settings(tmp_path / "log.json"), devices, heard)
    assert [f.planned for f in findings] == planned
    assert all(f.trials for f in findings), [f.why for f in findings]


def test_trials_of_another_machine_are_not_these(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "log.json")
    point = Point("k", (("tile", (4, 3)), ("on", True)))
    journal.add("t", "s", "here", [Trial(point, OK, 1.5, 10.0)])
    assert journal.trials("t", "s", "here")[0].point == point
    assert not journal.trials("t", "s", "there") and not journal.trials("t", "other", "here")


def test_where_weights_come_from_is_part_of_a_trial(planned: list[Planned], tmp_path: Path) -> None:
    log, far = tmp_path / "log.json", FakeDevice()
    fast = planned[0].space.points[5]
    run(planned, log, FakeDevice())
    settings = Settings(log, weights=3_000_000)
    (finding,) = tune_tasks(planned, PROFILE, settings, [one_is_faster(fast)])
    assert not finding.resumed
    (record,) = read_records(log).records
    assert record.weights == 3_000_000 and parse_record(record.line()) == record
    (finding,) = tune_tasks(planned, PROFILE, settings, [far])
    assert finding.resumed and far.runs == 0


def test_a_run_reads_all_weights_but_those_of_embeddings() -> None:
    (plan,) = plan_of(None, "znver4", "W4A8g32", [(256, 128)])
    assert weights_read(plan) == 256 * 128 * 4.5 / 8


def write_some(path: str, first: int) -> None:
    for i in range(first, first + 20):
        add_records(Path(path), [record(i)])
        Journal(Path(path)).add("t", "s", "here", [Trial(Point(f"k{i}", ()), OK, 1.0)])


def record(n: int) -> Record:
    return Record("linear", "k", {"a": n}, "s", n=n, k=1, scheme="W8A8", interval=(1.1, 1.3))


def test_two_tuners_share_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=write_some, args=(str(path), first)) for first in (1, 101)]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    found = read_records(path)
    assert len(found.records) == 40 and not found.remarks
    lines = Journal(path).path.read_text().splitlines()
    assert len(lines) == 40 and all(json.loads(line) for line in lines)
