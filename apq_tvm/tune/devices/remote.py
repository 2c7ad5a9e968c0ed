"""What the tuner sees of a device: `apq_tvm.tune.device.Device` over a connection."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from apq_tvm.bench.timing import COLD_BYTES
from apq_tvm.codegen.build.toolchain import Toolchain
from apq_tvm.errors import DeviceFailed, DeviceLost, DeviceUnfit
from apq_tvm.tune.device import TIMED_OUT, Job, Outcome
from apq_tvm.tune.devices.address import Address, parse_devices
from apq_tvm.tune.devices.connection import Connection
from apq_tvm.tune.devices.errand import Done, Errand
from apq_tvm.tune.devices.machine import Machine
from apq_tvm.tune.devices.tracker import expand
from apq_tvm.types import DeviceProfile

FAILURES = 3
"""A device that was lost so often in a row is given up."""

EMULATED_BYTES = 16 << 20
"""Copies of weights where nothing is timed: only that there are some matters."""

_PROGRAM = "program"

Connect = Callable[[Address, DeviceProfile, Toolchain | None], Connection]


class RemoteDevice:
    """A device that is opened again when it was lost.

    Parameters
    ----------
    address : Address
    profile : DeviceProfile
        Of the target that programs are compiled for.
    tools : Toolchain, optional
        The C compiler for it.
    connect : callable
        Opens a connection; for tests.

    Attributes
    ----------
    name, speed, cold_bytes, streams
        As `apq_tvm.tune.device.Device` has them.

    Raises
    ------
    DeviceFailed
        It cannot be reached, or lacks what code for the target uses.
    """

    def __init__(
        self,
        address: Address,
        profile: DeviceProfile,
        tools: Toolchain | None = None,
        connect: Connect = Connection,
    ) -> None:
        self.name, self.speed = str(address), not address.emulated
        self.streams = address.kind != "rpc"  # whose lines come all at the end
        self._address, self._profile, self._tools = address, profile, tools
        self._connect = connect
        self._held: list[Connection] = []
        self._names: dict[Path, str] = {}
        self._made, self._failures = 0, 0
        self._finalizer = weakref.finalize(self, _close, self._held)
        memory = self._open().machine.memory
        self.cold_bytes = min(COLD_BYTES, memory // 4 or COLD_BYTES)
        if not self.speed:
            self.cold_bytes = min(self.cold_bytes, EMULATED_BYTES)

    @property
    def machine(self) -> Machine:
        """What it is."""
        return self._open().machine

    def describe(self) -> str:
        """The machine in one line, for records."""
        machine = self.machine
        cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
        model = f"{machine.model or machine.arch}, {cores}"
        return model if self.speed else f"emulated {self._address.name}: {machine.arch}"

    def check(self, features: Sequence[str]) -> None:
        """See that the device has features, by LLVM's names."""
        from apq_tvm.codegen.build.kernels import CPUINFO_FLAGS

        machine = self.machine
        lacking = sorted({f for f in features if CPUINFO_FLAGS.get(f, f) not in machine.flags})
        if lacking:
            raise DeviceUnfit(f"{self.name} ({machine.model}) lacks {', '.join(lacking)}")

    def run(self, job: Job, on_line: Callable[[str], None] | None = None) -> Outcome:
        """Run a program once; a device that was lost before is opened again."""
        name = self._names.get(job.data)
        if name is None:
            self._made += 1
            name = self._names[job.data] = f"data{self._made}"
        errand = Errand(
            {_PROGRAM: job.program, name: job.data},
            (_PROGRAM, name, *job.arguments),
            timeout_s=job.seconds,
            keep=frozenset((name,)),
        )
        try:
            done = self._open().run(errand, on_line)
        except DeviceFailed:
            self._failures += 1
            self._lose()
            raise
        self._failures = 0
        return _outcome(done)

    def forget(self, data: Path) -> None:
        """No job will read `data` any more."""
        name = self._names.pop(data, None)
        if name is None or not self._held:
            return
        try:
            self._held[0].forget(name)
        except DeviceFailed:  # the next job finds out
            self._lose()

    def close(self) -> None:
        """End the connection and remove what is left there."""
        self._finalizer()

    def _open(self) -> Connection:
        if self._failures >= FAILURES:
            raise DeviceLost(f"{self.name} was lost {FAILURES} times in a row and is given up")
        if not self._held:
            self._held.append(self._connect(self._address, self._profile, self._tools))
        return self._held[0]

    def _lose(self) -> None:
        """What was there is gone, files too."""
        _close(self._held)


def open_devices(
    text: str,
    profile: DeviceProfile,
    tools: Toolchain | None = None,
    remark: Callable[[str], None] | None = None,
) -> list[RemoteDevice]:
    """Open every device of a ``--device``; a tracker's key stands for all its servers.

    Parameters
    ----------
    text : str
        Comma list of addresses (`apq_tvm.tune.devices.address`).
    profile : DeviceProfile
        Of the target that programs are compiled for.
    tools : Toolchain, optional
    remark : callable, optional
        Told about each that cannot be used, while others can.

    Raises
    ------
    BadDevice
        An address is spelled wrongly.
    DeviceFailed
        None can be used; the first one's reason.
    """
    addresses = expand(parse_devices(text))
    opened: list[RemoteDevice] = []
    failures: list[DeviceFailed] = []
    for address in addresses:
        try:
            opened.append(RemoteDevice(address, profile, tools))
        except DeviceFailed as error:
            failures.append(error)
        except BaseException:
            for device in opened:
                device.close()
            raise
    if not opened:
        raise failures[0]
    for failure in failures:
        if remark is not None:
            remark(f"{failure}; going on without it")
    return opened


def _outcome(done: Done) -> Outcome:
    """As the tuner wants it: one number says how a program ended."""
    code = {"exit": done.code, "signal": -done.code, "timeout": TIMED_OUT}[done.status]
    return Outcome(tuple(done.stdout.splitlines()), code, done.stderr[-2000:])


def _close(held: list[Connection]) -> None:
    while held:
        held.pop().close()
