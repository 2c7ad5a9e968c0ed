"""Search spaces: every way to answer what a schedule asks.

A schedule is a function of its decisions, and what it asks later may depend on what was answered
before. So a space is a tree; it is walked by running the schedule's questions again and again, each
time with the last answer that has another one changed.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from apq_tvm.errors import NotApplicable
from apq_tvm.schedules.decide import Decide, Defaults, Questions, Random

T = TypeVar("T")

MOST = 20000
"""Points of a space that are listed; of larger ones as many are drawn at random."""


@dataclass(frozen=True)
class Point:
    """One candidate.

    Parameters
    ----------
    kernel : str
        Or what else is scheduled.
    decisions : tuple of (str, object)
        Every answer, in the order of the questions.
    """

    kernel: str
    decisions: tuple[tuple[str, Any], ...]

    def text(self) -> str:
        """For people: ``"gemv_... ahead=0, unroll=2"``."""
        return f"{self.kernel} {', '.join(f'{n}={v}' for n, v in self.decisions)}".strip()


@dataclass(frozen=True)
class Space:
    """The candidates of a task; the first is the default.

    Parameters
    ----------
    points : tuple of Point
    refused : tuple of (str, str)
        Combinations that a schedule declined, with its reason.
    whole : bool
        Whether these are all there are.
    """

    points: tuple[Point, ...]
    refused: tuple[tuple[str, str], ...] = ()
    whole: bool = True

    def changed(self) -> Mapping[Point, Sequence[Point]]:
        """Points and those that differ from them in one answer: mutations."""
        slots: dict[tuple[Any, ...], list[Point]] = {}
        for point in self.points:
            for i in range(len(point.decisions)):
                slots.setdefault(_without(point, i), []).append(point)
        near: dict[Point, list[Point]] = {point: [] for point in self.points}
        for same in slots.values():
            for point in same:
                near[point] += [other for other in same if other != point]
        return near


SHARING = ("grain", "parallel_least")
"""Decisions about how loops are shared out among threads.

They are not searched: a kernel that runs again and again by itself says little of what a second
thread brings a module, whose functions differ. Of SmolLM2 on two threads (Zen 4, 2026-11-29) small
layers were 1.1 to 2 times as fast by themselves where they were not shared out, and all of the
model was 7 to 9 % slower.
"""


def unshared(space: Space) -> Space:
    """The space with loops shared out as they are by default."""
    usual = {"grain": 1, **dict(space.points[0].decisions)}
    kept = [
        point
        for point in space.points
        if all(name not in SHARING or usual[name] == value for name, value in point.decisions)
    ]
    return replace(space, points=tuple(kept))


def _without(point: Point, index: int) -> tuple[Any, ...]:
    rest = point.decisions[:index] + point.decisions[index + 1 :]
    return point.kernel, point.decisions[index][0], rest


class _Path:
    """Answers by number, the first beyond what is given."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self.sizes: list[int] = []

    def __call__(self, name: str, choices: Sequence[T]) -> T:
        at = len(self.sizes)
        self.sizes.append(len(choices))
        return choices[self._numbers[at] if at < len(self._numbers) else 0]


def walk(ask: Callable[[Decide], Any]) -> Iterator[tuple[tuple[tuple[str, Any], ...], str]]:
    """Every way to answer, the defaults first, each with the reason why it is refused or ``""``."""
    numbers: list[int] = []
    while True:
        path, reason = _Path(numbers), ""
        asked = Questions(path)
        try:
            asked.of(ask)
        except NotApplicable as error:
            reason = str(error)
        yield tuple(asked.taken.items()), reason
        full = [*numbers, *[0] * (len(path.sizes) - len(numbers))][: len(path.sizes)]
        while full and full[-1] + 1 >= path.sizes[len(full) - 1]:
            full.pop()
        if not full:
            return
        full[-1] += 1
        numbers = full


def space_of(asks: Mapping[str, Callable[[Decide], Any]], most: int = MOST) -> Space:
    """The space of several kernels, the default's first.

    Parameters
    ----------
    asks : mapping of str to callable
        Kernel → what asks its questions.
    most : int
        Points to list.
    """
    points: list[Point] = []
    refused: list[tuple[str, str]] = []
    for kernel, ask in asks.items():
        for decisions, reason in walk(ask):
            point = Point(kernel, decisions)
            if reason:
                refused.append((point.text(), reason))
            else:
                points.append(point)
            if len(points) >= most:
                return Space(tuple(_drawn(asks, most)), tuple(refused), whole=False)
    return Space(tuple(dict.fromkeys(points)), tuple(refused))


def _drawn(asks: Mapping[str, Callable[[Decide], Any]], most: int) -> list[Point]:
    """The default and random points of a space that is too large to list."""
    first = next(iter(asks))
    default = Questions(Defaults())
    default.of(asks[first])
    found = {Point(first, tuple(default.taken.items())): None}
    for seed in range(most):
        kernel = random.Random(seed).choice(list(asks))
        asked = Questions(Random(seed))
        with suppress(NotApplicable):
            asked.of(asks[kernel])
            found[Point(kernel, tuple(asked.taken.items()))] = None
    return list(found)


def covering(points: Sequence[Point]) -> list[Point]:
    """Few points that have every answer of every decision of every kernel, the default first."""
    order = list(points[1:])
    random.Random(0).shuffle(order)
    default, *answers = (
        {(point.kernel, name, value) for name, value in point.decisions}
        for point in (points[0], *order)
    )
    return [points[0], *(order[i] for i in cover(answers, default))]


def cover(
    cases: Sequence[Set[Hashable]], covered: Set[Hashable] = frozenset(), most: int = sys.maxsize
) -> list[int]:
    """Which few of the cases have all that any of them has, but for what is covered.

    Taken one by one, of those that add most the first: no smallest cover, but near it. What a case
    adds only shrinks, so it is counted again only when it would be the next.

    Parameters
    ----------
    cases : sequence of set
    covered : set
    most : int
        So many of them.

    Returns
    -------
    list of int
        In the order in which they were taken.
    """
    missing = set[Hashable]().union(*cases) - covered
    best = [(-len(case), i) for i, case in enumerate(cases)]
    heapq.heapify(best)
    taken: list[int] = []
    while missing and len(taken) < most:
        adds, i = heapq.heappop(best)
        now = -len(missing & cases[i])
        if now == adds:
            taken.append(i)
            missing -= cases[i]
        else:
            heapq.heappush(best, (now, i))
    return taken


class Features:
    """Numbers that a model of times sees of a point.

    Numeric answers are one number (its logarithm), tuples of numbers several, others and kernels
    are a column for each value.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        columns: dict[tuple[Any, ...], int] = {}
        for point in points:
            for key, _ in _numbers(point):
                columns.setdefault(key, len(columns))
        self._columns = columns

    def __call__(self, points: Sequence[Point]) -> list[list[float]]:
        """A row for each point; nan where a kernel has no such decision."""
        rows = []
        for point in points:
            row = [math.nan] * len(self._columns)
            for key, value in _numbers(point):
                row[self._columns[key]] = value
            rows.append(row)
        return rows


def _numbers(point: Point) -> Iterator[tuple[tuple[Any, ...], float]]:
    yield ("kernel", point.kernel), 1.0
    for name, value in point.decisions:
        parts = value if isinstance(value, tuple) else (value,)
        for i, part in enumerate(parts):
            if isinstance(part, int | float):
                yield (name, i), math.log2(abs(float(part)) + 1)
            else:
                yield (name, i, str(part)), 1.0
