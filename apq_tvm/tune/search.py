"""Which candidates to try next.

Small spaces are tried whole. Of larger ones every kernel has a try as it is by default, and some
points are drawn at random; then gradient boosted trees (Chen and Guestrin, KDD 2016) learn to rank
points by what their decisions are, and say which of the rest are worth a trial, mutations of the
best among them (the way of AutoTVM: Chen et al., NeurIPS 2018).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from apq_tvm.extras import require
from apq_tvm.tune.space import Features, Point, Space

BATCH = 16
"""Candidates of one program, and between two fits."""

FIRST = 16
"""Points before the first fit."""

EXPLORED = 0.15
"""Part of a batch that is drawn at random all the same."""

LEVELS = 16
"""Of ranks that trees learn."""


class Search(Protocol):
    """Chooses the next trials."""

    def propose(self, count: int, tried: Mapping[Point, float]) -> list[Point]:
        """At most `count` points that were not tried; `tried` are ratios, 0 of what failed."""


class InOrder:
    """All points, one after the other."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def propose(self, count: int, tried: Mapping[Point, float]) -> list[Point]:
        """The next ones."""
        return [p for p in self._space.points if p not in tried][:count]


class AtRandom:
    """Points in random order."""

    def __init__(self, space: Space, seed: int) -> None:
        self._order = list(space.points)
        random.Random(seed).shuffle(self._order)

    def propose(self, count: int, tried: Mapping[Point, float]) -> list[Point]:
        """The next ones."""
        return [p for p in self._order if p not in tried][:count]


class Boosted:
    """Every kernel and random points first, then what trees find worth a trial.

    Trees know nothing of a kernel of which no point was tried: one of few points among many of
    others would hardly ever be drawn.

    Parameters
    ----------
    space : Space
    seed : int

    Raises
    ------
    MissingPackage
        xgboost is not installed.
    """

    def __init__(self, space: Space, seed: int) -> None:
        require("xgboost")
        self._space, self._seed = space, seed
        self._random = random.Random(seed)
        self._draw = AtRandom(space, seed)
        self._kernels = list({p.kernel: p for p in reversed(space.points)}.values())
        self._near = space.changed()
        features = Features(space.points)
        self._rows = dict(zip(space.points, features(space.points), strict=True))

    def propose(self, count: int, tried: Mapping[Point, float]) -> list[Point]:
        """Kernels and random ones until there is something to learn from."""
        if len(tried) < FIRST:
            wanted = min(count, FIRST - len(tried))
            kernels = [p for p in self._kernels if p not in tried][:wanted]
            known = {**tried, **dict.fromkeys(kernels, 0.0)}
            return kernels + self._draw.propose(wanted - len(kernels), known)
        score = self._fitted(tried)
        rest = [p for p in self._space.points if p not in tried]
        best = sorted(tried, key=lambda p: -tried[p])[:8]
        changed = {other for point in best for other in self._near[point] if other not in tried}
        ranked = sorted(rest, key=lambda p: -(score[p] + (0.05 if p in changed else 0.0)))
        explored = sum(self._random.random() < EXPLORED for _ in range(count))
        chosen = ranked[: count - explored]
        known = {**tried, **dict.fromkeys(chosen, 0.0)}
        return chosen + self._draw.propose(explored, known)

    def _fitted(self, tried: Mapping[Point, float]) -> dict[Point, float]:
        """What trees that were fitted to the trials make of every point, from 0 to 1."""
        import xgboost

        points = list(tried)
        ratios = np.array([tried[p] for p in points])
        labels = _levels(ratios)
        data = xgboost.DMatrix(np.array([self._rows[p] for p in points]), label=labels)
        data.set_group([len(points)])
        options: dict[str, Any] = {
            "objective": "rank:pairwise", "eta": 0.2, "max_depth": 4, "min_child_weight": 0.5,
            "seed": self._seed, "nthread": 1, "verbosity": 0,
        }  # fmt: skip
        trees = xgboost.train(options, data, num_boost_round=60)
        every = xgboost.DMatrix(np.array([self._rows[p] for p in self._space.points]))
        scores = trees.predict(every)
        span = float(np.ptp(scores)) or 1.0
        scaled = (scores - scores.min()) / span
        return dict(zip(self._space.points, map(float, scaled), strict=True))


def _levels(ratios: Any) -> Any:
    """Ranks as few whole numbers: trees weigh pairs by them."""
    order = np.argsort(np.argsort(ratios))
    return np.floor(order * LEVELS / len(ratios)).astype(np.int32)


def search_for(space: Space, budget: int, seed: int) -> Search:
    """The way to search a space with so many trials."""
    if len(space.points) <= budget:
        return InOrder(space)
    return Boosted(space, seed) if needs_trees(space, budget) else AtRandom(space, seed)


def needs_trees(space: Space, budget: int) -> bool:
    """Whether xgboost is needed: fewer trials than points, and more than are drawn at random."""
    return FIRST < budget < len(space.points)


def best_of(tried: Mapping[Point, float], count: int) -> Sequence[Point]:
    """The points of the largest ratios."""
    return sorted(tried, key=lambda p: (-tried[p], p.text()))[:count]
