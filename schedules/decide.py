"""How a schedule's choices are answered: by default, at random, or from a record.

A schedule is one readable function of its decisions: it asks ``decide("n_tile", (16, 8, 32))`` for
every choice and gets one of the values back. The first value is the default. A candidate of the
tuner is a dict of decisions; running the schedule again with one entry changed gives the next.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Decide(Protocol):
    """Answers one named choice."""

    def __call__(self, name: str, choices: Sequence[T]) -> T:
        """Return one of `choices`; the first is the default."""


class DecideOf(Protocol):
    """Finds who answers for a function that is no kernel of a linear layer: those are planned."""

    def __call__(self, function: str, default: Callable[[], Any] | None = None) -> Decide:
        """Of a preparation, `function` is its key, of others their rule.

        `default` makes the function scheduled by default, which records are compared with.
        """


class Defaults:
    """Always the first choice."""

    def __call__(self, name: str, choices: Sequence[T]) -> T:
        return choices[0]


class Recording:
    """Passes questions on; a name is asked once, and both sides are kept.

    Parameters
    ----------
    decide : Decide
        Who answers.

    Attributes
    ----------
    taken : dict of str to object
        The answers.
    alternatives : dict of str to tuple
        What they were chosen from.
    """

    def __init__(self, decide: Decide) -> None:
        self._decide = decide
        self.taken: dict[str, object] = {}
        self.alternatives: dict[str, tuple[object, ...]] = {}

    def __call__(self, name: str, choices: Sequence[T]) -> T:
        assert name not in self.taken, f"{name} is asked twice"
        choice = self._decide(name, choices)
        self.taken[name], self.alternatives[name] = choice, tuple(choices)
        return choice


class AllAskedError(Exception):
    """Whoever wanted a schedule's questions alone has them all."""


class Questions(Recording):
    """A schedule's questions, for whom it need not be made."""

    def of(self, schedule: Callable[[Decide], Any]) -> None:
        """Let `schedule` ask; what it does after its last question may be left out.

        Raises
        ------
        NotApplicable
            It declines what was answered.
        """
        with suppress(AllAskedError):
            schedule(self)


def all_asked(decide: Decide) -> None:
    """A schedule says that it asks no more, and declines nothing either, before it does its work.

    Raises
    ------
    AllAskedError
        Nobody wants the work: the tuner looks for what there is to choose.
    """
    if isinstance(decide, Questions):
        raise AllAskedError


class Random:
    """A random choice each time, repeatable from `seed`; `taken` records the answers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.taken: dict[str, object] = {}

    def __call__(self, name: str, choices: Sequence[T]) -> T:
        choice = self._random.choice(choices)
        self.taken[name] = choice
        return choice


class Recorded:
    """Answers from `record`, a dict of decisions; an entry that is missing gets the default.

    Raises
    ------
    ValueError
        A recorded value is no longer among the choices: the record is of another schedule version.
    """

    def __init__(self, record: Mapping[str, object]) -> None:
        self._record = record
        self.taken: dict[str, object] = {}

    def __call__(self, name: str, choices: Sequence[T]) -> T:
        choice = self._record.get(name, choices[0])
        for value in choices:
            if value == choice:
                self.taken[name] = value
                return value
        raise ValueError(f"decision {name}={choice!r} is not among {list(choices)!r}")
