"""ONNX's own node tests: what passed once passes, the rest is refused by name, nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node_cases.cases import Case, collect, store
from tests.node_cases.judge import Judge
from tests.node_cases.lists import passing

FILES = (
    *("topk", "mod", "div", "bitshift", "gathernd", "scatternd", "scatterelements", "cumsum"),
    *("isinf", "onehot", "reversesequence", "convtranspose", "maxpool", "col2im", "trilu"),
)
"""Of onnx; all take ten seconds to collect. `make test` compiles those of one opset."""

PARTS = 12
"""Of all cases, so that a limit of time (``--minutes``) can come between."""

TARGETS = ("host", "rtx-3090")
"""A processor, and a GPU that is simulated."""


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_sample_passes(target: str, tmp_path: Path) -> None:
    """As one module."""
    known, found = set(passing(target)), [case for case in collect(*FILES)]
    keys = [case.key for case in found]
    common = max(set(keys), key=keys.count)
    chosen = [case for case in found if case.key == common and case.name in known][:40]
    store(chosen, tmp_path)
    outcomes = dict(Judge(tmp_path, target).compiled(chosen))
    assert {name: why for name, (kind, why) in outcomes.items() if kind != "passes"} == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[Case]:
    """Every case, those of one opset side by side."""
    found = sorted(collect(), key=lambda case: (case.key, case.name))
    store(found, folder)
    return found


@pytest.mark.all_cases
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case(part: int, target: str, cases: list[Case], folder: Path) -> None:
    """No bug, and nothing that passed is refused; what passed goes into modules of many at once."""
    size, known, judge = -(-len(cases) // PARTS), set(passing(target)), Judge(folder, target)
    mine = {case.name: case for case in cases[part * size : (part + 1) * size]}
    outcomes = judge.alone([name for name in mine if name not in known], "schedule")
    refused = {name for name, (kind, _) in outcomes.items() if kind != "passes"}
    outcomes |= dict(judge.compiled([c for name, c in mine.items() if name not in refused]))
    bugs = {n: o for n, o in outcomes.items() if o[0] not in ("passes", "refused")}
    lost = {n: outcomes[n] for n in known & outcomes.keys() if outcomes[n][0] != "passes"}
    assert not bugs and not lost
