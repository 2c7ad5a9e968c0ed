"""Where candidates are timed: what the tuner asks of a device, and what comes back.

A batch of candidates is one program (`apq_tvm.tune.program`): static C without Python, which checks
every candidate's result and times them in turns. A device runs it somewhere and returns what it
printed. So a device need know nothing of kernels, and a candidate that crashes or hangs takes one
program with it: the last ``at`` line says which candidate that was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from apq_tvm.codegen.build.toolchain import Toolchain


@dataclass(frozen=True)
class Job:
    """One run of a program.

    Parameters
    ----------
    program : Path
        Statically linked executable for the device; its first argument is the path of `data`.
    data : Path
        The file it reads: tensors, expected results. Several jobs of one batch share it, so that a
        device may keep its copy (by content, or by the path until `Device.forget`).
    arguments : tuple of str
        What follows, such as ``("check=1", "rounds=5")``; plain letters, digits, ``=,.``.
    seconds : float
        It is ended after so long.
    objects : tuple of Path
        What `program` was linked from, for devices that load a shared library instead: position
        independent, their entry is ``int apq_tune_main(int argc, char **argv)``, and lines go to
        where ``apq_tune_print(const char *line)`` sends them, a weak function that prints.
    tools : Toolchain or None
        What links those.
    """

    program: Path
    data: Path
    arguments: tuple[str, ...]
    seconds: float
    objects: tuple[Path, ...] = ()
    tools: Toolchain | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Outcome:
    """What a program left.

    Parameters
    ----------
    lines : tuple of str
        Its standard output; of one that ended early, what there was.
    code : int
        Exit status; minus the signal's number if one ended it; `TIMED_OUT` after `Job.seconds`.
    errors : str
        The end of its standard error, for messages.
    """

    lines: tuple[str, ...]
    code: int
    errors: str = ""


TIMED_OUT = -1000
"""`Outcome.code` of a program that the device ended because its time was over."""


class Device(Protocol):
    """Somewhere programs run. A device is used by one thread at a time.

    Attributes
    ----------
    name : str
        For people: ``"local"``, ``"ssh://pi@board"``.
    speed : bool
        Whether its times say anything of the processor: False where it is emulated. Candidates are
        checked there and nothing is recorded as faster.
    cold_bytes : int
        Memory that copies of weights may take there; 256 MiB keep them out of any cache.
    streams : bool
        Whether `run` tells lines as they come. Where it does not, a search gives each candidate a
        run of its own, so that what it came to is known before the next begins; candidates do not
        take turns there.
    """

    name: str
    speed: bool
    cold_bytes: int
    streams: bool

    def describe(self) -> str:
        """The machine in one line for records: ``"AMD EPYC 9B45, 2 cores"``.

        Raises
        ------
        DeviceFailed
            It cannot be reached; the message says why and what to do.
        """

    def check(self, features: Sequence[str]) -> None:
        """See that the device has the LLVM `features` that a profile promises.

        Raises
        ------
        DeviceFailed
            Unreachable, or features are missing: their names are in the message.
        """

    def run(self, job: Job, on_line: Callable[[str], None] | None = None) -> Outcome:
        """Run a program once.

        Parameters
        ----------
        job : Job
        on_line : callable, optional
            Told every line as it comes, where the device can; else all at the end.

        Raises
        ------
        DeviceFailed
            The device was lost: no word of the program. One trial is counted as lost for it, and
            the next job may try again.
        """

    def forget(self, data: Path) -> None:
        """No job will read `data` any more."""
