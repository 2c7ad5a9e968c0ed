"""Trials that were made, so that a tuner that starts again repeats none.

One JSON object a line, appended when a candidate's first sample is known and again when its batch
ends: a tuner that is killed loses the trial in flight at most, and those of its batch keep what
fewer samples say of them. A torn last line is passed over. The file is synced as each batch ends,
against a machine that dies. A lock lets several write one file.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from apq_tvm.errors import OutputFailed
from apq_tvm.tune.measure import Trial
from apq_tvm.tune.space import Point
from apq_tvm.tuning_logs.records import Record, merged, read_records, write_records


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a log; others wait.

    Raises
    ------
    OutputFailed
        The folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock").open("a")
    except OSError as error:
        raise OutputFailed(
            f"{path}: {error.strerror or error}; name a file that can be written with --log"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def add_records(path: Path, records: Sequence[Record]) -> None:
    """Merge records into a log, which stays whole at every moment.

    A record takes the place of older ones of its identity that are of another schedule or that it
    is better than.

    Raises
    ------
    BadLog, OutputFailed
        The log cannot be read or written.
    """
    with locked(path):
        found = read_records(path).records if path.exists() else ()
        fresh = {record.identity: record.schedule for record in records}
        known = [r for r in found if fresh.get(r.identity, r.schedule) == r.schedule]
        write_records(path, merged([*known, *records]))


class Journal:
    """The trials beside a log.

    Parameters
    ----------
    path : Path
        Of the log; the journal has ``.trials`` behind its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f"{path.name}.trials")

    def trials(self, task: str, schedule: str, machine: str) -> list[Trial]:
        """Trials of a task beside the same default on the same machine, the last of each point."""
        wanted = {"task": task, "schedule": schedule, "machine": machine}
        found: dict[Point, Trial] = {}
        for line in self._lines():
            if all(line.get(name) == value for name, value in wanted.items()):
                # A trial of a damaged line is made again.
                with suppress(ValueError, TypeError, KeyError):
                    trial = _trial(line)
                    found[trial.point] = trial
        return list(found.values())

    def finished(self, task: str, schedule: str, machine: str) -> dict[str, Any] | None:
        """What was written when the task ended, None if it did not."""
        wanted = {"end": task, "schedule": schedule, "machine": machine}
        ends = [
            line
            for line in self._lines()
            if all(line.get(name) == value for name, value in wanted.items())
        ]
        return ends[-1] if ends else None

    def add(
        self, task: str, schedule: str, machine: str, trials: Sequence[Trial], sync: bool = True
    ) -> None:
        """Write trials.

        Parameters
        ----------
        task, schedule, machine : str
        trials : sequence of Trial
        sync : bool
            False while others are timed: what is written then outlives the process, and its power
            supply after `sync`.

        Raises
        ------
        OutputFailed
            The file cannot be written: no room, no right.
        """
        head = {"task": task, "schedule": schedule, "machine": machine}
        self._append([{**head, **_words(trial)} for trial in trials], sync)

    def end(self, task: str, schedule: str, machine: str, **words: Any) -> None:
        """Write that a task is done."""
        self._append([{"end": task, "schedule": schedule, "machine": machine, **words}])

    def sync(self) -> None:
        """Have what was written on the disk."""
        if self.path.exists():
            self._append([])

    def _append(self, lines: Sequence[dict[str, Any]], sync: bool = True) -> None:
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with locked(self.path):
            try:
                _write_behind(self.path, text.encode(), sync)
            except OSError as error:
                raise OutputFailed(
                    f"{self.path}: {error.strerror or error}; make room, or name another file with "
                    "--log"
                ) from error

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                words = json.loads(line)
            except ValueError:
                continue  # torn by a kill
            if isinstance(words, dict):
                yield words


def _write_behind(path: Path, text: bytes, sync: bool) -> None:
    """Append whole lines, behind one that was torn on a line of their own."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        if text and size and os.pread(file, 1, size - 1) != b"\n":
            text = b"\n" + text
        while text:
            text = text[os.write(file, text) :]
        if sync:
            os.fsync(file)
    finally:
        os.close(file)


def _words(trial: Trial) -> dict[str, Any]:
    point = trial.point
    return {
        "kernel": point.kernel,
        "decisions": [[name, value] for name, value in point.decisions],
        "status": trial.status,
        "ratio": round(trial.ratio, 5),
        "ns": round(trial.ns, 1),
        **({"why": trial.why[:500]} if trial.why else {}),
    }


def _trial(words: dict[str, Any]) -> Trial:
    """The trial of a line; an error for one that was damaged."""
    decisions = tuple((str(name), _tuples(value)) for name, value in words["decisions"])
    ratio, ns = float(words["ratio"]), float(words["ns"])
    if not (0 <= ratio < math.inf and 0 <= ns < math.inf):
        raise ValueError("no times")
    hash(decisions)
    point = Point(str(words["kernel"]), decisions)
    return Trial(point, str(words["status"]), ratio, ns, str(words.get("why", "")))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
