"""Which tests `make test` leaves to `make test-all`: those that take no branch of the product of
their own, or too few for their time.

`make choose-tests` records them (`tests.recording`) and writes ``tests/left.txt``. A test stays if
it is cheap or if nothing but it tells (`KEPT`: kernels by format and instruction, the C runtime and
the tree itself, none of which coverage sees); of the others whichever takes most new branches for
its time, again and again, while there are some that are worth it. A fixture costs the first test
that needs it. A test that is new stays, as it is in no list. What is kept outside of fixtures
(`compiled_once`, modules of `words`) costs the first test that wants it: the next time another may
be dear.

After Rothermel et al., "Prioritizing Test Cases for Regression Testing" (2001), additional branch
coverage, for seconds as Malishevsky et al. weigh it (2006).
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LEFT = Path(__file__).with_name("left.txt")

CHEAP_S = 0.3
"""CPU seconds, as recorded, of a test that stays whatever it does."""

LEAST = 6
"""New branches that a second of a test must take."""

KEPT = ("tests/conformance/", "tests/node_cases/", "tests/e2e/module/", "tests/unit/test_")

Branches = frozenset[int]


@dataclass(frozen=True)
class Case:
    """A test as recorded: without what shared fixtures cost and execute."""

    name: str
    cpu: float
    needs: frozenset[str]


@dataclass
class Recorded:
    """What `tests.recording` wrote: tests, seconds of fixtures, branches by either's name."""

    tests: list[Case] = field(default_factory=list)
    fixtures: dict[str, float] = field(default_factory=dict)
    branches: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Recorded:
        """Of all processes."""
        found = cls()
        for path in sorted(folder.glob("tests-*.jsonl")):
            for row in map(json.loads, path.read_text().splitlines()):
                found.tests.append(Case(row["name"], row["cpu"], frozenset(row["needs"])))
                found.fixtures |= row["made"]
        known: dict[tuple[str, int, int], int] = {}
        for path in sorted(folder.glob("coverage.*")):
            for context, branch in _covered(path):
                at = known.setdefault(branch, len(known))
                found.branches.setdefault(context, set()).add(at)
        return found


def _covered(path: Path) -> Iterable[tuple[str, tuple[str, int, int]]]:
    """Who took which branch: (file, from line, to line). The tables are those of coverage 7."""
    try:
        with sqlite3.connect(path) as data:
            rows = data.execute(
                "select context, path, fromno, tono from arc "
                "join context on context_id = context.id join file on file_id = file.id"
            ).fetchall()
    except sqlite3.DatabaseError as error:  # of a process that a test killed as it wrote
        print(f"{path} is left out: {error}")
        return
    for context, *branch in rows:
        # A process is called by its environment, then by what it says itself.
        yield context.rpartition("|")[2], tuple(branch)


def choose(
    tests: Iterable[Case], fixtures: Mapping[str, float], branches: Mapping[str, set[int]]
) -> set[str]:
    """The names of those that stay."""
    stay, paid, have = set[str](), set[str](), set(branches.get("", ()))
    waiting = {test.name: test for test in tests}

    def price(test: Case) -> float:
        return test.cpu + sum(fixtures.get(name, 0.0) for name in test.needs - paid)

    def take(test: Case) -> None:
        del waiting[test.name]
        stay.add(test.name)
        have.update(*(branches.get(name, ()) for name in (test.name, *test.needs)))
        paid.update(test.needs)

    def new(test: Case) -> int:
        taken = (branches.get(name, set()) for name in (test.name, *(test.needs - paid)))
        return len(set().union(*taken) - have)

    for test in [t for t in waiting.values() if t.name.startswith(KEPT) or price(t) < CHEAP_S]:
        take(test)
    while waiting:
        best = max(waiting.values(), key=lambda test: new(test) / price(test))
        if new(best) < LEAST * price(best):
            break
        take(best)
    for test in [t for t in waiting.values() if price(t) < CHEAP_S]:
        take(test)
    return stay


def left_lines(tests: Iterable[Case], stay: set[str]) -> list[str]:
    """Those that do not stay; the name of a test of which no case stays."""
    functions = {name.partition("[")[0] for name in stay}
    found = set()
    for name in {test.name for test in tests} - stay:
        function = name.partition("[")[0]
        found.add(name if function in functions else function)
    return sorted(found)


def main() -> None:
    recorded = Recorded.read(Path(sys.argv[1]))
    stay = choose(recorded.tests, recorded.fixtures, recorded.branches)
    lines = left_lines(recorded.tests, stay)
    LEFT.write_text("".join(f"{line}\n" for line in lines))
    seconds = sum(test.cpu for test in recorded.tests if test.name in stay)
    needed = set().union(*(test.needs for test in recorded.tests if test.name in stay))
    seconds += sum(recorded.fixtures.get(name, 0.0) for name in needed)
    every = set().union(*recorded.branches.values())
    kept = (recorded.branches.get(name, set()) for name in ("", *stay, *needed))
    missing = len(every - set().union(*kept))
    print(f"{len(stay)} of {len(recorded.tests)} tests stay: {seconds:.0f} CPU seconds;")
    print(f"{missing} of {len(every)} branches are taken by others alone")


if __name__ == "__main__":
    main()
