"""Which tests are left to a longer run, and that those that are do exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.choosing import ALL, LEAST, LEFT, TEST, Case, Choice, Limits, Recorded, left, left_lines

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits("kept", cheap_s=0.3, kernel=1)


def case(name: str, cpu: float, *needs: str) -> Case:
    return Case(name, True, cpu, frozenset(needs))


def branches(**counts: Iterable[int]) -> dict[str, set[int]]:
    return {name: set(numbers) for name, numbers in counts.items()}


def choose(
    tests: Sequence[Case], fixtures: dict[str, float], taken: dict[str, set[int]]
) -> set[str]:
    return Choice(Recorded([*tests], fixtures, taken)).add(tests, LIMITS)


def test_what_is_cheap_or_kept_stays() -> None:
    tests = [case("cheap", 0.2), case("kept", 99.0), case("dear", 1.0)]
    assert choose(tests, {}, {}) == {"cheap", "kept"}


def test_what_takes_most_new_branches_for_its_time_comes_first() -> None:
    tests = [case("wide", 10.0), case("narrow", 1.0), case("same", 1.0)]
    # Of wide's branches fifty are not new behind narrow, which does as much in a tenth of the time.
    worth = 50 + 10 * LEAST
    enough = branches(wide=range(worth), narrow=range(50), same=range(40))
    assert choose(tests, {}, enough) == {"wide", "narrow"}
    few = branches(wide=range(worth - 1), narrow=range(50), same=range(40))
    assert choose(tests, {}, few) == {"narrow"}


def test_a_fixture_is_paid_once() -> None:
    tests = [case("a", 0.2, "model"), case("b", 0.2, "model")]
    few = {"model": set(range(9)), "a": {9}}
    assert choose(tests, {"model": 9.0}, few) == set()
    assert choose(tests, {"model": 0.1}, few) == {"a", "b"}
    many = {**few, "model": set(range(10 * LEAST))}
    assert choose(tests, {"model": 9.0}, many) == {"a", "b"}


def test_who_waits_is_worth_more_behind_a_paid_fixture() -> None:
    tests = [case("a", 1.0, "model"), case("b", 1.0, "model"), case("c", 2.0)]
    taken = branches(model=range(40), a=range(40, 60), b=range(60, 66), c=range(100, 115))
    assert choose(tests, {"model": 4.0}, taken) == {"a", "b", "c"}


def test_a_longer_run_adds_what_kernels_are_made_of() -> None:
    tests = [case("a", 1.0), case("b", 1.0), case("c", 1.0), case("d", 1.0)]
    taken = branches(a=range(9), b=range(8), c=range(10), d={0, 20})
    recorded = Recorded(tests, {}, taken, kernels={9})
    choice = Choice(recorded)
    assert choice.add(tests[:2], LIMITS) == {"a"}
    assert recorded.missing({"a"}) == {9, 20} and recorded.seconds({"a"}) == 1
    assert choice.add(tests, Limits("kept", 0.3, kernel=6)) == {"a", "c"}
    assert recorded.missing({"a", "c"}) == {20}


def test_functions_stand_for_all_their_cases() -> None:
    tests = [case(name, 1.0) for name in ("f[1]", "f[2]", "g[1]", "g[2]", "h")]
    assert left_lines(tests, {"f[2]"}) == ["f[1]", "g", "h"]


def test_whoever_is_left_exists() -> None:
    lines = {line for path in LEFT.glob("*.txt") for line in path.read_text().splitlines()}
    names = {line.partition("[")[0] for line in lines}
    files = {name.partition("::")[0] for name in names}
    known = {
        f"{file}::{part.name}"
        for file in files
        for part in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(part, ast.FunctionDef)
    }
    assert names <= known


def test_what_is_kept_is_in_no_list() -> None:
    for command, limits in (("test", TEST), ("test-all", ALL)):
        assert [name for name in left(command) if re.match(limits.kept, name)] == []
