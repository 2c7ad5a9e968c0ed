"""Devices that serve TVM's RPC, found by a tracker: for fleets that have both already.

A server takes files, loads a library and calls its functions, but starts no programs: a small
library (``rpc_bridge.c``) does. The session lives in a process of its own (`rpc_worker`).
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from apq_tvm.errors import DeviceFailed, DeviceLost, DeviceUnfit, DeviceUnreachable
from apq_tvm.tune.devices.address import Address
from apq_tvm.tune.devices.tracker import Tracker
from apq_tvm.tune.devices.transport import (
    AGENT,
    GRACE_S,
    TRANSFER_S,
    Content,
    OnLine,
    Ran,
    check_names,
    checked_words,
    ended,
)

BRIDGE, FUNCTION, COMMAND = "bridge.so", "apq_run", "command"

WORKER = "apq_tvm.tune.devices.rpc_worker"

START_S = 120.0
"""For the process to import TVM and to connect."""

LOG_BYTES = 4000


class RpcTransport:
    """A session with a free server of a tracker's key; the server has a folder for it.

    Parameters
    ----------
    address : Address
        Of kind rpc.
    agent : Path
        The agent's program, for the device; ``bridge.so`` lies beside it.

    Raises
    ------
    DeviceFailed
        There is no tracker, no free server, or the server does not take the bridge.
    """

    def __init__(self, address: Address, agent: Path) -> None:
        self.address = address
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="apq-rpc-")
        self._log = Path(self._folder.name) / "log"
        tracker = Tracker(address)
        try:
            host, port, word = tracker.request()
        finally:
            tracker.close()
        try:
            self._start(host, port, word)
            self.put({AGENT: agent, BRIDGE: agent.with_name(BRIDGE)})
            try:
                self._ask({"load": BRIDGE}, GRACE_S)
            except _Refused as error:
                raise DeviceUnfit(
                    f"{address} cannot load the library that was compiled for it: {error}; is the "
                    "target of its architecture?"
                ) from error
        except BaseException:
            self.close()
            raise

    def put(self, files: Mapping[str, Content]) -> None:
        """Upload files; a server's folder has no folders in it."""
        check_names(files)
        if any("/" in name for name in files):
            raise ValueError("a server of TVM takes no folders")
        with tempfile.TemporaryDirectory(prefix="apq-put-") as folder:
            pairs = []
            for i, (name, content) in enumerate(files.items()):
                path = content if isinstance(content, Path) else Path(folder) / str(i)
                if isinstance(content, bytes):
                    path.write_bytes(content)
                pairs.append([name, str(path)])
            self._sure({"put": pairs}, TRANSFER_S)

    def run(self, command: Sequence[str], timeout_s: float, on_line: OnLine | None = None) -> Ran:
        """Run a program of the folder; its lines come all at the end."""
        milliseconds = str(max(1, round(timeout_s * 1000)))
        stdout, stderr = self._call([AGENT, "run", "@folder", milliseconds, *command], timeout_s)
        ran = ended(self.address, stdout, stderr)
        if on_line is not None:
            for line in ran.stdout.splitlines():
                on_line(line)
        return ran

    def facts(self) -> str:
        """What the agent says of the device."""
        return self._call([AGENT, "facts"], GRACE_S)[0]

    def get(self, names: Sequence[str]) -> dict[str, bytes]:
        """Download files that are there."""
        check_names(names)
        found = {}
        for i, name in enumerate(names):
            path = Path(self._folder.name) / f"got{i}"
            with suppress(_Refused):
                self._ask({"get": name, "to": str(path)}, TRANSFER_S)
                found[name] = path.read_bytes()
        return found

    def remove(self, names: Sequence[str]) -> None:
        """Remove files of the folder."""
        check_names(names)
        with suppress(_Refused):
            self._ask({"remove": list(names)}, GRACE_S)

    def close(self) -> None:
        """End the session: the server removes its folder."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def _start(self, host: str, port: int, word: str) -> None:
        # It finds packages where this process does.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {WORKER} import main; main()"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, host, str(port), word],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()
        try:
            self._answer(START_S)
        except (_Refused, DeviceLost) as error:
            raise DeviceUnreachable(
                f"{self.address}: the server at {host}:{port} cannot be reached: {error}"
            ) from error

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _call(self, words: Sequence[str], timeout_s: float) -> tuple[str, str]:
        """What a program of the folder says on its two outputs."""
        self.put({COMMAND: "".join(f"{word}\n" for word in checked_words(words)).encode()})
        code = self._sure({"call": FUNCTION}, timeout_s + GRACE_S)
        said = self.get(["stdout", "stderr"])
        self.remove([COMMAND, *said])
        if code < 0:
            raise DeviceUnfit(f"{self.address}: the server cannot start programs")
        out, err = (said.get(name, b"").decode(errors="replace") for name in ("stdout", "stderr"))
        return out, err

    def _sure(self, message: Mapping[str, Any], timeout_s: float) -> Any:
        """Ask for what the server has no reason to refuse."""
        try:
            return self._ask(message, timeout_s)
        except _Refused as error:
            raise DeviceLost(f"{self.address}: {error}") from error

    def _ask(self, message: Mapping[str, Any], timeout_s: float) -> Any:
        if self._process is None or self._process.stdin is None:
            raise DeviceLost(f"{self.address}: the session is over")
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._gone() from error
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> Any:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty as error:
            assert self._process is not None
            self._process.kill()
            raise DeviceLost(f"{self.address} gave no answer for {timeout_s:.0f} s") from error
        if not line:
            raise self._gone()
        document = json.loads(line)
        if "error" in document:
            raise _Refused(str(document["error"]))
        return document["ok"]

    def _gone(self) -> DeviceLost:
        said = (
            self._log.read_text(errors="replace").strip()[-LOG_BYTES:] if self._log.exists() else ""
        )
        last = (said.splitlines() or ["the connection broke"])[-1]
        return DeviceLost(f"{self.address} was lost: {last}")


class _Refused(DeviceFailed):
    """The server answered, with an error."""
