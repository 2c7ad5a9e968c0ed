"""Rules of what was measured on a device: which kernels of linear layers they are for.

They lie in a file of ``tuning_logs/<device>/``, with where they were measured; what a device's own
file leaves open it borrows of its kin (`DeviceProfile.measured_as`). A rule is for the kernels
whose fields all have what it says of them; of a list any may fit. In text ``*``, ``?`` and
``[1-8]`` stand for other characters, as in names of files. What else it says are its answers, of
`apq_tvm.schedules.linear.thresholds` and `apq_tvm.schedules.linear.preferences`; ``why`` has the
figures, for people; with ``"lent": false`` it is of the way to one device's memory, and kin do not
borrow it::

    {"measured": "where and how",
     "rules": [{"kind": "gemm", "weights": ["cb*", "nl4"], "least": 8, "why": "..."}]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from apq_tvm.errors import BadLog
from apq_tvm.tuning_logs import log_path, read_log

if TYPE_CHECKING:
    from apq_tvm.schedules.linear.kernel import LinearKernel
    from apq_tvm.types import DeviceProfile

_FIELDS = dict.fromkeys(("kind", "weights", "instruction", "family"), str) | dict.fromkeys(
    ("act_bits", "m_tile", "bits", "width", "run", "m_named"), int
)
"""What rules may name of a kernel, and what it is."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which kernels a rule is for.

    Parameters
    ----------
    where : mapping of str to tuple
        Field of a kernel → what it may be.
    lent : bool
        Whether other devices may borrow it.
    """

    where: Mapping[str, tuple[Any, ...]]
    lent: bool = True

    def fits(self, kernel: LinearKernel) -> bool:
        """Whether the rule is for a kernel."""
        return all(any(_like(kernel, name, v) for v in vs) for name, vs in self.where.items())


def _like(kernel: LinearKernel, name: str, wanted: Any) -> bool:
    mine = kernel.instruction.name if name == "instruction" else getattr(kernel, name)
    return fnmatchcase(mine, wanted) if isinstance(wanted, str) else bool(mine == wanted)


R = TypeVar("R", bound=Rule)


class Log(NamedTuple, Generic[R]):
    """One device's file: where and how it was measured, and its rules."""

    measured: str
    rules: tuple[R, ...]


class Found(NamedTuple, Generic[R]):
    """A rule that is for a kernel, and the device in whose file it stands."""

    rule: R
    device: str
    measured: str


@dataclass(frozen=True)
class Kind(Generic[R]):
    """A kind of rules.

    Parameters
    ----------
    log : str
        Name of the file, without ``.json``.
    answers : mapping of str to type
        What a rule may say beside the kernels it is for.
    make : callable
        The rule from ``where=`` and its answers; its second argument is how errors call it. Raises
        ValueError that names the wrong key.
    """

    log: str
    answers: Mapping[str, type]
    make: Callable[[dict[str, Any], str], R]

    def parse(self, log: Any) -> Log[R]:
        """Read what the file holds.

        Raises
        ------
        ValueError
            Names the key that is missing, unknown, or holds what it must not.
        """
        check(log, "the whole", dict)
        for name in log:
            if name not in Log._fields:
                raise ValueError(f"{name}: is none of {', '.join(Log._fields)}")
        rules = check(log.get("rules"), "rules", list)
        measured = check(log.get("measured"), "measured", str)
        return Log(measured, tuple(self._rule(r, f"rules[{i}]") for i, r in enumerate(rules)))

    def _rule(self, words: Any, key: str) -> R:
        where, answers = {}, {}
        for name, value in check(words, key, dict).items():
            if name in _FIELDS:
                values = value if isinstance(value, list) else [value]
                where[name] = tuple(check(v, f"{key}.{name}", _FIELDS[name]) for v in values)
            elif name == "why":
                check(value, f"{key}.why", str)
            elif name == "lent":
                if value is not False:
                    raise ValueError(f"{key}.lent: {value!r} is not false")
                answers[name] = value
            elif name in self.answers:
                answers[name] = check(value, f"{key}.{name}", self.answers[name])
            else:
                raise ValueError(f"{key}.{name}: kernels have no such field")
        return self.make({"where": where, **answers}, key)

    def where(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """What a rule of a file says of the kernels that it is for."""
        return {name: value for name, value in words.items() if name in _FIELDS}

    def logs_of(self, profile: DeviceProfile) -> Iterator[tuple[str, Log[R]]]:
        """(device, its file) of a device and of those it borrows from, the nearest first."""
        for device in (profile.name, *profile.measured_as):
            log = read_log(device, self.log, self.parse)
            if log is not None:
                yield device, log

    def rules_of(self, kernel: LinearKernel, profile: DeviceProfile) -> Iterator[Found[R]]:
        """The rules that are for a kernel, those of the nearest file first."""
        for device, log in self.logs_of(profile):
            for rule in log.rules:
                if rule.fits(kernel) and (rule.lent or device == profile.name):
                    yield Found(rule, device, log.measured)

    def check(self, kernels: Sequence[LinearKernel], profile: DeviceProfile) -> None:
        """Refuse files with rules for what no kernel is.

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
        for device, log in self.logs_of(profile):
            for i, rule in enumerate(log.rules):
                if not any(map(rule.fits, kernels)):
                    wanted = ", ".join(
                        f"{name} {' or '.join(map(str, values))}"
                        for name, values in rule.where.items()
                    )
                    raise BadLog(
                        f"{log_path(device, self.log)}: rules[{i}]: no kernel of {profile.name} has"
                        f" {wanted}"
                    )


def check(value: Any, key: str, kind: type) -> Any:
    """`value`, which has to be of a type.

    Raises
    ------
    ValueError
        It is of another; names `key`.
    """
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{key}: {value!r} is no {kind.__name__}")
    return value
