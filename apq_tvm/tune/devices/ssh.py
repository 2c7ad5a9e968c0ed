"""Devices by ssh: files by scp, programs by the agent, one connection for all of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from apq_tvm.errors import (
    DeviceFailed,
    DeviceLost,
    DeviceUnfit,
    DeviceUnreachable,
    HostKeyRefused,
)
from apq_tvm.tune.devices.address import Address
from apq_tvm.tune.devices.transport import (
    AGENT,
    GRACE_S,
    TRANSFER_S,
    Content,
    OnLine,
    Ran,
    agent_command,
    call,
    call_device,
    check_names,
    checked_words,
    ended,
    find_program,
    stage,
)

CONNECT_S = 10
"""For ssh to reach the device."""

INSTALL = "apt-get install openssh-client"
_FOLDER = re.compile(r"(/[\w.-]+)*/apq-[A-Za-z0-9]{8}", re.ASCII)
_FAILED = 255
"""What ssh itself ends with where there is no connection."""


class SshTransport:
    """A folder of a device that ssh reaches, without questions: keys, not passwords.

    Parameters
    ----------
    address : Address
        Of kind ssh. The user's own configuration of ssh holds (``~/.ssh/config``).
    agent : Path
        The agent's program, for the device.

    Raises
    ------
    DeviceFailed
        ssh or scp is missing, the device does not answer, refuses the login, or its host key is
        unknown or another one.
    """

    def __init__(self, address: Address, agent: Path) -> None:
        self.address = address
        self._ssh, self._scp = (find_program(name, INSTALL) for name in ("ssh", "scp"))
        # Sockets have short names: not below a long TMPDIR.
        self._control = Path(tempfile.mkdtemp(prefix="apq-ssh-", dir="/tmp"))
        self._folder = ""
        base = address.name or "/tmp"
        try:
            made = self._call("mktemp", "-d", f"{base}/apq-XXXXXXXX").strip()
            if not _FOLDER.fullmatch(made):
                raise DeviceUnfit(
                    f"{address}: mktemp -d made {made[:200]!r}; does a login there print "
                    "something? Name a folder that exists: ssh://user@host/folder"
                )
            self._folder = made
            self.put({AGENT: agent})
        except BaseException:
            self.close()
            raise

    def put(self, files: Mapping[str, Content]) -> None:
        """Copy files into the folder."""
        check_names(files)
        with tempfile.TemporaryDirectory(prefix="apq-put-") as name:
            staged = Path(name)
            stage(staged, files)
            tops = [str(path) for path in sorted(staged.iterdir())]
            self._copy([*tops, f"{self._place()}:{self._folder}/"])

    def run(self, command: Sequence[str], timeout_s: float, on_line: OnLine | None = None) -> Ran:
        """Run a program of the folder."""
        words = agent_command(self._folder, command, timeout_s)
        done = self._remote(words, timeout_s + GRACE_S, on_line)
        try:
            return ended(self.address, done.stdout, done.stderr)
        except DeviceLost as error:
            refused = refusal(self.address, done.stderr)
            if done.returncode == _FAILED and refused is not None:
                raise DeviceLost(str(refused)) from error
            raise

    def facts(self) -> str:
        """What the agent says of the device."""
        done = self._remote([f"{self._folder}/{AGENT}", "facts"], GRACE_S)
        if done.returncode != 0:
            text = done.stderr.strip()[-500:]
            raise DeviceUnfit(
                f"{self.address} cannot run the program that was compiled for it: {text}; is the "
                f"target of its architecture, and may programs in {self._folder} run (noexec)?"
            )
        return done.stdout

    def get(self, names: Sequence[str]) -> dict[str, bytes]:
        """Copy files back, one by one: one that is missing keeps none of the others."""
        check_names(names)
        found = {}
        with tempfile.TemporaryDirectory(prefix="apq-get-") as folder:
            for i, name in enumerate(names):
                path = Path(folder) / str(i)
                with suppress(FileNotFoundError):
                    self._copy([f"{self._place()}:{self._folder}/{name}", str(path)])
                    found[name] = path.read_bytes()
        return found

    def remove(self, names: Sequence[str]) -> None:
        """Remove files of the folder."""
        check_names(names)
        if names:
            self._call("rm", "-f", "--", *(f"{self._folder}/{name}" for name in names))

    def close(self) -> None:
        """Remove the folder and end the connection."""
        with suppress(DeviceFailed):
            if self._folder:
                self._call("rm", "-rf", "--", self._folder)
        with suppress(OSError, subprocess.TimeoutExpired):
            call([self._ssh, *self._options(), "-O", "exit", self.address.login], GRACE_S)
        shutil.rmtree(self._control, ignore_errors=True)

    def _options(self, port: str = "-p") -> list[str]:
        """What ssh and scp have in common."""
        shared = ("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ServerAliveInterval=10",
                  "ServerAliveCountMax=3", "ControlMaster=auto", "ControlPersist=60",
                  f"ControlPath={self._control}/s")  # fmt: skip
        options = [word for option in shared for word in ("-o", option)]
        return [*options, *([port, str(self.address.port)] if self.address.port else [])]

    def _place(self) -> str:
        """The host, as scp spells it."""
        host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
        return f"{self.address.user}@{host}" if self.address.user else host

    def _remote(
        self, words: Sequence[str], timeout_s: float, on_line: OnLine | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command there: words that mean nothing to its shell."""
        command = [self._ssh, *self._options(), "-T", self.address.login, *checked_words(words)]
        return call_device(self.address, command, timeout_s, on_line)

    def _call(self, *words: str) -> str:
        done = self._remote(words, GRACE_S + CONNECT_S)
        if done.returncode == _FAILED:
            raise refusal(self.address, done.stderr) or unreachable(self.address, done.stderr)
        if done.returncode != 0:
            raise DeviceUnfit(f"{self.address}: {words[0]}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def _copy(self, names: Sequence[str]) -> None:
        command = [self._scp, "-q", "-r", "-p", *self._options("-P"), "--", *names]
        try:
            done = call(command, TRANSFER_S)
        except subprocess.TimeoutExpired as error:
            raise DeviceLost(f"{self.address}: a transfer hung for {TRANSFER_S:.0f} s") from error
        if done.returncode == 0:
            return
        text = done.stderr.strip()
        if "No such file" in text:
            raise FileNotFoundError(text)
        raise refusal(self.address, text) or DeviceLost(
            f"{self.address}: a transfer failed: {text[-500:]}"
        )


def refusal(address: Address, text: str) -> DeviceFailed | None:
    """The error that ssh's words mean, where they say who was refused; None for others."""
    port = f" -p {address.port}" if address.port else ""
    if "HOST IDENTIFICATION HAS CHANGED" in text:
        name = f"'[{address.host}]:{address.port}'" if address.port else address.host
        return HostKeyRefused(
            f"{address}: its host key is another one than the one that is known. If the device was "
            f"set up anew: ssh-keygen -R {name}; if not, somebody may be listening"
        )
    if "Host key verification failed" in text or "host key is known" in text:
        return HostKeyRefused(
            f"{address}: its host key is not known here; look at it once by hand: "
            f"ssh{port} {address.login}"
        )
    if "Permission denied" in text or "Too many authentication failures" in text:
        return DeviceUnreachable(
            f"{address} refuses the login without a password: ssh-copy-id{port} {address.login}"
        )
    return None


def unreachable(address: Address, text: str) -> DeviceUnreachable:
    """The error of a connection that failed for other reasons."""
    port = f" -p {address.port}" if address.port else ""
    last = (text.strip().splitlines() or ["no answer"])[-1]
    return DeviceUnreachable(
        f"{address} cannot be reached: {last}; try it by hand: ssh{port} {address.login}"
    )
