"""ONNX's own node tests: what passed once passes, the rest is refused by name, nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node_cases.cases import CONSTANT, Case
from tests.node_cases.forms import TARGETS, judged, kind
from tests.node_cases.lists import passing
from tests.node_cases.parts import PARTS, check_part, check_sample, check_types

TARGET = "host"


@pytest.mark.slow
def test_a_sample_passes(tmp_path: Path) -> None:
    check_sample(TARGET, tmp_path)


@pytest.mark.all_cases
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case(part: int, cases: list[Case], folder: Path) -> None:
    check_part(part, TARGET, cases, folder)


@pytest.mark.every_case
@pytest.mark.parametrize("part", range(PARTS))
def test_every_other_case(part: int, cases: list[Case], folder: Path) -> None:
    check_part(part, TARGET, cases, folder, others=True)


@pytest.mark.all_cases
def test_every_type(cases: list[Case], tmp_path: Path) -> None:
    check_types(cases, TARGET, tmp_path)


@pytest.mark.every_case
def test_every_other_type(cases: list[Case], tmp_path: Path) -> None:
    check_types(cases, TARGET, tmp_path, others=True)


@pytest.mark.all_cases
def test_every_kind_is_judged_in_both_forms_on_both_targets(cases: list[Case]) -> None:
    """And every case at least once."""
    named = {case.name: case for case in cases}
    known = [frozenset(passing(target)) for target in TARGETS]
    plain = {name for name in named if not name.endswith(CONSTANT)}
    found = {target: {case.name for case in judged(cases, target)} for target in TARGETS}
    assert {name.removesuffix(CONSTANT) for names in found.values() for name in names} == plain
    seen = set()
    for target, names in found.items():
        for name in names:
            of = kind(name.removesuffix(CONSTANT), named, known)
            seen |= {(of, target), (of, name.endswith(CONSTANT))}
    for name in plain:
        of = kind(name, named, known)
        forms = {(of, False), (of, True)} if name + CONSTANT in named else {(of, False)}
        assert seen >= forms | {(of, target) for target in TARGETS}, name
