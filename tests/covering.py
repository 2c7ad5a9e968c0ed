"""Which cases of a large product `make test` runs: enough for every value of every parameter.

A test of hundreds of cases is a product of a few lists. `make test` takes few cases that together
have every value of every parameter, of a record every field; `make test-all` (``--all-cases``)
takes them all. Tests of one short list, whose rows somebody chose, run whole, but for rows marked
``all_cases`` and for all but two of the seeds of random decisions. A test marked ``few(n)`` is one
whose kernels `tests/conformance` runs too: `make test` takes the `n` cases that add most, and `make
test-all` the cover.
"""

from __future__ import annotations

import dataclasses
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
    """``--all-cases``: the full product of every test's parameters."""
    parser.addoption("--all-cases", action="store_true", help="every case of every product")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that cover nothing new, unless all are asked for or named one by one."""
    if any("[" in arg for arg in config.args):
        return
    every = config.getoption("--all-cases")
    left_out = [item for item in items if not every and _for_all_cases(item)]
    dropped = set(map(id, left_out))
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if id(item) not in dropped:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        few = cases[0].get_closest_marker("few")
        if every and few is None:
            continue
        most = few.args[0] if few and not every else sys.maxsize
        single = len([*cases[0].iter_markers("parametrize")]) == 1
        if len(cases) > min(FEW if single else 1, most):
            taken = cover([*map(_values, cases)], most)
            left_out += [item for item, wanted in zip(cases, taken, strict=True) if not wanted]
    if left_out:
        dropped = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in dropped]
        config.hook.pytest_deselected(items=left_out)


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
