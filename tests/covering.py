"""Which cases of a large product `make test` runs: enough for every value of every parameter.

A test of hundreds of cases is a product of a few lists. `make test` takes cases, in order, that
have a value no case before them had; `make test-all` (``--all-cases``) takes them all. Tests of a
few cases, whose rows somebody chose, always run whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import pytest

FEW = 12
"""Up to so many cases of one test are all run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--all-cases``: the full product of every test's parameters."""
    parser.addoption("--all-cases", action="store_true", help="every case of every product")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that cover nothing new, unless all are asked for or named one by one."""
    if config.getoption("--all-cases") or any("[" in arg for arg in config.args):
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = [
        item
        for cases in tests.values()
        if len(cases) > FEW
        for item, wanted in zip(cases, new_values(map(_values, cases)), strict=True)
        if not wanted
    ]
    if left_out:
        dropped = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in dropped]
        config.hook.pytest_deselected(items=left_out)


def new_values(cases: Iterable[tuple[tuple[str, Hashable], ...]]) -> list[bool]:
    """For each case whether it has a (parameter, value) that none before it has."""
    seen: set[tuple[str, Hashable]] = set()
    wanted = []
    for case in cases:
        wanted.append(not seen.issuperset(case))
        seen.update(case)
    return wanted


def _values(item: pytest.Item) -> tuple[tuple[str, Hashable], ...]:
    """Parameters and values of a case; what cannot be hashed counts by identity."""
    params = getattr(item, "callspec").params  # noqa: B009
    return tuple((name, _key(value)) for name, value in params.items())


def _key(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), value)
