"""Records of the tuner: what was found faster than a default, one JSON object a line, sorted.

Lines do not depend on each other, so that git merges files of them. ``tuning_logs/<device>/
records.json`` are shipped; ``--log FILE`` is another such file. `apq_tvm.schedules.recorded` says
what a compilation makes of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from apq_tvm.errors import BadLog
from apq_tvm.files import replacing

TIMED, STATIC = "timed", "static"
"""How a record came to be: measured on the device, or ranked without one."""

LINEAR, FUNCTION = "linear", "function"
"""What it is of: a kernel of linear layers, or any other function of a module."""

DEFAULT = (1.0, 1.0)
"""Interval of a record that says that the default stays."""


@dataclass(frozen=True)
class Record:
    """One finding.

    Parameters
    ----------
    op : str
        `LINEAR` or `FUNCTION`.
    kernel : str
        Of a linear layer the kernel; of another function its rule or, for what is done to
        activations, its key.
    decisions : mapping of str to object
        Answers that differ from the defaults, none where another kernel is all that differs;
        numbers, texts, booleans or tuples of these.
    schedule : str
        `fingerprint` of the default: of another one, the record says nothing.
    n, k : int
        Shape of a linear layer; else 0.
    scheme : str
        Of a linear layer, ``"float"`` without one.
    details : tuple of (str, int)
        As `LinearSpec.details`.
    width : int
        Bits, where they are chosen at run time; else 0.
    rows : (int, int)
        Rows of x that it holds for, both inclusive; -1 is no limit.
    ratio : float
        Time of the default over the found one's.
    interval : (float, float)
        Of the ratio, with 95 % confidence.
    threads : int
    weights : int
        Bytes of weights that calls took in turns, those of the model that was tuned: more than a
        cache holds come from behind it. 0 is out of all caches.
    how : str
        `TIMED` or `STATIC`.
    machine, date : str
    versions : mapping of str to str
        Of apq_tvm, tvm and LLVM.
    """

    op: str
    kernel: str
    decisions: Mapping[str, Any]
    schedule: str
    n: int = 0
    k: int = 0
    scheme: str = ""
    details: tuple[tuple[str, int], ...] = ()
    width: int = 0
    rows: tuple[int, int] = (1, -1)
    ratio: float = 1.0
    interval: tuple[float, float] = DEFAULT
    threads: int = 1
    weights: int = 0
    how: str = TIMED
    machine: str = ""
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_default(self) -> bool:
        """Whether nothing faster was found: then it keeps records of other shapes away."""
        return not self.decisions and self.interval == DEFAULT

    @property
    def identity(self) -> tuple[Any, ...]:
        """Records of one identity answer one question: the better of two is kept."""
        what = (self.schedule, self.kernel) if self.op == FUNCTION else ("", "")
        shape = (self.n, self.k, self.scheme, self.details, self.width)
        return (self.op, *shape, self.rows, self.threads, *what)

    @property
    def worth(self) -> tuple[bool, float, str]:
        """By which the better of two is found: timed ones first, then what is sure, then later."""
        return self.how == TIMED, self.interval[0], self.date

    def line(self) -> str:
        """As a file has it, without the end of the line."""
        return json.dumps(_plain(self), ensure_ascii=False, allow_nan=False)

    def tells(self) -> str:
        """What was found and where, in words."""
        if self.is_default:
            return f"nothing faster was found, {self.machine}, {self.threads} threads, {self.date}"
        low, high = self.interval
        sure = f"{self.ratio:.2f} times the default ({low:.2f} to {high:.2f})"
        what = sure if self.how == TIMED else f"{self.ratio:.2f} times the default, not timed"
        return f"{what}, {self.machine}, {self.threads} threads, {self.date}"


def _plain(record: Record) -> dict[str, Any]:
    """Fields in their order; those that hold nothing are left out."""
    fields = {
        "op": record.op, "n": record.n, "k": record.k, "scheme": record.scheme,
        "details": dict(record.details), "width": record.width, "rows": list(record.rows),
        "threads": record.threads, "weights": record.weights,
        "kernel": record.kernel, "decisions": dict(record.decisions),
        "ratio": round(record.ratio, 4), "interval": [round(v, 4) for v in record.interval],
        "how": record.how, "machine": record.machine, "date": record.date,
        "versions": dict(record.versions), "schedule": record.schedule,
    }  # fmt: skip
    return {name: value for name, value in fields.items() if value not in (0, "", {})}


_KINDS: dict[str, type | tuple[type, ...]] = {
    "op": str, "n": int, "k": int, "scheme": str, "details": dict, "width": int,
    "rows": list, "threads": int, "weights": int,
    "kernel": str, "decisions": dict, "ratio": (int, float), "interval": list, "how": str,
    "machine": str, "date": str, "versions": dict, "schedule": str,
}  # fmt: skip


_MOST = (1 << 63) - 1
"""Of a size: what is larger is none, and no float either."""


def parse_record(line: str) -> Record:
    """Read one line.

    Raises
    ------
    ValueError
        Says what is missing, unknown or of the wrong type.
    """
    words = json.loads(line)
    if not isinstance(words, dict):
        raise ValueError("it is no JSON object")
    for name, value in words.items():
        if name not in _KINDS:
            raise ValueError(f"{name}: records have no such field")
        if not isinstance(value, _KINDS[name]) or isinstance(value, bool):
            raise ValueError(f"{name}: {value!r} is of the wrong type")
    for name in ("op", "kernel", "schedule", "ratio", "interval"):
        if name not in words:
            raise ValueError(f"{name} is missing")
    if words["op"] not in (LINEAR, FUNCTION):
        raise ValueError(f"op: {words['op']!r} is neither {LINEAR} nor {FUNCTION}")
    if words.get("how", TIMED) not in (TIMED, STATIC):
        raise ValueError(f"how: {words['how']!r} is neither {TIMED} nor {STATIC}")
    for name, least in (("n", 0), ("k", 0), ("width", 0), ("weights", 0), ("threads", 1)):
        if words.get(name, least) < least:
            raise ValueError(f"{name}: {words[name]} is less than {least}")
        if words.get(name, least) > _MOST:
            raise ValueError(f"{name}: is more than {_MOST}")
    rows, interval = words.get("rows", [1, -1]), words["interval"]
    if len(rows) != 2 or not all(isinstance(r, int) for r in rows) or rows[0] < 1:
        raise ValueError(f"rows: {rows!r} is no range of rows")
    if len(interval) != 2 or not all(isinstance(v, int | float) for v in interval):
        raise ValueError(f"interval: {interval!r} is no pair of numbers")
    if not all(math.isfinite(v) for v in (words["ratio"], *interval)):
        raise ValueError(f"ratio: {words['ratio']}, {interval} are not all finite")
    given = {
        **words,
        "rows": tuple(rows),
        "interval": tuple(map(float, interval)),
        "decisions": {name: _tuples(value) for name, value in words.get("decisions", {}).items()},
        "details": tuple((str(key), int(v)) for key, v in words.get("details", {}).items()),
    }
    return Record(**given)


def _tuples(value: Any) -> Any:
    """JSON has lists where decisions have tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class RecordFile:
    """What a file holds.

    Parameters
    ----------
    records : tuple of Record
        In the file's order.
    remarks : tuple of str
        Lines that could not be read, each with the file and the reason; they are passed over.
    """

    records: tuple[Record, ...] = ()
    remarks: tuple[str, ...] = ()


