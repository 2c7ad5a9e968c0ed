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


@pytest.mark.all_cases
def test_every_type(cases: list[Case], tmp_path: Path) -> None:
    check_types(cases, TARGET, tmp_path)


@pytest.mark.all_cases
def test_every_kind_is_judged_in_both_forms_on_both_targets(cases: list[Case]) -> None:
    """And every case in each form, and on each target."""
    named = {case.name: case for case in cases}
    known = [frozenset(passing(target)) for target in TARGETS]
    both = {name for name in named if name + CONSTANT in named}
    found = {target: {case.name for case in judged(cases, target)} for target in TARGETS}
    assert found["host"] | found["rtx-3090"] == set(named)
    seen = set()
    for target, names in found.items():
        assert {name.removesuffix(CONSTANT) for name in names} == named.keys() - {
            name + CONSTANT for name in both
        }
        for name in names:
            plain = name.removesuffix(CONSTANT)
            if plain in both:
                seen.add((kind(plain, named, known), plain != name, target))
    wanted = {
        (kind(name, named, known), form, target)
        for name in both
        for form in (False, True)
        for target in TARGETS
    }
    assert seen == wanted
