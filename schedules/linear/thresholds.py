"""For how many rows of x a kernel is chosen: where it was measured to be the fastest.

A kernel's `m_tile` is a promise: it reads that many rows. From where on it pays, and up to where,
are figures of a machine, in rules (`apq_tvm.schedules.linear.rules`) of
``tuning_logs/<device>/thresholds.json``::

    {"kind": "gemm", "weights": ["cb*", "nl4"], "least": 8, "most": 31, "why": "..."}
    {"kind": "bitserial", "m_tile": 1, "most": 1, "most_act_bits": {"1": 4, "2": 3}}

The first rule that is for a kernel decides. Without one it is chosen from `m_tile` on. The answers:

- ``least``, ``most``: rows of x;
- ``least_whole``: ``least`` where a row of weights has one scale;
- ``most_act_bits``: bits of weights → the most bits of activations for which planes of both are
  multiplied faster than integers; for other bits of weights they never are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apq_tvm.errors import NotApplicable
from apq_tvm.schedules.linear import rules

if TYPE_CHECKING:
    from apq_tvm.ops.linear.spec import LinearSpec
    from apq_tvm.schedules.linear.kernel import LinearKernel
    from apq_tvm.types import DeviceProfile


@dataclass(frozen=True, kw_only=True)
class Rule(rules.Rule):
    """Rows of x that some kernels are chosen for.

    Parameters
    ----------
    least, most : int
        Rows; `most` -1 is no limit. A kernel's `m_tile` holds in any case.
    least_whole : int or None
        `least` of layers that have one scale for a whole row of weights; None where it is the same.
    most_act_bits : mapping of int to int, or None
        Bits of weights → most bits of activations; None where it does not matter.
    """

    least: int = 1
    most: int = -1
    least_whole: int | None = None
    most_act_bits: Mapping[int, int] | None = None


def _rule(words: dict[str, Any], key: str) -> Rule:
    if "most_act_bits" in words:
        key = f"{key}.most_act_bits"
        bits = {str(q): q for q in range(1, 9)}
        if not words["most_act_bits"].keys() <= bits.keys():
            raise ValueError(f"{key}: {list(words['most_act_bits'])} are no bits of weights")
        pairs = words["most_act_bits"].items()
        words["most_act_bits"] = {bits[q]: rules.check(p, f"{key}.{q}", int) for q, p in pairs}
    return Rule(**words)


THRESHOLDS = rules.Kind(
    "thresholds",
    {"least": int, "most": int, "least_whole": int, "most_act_bits": dict},
    _rule,
)


def rule_of(kernel: LinearKernel, profile: DeviceProfile) -> rules.Found[Rule] | None:
    """The first rule that is for a kernel, of the nearest log that has one."""
    return next(THRESHOLDS.rules_of(kernel, profile), None)


def rows_of(kernel: LinearKernel, spec: LinearSpec, profile: DeviceProfile) -> tuple[int, int]:
    """Fewest and most rows of x (-1: no limit) that a kernel is chosen for on a device.

    Raises
    ------
    NotApplicable
        For any rows another kernel was measured to be faster; the message says where.
    """
    found = rule_of(kernel, profile)
    if found is None:
        return kernel.m_tile, -1
    rule = found.rule
    if rule.most_act_bits is not None and spec.scheme is not None:
        q, p = spec.scheme.bits, spec.scheme.act_bits
        most = rule.most_act_bits.get(q, 0)
        if p > most:
            raise NotApplicable(
                f"integer dot is faster from q*p >= {q * (most + 1)} on at W{q}, found with "
                f"{kernel.instruction.name} for {kernel.m_tile} rows of x; this is {q}*{p} "
                f"({source(found, profile)})"
            )
    least = rule.least
    if rule.least_whole is not None and spec.scheme is not None and spec.scheme.group_size == -1:
        least = rule.least_whole
    return max(least, kernel.m_tile), rule.most


def source(found: rules.Found[Rule], profile: DeviceProfile) -> str:
    """Where a rule's figures come from, and whether the device borrows them."""
    if found.device == profile.name:
        return f"measured: {found.measured}"
    return f"{profile.name} borrows it of {found.device}: {found.measured}"
