"""Which cases of a large product run: enough for every value, or every pair of values.

A test of hundreds of cases is a product of a few lists. `make test` takes few cases that together
have every value of every parameter, of a record every field; `make test-all` (``--all-cases``) so
many that they have every pair of values: of two parameters the whole product, of more a covering
array. Tests of one short list, whose rows somebody chose, run whole, but for rows marked
``all_cases`` and for all but two of the seeds of random decisions. A test marked ``few(n)`` is one
whose kernels `tests/conformance` runs too: `make test` takes the `n` cases that add most, and `make
test-all` the cover of every value.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Hashable, Iterator, Sequence

import pytest

SEEDS = 2
"""So many seeds of a parameter ``seed``."""

Value = tuple[str, Hashable]
"""(parameter or field, value)"""

FEW = 12
"""Up to so many rows of one list are all run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--all-cases``: every pair of values of every test's parameters; ``--further-cases``."""
    parser.addoption("--all-cases", action="store_true", help="every pair of values of products")
    parser.addoption(
        "--further-cases", action="store_true", help="of --all-cases those that make test leaves"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that cover nothing new, unless all are asked for or named one by one."""
    if any("[" in arg for arg in config.args):
        return
    further = config.getoption("--further-cases")
    taken = _taken(items, every=further or config.getoption("--all-cases"))
    if further:
        taken -= _taken(items, every=False)
    left_out = [item for item in items if item not in taken]
    if left_out:
        items[:] = [item for item in items if item in taken]
        config.hook.pytest_deselected(items=left_out)


def _taken(items: Sequence[pytest.Item], every: bool) -> set[pytest.Item]:
    """The cases of ``make test-all``, or of ``make test``."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if every or not _for_all_cases(item):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    taken: set[pytest.Item] = set()
    for cases in tests.values():
        few = cases[0].get_closest_marker("few")
        most = few.args[0] if few and not every else sys.maxsize
        single = len([*cases[0].iter_markers("parametrize")]) == 1
        if len(cases) <= min(FEW if single else 1, most):
            taken.update(cases)
            continue
        values = [*map(_values, cases)]
        wanted = pairs(values) if every and not few else cover(values, most)
        taken.update(itertools.compress(cases, wanted))
    return taken


def _for_all_cases(item: pytest.Item) -> bool:
    """Whether it is marked ``all_cases``, or has random decisions of a later seed."""
    values = getattr(getattr(item, "callspec", None), "params", {})
    return item.get_closest_marker("all_cases") is not None or values.get("seed", 0) >= SEEDS


def cover(cases: Sequence[frozenset[Value]], most: int = sys.maxsize) -> list[bool]:
    """Which few of the cases have every value that any of them has; `most` of them.

    Taken one by one, of those that add most the first: no smallest cover, but near it.
    """
    taken = [False] * len(cases)
    missing = frozenset().union(*cases)
    while missing and sum(taken) < most:
        best = max(range(len(cases)), key=lambda i: len(missing & cases[i]))
        taken[best] = True
        missing -= cases[best]
    return taken


def pairs(cases: Sequence[frozenset[Value]]) -> list[bool]:
    """Which cases have a pair of values that none before them has."""
    seen: set[tuple[Value, ...]] = set()
    taken = []
    for case in cases:
        new = {*itertools.combinations(sorted(case, key=repr), min(2, len(case)))} - seen
        taken.append(bool(new))
        seen |= new
    return taken


def _values(item: pytest.Item) -> frozenset[Value]:
    """Parameters and values of a case; of a record (a kernel, a scheme) each of its fields."""
    params = getattr(item, "callspec").params  # noqa: B009
    return frozenset(pair for name, value in params.items() for pair in _pairs(name, value))


def _pairs(name: str, value: object) -> Iterator[Value]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            if not callable(inner):
                yield from _pairs(f"{name}.{field.name}", inner)
        return
    try:
        hash(value)
    except TypeError:
        yield name, id(value)
    else:
        yield name, (type(value), value)
