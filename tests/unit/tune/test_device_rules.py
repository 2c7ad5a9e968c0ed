"""Rules for a device from times of its kernels: ranges of rows, decisions, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from apq_tvm.errors import BadLog
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.schedules.linear.preferences import PREFERENCES
from apq_tvm.schedules.linear.thresholds import THRESHOLDS
from apq_tvm.select import by_name
from apq_tvm.tune.api import plan_of
from apq_tvm.tune.rules import Found, find_rules, write_rules
from apq_tvm.tune.rules.file import add_rules, where_of
from apq_tvm.tune.rules.ranges import best_ranges, limits
from apq_tvm.tune.tasks import Task, extract
from apq_tvm.tuning_logs.records import LINEAR

PROFILE = find_profile("znver4")
KERNELS = by_name(linear_kernels(PROFILE))
ROWS = (1, 4, 8, 16, 64, 128)
PANEL, FOUR = "gemm_W4A8_vpdpbusd512_r16", "gemv_W4A8_vpdpbusd512_r16m4"


class Told:
    """Says of kernels what it was given."""

    def __init__(self, shares: Any, changes: Any = None) -> None:
        self._shares, self._changes = shares, changes or {}

    def kernels(self, tasks: Sequence[Task]) -> dict[str, dict[int, float]]:
        rows = {task.m: task.kernels for task in tasks}
        names = {name for kernels in rows.values() for name in kernels}
        return {n: {m: self._shares(n, m) for m, ks in rows.items() if n in ks} for n in names}

    def changes(self, tasks: Any, kernel: str, base: Mapping[str, Any]) -> Any:
        return {} if base else self._changes.get(kernel, {})


def tasks_of(scheme: str) -> list[Task]:
    plans = plan_of(None, "znver4", scheme, [(64, 64), (96, 64)])
    return [task for plan in plans for task in extract(plan, ROWS) if task.op == LINEAR]


def rules(tasks: Sequence[Task], told: Told) -> list[Found]:
    return [rule for answer in find_rules(tasks, told) for rule in answer.rules]  # type: ignore[arg-type]


def as_today(tasks: Sequence[Task]) -> Any:
    """The kernel that is chosen is the fastest."""
    chosen = {task.m: task.kernel for task in tasks}
    return lambda name, m: 1.0 if chosen[m] == name else 0.5


def test_the_best_ranges_are_whole() -> None:
    shares = {
        "panel": {8: 0.6, 16: 0.9, 64: 1.0, 128: 1.0},
        "four": {4: 1.0, 8: 1.0, 16: 1.0, 64: 0.99, 128: 0.7},
        "one": {1: 1.0, 4: 0.5, 8: 0.5, 16: 0.3, 64: 0.2, 128: 0.1},
    }
    found = best_ranges(["panel", "four", "one"], ROWS, shares)
    assert found == {"panel": [64, 128], "four": [4, 8, 16], "one": [1]}


def test_one_bad_number_of_rows_does_not_end_a_range() -> None:
    shares = {"a": {1: 1.0, 4: 0.97, 8: 1.0, 16: 1.0}, "b": {1: 0.8, 4: 1.0, 8: 0.8, 16: 0.8}}
    assert best_ranges(["a", "b"], (1, 4, 8, 16), shares) == {"a": [1, 4, 8, 16], "b": []}


@pytest.mark.parametrize(
    ("serves", "expected"),
    [([64, 128], (33, -1)), ([1, 4], (1, 5)), ([8, 16], (6, 32)), ([], (1, 0))],
)
def test_between_two_numbers_the_middle_decides(serves: list[int], expected: Any) -> None:
    assert limits(serves, ROWS) == expected


def test_what_is_as_today_needs_no_rules() -> None:
    tasks = tasks_of("W4A8g32")
    assert rules(tasks, Told(as_today(tasks))) == []


def test_what_could_not_be_timed_decides_nothing() -> None:
    told = Told(lambda n, m: 1.0)
    told.kernels = lambda tasks: {}  # type: ignore[method-assign]
    assert rules(tasks_of("W4A8g32"), told) == []


def test_a_kernel_that_pays_from_elsewhere_gets_a_rule() -> None:
    def shares(name: str, m: int) -> float:
        if name == PANEL:
            return 1.0 if m >= 16 else 0.7
        if name == FOUR:
            return 0.8 if m >= 16 else 1.0
        return 1.0 if m < 4 and name.endswith("m1") and "bitserial" not in name else 0.3

    found = rules(tasks_of("W4A8g32"), Told(shares))
    (rule,) = [each for each in found if each.kernel == PANEL]
    assert rule.words["least"] == 12 and "most" not in rule.words
    assert rule.gain > 1.2
    made = THRESHOLDS.parse({"measured": "here", "rules": [rule.words]}).rules[0]
    assert [name for name, kernel in KERNELS.items() if made.fits(kernel)] == [PANEL]


def test_rows_with_one_scale_have_a_limit_of_their_own() -> None:
    def shares(name: str, m: int) -> float:
        return 1.0 if (name == PANEL) == (m >= 64) and "bitserial" not in name else 0.5

    (rule,) = [each for each in rules(tasks_of("W4A8"), Told(shares)) if each.kernel == PANEL]
    assert rule.words["least_whole"] == 33 and rule.words["least"] != 33


def test_decisions_that_gain_everywhere_are_preferred() -> None:
    tasks = tasks_of("W4A8g32")
    better = {("streams", 2): [1.1, 1.05], ("ahead", 0): [1.3, 0.9], ("unroll", 2): [1.01, 1.02]}
    told = Told(as_today(tasks), {FOUR: better})
    (rule,) = rules(tasks, told)
    assert (rule.kernel, rule.log, rule.words["first"]) == (FOUR, "preferences", {"streams": 2})
    made = PREFERENCES.parse({"measured": "here", "rules": [rule.words]}).rules[0]
    assert [name for name, kernel in KERNELS.items() if made.fits(kernel)] == [FOUR]


@pytest.mark.parametrize("name", [PANEL, FOUR, "gemm_W4A16_fma_r16"])
def test_a_rule_is_for_its_kernel_alone(name: str) -> None:
    kernels = list(KERNELS.values())
    made = THRESHOLDS.parse(
        {"measured": "", "rules": [{**where_of(KERNELS[name], kernels), "least": 3}]}
    )
    fits = {kernel.name for kernel in kernels if made.rules[0].fits(kernel)}
    assert name in fits and {each.rpartition("_r")[0] for each in fits} == {
        name.rpartition("_r")[0]
    }


def test_files_keep_what_others_wrote(tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    old = [{"kind": "gemm", "weights": ["nl4", "cb*"], "least": 9, "why": "by hand"}]
    path.write_text(json.dumps({"measured": "once", "rules": old}))
    mine = Found(PANEL, "thresholds", {**where_of(KERNELS[PANEL], []), "least": 7}, 1.1)
    assert write_rules([mine], tmp_path, "today") == [path]
    again = Found(PANEL, "thresholds", {**mine.words, "least": 8}, 1.1)
    write_rules([again], tmp_path, "today")
    log = json.loads(path.read_text())
    assert log["measured"] == "once"
    assert [rule["least"] for rule in log["rules"]] == [8, 9]


def test_a_damaged_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    path.write_text('{"measured": "once", "rules": [{"kind": 3}]}')
    with pytest.raises(BadLog, match=r"rules\[0\]\.kind"):
        add_rules(path, THRESHOLDS, [{"kind": "gemm", "least": 2}], "today")
    assert json.loads(path.read_text())["rules"] == [{"kind": 3}]
