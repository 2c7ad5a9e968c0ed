"""This machine, and the emulator on it: what they do in a folder, no connection in between."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from apq_tvm.errors import DeviceLost, DeviceToolMissing, DeviceUnfit
from apq_tvm.tune.devices.address import Address
from apq_tvm.tune.devices.transport import (
    AGENT,
    GRACE_S,
    NOT_STARTED,
    Content,
    OnLine,
    Ran,
    call,
    check_names,
    stage,
)

QEMU_TIMES = 20
"""The emulator is so much slower, about: a program's time is longer there."""


class LocalTransport:
    """A folder of this machine.

    Parameters
    ----------
    address : Address
        ``local``, or ``qemu://cpu``: programs run under qemu-user then.
    agent : Path
        The agent's program.

    Raises
    ------
    DeviceToolMissing
        qemu-user is not installed.
    """

    def __init__(self, address: Address, agent: Path) -> None:
        self.address = address
        self._prefix = emulator_of(address) if address.kind == "qemu" else []
        self._folder = Path(tempfile.mkdtemp(prefix="apq-device-"))
        shutil.copy2(agent, self._folder / AGENT)

    def put(self, files: Mapping[str, Content]) -> None:
        """Copy files into the folder."""
        check_names(files)
        stage(self._folder, files)

    def run(self, command: Sequence[str], timeout_s: float, on_line: OnLine | None = None) -> Ran:
        """Run a program of the folder, or of this machine where the folder has none of the name."""
        # Without the agent: under qemu-user it could not start a program of the emulated machine.
        name, *arguments = command
        check_names([name])
        path = self._folder / name
        if path.is_file():
            path.chmod(0o700)
            name = str(path)
        allowed = timeout_s * (QEMU_TIMES if self._prefix else 1)
        try:
            done = call([*self._prefix, name, *arguments], allowed, on_line, self._folder)
        except subprocess.TimeoutExpired as error:
            out, err = (str(text or "") for text in (error.stdout, error.stderr))
            return Ran("timeout", round(allowed * 1000), out, err)
        except OSError as error:
            return Ran("exit", NOT_STARTED, "", f"{command[0]} does not start: {error}")
        code = done.returncode
        status = "signal" if code < 0 else "exit"
        return Ran(status, abs(code), done.stdout, done.stderr)

    def facts(self) -> str:
        """What the agent says of the machine, or of what the emulator is."""
        try:
            done = call([*self._prefix, str(self._folder / AGENT), "facts"], GRACE_S)
        except OSError as error:
            raise DeviceUnfit(
                f"{self.address} cannot run the program that was compiled for it: {error.strerror};"
                " is the target of this machine's architecture?"
            ) from error
        if done.returncode != 0:
            raise DeviceLost(f"{self.address}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def get(self, names: Sequence[str]) -> dict[str, bytes]:
        """Read files of the folder."""
        check_names(names)
        paths = {name: self._folder / name for name in names}
        return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}

    def remove(self, names: Sequence[str]) -> None:
        """Remove files of the folder."""
        check_names(names)
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def emulator_of(address: Address) -> list[str]:
    """The start of a command line that runs a program of 64-bit Arm.

    Raises
    ------
    DeviceToolMissing
        qemu-user is not installed.
    """
    for name in ("qemu-aarch64-static", "qemu-aarch64"):
        if path := shutil.which(name):
            return [path, "-cpu", address.name]
    raise DeviceToolMissing(
        f"{address}: qemu-aarch64-static is not on PATH: apt-get install qemu-user-static"
    )
