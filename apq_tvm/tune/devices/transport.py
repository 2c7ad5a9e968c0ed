"""What every way to a device can do: take files, run a program with a time-out, give files back."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from apq_tvm.errors import DeviceLost, DeviceToolMissing
from apq_tvm.tune.devices.address import Address

GRACE_S = 20.0
"""Beyond a program's own time: for the connection, before the device counts as lost."""

TRANSFER_S = 600.0
"""A transfer that takes longer hangs."""

END_S = 5.0
"""For the last words of a program that is over."""

AGENT = "agent"
"""The name of ``agent.c``, compiled, in a device's working folder."""

NOT_STARTED = 126
"""What shells give for a program that could not be started."""

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9_./=:,+@-]+", re.ASCII)
_ENDED = re.compile(r"^apq-agent: (exit|signal|timeout|fault) (\d+)\r?$", re.MULTILINE)

Content = Path | bytes
"""A file of this machine, or what a file is to hold."""

OnLine = Callable[[str], None]


@dataclass(frozen=True)
class Ran:
    """How a program ended.

    Parameters
    ----------
    status : str
        ``"exit"``, ``"signal"`` or ``"timeout"``.
    code : int
        What it returned, or the signal that ended it, or the milliseconds it was given.
    stdout, stderr : str
    """

    status: str
    code: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        """Whether it ended by itself and returned 0."""
        return self.status == "exit" and self.code == 0


class Transport(Protocol):
    """A connection to one device, with a working folder of its own there.

    Every method raises `apq_tvm.errors.DeviceFailed` where the connection fails; what the program
    does is no error of the transport.
    """

    address: Address

    def put(self, files: Mapping[str, Content]) -> None:
        """Copy files into the folder, by their names there (`check_names`)."""

    def run(self, command: Sequence[str], timeout_s: float, on_line: OnLine | None = None) -> Ran:
        """Run a program of the folder, in it; tell lines of its standard output as they come."""

    def facts(self) -> str:
        """What ``agent facts`` prints."""

    def get(self, names: Sequence[str]) -> dict[str, bytes]:
        """Copy files back that exist; those that do not are left out."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files of the folder."""

    def close(self) -> None:
        """Remove the folder and end the connection; never raises."""


def check_names(names: Iterable[str]) -> None:
    """Refuse names of files that could be anything else: to a shell, to scp, or to another folder.

    Raises
    ------
    ValueError
        They are ours, never a model's, so that this is a mistake in the caller.
    """
    for name in names:
        if not _FILE.fullmatch(name):
            raise ValueError(f"{name!r} is no plain name of a file on a device")


def checked_words(words: Iterable[str]) -> list[str]:
    """Words of a command as ssh and adb may have them: nothing in them means anything to a shell.

    Raises
    ------
    ValueError
        One could; commands are made of our own words, never of a model's names.
    """
    checked = list(words)
    for word in checked:
        if not _WORD.fullmatch(word):
            raise ValueError(f"{word!r} may not stand in a command for a device")
    return checked


def agent_command(folder: str, command: Sequence[str], timeout_s: float) -> list[str]:
    """The command that runs `command` in a device's folder."""
    milliseconds = max(1, round(timeout_s * 1000))
    words = [f"{folder}/{AGENT}", "run", folder, str(milliseconds), *command]
    return checked_words(words)


def ended(address: Address, stdout: str, stderr: str) -> Ran:
    """How a program ended, of the agent's last line.

    Raises
    ------
    DeviceLost
        There is no such line: the agent did not live to say it.
    """
    for text in (stderr, stdout):  # an old adb has one stream for both
        found = list(_ENDED.finditer(text))
        if found:
            status, code = found[-1][1], int(found[-1][2])
            shown = _ENDED.sub("", text).rstrip("\n")
            if status == "fault":
                return Ran("exit", NOT_STARTED, stdout, f"the agent failed with error {code}")
            out, err = (stdout, shown) if text is stderr else (shown, stderr)
            return Ran(status, code, out, err)
    last = (stderr or stdout).strip()[-500:] or "it said nothing"
    raise DeviceLost(f"{address} was lost while a program ran there: {last}")


def find_program(name: str, remedy: str) -> str:
    """Path of a program of this machine.

    Raises
    ------
    DeviceToolMissing
        It is not on PATH; with the remedy.
    """
    found = shutil.which(name)
    if found is None:
        raise DeviceToolMissing(f"{name} is not on PATH: {remedy}")
    return found


def call(
    command: Sequence[str],
    timeout_s: float,
    on_line: OnLine | None = None,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program of this machine, without a shell and without input.

    Parameters
    ----------
    command : sequence of str
    timeout_s : float
    on_line : callable, optional
        Told every line of its standard output as it comes.
    folder : Path, optional
        Where it runs.

    Raises
    ------
    subprocess.TimeoutExpired
        It was ended after `timeout_s`, with all that it started; holds what it said.
    """
    process = subprocess.Popen(
        list(command),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is ours to handle
    )
    lines: list[str] = []

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if on_line is not None:
                on_line(line.rstrip("\n"))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    late = False
    try:
        assert process.stderr is not None
        errors = _Drain(process.stderr)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = True
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it left behind
        process.wait()
    listener.join(END_S)
    out, err = "".join(lines), errors.text()
    if late:
        raise subprocess.TimeoutExpired(list(command), timeout_s, out, err)
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def call_device(
    address: Address, command: Sequence[str], timeout_s: float, on_line: OnLine | None = None
) -> subprocess.CompletedProcess[str]:
    """`call` what reaches a device.

    Raises
    ------
    DeviceLost
        It did not end in time.
    """
    try:
        return call(command, timeout_s, on_line)
    except subprocess.TimeoutExpired as error:
        raise DeviceLost(f"{address} gave no answer for {timeout_s:.0f} s") from error


class _Drain:
    """Reads a stream to its end in a thread of its own: a full pipe would stop its writer."""

    def __init__(self, stream: IO[str]) -> None:
        self._parts: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._parts.append(line)

    def text(self) -> str:
        """All of it; what has not come after `END_S` is held open by somebody else."""
        self._thread.join(END_S)
        return "".join(self._parts)


def stage(folder: Path, files: Mapping[str, Content]) -> None:
    """Lay files out in a folder of this machine."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            shutil.copy2(content, path)
