"""This machine as a device: each program is a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from apq_tvm.bench.timing import COLD_BYTES
from apq_tvm.errors import DeviceFailed
from apq_tvm.tune.device import TIMED_OUT, Job, Outcome

_CPUINFO = Path("/proc/cpuinfo")


class Local:
    """Runs programs here.

    Parameters
    ----------
    features : frozenset of str, optional
        What the machine has, by LLVM name; by default as `apq_tvm.schedules.devices` finds it.
    """

    name = "local"
    speed = True
    cold_bytes = COLD_BYTES
    streams = True

    def __init__(self, features: frozenset[str] | None = None) -> None:
        self._features = features

    def describe(self) -> str:
        """Its processor and how many cores this process may use."""
        cores = len(os.sched_getaffinity(0))
        return f"{_processor()}, {cores} core{'s' if cores > 1 else ''}"

    def check(self, features: Sequence[str]) -> None:
        """See that this machine has the features."""
        if self._features is None:
            from apq_tvm.schedules.devices import find_profile

            self._features = find_profile("host").features
        lacking = sorted(set(features) - self._features)
        if lacking:
            raise DeviceFailed(
                f"this machine lacks {', '.join(lacking)}: candidates cannot run here; tune with "
                "--target host, or on a machine that has them with --device"
            )

    def run(self, job: Job, on_line: Callable[[str], None] | None = None) -> Outcome:
        """Run a program; lines are told as they come."""
        command = [str(job.program), str(job.data), *job.arguments]
        lines: list[str] = []
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
            )
        except OSError as error:
            raise DeviceFailed(f"{job.program} does not start here: {error}") from error
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(job.seconds, end)
        timer.start()
        try:
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if on_line is not None:
                    on_line(lines[-1])
            errors = process.stderr.read()
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
        return Outcome(tuple(lines), TIMED_OUT if late.is_set() else code, errors[-2000:])

    def forget(self, data: Path) -> None:
        """Nothing is kept."""


def _processor() -> str:
    """The processor's own name, or the machine's architecture."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    name = found.get("model name") or os.uname().machine
    family, model = found.get("cpu family"), found.get("model")
    return f"{name} (family {family} model {model})" if family and model else name
