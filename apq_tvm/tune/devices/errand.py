"""The unit of work on a device: files that go there, a program, files that come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from apq_tvm.errors import BadInput
from apq_tvm.tune.devices.transport import Content


@dataclass(frozen=True)
class Errand:
    """What is run once on one device.

    Parameters
    ----------
    files : mapping of str to Path or bytes
        By their names there, which are plain ones of ours (`transport.check_names`).
    command : tuple of str
        The program, one of `files`, and its arguments.
    outputs : tuple of str
        Files that come back, those that are there.
    timeout_s : float
        The program's time; under an emulator it has more.
    keep : frozenset of str
        Of `files`: what stays there until it is forgotten, and is not copied again.
    """

    files: Mapping[str, Content]
    command: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    timeout_s: float = 30.0
    keep: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Done:
    """What became of an errand.

    Parameters
    ----------
    device : str
        The address.
    emulated : bool
        Times in the outputs say nothing about a device, and are never recorded.
    status : str
        ``"exit"``, ``"signal"`` or ``"timeout"``.
    code : int
        What the program returned, the signal that ended it, or the milliseconds it had.
    stdout, stderr : str
    files : mapping of str to bytes
        The outputs.
    """

    device: str
    emulated: bool
    status: str
    code: int = 0
    stdout: str = ""
    stderr: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself and returned 0."""
        return self.status == "exit" and self.code == 0

    def check(self, what: str = "the program") -> None:
        """Raise what went wrong, if anything did.

        Raises
        ------
        BadInput
            The program ended otherwise; with its last words.
        """
        if self.ok:
            return
        how = {
            "exit": f"ended with {self.code}",
            "signal": f"was ended by signal {self.code}",
            "timeout": f"was still running after {self.code / 1000:g} s",
        }[self.status]
        last = (self.stderr.strip() or self.stdout.strip())[-500:]
        raise BadInput(f"{what} {how} on {self.device}{': ' if last else ''}{last}")
