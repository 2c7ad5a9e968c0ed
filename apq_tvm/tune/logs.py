"""Files of records: put together, cleared of what is stale, shown, and checked again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from apq_tvm.errors import BadLog
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.schedules.recorded import default_of_kernel, scheme_of
from apq_tvm.select import by_name
from apq_tvm.tune.journal import locked
from apq_tvm.tuning_logs.records import (
    LINEAR,
    Record,
    RecordFile,
    merged,
    read_records,
    write_records,
)
from apq_tvm.types import AnyPath, DeviceProfile


def read_all(paths: Iterable[AnyPath]) -> RecordFile:
    """The records of several files, in their order.

    Raises
    ------
    BadLog
        One cannot be read.
    """
    records: list[Record] = []
    remarks: list[str] = []
    for path in paths:
        found = read_records(Path(path))
        records += found.records
        remarks += found.remarks
    return RecordFile(tuple(records), tuple(remarks))


def merge(paths: Sequence[AnyPath], output: AnyPath) -> RecordFile:
    """Write the best record of each question that the files answer.

    Parameters
    ----------
    paths : sequence of str or path
    output : str or path
        May be one of them.

    Returns
    -------
    RecordFile
        What was written, and remarks on lines that were no records.

    Raises
    ------
    BadLog, OutputFailed
    """
    output = Path(output)
    found = read_all(paths)
    with locked(output):
        records = merged(found.records)
        write_records(output, records)
    return RecordFile(tuple(records), found.remarks)


@dataclass(frozen=True)
class Stale:
    """A record that compilations pass over, and why."""

    record: Record
    why: str


def spec_of(record: Record) -> LinearSpec:
    """The layer that a record of a linear kernel is of."""
    scheme = scheme_of(record)
    asymmetric = scheme is not None and scheme.asymmetric_acts
    return LinearSpec(record.n, record.k, scheme, details=record.details, asymmetric=asymmetric)


def stale(records: Iterable[Record], profile: DeviceProfile) -> list[Stale]:
    """Records of schedules that are others today, or of kernels that are gone."""
    kernels = by_name(linear_kernels(profile))
    found = []
    for record in records:
        if record.op != LINEAR:
            continue  # which function it is of only a model tells
        kernel = kernels.get(record.kernel)
        if kernel is None:
            found.append(Stale(record, f"{profile.name} has no kernel {record.kernel}"))
            continue
        now = default_of_kernel(spec_of(record), kernel, profile)
        if now != record.schedule:
            what = f"now {now}" if now else "which does not compute this layer any more"
            found.append(Stale(record, f"of schedule {record.schedule}, {what}"))
    return found


def prune(path: AnyPath, target: str) -> list[Stale]:
    """Drop stale records from a file, and lines that are none.

    Raises
    ------
    BadLog, BadTarget, OutputFailed
    """
    path, profile = Path(path), find_profile(target)
    with locked(path):
        found = read_records(path)
        dropped = stale(found.records, profile)
        gone = {entry.record.line() for entry in dropped}
        write_records(path, [r for r in found.records if r.line() not in gone])
    return dropped


def device_of(path: AnyPath) -> str:
    """The device whose log a file is, by its folder; ``"host"`` for files elsewhere."""
    from apq_tvm.schedules.devices import PROFILES

    name = Path(path).resolve().parent.name
    return name if any(name == profile.name for profile in PROFILES) else "host"


def check_file(path: AnyPath) -> Path:
    """The path, if there is a file.

    Raises
    ------
    BadLog
    """
    path = Path(path)
    if not path.is_file():
        raise BadLog(f"{path}: there is no such file of records; apq-tvm tune makes one")
    return path
