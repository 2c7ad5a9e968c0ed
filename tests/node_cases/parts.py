"""What tests of a target ask of ONNX's node cases: a sample in one module, and a part of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.node_cases.cases import Case, collect, every, store
from tests.node_cases.forms import judged
from tests.node_cases.judge import Judge
from tests.node_cases.lists import passing
from tests.node_cases.typed import in_turns, typed
from tests.node_cases.worker import Outcome

FILES = (
    *("topk", "mod", "div", "bitshift", "gathernd", "scatternd", "scatterelements", "cumsum"),
    *("isinf", "onehot", "reversesequence", "convtranspose", "maxpool", "col2im", "trilu"),
)
"""Of onnx; all take ten seconds to collect. `make test` compiles those of one opset."""

PARTS = 8
"""Of all cases that are judged, so that a limit of time (``--minutes``) can come between."""


def stored(folder: Path) -> list[Case]:
    """Every case, those of one opset side by side, in a folder."""
    found = every()
    store(found, folder)
    return found


def check_sample(target: str, folder: Path) -> None:
    """As one module."""
    known, found = set(passing(target)), [case for case in collect(*FILES)]
    keys = [case.key for case in found]
    common = max(set(keys), key=keys.count)
    chosen = [case for case in found if case.key == common and case.name in known][:40]
    store(chosen, folder)
    outcomes = dict(Judge(folder, target).compiled(chosen))
    assert {name: why for name, (kind, why) in outcomes.items() if kind != "passes"} == {}


def check_types(cases: Sequence[Case], target: str, folder: Path, others: bool = False) -> None:
    """Every operator at every type: as ONNX Runtime has it, or refused by name. Types that are
    made alike take turns among the operators; `others` are those whose turn it is not.
    """
    mine = [case for case, turn in in_turns(typed(cases)) if turn != others]
    store(mine, folder)
    outcomes = _check(mine, passing(target, of_types=True), Judge(folder, target))
    assert sum(kind == "passes" for kind, _ in outcomes.values()) > len(outcomes) // 2


def check_part(
    part: int, target: str, cases: Sequence[Case], folder: Path, others: bool = False
) -> None:
    """Of those that `make test-all` judges (`forms`), or of all others."""
    chosen = judged(cases, target)
    if others:
        taken = {case.name for case in chosen}
        chosen = [case for case in cases if case.name not in taken]
    size = -(-len(chosen) // PARTS)
    _check(chosen[part * size : (part + 1) * size], passing(target), Judge(folder, target))


def _check(cases: Sequence[Case], passed: Sequence[str], judge: Judge) -> dict[str, Outcome]:
    """No bug, and nothing that passed is refused. What passed goes into modules of many at once, in
    which nothing else is: one that is refused would break them up."""
    mine, known = {case.name: case for case in cases}, set(passed)
    outcomes = judge.alone([name for name in mine if name not in known], "graph")
    refused = {name for name, (kind, _) in outcomes.items() if kind != "passes"}
    for group in (mine.keys() & known, mine.keys() - known - refused):
        outcomes |= dict(judge.compiled([mine[name] for name in group]))
    bugs = {n: o for n, o in outcomes.items() if o[0] not in ("passes", "refused")}
    lost = {n: outcomes[n] for n in known & outcomes.keys() if outcomes[n][0] != "passes"}
    assert bugs | lost == {}
    return outcomes
