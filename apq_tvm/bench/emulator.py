"""One kernel as a program of its own, run on this machine or under qemu-user for another one."""

from __future__ import annotations

import functools
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.bench.trace import INSTALL as INSTALL
from apq_tvm.bench.trace import Symbol, Trace, functions, run, symbols, trace
from apq_tvm.codegen.build.kernels import build_kernels
from apq_tvm.codegen.package.folder import COMMON
from apq_tvm.codegen.templates.tensors import DL_CODES
from apq_tvm.errors import BuildError
from apq_tvm.types import Array, DeviceProfile

COMPILERS = {"x86_64": "gcc", "aarch64": "aarch64-linux-gnu-gcc"}
EMULATORS = {"aarch64": "qemu-aarch64-static"}
"""qemu-user by architecture, where it is not this machine's own."""


class Program:
    """A statically linked executable that calls one kernel.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Scheduled.
    profile : DeviceProfile
    folder : Path
        Where the program and its files go.
    cpu : str
        What qemu is to be, ``max`` by default. Code with instructions that it lacks fails.
    checked : bool
        Let the kernel check the types and shapes of its arguments.

    Raises
    ------
    BuildError
        The cross compiler or qemu is missing, or the kernel cannot be built.
    """

    def __init__(
        self,
        func: Any,
        profile: DeviceProfile,
        folder: Path,
        cpu: str = "max",
        checked: bool = True,
    ) -> None:
        import tvm

        name = "kernel"
        mod = tvm.IRModule({name: func.with_attr("global_symbol", name)})
        target = tvm.target.Target(dict(profile.target))
        objects = build_kernels(mod, [name], target, folder, checked=checked)
        self.path, self._folder = folder / "program", folder
        self._cpu, self._objects = cpu, objects
        self._command = [*emulator(profile.arch, cpu), str(self.path)]
        files = map(str, (kernel_main(profile.arch), *objects))
        run([COMPILERS[profile.arch], "-static", *files, "-lm", "-o", str(self.path)])

    def __call__(self, *arrays: Array) -> None:
        """Call the kernel on C-contiguous arrays; what it writes is written back into them."""
        files = self._files(arrays)
        run([*self._command, *files])
        self._read(arrays)

    def trace(self, *arrays: Array) -> Trace:
        """Call the kernel under qemu, and count what it executes too.

        Raises
        ------
        BuildError
            qemu-user is missing or failed.
        """
        files = self._files(arrays)
        counted = trace(self.path, files, self._folder, ("-cpu", self._cpu))
        self._read(arrays)
        return counted

    def functions(self) -> list[Symbol]:
        """The functions of the kernel, named or not, at their addresses in the program."""
        placed = {symbol.name: symbol for symbol in symbols(self.path)}
        found = []
        for path in self._objects:
            own = [symbol for symbol in symbols(path) if symbol.name.startswith("__tvm_ffi_kernel")]
            offset = placed[own[0].name].address - own[0].address
            found += functions(path, offset)
        return found

    def _files(self, arrays: tuple[Array, ...]) -> list[str]:
        """Write the arguments; the program reads the first file and writes the second."""
        calls, results = self._folder / "calls", self._folder / "results"
        calls.write_bytes(kernel_arguments(arrays))
        return [str(calls), str(results)]

    def _read(self, arrays: tuple[Array, ...]) -> None:
        data, at = (self._folder / "results").read_bytes(), 0
        for array in arrays:
            if array.flags.writeable:
                values = np.frombuffer(data, array.dtype, array.size, at)
                array[...] = values.reshape(array.shape)
            at += array.nbytes


@functools.cache
def kernel_main(arch: str) -> Path:
    """The object file that reads the arguments and calls the kernel, compiled once per process."""
    folder = tempfile.TemporaryDirectory(prefix="apq_emulator_")
    _folders.append(folder)
    source, made = Path(__file__).with_suffix(".c"), Path(folder.name) / "emulator.o"
    run([COMPILERS[arch], "-O1", "-c", f"-I{COMMON}", str(source), "-o", str(made)])
    return made


_folders: list[tempfile.TemporaryDirectory[str]] = []


def emulator(arch: str, cpu: str) -> list[str]:
    """The start of a command line that runs a program of `arch`; empty on such a machine.

    Raises
    ------
    BuildError
        qemu-user is missing; with how to install it.
    """
    if arch == os.uname().machine:
        return []
    path = shutil.which(EMULATORS[arch])
    if path is None:
        raise BuildError(f"{EMULATORS[arch]} is not on PATH: {INSTALL}")
    return [path, "-cpu", cpu]


def kernel_arguments(arrays: tuple[Array, ...]) -> bytes:
    """Arrays as `kernel_main` reads them from its first file."""
    parts = [struct.pack("<i", len(arrays))]
    for array in arrays:
        if not array.flags.c_contiguous:
            raise ValueError("arrays of a kernel must be C-contiguous")
        code, bits = DL_CODES[array.dtype.kind], 8 * array.dtype.itemsize
        parts.append(struct.pack("<BBHi", code, bits, 1, array.ndim))
        parts.append(struct.pack(f"<{array.ndim}qQ", *array.shape, array.nbytes))
        parts.append(array.tobytes())
    return b"".join(parts)
