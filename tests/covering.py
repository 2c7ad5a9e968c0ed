"""Which cases of a large product run: enough for every value, or every pair of values.

A test of hundreds of cases is a product of a few lists. `make test` takes few cases that together
have every value of every parameter, of a record every field; `make test-every` (``--every-case``)
so many more that they have every pair of values: of two parameters the whole product, of more a
covering array. Between them is `make test-all` (``--all-cases``): both leave what `tests.choosing`
found to take nothing of its own for its time. Tests of one short list, whose rows somebody chose,
run whole, but for rows marked ``all_cases`` and for all but two of the seeds of random decisions. A
test marked ``few(n)`` is one whose kernels `tests/conformance` runs too: `make test` takes the `n`
cases that add most, and others the cover of every value. Every pair may be left to one case: what
would be skipped on every machine must be in no list.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set

import pytest

from apq_tvm.tune.space import cover
from tests.choosing import left

SEEDS = 2
"""So many seeds of a parameter ``seed``."""

OF_VALUES = pytest.StashKey[bool]()
"""Of an item: whether it is needed for every value, as those of `make test` are."""

Value = tuple[str, Hashable]
"""(parameter or field, value)"""

FEW = 12
"""Up to so many rows of one list are all run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which cases: ``--all-cases``, ``--every-case``, ``--further-cases``."""
    parser.addoption("--all-cases", action="store_true", help="those of make test-all")
    parser.addoption("--every-case", action="store_true", help="those of make test-every")
    parser.addoption(
        "--further-cases", action="store_true", help="of make test-all those that make test leaves"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another command runs, unless cases are named one by one."""
    if any("[" in arg for arg in config.args):
        return
    further = config.getoption("--further-cases")
    longer = further or config.getoption("--all-cases") or config.getoption("--every-case")
    of_values, every = set[pytest.Item](), set[pytest.Item]()
    for cases in _by_test(items):
        first = _chosen([case for case in cases if not _for_all_cases(case)])
        of_values |= first
        if longer:
            every |= first | _chosen(cases, every=True, first=first)
    for item in items:
        item.stash[OF_VALUES] = item in of_values
    taken = {item for item in of_values if not _is_left(item, "test")}
    if longer:
        if not config.getoption("--every-case"):
            every = {item for item in every if not _is_left(item, "test-all")}
        taken = every - taken if further else every | taken
    left_out = [item for item in items if item not in taken]
    if left_out:
        items[:] = [item for item in items if item in taken]
        config.hook.pytest_deselected(items=left_out)


def _by_test(items: Sequence[pytest.Item]) -> Iterable[list[pytest.Item]]:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests.values()


def _is_left(item: pytest.Item, command: str) -> bool:
    """Whether ``make command`` leaves it to the next."""
    marked = command == "test-all" and item.get_closest_marker("every_case") is not None
    return marked or not left(command).isdisjoint((item.nodeid, item.nodeid.partition("[")[0]))


def _chosen(
    cases: Sequence[pytest.Item], every: bool = False, first: Set[pytest.Item] = frozenset()
) -> set[pytest.Item]:
    """Of one test, beside the `first`, those that are needed to cover what all of them have."""
    if not cases:
        return set()
    few = cases[0].get_closest_marker("few")
    most = few.args[0] if few and not every else sys.maxsize
    single = len([*cases[0].iter_markers("parametrize")]) == 1
    if len(cases) <= min(FEW if single else 1, most):
        return set(cases)
    values = [*map(_values, cases)]
    has = [*map(pairs, values)] if every and not few else values
    covered = frozenset[Hashable]().union(*itertools.compress(has, [c in first for c in cases]))
    return {cases[i] for i in cover(has, covered, most)}


def _for_all_cases(item: pytest.Item) -> bool:
    """Whether it is marked so, or has random decisions of a later seed."""
    values = getattr(getattr(item, "callspec", None), "params", {})
    marked = any(item.get_closest_marker(name) for name in ("all_cases", "every_case"))
    return marked or values.get("seed", 0) >= SEEDS


def pairs(case: Set[Value]) -> frozenset[tuple[Value, ...]]:
    """Every pair of its values; of a single one that."""
    return frozenset(itertools.combinations(sorted(case, key=repr), min(2, len(case))))


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
