"""Which candidates come first."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from apq_tvm.tune.search import FIRST, Boosted, InOrder, search_for
from apq_tvm.tune.space import Point, Space

MANY = [Point("many", (("tile", i),)) for i in range(500)]
FEW = [Point(name, (("tile", i),)) for name in ("one", "other") for i in range(3)]
SPACE = Space((*MANY, *FEW))


@pytest.fixture(autouse=True)
def trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fitted here."""
    monkeypatch.setitem(sys.modules, "xgboost", ModuleType("xgboost"))


@pytest.mark.parametrize("seed", range(5))
def test_every_kernel_is_tried_as_it_is_by_default(seed: int) -> None:
    first = Boosted(SPACE, seed).propose(FIRST, {})
    assert len(set(first)) == len(first) == FIRST
    assert {MANY[0], FEW[0], FEW[3]} <= set(first)


def test_what_was_tried_is_not_proposed_again() -> None:
    search = Boosted(SPACE, 0)
    tried: dict[Point, float] = {}
    while len(tried) < FIRST:
        (point,) = search.propose(1, tried)
        assert point not in tried
        tried[point] = 1.0
    assert {MANY[0], FEW[0], FEW[3]} <= tried.keys()


def test_small_spaces_are_tried_whole() -> None:
    assert isinstance(search_for(SPACE, len(SPACE.points), 0), InOrder)
    assert isinstance(search_for(SPACE, len(SPACE.points) - 1, 0), Boosted)
