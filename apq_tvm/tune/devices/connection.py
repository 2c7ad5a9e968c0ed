"""One device: opened, looked at, and given errands one after the other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType

from apq_tvm.codegen.build.toolchain import Toolchain, find_toolchain, run
from apq_tvm.errors import BadTarget
from apq_tvm.tune.devices.adb import AdbTransport
from apq_tvm.tune.devices.address import Address
from apq_tvm.tune.devices.errand import Done, Errand
from apq_tvm.tune.devices.local import LocalTransport
from apq_tvm.tune.devices.machine import Machine, check_fit, parse_facts
from apq_tvm.tune.devices.rpc import BRIDGE, RpcTransport
from apq_tvm.tune.devices.ssh import SshTransport
from apq_tvm.tune.devices.transport import AGENT, Content, OnLine, Transport
from apq_tvm.types import DeviceProfile

Opener = Callable[[Address, Path], Transport]

_OPENERS: Mapping[str, Opener] = {
    "local": LocalTransport,
    "qemu": LocalTransport,
    "ssh": SshTransport,
    "adb": AdbTransport,
    "rpc": RpcTransport,
}

_folders: list[tempfile.TemporaryDirectory[str]] = []


class Connection:
    """A device that code for a target runs on.

    Parameters
    ----------
    address : Address
    profile : DeviceProfile
        Of the target.
    tools : Toolchain, optional
        The C compiler for it; the usual one by default.

    Raises
    ------
    DeviceFailed
        It cannot be reached, or lacks what code for the target uses.
    BadTarget
        The emulator is not of the target's architecture.
    BuildError
        There is no C compiler for the target.
    """

    def __init__(
        self, address: Address, profile: DeviceProfile, tools: Toolchain | None = None
    ) -> None:
        if address.kind == "qemu" and profile.host_arch != "aarch64":
            raise BadTarget(
                f"{address} is 64-bit Arm, and target {profile.name} is {profile.host_arch}"
            )
        self.address = address
        self._kept: dict[str, Content] = {}
        agent = agent_program((tools or toolchain(profile)).cc)
        self.transport = _OPENERS[address.kind](address, agent)
        try:
            self.machine: Machine = parse_facts(self.transport.facts(), str(address))
            check_fit(self.machine, profile, str(address))
        except BaseException:
            self.close()
            raise

    def run(self, errand: Errand, on_line: OnLine | None = None) -> Done:
        """Do an errand, and leave nothing of it behind but what it keeps.

        Parameters
        ----------
        errand : Errand
        on_line : callable, optional
            Told lines of the program's standard output as they come.

        Returns
        -------
        Done
            Whatever the program did.

        Raises
        ------
        DeviceFailed
            The connection failed: the device is to be closed.
        """
        there = self._kept.keys() & errand.keep
        self.transport.put({n: f for n, f in errand.files.items() if n not in there})
        self._kept |= {name: errand.files[name] for name in errand.keep}
        ran = self.transport.run(errand.command, errand.timeout_s, on_line)
        files = self.transport.get(errand.outputs)
        over = dict.fromkeys((*errand.files, *errand.outputs))
        self.transport.remove([name for name in over if name not in self._kept])
        return Done(
            str(self.address),
            self.address.emulated,
            ran.status,
            ran.code,
            ran.stdout,
            ran.stderr,
            files,
        )

    def forget(self, name: str) -> None:
        """Remove a file that was kept."""
        if self._kept.pop(name, None) is not None:
            self.transport.remove([name])

    def close(self) -> None:
        """Remove what is left there; never raises."""
        self.transport.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def run_once(address: Address, profile: DeviceProfile, errand: Errand) -> Done:
    """Open a device for one errand."""
    with Connection(address, profile) as device:
        return device.run(errand)


def toolchain(profile: DeviceProfile, cc: str = "", sysroot: str = "") -> Toolchain:
    """The C compiler for programs of a target.

    Raises
    ------
    BuildError
        There is none; with the line that installs it.
    """
    environment = tuple(os.environ.get(name, "") for name in ("CC", "PATH"))
    return _toolchain(profile.triple, cc, sysroot, environment)


@cache
def _toolchain(triple: str, cc: str, sysroot: str, environment: tuple[str, ...]) -> Toolchain:
    """Looking for it starts a dozen programs; `environment` is what else decides."""
    return find_toolchain(triple, cc, sysroot, exact=False)


@cache
def agent_program(cc: tuple[str, ...]) -> Path:
    """The agent, and beside it the library for TVM's servers, compiled once per process."""
    folder = tempfile.TemporaryDirectory(prefix="apq-agent-")
    _folders.append(folder)
    made, here = Path(folder.name), Path(__file__)
    run([*cc, "-O1", "-static", str(here.with_name("agent.c")), "-o", str(made / AGENT)])
    library = [str(here.with_name("rpc_bridge.c")), "-o", str(made / BRIDGE), "-ldl"]
    run([*cc, "-O1", "-shared", "-fPIC", *library])
    return made / AGENT
