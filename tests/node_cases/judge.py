"""Each case ends as ``passes``, ``refused``, or a bug: ``wrong crash error slow hang``.

Cases run in processes of their own, many in one module; a group that does not pass whole is halved.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from apq_tvm.codegen.cuda.simulator import DRIVER, build_driver
from apq_tvm.schedules.devices import find_profile
from tests.node_cases.cases import Case
from tests.node_cases.processes import cpu_seconds
from tests.node_cases.worker import Outcome, serve

GROUP = 48
SECONDS = 300
"""Of CPU for a group; a single case gets a fifth."""

STILL = 120
"""Seconds without any CPU after which a process waits for itself, however slow its machine."""


class Judge:
    """Runs cases that were stored in its `folder`, for `target`: GPUs are simulated."""

    def __init__(self, folder: Path, target: str = "host") -> None:
        self.folder, self.target = folder, target
        if find_profile(target).gpu:
            self._build_driver()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["apq_tvm.pipeline", "tests.node_cases.preload"])

    def _build_driver(self) -> None:
        """Once for all parts."""
        if not (self.folder / DRIVER).exists():
            build_driver(self.folder)

    def alone(self, names: Sequence[str], stage: str) -> dict[str, Outcome]:
        """Outcomes of the stages up to ``"import"`` or ``"graph"``, case by case."""
        left, found = list(names), dict[str, Outcome]()
        while left:
            group, left = left[: 4 * GROUP], left[4 * GROUP :]
            while group:
                done, why = self._run(group, stage)
                found |= done
                group = group[len(done) :]
                if group:
                    found[group.pop(0)] = why
        return found

    def compiled(self, cases: Sequence[Case]) -> Iterator[tuple[str, Outcome]]:
        """Outcomes of modules, as they come."""
        ordered = sorted(cases, key=lambda c: (c.key, c.name))
        for _, group in groupby(ordered, key=lambda c: c.key):
            names = [case.name for case in group]
            for start in range(0, len(names), GROUP):
                yield from self._group(names[start : start + GROUP])

    def _group(self, names: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
        found, why = self._run(names, "compile")
        together = len(found) == len(names)
        kinds = {kind for kind, _ in found.values()}
        if together and (len(names) == 1 or kinds <= {"passes", "wrong"}):
            yield from found.items()
        elif len(names) == 1:
            yield names[0], why
        else:
            size = -(-len(names) // (2 if len(names) < 12 else 4))
            for start in range(0, len(names), size):
                yield from self._group(names[start : start + size])

    def _run(self, names: Sequence[str], stage: str) -> tuple[dict[str, Outcome], Outcome]:
        """What one process said, and how it ended; one that stands still gets a second try."""
        found, why = self._tried(names, stage)
        if why[0] == "hang":
            warnings.warn(f"{stage} of {', '.join(names)} stood still:\n{why[1]}", stacklevel=2)
            found, why = self._tried(names, stage)
        return found, why

    def _tried(self, names: Sequence[str], stage: str) -> tuple[dict[str, Outcome], Outcome]:
        here, there = self._context.Pipe(duplex=False)
        seconds = SECONDS if stage == "compile" and len(names) > 1 else SECONDS // 5
        words = (there, self.folder, names, stage, seconds, self.target)
        process = self._context.Process(target=serve, args=words)
        process.start()
        there.close()
        found, why = dict[str, Outcome](), ("passes", "")
        used = -1.0
        try:
            while len(found) < len(names) and why[0] != "hang":
                if here.poll(STILL):
                    name, outcome = here.recv()
                    found[name] = outcome
                elif (now := cpu_seconds(process.pid)) == used:
                    why = ("hang", self._stacks(process.pid))
                else:
                    used = now
        except EOFError:
            process.join(STILL)
            if process.exitcode == -signal.SIGPROF:
                why = ("slow", f"no answer in {seconds} s of CPU")
            else:
                why = ("crash", f"the process ended with {process.exitcode}")
        process.kill()
        process.join()
        return found, why

    def _stacks(self, pid: int) -> str:
        """Where the threads of a process are, which it says itself (`serve`)."""
        os.kill(pid, signal.SIGUSR1)
        time.sleep(5)
        path = self.folder / f"{pid}.stacks"
        return path.read_text() if path.exists() else "no stacks"
