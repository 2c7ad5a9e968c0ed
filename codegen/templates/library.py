"""The C library of a module: its functions, an open handle, and contexts for calls."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import BadWeights, InputError, LoadError, RunError, WrongMachine
from .ports import TensorInfo, dtype_of
from .tensors import Tensors

_ERRORS = {-1: InputError, -2: BadWeights, -3: WrongMachine, -4: RunError, -5: RunError}


class Context:
    """What one call at a time uses: the library's context, and the tensors that go to it."""

    def __init__(
        self, c: ctypes.c_void_p, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]
    ) -> None:
        self.c = c
        self.given = Tensors([dtype_of(info) for info in inputs])
        self.wanted = Tensors([dtype_of(info) for info in outputs])
        self.known = False  # whether `shapes` are those of the outputs for `given`
        self.shapes: list[tuple[int, ...]] = []
        self.dims = (ctypes.c_int64 * max(sum(len(info.shape) for info in outputs), 1))()
        self.small: list[bool] = []  # whether the library may copy an output
        self.late: list[int] = []  # outputs whose shapes only a run tells
        self.stream = 0  # of a GPU, what its runs go to


def _system() -> str:
    """Android has a C library of its own, whatever name Python gives the system."""
    return "android" if hasattr(sys, "getandroidapilevel") else sys.platform


def _libc() -> str:
    """This Python's C library, as triples call it."""
    if _system() == "android":
        return "android"
    try:
        return "gnu" if os.confstr("CS_GNU_LIBC_VERSION") else "musl"
    except (OSError, ValueError):
        return "musl"


def _loadable(file: Path) -> str:
    """A path of the library that stands for this file alone.

    The C library's loader knows libraries by their paths: after a compile into the same folder it
    would give the old one. So files that replaced others are called ``folder/./lib``, and so on;
    which they are this process keeps in `sys`, for all that import packages anew.
    """
    status = file.stat()
    known: dict[str, list[tuple[int, int]]] = sys.__dict__.setdefault("_apq_tvm_libraries", {})
    files = known.setdefault(str(file), [])
    if (which := (status.st_dev, status.st_ino)) not in files:
        files.append(which)
    return os.path.join(file.parent, *files.index(which) * ["."], file.name)


class Library:
    """The loaded library, its open handle, and contexts that no call is using."""

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        inputs: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
    ) -> None:
        info = manifest["library"]
        self.inputs, self.outputs = inputs, outputs
        self.name = str(info["name"])
        here = (_system(), platform.machine())
        if here != (info["system"], info["machine"]):
            raise WrongMachine(
                f"{self.name} was compiled for {info['system']} on {info['machine']}, this is "
                f"{here[0]} on {here[1]}; compile the model for this machine: "
                "apq-tvm compile --target, see apq-tvm targets"
            )
        path = folder / f"lib{self.name}.so"
        try:
            self.c = ctypes.CDLL(_loadable(path))
            for function in ("last_error", "target", "version"):
                self.function(function).restype = ctypes.c_char_p
            self.function("stream").restype = ctypes.c_void_p
        except (OSError, AttributeError) as error:  # no library, or another module's
            text = f"{path} cannot be loaded: {error}"
            if info["libc"] != _libc():
                raise WrongMachine(
                    f"{text}; it is linked with the C library {info['libc']}, and this Python with "
                    f"{_libc()}: compile the model with --triple {here[1]}-linux-{_libc()}"
                ) from error
            raise LoadError(text) from error
        self.run_c = self.function("run_bits")
        self.shapes_c = self.function("output_shapes")
        self.result_c = self.function("result")
        self.weights = os.fsencode(folder / "weights.safetensors")
        self.device, self.arrays = 0, 0  # which, and how many outputs lie in its memory
        self.idle: deque[Context] = deque()
        self.contexts = 0  # idle ones, and those of calls
        self.handle = self.open_on(0)
        self.check_ports(folder)
        self.verified = False

    def open_on(self, device: int) -> ctypes.c_void_p:
        """A handle for runs on a device."""
        handle = ctypes.c_void_p()
        number = ctypes.c_int32(device)
        self.check(self.function("open_on")(self.weights, number, ctypes.byref(handle)))
        return handle

    def move(self, device: int) -> None:
        """Let all runs from now on be on another device."""
        if len(self.idle) != self.contexts:
            raise RunError(f"{self.name} cannot change its device while it runs")
        if self.arrays:  # a GPU's library
            from .device_array import forget

            forget()
        if self.arrays:
            raise RunError(
                f"{self.name} cannot change its device: {self.arrays} arrays lie in the memory of "
                f"GPU {self.device}; copy them by numpy.asarray, and let go of them"
            )
        fresh = self.open_on(device)
        while self.idle:
            self.function("context_destroy")(self.idle.pop().c)
        self.contexts = 0
        self.function("close")(self.handle)
        self.handle, self.device = fresh, device

    def __del__(self) -> None:
        """Give a GPU's memory back when nobody holds the module; the process's end does anyway."""
        if sys is None or sys.is_finalizing() or not getattr(self, "handle", None):
            return
        while self.idle:
            self.function("context_destroy")(self.idle.pop().c)
        self.function("close")(self.handle)
        self.handle = ctypes.c_void_p()  # arrays may go after it, in one round of the collector

    def check_ports(self, folder: Path) -> None:
        """The library reads and writes as many tensors and dimensions as it was built for."""
        for kind, ports in (("input", self.inputs), ("output", self.outputs)):
            rank = self.function(f"{kind}_rank")
            found = [rank(self.handle, ctypes.c_int32(i)) for i in range(len(ports) + 1)]
            if found != [*(len(port.shape) for port in ports), -1]:
                raise LoadError(
                    f"{folder / 'manifest.json'} does not belong to lib{self.name}.so: other "
                    f"{kind}s; copy or compile the module again"
                )

    def function(self, name: str) -> Any:
        """``<module>_<name>``."""
        return getattr(self.c, f"{self.name}_{name}")

    def check(self, code: int) -> None:
        """Raise what a return code stands for."""
        if code != 0:
            text = self.function("last_error")().decode(errors="replace")
            raise _ERRORS.get(code, RunError)(text)

    def call(self, name: str, *args: Any) -> int:
        """Call ``<module>_<name>`` on the handle."""
        return int(self.function(name)(self.handle, *args))

    def take_context(self) -> Context:
        """An idle context, or a new one; a deque is safe here without a lock, also over a fork."""
        try:
            return self.idle.pop()
        except IndexError:
            context = ctypes.c_void_p()
            self.check(self.call("context_create", ctypes.byref(context)))
            self.contexts += 1
            made = Context(context, self.inputs, self.outputs)
            made.stream = self.function("stream")(context) or 0
            return made
