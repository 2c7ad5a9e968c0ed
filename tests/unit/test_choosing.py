"""Which tests are left to `make test-all`, and that those that are do exist."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.choosing import CHEAP_S, KEPT, LEAST, LEFT, Case, choose, left_lines

ROOT = Path(__file__).resolve().parents[2]


def case(name: str, cpu: float, *needs: str) -> Case:
    return Case(name, cpu, frozenset(needs))


def branches(**counts: range) -> dict[str, set[int]]:
    return {name: set(numbers) for name, numbers in counts.items()}


def test_what_is_cheap_or_kept_stays() -> None:
    kept = KEPT[0] + "test_x.py::test_y"
    tests = [case("cheap", CHEAP_S / 2), case(kept, 99.0), case("dear", 1.0)]
    assert choose(tests, {}, {}) == {"cheap", kept}


def test_what_takes_most_new_branches_for_its_time_comes_first() -> None:
    tests = [case("wide", 10.0), case("narrow", 1.0), case("same", 1.0)]
    # Of wide's branches fifty are not new behind narrow, which does as much in a tenth of the time.
    worth = 50 + 10 * LEAST
    enough = branches(wide=range(worth), narrow=range(50), same=range(40))
    assert choose(tests, {}, enough) == {"wide", "narrow"}
    few = branches(wide=range(worth - 1), narrow=range(50), same=range(40))
    assert choose(tests, {}, few) == {"narrow"}


def test_a_fixture_is_paid_once() -> None:
    tests = [case("a", CHEAP_S / 2, "model"), case("b", CHEAP_S / 2, "model")]
    few = {"model": set(range(9)), "a": {9}}
    assert choose(tests, {"model": 9.0}, few) == set()
    assert choose(tests, {"model": 0.1}, few) == {"a", "b"}
    many = {**few, "model": set(range(10 * LEAST))}
    assert choose(tests, {"model": 9.0}, many) == {"a", "b"}


def test_functions_stand_for_all_their_cases() -> None:
    tests = [case(name, 1.0) for name in ("f[1]", "f[2]", "g[1]", "g[2]", "h")]
    assert left_lines(tests, {"f[2]"}) == ["f[1]", "g", "h"]


def test_whoever_is_left_exists() -> None:
    names = {line.partition("[")[0] for line in LEFT.read_text().splitlines()}
    files = {name.partition("::")[0] for name in names}
    known = {
        f"{file}::{part.name}"
        for file in files
        for part in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(part, ast.FunctionDef)
    }
    assert names <= known
