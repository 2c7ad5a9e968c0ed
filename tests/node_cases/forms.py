"""Which cases of two forms are judged for which target.

A case of several inputs has a second form, whose inputs after the first are weights. Stages before
a kernel is scheduled see the form, and are the same for both targets; what schedules sees the
operator and its types. So `make test-all` takes every pair of these: cases of the same operators,
the same types and the same outcomes so far are of one kind, and take turns among forms and targets.
Each is judged once, and each kind in both forms and on both targets; one that is alone twice. `make
test-every` judges what is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from apq_tvm.schedules.devices import find_profile
from tests.node_cases.cases import CONSTANT, Case
from tests.node_cases.lists import passing

TARGETS = ("host", "rtx-3090")
"""Whose lists say what passed so far."""

TURNS = (("", False), (CONSTANT, True), (CONSTANT, False), ("", True))
"""Form, and whether on a GPU: two that follow each other are of both."""


def judged(cases: Sequence[Case], target: str) -> list[Case]:
    """The cases that `make test-all` judges for a target, in their order."""
    known = [frozenset(passing(each)) for each in TARGETS]
    named = {case.name: case for case in cases}
    alike: dict[Hashable, list[str]] = defaultdict(list)
    for name in sorted(named):
        if not name.endswith(CONSTANT):
            alike[kind(name, named, known)].append(name)
    gpu = bool(find_profile(target).gpu)
    taken = {
        name
        for number, names in enumerate(alike.values())
        for name, on_gpu in _turns(names, 2 * (number % 2), named)
        if on_gpu == gpu
    }
    return [case for case in cases if case.name in taken]


def _turns(
    names: Sequence[str], first: int, named: Mapping[str, Case]
) -> Iterator[tuple[str, bool]]:
    """Of one kind: a form of a case, and whether on a GPU."""
    for number, name in enumerate(names if len(names) > 1 else 2 * names, first):
        form, gpu = TURNS[number % len(TURNS)]
        yield (name + form if name + form in named else name), gpu


def kind(
    name: str, cases: Mapping[str, Case], known: Sequence[frozenset[str]]
) -> tuple[Hashable, ...]:
    """Equal for cases that take turns: their operators, types, forms, and which of all passed."""
    case = cases[name]
    operators = frozenset(node.op_type for node in case.proto.graph.node)
    types = frozenset(map(_type, case.feeds.values()))
    forms = [form for form in (name, name + CONSTANT) if form in cases]
    passed = tuple(form in names for form in forms for names in known)
    return operators, types, *passed


def _type(value: Any) -> str:
    return f"{len(value)}" if isinstance(value, list) else str(np.asarray(value).dtype)
