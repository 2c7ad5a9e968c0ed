"""ONNX's own node tests on a simulated GPU; a file of its own, so that both workers have one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node_cases.cases import Case
from tests.node_cases.parts import PARTS, check_part, check_sample

TARGET = "rtx-3090"


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
