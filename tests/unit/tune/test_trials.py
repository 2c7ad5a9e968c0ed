"""Trials end whatever candidates do, and what is wrong or slower never becomes a record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_device import FakeDevice, FakeLinker
from fake_workshop import FakeWorkshop, symbol

from apq_tvm.errors import DeviceFailed
from apq_tvm.tune.measure import CRASHED, LATE, LOST, OK, REFUSED, WRONG, Bench, DefaultFailed
from apq_tvm.tune.ratios import ratio_of
from apq_tvm.tune.space import Point

DEFAULT = Point("k", (("a", 0),))
POINTS = [Point("k", (("a", a),)) for a in range(1, 5)]


def bench(tmp_path: Path, device: FakeDevice, refused: Any = ()) -> Bench:
    linker: Any = FakeLinker(tmp_path)
    workshop: Any = FakeWorkshop(refused=refused)
    return Bench(workshop, linker, device, tmp_path, DEFAULT)


def test_a_crash_costs_one_trial(tmp_path: Path) -> None:
    device = FakeDevice(crashing={symbol(POINTS[1])}, hanging={symbol(POINTS[2])})
    made = bench(tmp_path, device).trials(POINTS)
    assert [trial.status for trial in made] == [OK, CRASHED, LATE, OK]
    assert "signal 11" in made[1].why and "too long" in made[2].why
    assert not list(tmp_path.glob("*"))  # programs and data are gone


def test_wrong_ones_are_never_timed(tmp_path: Path) -> None:
    device = FakeDevice(wrong={symbol(POINTS[0])})
    made = bench(tmp_path, device).trials(POINTS)
    assert made[0].status == WRONG and made[0].ratio == 0
    assert "300" in made[0].why
    assert symbol(POINTS[0]) not in device.timed


def test_what_is_refused_is_a_trial(tmp_path: Path) -> None:
    made = bench(tmp_path, FakeDevice(), refused=[POINTS[3]]).trials(POINTS)
    assert made[3].status == REFUSED and "does not fit" in made[3].why


def test_a_lost_device_costs_a_trial_and_is_given_up_at_last(tmp_path: Path) -> None:
    made = bench(tmp_path, FakeDevice(lost=1)).trials(POINTS)
    assert [trial.status for trial in made] == [LOST, OK, OK, OK]
    with pytest.raises(DeviceFailed, match="the fake is lost"):
        bench(tmp_path, FakeDevice(lost=99)).trials(POINTS)


def test_a_slow_moment_does_not_change_the_ranking(tmp_path: Path) -> None:
    """Whenever it is; candidates that do not take turns are ranked by it."""

    costs = {symbol(point): 1000.0 - 20 * i for i, point in enumerate((DEFAULT, *POINTS))}

    def ranked(start: int, streams: bool) -> bool:
        def pace(taken: int) -> float:
            return 1.5 if start <= taken < start + 11 else 1.0

        device = FakeDevice(costs.__getitem__, noise=0, pace=pace, streams=streams)
        made = bench(tmp_path, device).trials(POINTS, told=lambda trial: None)
        ratios = [trial.ratio for trial in made]
        return ratios == sorted(ratios)

    assert all(ranked(start, streams=True) for start in range(60))
    assert not all(ranked(start, streams=False) for start in range(60))


def test_a_default_that_fails_ends_the_task(tmp_path: Path) -> None:
    class Broken(FakeDevice):
        def run(self, job: Any, on_line: Any = None) -> Any:
            from apq_tvm.tune.device import Outcome

            return Outcome(("apq-tune 1 2", "at check 0"), -4, "illegal instruction")

    with pytest.raises(DefaultFailed, match="signal 4 on fake"):
        bench(tmp_path, Broken()).trials(POINTS)


def test_a_default_that_is_wrong_ends_the_task(tmp_path: Path) -> None:
    class Wrong(FakeDevice):
        def run(self, job: Any, on_line: Any = None) -> Any:
            from apq_tvm.tune.device import Outcome

            return Outcome(("apq-tune 1 2", "at check 0", "checked 0 8.5", "done"), 0)

    with pytest.raises(DefaultFailed, match=r"8\.5 times as far"):
        bench(tmp_path, Wrong()).trials(POINTS)


def test_samples_of_a_clock_that_jumps_are_left_out(tmp_path: Path) -> None:
    made = bench(tmp_path, FakeDevice(jumps=True))
    assert all(trial.status == OK for trial in made.trials(POINTS, rounds=20))
    assert made.odd > 0


@pytest.mark.parametrize(("slowdown", "records"), [(1.05, 0), (1.0, 0), (0.9, 50)])
def test_fifty_candidates_of_one_speed(tmp_path: Path, slowdown: float, records: int) -> None:
    """5 % slower, or as fast: never a record; a tenth faster: always."""

    def cost(name: str) -> float:
        return 1000.0 if name == symbol(DEFAULT) else 1000.0 * slowdown

    kept = 0
    for seed in range(50):
        device = FakeDevice(cost, noise=0.05, seed=seed)
        kept += bench(tmp_path, device).last(POINTS[0], 0.975).is_faster
    assert kept == records


def test_a_wrong_one_is_not_even_timed_at_last(tmp_path: Path) -> None:
    device = FakeDevice(lambda name: 1.0 if "a=1" in name else 1000.0, wrong={symbol(POINTS[0])})
    ratio = bench(tmp_path, device).last(POINTS[0], 0.975)
    assert ratio.samples == 0 and not ratio.is_faster


def test_equal_code_has_a_ratio_of_one(tmp_path: Path) -> None:
    noise = bench(tmp_path, FakeDevice()).noise()
    assert 0.97 < noise.low < 1 < noise.high < 1.03


def test_intervals_are_of_the_binomial_distribution() -> None:
    pairs = [(1.0 + i / 100, 1.0) for i in range(10)]
    ratio = ratio_of(pairs)  # of ten, ranks 2 and 9: 97.9 % (Conover 1999, table A3)
    assert (ratio.low, ratio.high) == (1.01, 1.08)
    few = ratio_of(pairs[:3])
    assert few.low == 0 and not few.is_faster
    assert ratio_of([]).samples == 0
