"""What a compilation makes of the tuner's records (`apq_tvm.tuning_logs.records`).

A record holds for a layer of its own shape and scheme, also one that says that nothing is faster
than the default; layers without one take the decisions of the nearest shape that has some; all
others the defaults. A record whose default schedule is not today's (`fingerprint`) says nothing.
Which it was, and why, is text that the manifest keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from apq_tvm.errors import NotApplicable
from apq_tvm.formats import parse_scheme
from apq_tvm.schedules.decide import Decide, Defaults
from apq_tvm.tuning_logs import log_path
from apq_tvm.tuning_logs.records import FUNCTION, LINEAR, TIMED, Record, read_records

if TYPE_CHECKING:
    from apq_tvm.ops.linear.spec import LinearSpec
    from apq_tvm.schedules.linear.kernel import LinearKernel
    from apq_tvm.types import DeviceProfile

T = TypeVar("T")

LOG = "records"

LAYER = "apq.layer"
"""Attribute of a PrimFunc: the name in its errors."""

FARTHEST = 3.0
"""Of two shapes, in doublings of N and of K together: what is farther is not near."""


def fingerprint(func: Any) -> str:
    """Hash of a scheduled PrimFunc, the same in every process, whatever its name in a module."""
    from tvm_ffi import structural_hash

    for name in ("global_symbol", LAYER):
        if func.attrs is not None and name in func.attrs:
            func = func.without_attr(name)
    return f"{structural_hash(func, map_free_vars=True) & (1 << 64) - 1:016x}"


def bare(spec: LinearSpec) -> LinearSpec:
    """The layer without what follows its product: what records are kept of."""
    return replace(spec, bias=False, activation="", residual=False, after=False)


class Nearly:
    """Answers from a record of another shape: what is no choice here gets the default."""

    def __init__(self, record: Mapping[str, object]) -> None:
        self._record = record

    def __call__(self, name: str, choices: Sequence[T]) -> T:
        wanted = self._record.get(name, choices[0])
        return next((value for value in choices if value == wanted), choices[0])


@dataclass(frozen=True)
class Advice:
    """What a record says of a kernel for some rows.

    Parameters
    ----------
    kernel : str
    decisions : tuple of (str, object)
        Every answer; empty for the defaults.
    rows : (int, int)
    source : str
        Which record it is, and what it found.
    stays : bool
        Nothing faster was found: what is chosen without records is.
    """

    kernel: str
    decisions: tuple[tuple[str, Any], ...]
    rows: tuple[int, int]
    source: str
    stays: bool = False


class Records:
    """Records for one device, and what was made of them.

    Parameters
    ----------
    records : iterable of Record
    remarks : iterable of str
        Of lines that are no records.
    """

    def __init__(self, records: Iterable[Record] = (), remarks: Iterable[str] = ()) -> None:
        self.records = tuple(sorted(records, key=Record.line))
        self.remarks = list(remarks)
        self._defaults: dict[tuple[Any, ...], str] = {}

    @classmethod
    def of(cls, profile: DeviceProfile, file: Path | None = None, shipped: bool = True) -> Records:
        """Those of `file`, and those shipped for the device where it has none.

        Raises
        ------
        BadLog
            `file` cannot be read.
        """
        records: list[Record] = []
        remarks: list[str] = []
        path = log_path(profile.name, LOG)
        for each in ([file] if file else []) + ([path] if shipped and path.is_file() else []):
            known = {record.identity for record in records}
            found = read_records(each)
            records += [r for r in found.records if r.identity not in known]
            remarks += found.remarks
        return cls(records, remarks)

    def __bool__(self) -> bool:
        return bool(self.records)

    def advice(
        self, spec: LinearSpec, kernels: Mapping[str, LinearKernel], profile: DeviceProfile
    ) -> list[Advice]:
        """What records say of a layer, the most to be trusted first.

        Parameters
        ----------
        spec : LinearSpec
        kernels : mapping of str to LinearKernel
            Those that compute the layer in its layout.
        profile : DeviceProfile
        """
        found = []
        for distance, record in self._near(spec, profile.cores):
            if record.is_default and distance > 0:
                continue
            kernel = kernels.get(record.kernel)
            if kernel is None or not self._is_current(record, spec, kernel, profile):
                continue
            taken = kernel.choose(spec, profile, Nearly(record.decisions)).decisions
            default = kernel.choose(spec, profile, Defaults()).decisions
            same = all(taken.get(name) == v for name, v in record.decisions.items())
            exact = "record" if distance == 0 else f"record of the nearest shape {_shape(record)}"
            partly = "" if same or distance == 0 else ", as far as its decisions are possible here"
            decisions = () if taken == default else tuple(taken.items())
            source = f"{exact}: {record.tells()}{partly}"
            found.append(Advice(record.kernel, decisions, record.rows, source, record.is_default))
        return found

    def _near(self, spec: LinearSpec, cores: int) -> list[tuple[float, Record]]:
        """Records of the scheme by their distance: timed before static, of as many threads as the
        module starts with before others, sure before likely."""
        scheme = str(spec.scheme) if spec.scheme else "float"
        near = []
        for record in self.records:
            if record.op != LINEAR or record.scheme != scheme or not record.n or not record.k:
                continue
            distance = abs(math.log2(record.n / spec.n)) + abs(math.log2(record.k / spec.k))
            if distance == 0 and record.details != spec.details:
                distance = 0.1
            if distance <= FARTHEST:
                near.append((distance, record))

        def order(entry: tuple[float, Record]) -> tuple[Any, ...]:
            distance, record = entry
            low, high = record.rows
            narrow = high - low if high >= 0 else math.inf
            shared = abs(math.log2(record.threads / cores))
            return record.how != TIMED, distance, shared, narrow, -record.interval[0], record.line()

        return sorted(near, key=order)

    def _is_current(
        self, record: Record, spec: LinearSpec, kernel: LinearKernel, profile: DeviceProfile
    ) -> bool:
        """Whether the kernel's default schedule is still what the record compares with."""
        own = (record.n, record.k, record.details)
        wanted = replace(bare(spec), n=own[0], k=own[1], details=own[2])
        key = (kernel.name, wanted)
        if key not in self._defaults:
            self._defaults[key] = default_of_kernel(wanted, kernel, profile)
        return self._current(record, self._defaults[key])

    def _current(self, record: Record, now: str) -> bool:
        if record.schedule == now:
            return True
        text = (
            f"record of {record.kernel} {_shape(record)} is of another schedule ({record.schedule},"
            f" now {now}): passed over; tune again, or drop it with: apq-tvm logs prune"
        )
        if text not in self.remarks:
            self.remarks.append(text)
        return False

    def decide(self, function: str, default: Callable[[], Any] | None = None) -> Decide:
        """Who answers for a function that is no kernel of a linear layer (`DecideOf`)."""
        of_name = [r for r in self.records if r.op == FUNCTION and r.kernel == function]
        if not of_name or default is None:
            return Defaults()
        now = fingerprint(default())
        current = [r for r in of_name if r.schedule == now]  # one name may be of many functions
        if not current:
            return Defaults()
        best = max(current, key=lambda record: (record.worth, record.line()))
        return Told(best.decisions, f"record: {best.tells()}")


class Told(Nearly):
    """Answers from a record; `source` says which."""

    def __init__(self, record: Mapping[str, object], source: str) -> None:
        super().__init__(record)
        self.source = source


def default_of_kernel(spec: LinearSpec, kernel: LinearKernel, profile: DeviceProfile) -> str:
    """`fingerprint` of a kernel's default for a layer; ``""`` where it does not compute that."""
    import tvm

    try:
        kernel.check(spec, profile)
        with tvm.target.Target(dict(profile.target)):
            return fingerprint(kernel.scheduled(kernel.choose(spec, profile, Defaults())))
    except NotApplicable:
        return ""


def scheme_of(record: Record) -> Any:
    """The `Scheme` that a record names, None for floats."""
    return parse_scheme(record.scheme) if record.scheme else None


def _shape(record: Record) -> str:
    shape = f"{record.n}x{record.k} " if record.n else ""
    low, high = record.rows
    return f"{shape}M={low}" + ("" if high == low else f"..{high if high >= 0 else ''}")
