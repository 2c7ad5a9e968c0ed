"""ONNX's own node tests: what passed once passes, the rest is refused by name, nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node_cases.cases import collect, store
from tests.node_cases.judge import Judge
from tests.node_cases.lists import passing

FILES = (
    *("topk", "mod", "div", "bitshift", "gathernd", "scatternd", "scatterelements", "cumsum"),
    *("isinf", "onehot", "reversesequence", "convtranspose", "maxpool", "col2im", "trilu"),
)
"""Of onnx; all take ten seconds to collect. `make test` compiles those of one opset."""


@pytest.mark.slow
def test_a_sample_passes(tmp_path: Path) -> None:
    """As one module."""
    known, found = set(passing()), [case for case in collect(*FILES)]
    keys = [case.key for case in found]
    common = max(set(keys), key=keys.count)
    chosen = [case for case in found if case.key == common and case.name in known][:40]
    store(chosen, tmp_path)
    outcomes = dict(Judge(tmp_path).compiled(chosen))
    assert {name: why for name, (kind, why) in outcomes.items() if kind != "passes"} == {}


@pytest.mark.all_cases
def test_every_case(tmp_path: Path) -> None:
    """No bug, and nothing that passed is refused."""
    cases = {case.name: case for case in collect()}
    store(list(cases.values()), tmp_path)
    judge = Judge(tmp_path)
    outcomes = judge.alone(list(cases), "schedule")
    taken = [cases[name] for name, (kind, _) in outcomes.items() if kind == "passes"]
    outcomes |= dict(judge.compiled(taken))
    bugs = {n: o for n, o in outcomes.items() if o[0] not in ("passes", "refused")}
    lost = {n: outcomes[n] for n in passing() if n in outcomes and outcomes[n][0] != "passes"}
    assert not bugs and not lost
