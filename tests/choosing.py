"""Which tests `make test` leaves to `make test-all`, and that to `make test-every`: those that take
no branch of the product of their own, or too few for their time.

`make choose-tests` records all of them (`tests.recording`) and writes ``tests/left/*.txt``. A test
stays if it is cheap or if nothing but it tells (`Limits.kept`: kernels by format and instruction,
the C runtime and the tree itself, none of which coverage sees); of the others whichever takes most
new branches for its time, again and again, while there are some that are worth it. A fixture costs
the first test that needs it. A test that is new stays, as it is in no list. What is kept outside of
fixtures (`compiled_once`, modules of `words`) costs the first test that wants it: the next time
another may be dear.

After Rothermel et al., "Prioritizing Test Cases for Regression Testing" (2001), additional branch
coverage, for seconds as Malishevsky et al. weigh it (2006).
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import sys
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

LEFT = Path(__file__).with_name("left")


@dataclass(frozen=True)
class Limits:
    """What stays.

    Parameters
    ----------
    kept : str
        Expression that the beginning of a name matches that stays.
    cheap_s : float
        CPU seconds, as recorded, of a test that stays whatever it does.
    kernel : int
        So many others a branch of what makes kernels is worth (`KERNELS`): one that is wrong there
        is not seen by who runs another.
    """

    kept: str
    cheap_s: float
    kernel: int


LEAST = 6
"""New branches that a second of another test must take."""

KERNELS = re.compile(
    r"/(tensorize|schedules|codegen/(cuda|graph|layouts)|apq_tvm/(ops|launches|sessions))/"
)
"""Files of the product."""

EXTREME = r"extreme|saturat|spill|finite|nan_|number_stays|inf[-\]]|nan\d?[-\]]|refuse|error"
"""What goes wrong seldom, by names of tests and cases."""

TEST = Limits(r"tests/(conformance|node_cases|e2e/module)/|tests/unit/test_", 0.3, kernel=1)
ALL = Limits(
    r"tests/(conformance|node_cases|fuzz)/|tests/e2e/cli/test_docs_|"
    rf"tests/(code|isa|tir|unit)/.*({EXTREME})",
    cheap_s=0.1,
    kernel=6,
)


@cache
def left(command: str) -> frozenset[str]:
    """Names of tests and of cases that ``make test`` or ``make test-all`` leaves to the next."""
    return frozenset((LEFT / f"{command}.txt").read_text().splitlines())


@dataclass(frozen=True)
class Case:
    """A test as recorded: without what shared fixtures cost and execute; whether `make test` runs
    it or leaves it.
    """

    name: str
    of_values: bool
    cpu: float
    needs: frozenset[str]


@dataclass
class Recorded:
    """What `tests.recording` wrote: tests, seconds of fixtures, branches by either's name; of all
    branches those of `KERNELS`.
    """

    tests: list[Case] = field(default_factory=list)
    fixtures: dict[str, float] = field(default_factory=dict)
    branches: dict[str, set[int]] = field(default_factory=dict)
    kernels: set[int] = field(default_factory=set)

    @classmethod
    def read(cls, folder: Path) -> Recorded:
        """Of all processes."""
        found = cls()
        for path in sorted(folder.glob("tests-*.jsonl")):
            for row in map(json.loads, path.read_text().splitlines()):
                needs = frozenset(row["needs"])
                found.tests.append(Case(row["name"], row["of_values"], row["cpu"], needs))
                found.fixtures |= row["made"]
        known: dict[tuple[str, int, int], int] = {}
        for path in sorted(folder.glob("coverage.*")):
            for context, branch in _covered(path):
                at = known.setdefault(branch, len(known))
                found.branches.setdefault(context, set()).add(at)
        found.kernels = {at for (path, *_), at in known.items() if KERNELS.search(path)}
        return found

    def seconds(self, names: Set[str]) -> float:
        """Of tests and of the fixtures that they need."""
        chosen = [test for test in self.tests if test.name in names]
        needed = set[str]().union(*(test.needs for test in chosen))
        return sum(test.cpu for test in chosen) + sum(self.fixtures.get(n, 0.0) for n in needed)

    def missing(self, names: Set[str]) -> set[int]:
        """Branches that others alone take."""
        needed = set[str]().union(*(test.needs for test in self.tests if test.name in names))
        kept = (self.branches.get(name, set()) for name in ("", *names, *needed))
        return set[int]().union(*self.branches.values()).difference(*kept)


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


class Choice:
    """Tests that stay, one after the other.

    Parameters
    ----------
    recorded : Recorded
    """

    def __init__(self, recorded: Recorded) -> None:
        self.stay = set[str]()
        self._fixtures, self._branches = recorded.fixtures, recorded.branches
        self._kernels = recorded.kernels
        self._paid = set[str]()
        self._have = set(self._branches.get("", ()))

    def add(self, tests: Iterable[Case], limits: Limits) -> set[str]:
        """The names of those that stay, of these and of all before."""
        waiting = {test.name: test for test in tests if test.name not in self.stay}

        def take(test: Case) -> None:
            del waiting[test.name]
            self._take(test)

        def cheap() -> list[Case]:
            return [t for t in waiting.values() if self._price(t) < limits.cheap_s]

        for test in [t for t in waiting.values() if re.match(limits.kept, t.name)]:
            take(test)
        for test in cheap():
            take(test)
        # Whoever waits is worth less than before, unless somebody else paid a fixture.
        most = {name: math.inf for name in waiting}
        while waiting:
            name = max(waiting, key=most.__getitem__)
            test = waiting[name]
            if most[name] > (worth := self._worth(test, limits.kernel)):
                most[name] = worth
                continue
            if worth < LEAST:
                break
            unpaid = test.needs - self._paid
            take(test)
            most |= {t.name: math.inf for t in waiting.values() if t.needs & unpaid}
        for test in cheap():
            take(test)
        return set(self.stay)

    def _take(self, test: Case) -> None:
        self.stay.add(test.name)
        self._have.update(*(self._branches.get(name, ()) for name in (test.name, *test.needs)))
        self._paid.update(test.needs)

    def _price(self, test: Case) -> float:
        return test.cpu + sum(self._fixtures.get(name, 0.0) for name in test.needs - self._paid)

    def _worth(self, test: Case, kernel: int) -> float:
        """New branches a second."""
        names = (test.name, *(test.needs - self._paid))
        taken = set[int]().union(*(self._branches.get(name, ()) for name in names))
        new = taken - self._have
        return (len(new) + (kernel - 1) * len(new & self._kernels)) / self._price(test)


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
    choice = Choice(recorded)
    first = [test for test in recorded.tests if test.of_values]
    for command, tests, limits in (("test", first, TEST), ("test-all", recorded.tests, ALL)):
        stay = choice.add(tests, limits)
        lines = left_lines(tests, stay)
        (LEFT / f"{command}.txt").write_text("".join(f"{line}\n" for line in lines))
        missing = recorded.missing(stay)
        print(
            f"make {command}: {len(stay)} of {len(recorded.tests)} tests, "
            f"{recorded.seconds(stay):.0f} CPU seconds; {len(missing)} branches are "
            f"taken by others alone, {len(missing & recorded.kernels)} of kernels"
        )


if __name__ == "__main__":
    main()
