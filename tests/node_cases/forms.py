"""Which cases of two forms are judged for which target.

A case of several inputs has a second form, whose inputs after the first are weights. Forms and
targets are a product of four, of which two cover every pair: one form for processors, the other for
GPUs. Stages before a kernel is scheduled see the form, and are the same for both; what schedules
sees the operator and its types. So cases alternate among those of the same operators, the same
types and the same outcomes so far: each of these has both forms on both targets, and a case that is
alone with them is judged four times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from apq_tvm.schedules.devices import find_profile
from tests.node_cases.cases import CONSTANT, Case
from tests.node_cases.lists import passing

TARGETS = ("host", "rtx-3090")
"""Whose lists say what passed so far."""


def judged(cases: Sequence[Case], target: str) -> list[Case]:
    """The cases for a target, in their order: all of one form, of two forms one or both."""
    known = [frozenset(passing(each)) for each in TARGETS]
    named = {case.name: case for case in cases}
    alike: dict[Hashable, list[str]] = defaultdict(list)
    for name in sorted(named):
        if name + CONSTANT in named:
            alike[kind(name, named, known)].append(name)
    gpu = bool(find_profile(target).gpu)
    left = set[str]()
    for names in alike.values():
        if len(names) > 1:
            left.update(
                name if (number % 2 == 0) == gpu else name + CONSTANT
                for number, name in enumerate(names)
            )
    return [case for case in cases if case.name not in left]


def kind(
    name: str, cases: Mapping[str, Case], known: Sequence[frozenset[str]]
) -> tuple[Hashable, ...]:
    """Equal for cases that may take turns: their operators, types, and which of the four passed."""
    case = cases[name]
    operators = frozenset(node.op_type for node in case.proto.graph.node)
    types = frozenset(str(np.asarray(value).dtype) for value in case.feeds.values())
    passed = tuple(form in names for form in (name, name + CONSTANT) for names in known)
    return operators, types, *passed
