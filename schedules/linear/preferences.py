"""What a device's kernels decide by default, where it is not what they decide elsewhere.

A schedule's choices come in the order that was best on the machines it was written on
(`apq_tvm.schedules.decide`). Of a device that wants others, such as a longer way ahead for its
prefetches, rules (`apq_tvm.schedules.linear.rules`) of ``tuning_logs/<device>/preferences.json``
name them, for layers of every shape and scheme; the tuner's records of one shape come before::

    {"kind": "gemv", "m_tile": [2, 4], "first": {"streams": 2, "ahead": 2048}, "why": "..."}

The first rule that is for a kernel and names a decision decides; what is no choice of a layer is
passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from apq_tvm.schedules.linear import rules

if TYPE_CHECKING:
    from apq_tvm.schedules.decide import Decide
    from apq_tvm.schedules.linear.kernel import LinearKernel
    from apq_tvm.types import DeviceProfile

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rule(rules.Rule):
    """Decisions by name → the value that comes first."""

    first: Mapping[str, object]


def _rule(words: dict[str, Any], key: str) -> Rule:
    if not words.get("first"):
        raise ValueError(f"{key}.first: names no decision")
    first = words["first"].items()
    choices = {name: tuple(v) if isinstance(v, list) else v for name, v in first}
    return Rule(**{**words, "first": choices})


PREFERENCES = rules.Kind("preferences", {"first": dict}, _rule)


def preferring(kernel: LinearKernel, profile: DeviceProfile, decide: Decide) -> Decide:
    """`decide`, asked with the order of choices that a device wants of a kernel."""
    first: dict[str, object] = {}
    for found in PREFERENCES.rules_of(kernel, profile):
        first = {**found.rule.first, **first}

    def ask(name: str, choices: Sequence[T]) -> T:
        return decide(name, sorted(choices, key=lambda value: value != first.get(name, value)))

    return ask if first else decide
