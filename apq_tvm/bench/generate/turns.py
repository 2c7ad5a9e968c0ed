"""Contenders in processes of their own that take turns: one measures, the others wait.

Threads of a rival that spin for a while would take a core from the next one, so there is a pause
between two turns; a process also has a peak of memory of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from apq_tvm.bench.timing import SETTLE_S
from apq_tvm.errors import BadInput

WORKER = "apq_tvm.bench.generate.worker"

SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100000))\n"
"""A busy neighbour; it ends with the process that started it."""

ENDS_S = 10.0
"""How long a process gets to end by itself."""


@dataclass(frozen=True)
class Entry:
    """A contender: its name in tables, ``"module"``, ``"onnx"`` or ``"gguf"``, and its path."""

    name: str
    kind: str
    path: str


class Worker:
    """The process of one contender.

    Parameters
    ----------
    entry : Entry
    threads, longest : int

    Raises
    ------
    BadInput
        It does not open; with its own message.
    """

    def __init__(self, entry: Entry, threads: int, longest: int) -> None:
        self.name = entry.name
        asked = {"kind": entry.kind, "path": entry.path, "threads": threads, "longest": longest}
        places = os.pathsep.join(path for path in sys.path if path)
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER, json.dumps(asked)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, "PYTHONPATH": places},
        )  # fmt: skip
        try:
            self.facts = self._answer()
        except BadInput:
            self.close()
            raise

    def ask(self, *request: Any) -> dict[str, Any]:
        """Measure once: ``"prefill", P`` or ``"decode", C, N``.

        Raises
        ------
        BadInput
            It failed; with its message.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # why it ended is in its answer
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(ENDS_S)
            self._log.seek(0)
            last = (self._log.read().strip().splitlines() or ["no message"])[-1]
            raise BadInput(f"{self.name} ended with {self._process.returncode}: {last}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BadInput(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@contextmanager
def workers(
    entries: Sequence[Entry], threads: int, longest: int
) -> Iterator[tuple[dict[str, Worker], dict[str, str]]]:
    """Open every contender; those that do not open come with the reason."""
    opened: dict[str, Worker] = {}
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        for entry in entries:
            try:
                worker = Worker(entry, threads, longest)
            except BadInput as error:
                failed[entry.name] = str(error).removeprefix(f"{entry.name}: ")
                continue
            stack.callback(worker.close)
            opened[entry.name] = worker
        yield opened, failed


@contextmanager
def busy_neighbour(wanted: bool) -> Iterator[None]:
    """One process that computes beside the body, if it is wanted."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Sampled:
    """Seconds of one contender and request: the least, the median, and its last answer."""

    best_s: float
    median_s: float
    rounds: int
    last: Mapping[str, Any]


def take_turns(
    opened: Mapping[str, Worker],
    request: Sequence[Any],
    *,
    budget_s: float,
    min_rounds: int = 3,
    max_rounds: int = 50,
) -> tuple[dict[str, Sampled], dict[str, str]]:
    """Measure one request of every contender in turns, after one round that is not counted.

    Returns
    -------
    dict of str to Sampled
    dict of str to str
        Why a contender failed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in opened}
    last: dict[str, Mapping[str, Any]] = {}
    failed: dict[str, str] = {}
    started = time.perf_counter()
    for index in range(max_rounds + 1):
        if index > min_rounds and time.perf_counter() - started > budget_s:
            break
        for name, worker in opened.items():
            if name in failed:
                continue
            time.sleep(SETTLE_S)
            try:
                last[name] = worker.ask(*request)
            except BadInput as error:
                failed[name] = str(error).removeprefix(f"{name}: ")
                continue
            if index:
                seconds[name].append(float(last[name]["seconds"]))
    done = {
        name: Sampled(min(found), median(found), len(found), last[name])
        for name, found in seconds.items()
        if name not in failed
    }
    return done, failed
