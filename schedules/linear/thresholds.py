"""For how many rows of x a kernel is chosen: where it was measured to be the fastest.

A kernel's `m_tile` is a promise: it reads that many rows. From where on it pays, and up to where,
are figures of a machine. They lie in ``tuning_logs/<device>/thresholds.json``, with where they were
measured; what a device's own log leaves open it borrows of its kin (`DeviceProfile.measured_as`).

::

    {"measured": "where and how",
     "rules": [{"kind": "gemm", "weights": ["cb", "nl4"], "least": 8, "most": 31, "why": "..."},
               {"kind": "bitserial", "m_tile": 1, "most": 1, "most_act_bits": {"1": 4, "2": 3}}]}

The first rule decides whose words all fit the fields of that name of a `LinearKernel`; of a list
any may fit. In text ``*``, ``?`` and ``[1-8]`` stand for other characters, as in names of files.
Without a rule a kernel is chosen from `m_tile` on. The answers:

- ``least``, ``most``: rows of x;
- ``most_act_bits``: bits of weights → the most bits of activations for which planes of both are
  multiplied faster than integers; for other bits of weights they never are;
- ``why``: the figures, for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from apq_tvm.errors import BadLog, NotApplicable
from apq_tvm.tuning_logs import log_path, read_log

if TYPE_CHECKING:
    from apq_tvm.ops.linear.spec import LinearSpec
    from apq_tvm.schedules.linear.kernel import LinearKernel
    from apq_tvm.types import DeviceProfile

LOG = "thresholds"

_FIELDS = dict.fromkeys(("kind", "weights", "instruction", "family"), str) | dict.fromkeys(
    ("act_bits", "m_tile", "bits", "width", "run", "m_named"), int
)
"""What rules may name of a kernel, and what it is."""

_ANSWERS = {"least": int, "most": int, "most_act_bits": dict, "why": str}


@dataclass(frozen=True)
class Rule:
    """Rows of x that some kernels are chosen for.

    Parameters
    ----------
    where : mapping of str to tuple
        Field of a kernel → what it may be.
    least, most : int
        Rows; `most` -1 is no limit. A kernel's `m_tile` holds in any case.
    most_act_bits : mapping of int to int, or None
        Bits of weights → most bits of activations; None where it does not matter.
    """

    where: Mapping[str, tuple[Any, ...]]
    least: int = 1
    most: int = -1
    most_act_bits: Mapping[int, int] | None = None

    def fits(self, kernel: LinearKernel) -> bool:
        """Whether the rule is for a kernel."""
        return all(any(_like(kernel, name, v) for v in vs) for name, vs in self.where.items())


def _like(kernel: LinearKernel, name: str, wanted: Any) -> bool:
    mine = kernel.instruction.name if name == "instruction" else getattr(kernel, name)
    return fnmatchcase(mine, wanted) if isinstance(wanted, str) else bool(mine == wanted)


class Thresholds(NamedTuple):
    """One device's log: where and how it was measured, and its rules."""

    measured: str
    rules: tuple[Rule, ...]


class Found(NamedTuple):
    """The rule that decides for a kernel, and the device in whose log it stands."""

    rule: Rule
    device: str
    measured: str


def parse(log: Any) -> Thresholds:
    """Read what the file holds.

    Raises
    ------
    ValueError
        Names the key that is missing, unknown, or holds what it must not.
    """
    _check(log, "the whole", dict)
    for name in log:
        if name not in Thresholds._fields:
            raise ValueError(f"{name}: is none of {', '.join(Thresholds._fields)}")
    rules = _check(log.get("rules"), "rules", list)
    measured = _check(log.get("measured"), "measured", str)
    return Thresholds(measured, tuple(_rule(r, f"rules[{i}]") for i, r in enumerate(rules)))


def _rule(words: Any, key: str) -> Rule:
    where, answers = {}, {}
    for name, value in _check(words, key, dict).items():
        if name in _ANSWERS:
            answers[name] = _check(value, f"{key}.{name}", _ANSWERS[name])
        elif name in _FIELDS:
            values = value if isinstance(value, list) else [value]
            where[name] = tuple(_check(v, f"{key}.{name}", _FIELDS[name]) for v in values)
        else:
            raise ValueError(f"{key}.{name}: kernels have no such field")
    answers.pop("why", None)
    if "most_act_bits" in answers:
        key = f"{key}.most_act_bits"
        bits = {str(q): q for q in range(1, 9)}
        if not answers["most_act_bits"].keys() <= bits.keys():
            raise ValueError(f"{key}: {list(answers['most_act_bits'])} are no bits of weights")
        pairs = answers["most_act_bits"].items()
        answers["most_act_bits"] = {bits[q]: _check(p, f"{key}.{q}", int) for q, p in pairs}
    return Rule(where, **answers)


def _check(value: Any, key: str, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{key}: {value!r} is no {kind.__name__}")
    return value


def logs_of(profile: DeviceProfile) -> Iterator[tuple[str, Thresholds]]:
    """(device, its log) of a device and of those it borrows from, the nearest first."""
    for device in (profile.name, *profile.measured_as):
        log = read_log(device, LOG, parse)
        if log is not None:
            yield device, log


def rule_of(kernel: LinearKernel, profile: DeviceProfile) -> Found | None:
    """The first rule that is for a kernel, of the nearest log that has one."""
    for device, log in logs_of(profile):
        for rule in log.rules:
            if rule.fits(kernel):
                return Found(rule, device, log.measured)
    return None


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
    return max(rule.least, kernel.m_tile), rule.most


def source(found: Found, profile: DeviceProfile) -> str:
    """Where a rule's figures come from, and whether the device borrows them."""
    if found.device == profile.name:
        return f"measured: {found.measured}"
    return f"{profile.name} borrows it of {found.device}: {found.measured}"


def check_rules(kernels: Sequence[LinearKernel], profile: DeviceProfile) -> None:
    """Refuse logs with rules for what no kernel is.

    Parameters
    ----------
    kernels : sequence of LinearKernel
        All of the device's instruction set.
    profile : DeviceProfile

    Raises
    ------
    BadLog
        Names the file and the rule.
    """
    for device, log in logs_of(profile):
        for i, rule in enumerate(log.rules):
            if not any(map(rule.fits, kernels)):
                wanted = ", ".join(
                    f"{name} {' or '.join(map(str, values))}" for name, values in rule.where.items()
                )
                raise BadLog(
                    f"{log_path(device, LOG)}: rules[{i}]: no kernel of {profile.name} has {wanted}"
                )
