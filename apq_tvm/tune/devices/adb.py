"""Android devices by adb: programs in ``/data/local/tmp``, where its shell may run some."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from apq_tvm.errors import DeviceFailed, DeviceLost, DeviceUnfit, DeviceUnreachable
from apq_tvm.tune.devices.address import Address
from apq_tvm.tune.devices.transport import (
    AGENT,
    GRACE_S,
    TRANSFER_S,
    Content,
    OnLine,
    Ran,
    agent_command,
    call_device,
    check_names,
    checked_words,
    ended,
    find_program,
    stage,
)

INSTALL = "apt-get install adb (or Android's platform-tools)"
BASE = "/data/local/tmp"
_FOLDER = re.compile(rf"{BASE}/apq-[A-Za-z0-9]{{8}}", re.ASCII)
_GONE = re.compile(
    r"(?i)device .*not found|device offline|no devices|closed|unauthorized|cannot connect"
)


class AdbTransport:
    """A folder of a device that adb reaches.

    Parameters
    ----------
    address : Address
        Of kind adb; its name is the serial number of ``adb devices``.
    agent : Path
        The agent's program, for the device.

    Raises
    ------
    DeviceFailed
        adb is missing, the device is not there, or has not allowed this machine.
    """

    def __init__(self, address: Address, agent: Path) -> None:
        self.address = address
        self._adb = find_program("adb", INSTALL)
        self._folder = ""
        try:
            made = self._call("shell", "mktemp", "-d", f"{BASE}/apq-XXXXXXXX").strip()
            if not _FOLDER.fullmatch(made):
                raise DeviceUnfit(f"{address}: mktemp -d made {made[:200]!r}, no folder in {BASE}")
            self._folder = made
            self.put({AGENT: agent})
            self._call("shell", "chmod", "700", f"{made}/{AGENT}")
        except BaseException:
            self.close()
            raise

    def put(self, files: Mapping[str, Content]) -> None:
        """Copy files into the folder."""
        check_names(files)
        with tempfile.TemporaryDirectory(prefix="apq-put-") as name:
            staged = Path(name)
            stage(staged, files)
            for path in sorted(staged.iterdir()):
                self._call("push", str(path), f"{self._folder}/", timeout_s=TRANSFER_S)

    def run(self, command: Sequence[str], timeout_s: float, on_line: OnLine | None = None) -> Ran:
        """Run a program of the folder."""
        words = agent_command(self._folder, command, timeout_s)
        done = self._adb_call(["shell", *words], timeout_s + GRACE_S, on_line)
        return ended(self.address, done.stdout, done.stderr)

    def facts(self) -> str:
        """What the agent says of the device."""
        done = self._adb_call(["shell", f"{self._folder}/{AGENT}", "facts"], GRACE_S)
        if done.returncode != 0 or "arch:" not in done.stdout:
            text = (done.stderr or done.stdout).strip()[-500:]
            raise DeviceUnfit(
                f"{self.address} cannot run the program that was compiled for it: {text}"
            )
        return done.stdout

    def get(self, names: Sequence[str]) -> dict[str, bytes]:
        """Copy files back that are there."""
        check_names(names)
        found = {}
        with tempfile.TemporaryDirectory(prefix="apq-get-") as folder:
            for i, name in enumerate(names):
                path = Path(folder) / str(i)
                words = ["pull", f"{self._folder}/{name}", str(path)]
                done = self._adb_call(words, TRANSFER_S)
                if done.returncode == 0 and path.is_file():
                    found[name] = path.read_bytes()
                elif _GONE.search(done.stderr):
                    raise DeviceLost(f"{self.address}: {done.stderr.strip()[-500:]}")
        return found

    def remove(self, names: Sequence[str]) -> None:
        """Remove files of the folder."""
        check_names(names)
        if names:
            self._call("shell", "rm", "-f", *(f"{self._folder}/{name}" for name in names))

    def close(self) -> None:
        """Remove the folder."""
        with suppress(DeviceFailed):
            if self._folder:
                self._call("shell", "rm", "-rf", self._folder)

    def _adb_call(
        self, words: Sequence[str], timeout_s: float, on_line: OnLine | None = None
    ) -> subprocess.CompletedProcess[str]:
        if words[0] == "shell":
            words = ["shell", *checked_words(words[1:])]
        command = [self._adb, "-s", self.address.name, *words]
        return call_device(self.address, command, timeout_s, on_line)

    def _call(self, *words: str, timeout_s: float = GRACE_S) -> str:
        done = self._adb_call(words, timeout_s)
        if done.returncode == 0:
            return done.stdout
        text = (done.stderr or done.stdout).strip()
        if "unauthorized" in text:
            raise DeviceUnreachable(
                f"{self.address} has not allowed this machine: unlock it and confirm its question"
            )
        if _GONE.search(text):
            shown = (text.splitlines() or ["no answer"])[-1]
            raise DeviceUnreachable(f"{self.address}: {shown}; adb devices lists what is there")
        raise DeviceUnfit(f"{self.address}: adb {' '.join(words[:2])}: {text[-500:]}")