def read_records(path: Path) -> RecordFile:
    """Read a file of records; lines that are none become remarks.

    Raises
    ------
    BadLog
        The file cannot be read, or holds no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadLog(f"{path}: {error}; name another one, or none with --no-log") from error
    records, remarks = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(parse_record(line))
        except (ValueError, TypeError, OverflowError) as error:
            remarks.append(f"{path}:{number}: not a record, passed over: {error}")
    return RecordFile(tuple(records), tuple(remarks))


def merged(records: Iterable[Record]) -> list[Record]:
    """The best record of each identity, sorted as files have them."""
    best: dict[tuple[Any, ...], Record] = {}
    for record in sorted(records, key=Record.line):  # whichever file comes first
        known = best.get(record.identity)
        if known is None or record.worth > known.worth:
            best[record.identity] = record
    return in_order(best.values())


def in_order(records: Iterable[Record]) -> list[Record]:
    """Sorted as files have them."""
    return sorted(records, key=lambda record: (*record.identity, record.kernel, record.line()))


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write a file whole or not at all: the old one stays until the new one is complete."""
    with replacing(path) as part:
        text = "".join(f"{record.line()}\n" for record in in_order(records))
        part.write_text(text, encoding="utf-8")


def without_time(record: Record) -> Record:
    """The record with nothing of when and where: to compare what is recorded."""
    return replace(record, machine="", date="", versions={})
