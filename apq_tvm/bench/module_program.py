"""A compiled module for another machine as a program of its own, run under qemu-user."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.bench.emulator import COMPILERS, emulator
from apq_tvm.bench.trace import Trace, run, trace
from apq_tvm.codegen.templates.tensors import DL_CODES
from apq_tvm.errors import BadInput
from apq_tvm.module import read_manifest
from apq_tvm.types import Array

SOURCE = Path(__file__).with_suffix(".c")


SYSTEM = Path("/usr/aarch64-linux-gnu")
"""Where Debian's cross compilers keep what programs load."""


class ModuleProgram:
    """A module's library, linked into a program that reads tensors from a file.

    Parameters
    ----------
    module : Path
        What `apq_tvm.compile` wrote, for 64-bit Arm.
    folder : Path
        For the program and its files.
    driver : Path, optional
        Folder of a ``libcuda.so.1`` that the program loads, for modules of GPUs: it is linked
        dynamically then.

    Raises
    ------
    BadInput
        The folder is no module.
    BuildError
        The cross compiler is missing or fails.
    """

    def __init__(self, module: Path, folder: Path, driver: Path | None = None) -> None:
        self.module, self.manifest = module, read_manifest(module)
        self.path, self._folder = folder / "module_program", folder
        library: list[str] = []
        self._found: list[str] = []
        if driver is not None:
            library = [f"-L{module}", f"-l{self.manifest['name']}"]
            self._found = ["-L", str(SYSTEM), "-E", f"LD_LIBRARY_PATH={module}:{driver}"]
        link_program(module, self.manifest, self.path, [COMPILERS["aarch64"]], library)
        self.target = ""
        """The device whose code ran last."""

    def run(self, feeds: Mapping[str, Array], cpu: str = "max", bits: int = 0) -> dict[str, Array]:
        """Run the module once.

        Parameters
        ----------
        feeds : mapping of str to ndarray
            Every input by name.
        cpu : str
            A processor that qemu knows.
        bits : int
            Width chosen at run time, 0 for what the module starts with.

        Returns
        -------
        dict of str to ndarray
            Outputs by name.

        Raises
        ------
        BadInput
            The module refuses the machine or the inputs; with its code and message.
        BuildError
            qemu is missing.
        """
        command = [*emulator("aarch64", cpu), *self._found, str(self.path)]
        command += self._files(feeds, bits)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BadInput(f"{self.module} ended with {done.returncode}: {done.stderr.strip()}")
        self.target = done.stdout.strip()
        return read_results((self._folder / "results").read_bytes(), self.manifest["outputs"])

    def trace(self, feeds: Mapping[str, Array], cpu: str = "max", bits: int = 0) -> Trace:
        """Run the module twice and count what the second run executes.

        Parameters are those of `run`.

        Raises
        ------
        BuildError
            qemu-user is missing, or the module refuses; with its message.
        """
        arguments = [*self._files(feeds, bits), "again"]
        return trace(self.path, arguments, self._folder, ("-cpu", cpu))

    def _files(self, feeds: Mapping[str, Array], bits: int) -> list[str]:
        """Write the inputs; arguments of the program."""
        calls, results = self._folder / "calls", self._folder / "results"
        calls.write_bytes(written_calls(self.manifest, feeds, bits))
        return [str(self.module / "weights.safetensors"), str(calls), str(results)]


def link_program(
    module: Path,
    manifest: Mapping[str, Any],
    program: Path,
    cc: Sequence[str],
    library: Sequence[str] = (),
) -> None:
    """Compile ``module_program.c`` for a module.

    Parameters
    ----------
    module : Path
    manifest : mapping
        Of the module.
    program : Path
        To be written; static unless `library` is given.
    cc : sequence of str
        The C compiler and its options.
    library : sequence of str
        What to link with instead of the module's static library.

    Raises
    ------
    BuildError
        The compiler is missing or fails.
    """
    name = manifest["name"]
    run([
        *cc, "-O1", "-Wall", "-Wextra", "-Werror", f"-I{module}", f"-DNAME={name}",
        f'-DHEADER="{name}.h"', str(SOURCE),
        *(library or ("-static", str(module / f"lib{name}.a"))),
        "-lm", "-ldl", "-lpthread", "-o", str(program),
    ])  # fmt: skip


def written_calls(manifest: Mapping[str, Any], feeds: Mapping[str, Array], bits: int = 0) -> bytes:
    """What the program's file CALLS holds: inputs, and which outputs are wanted.

    Parameters
    ----------
    manifest : mapping
        Of the module.
    feeds : mapping of str to ndarray
        Every input by name.
    bits : int
        Width chosen at run time, 0 for what the module starts with.
    """
    inputs, outputs = manifest["inputs"], manifest["outputs"]
    parts = [struct.pack("<ii", bits, len(inputs))]
    for port in inputs:
        array = np.ascontiguousarray(feeds[port["name"]])
        parts += [_header(array.dtype, array.shape), array.tobytes()]
    parts.append(struct.pack("<i", len(outputs)))
    parts += [_header(np.dtype(p["dtype"]), (0,) * len(p["shape"])) for p in outputs]
    return b"".join(parts)


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Type, rank and dimensions of a tensor, as the program reads them."""
    head = struct.pack("<BBHi", DL_CODES[dtype.kind], 8 * dtype.itemsize, 1, len(shape))
    return head + struct.pack(f"<{len(shape)}q", *shape)


def read_results(data: bytes, ports: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Read what the program wrote, by name: dimensions and values of each output.

    Raises
    ------
    BadInput
        It is too short.
    """
    try:
        return _read(data, ports)
    except (struct.error, ValueError) as error:
        raise BadInput(f"the program's results are damaged: {error}") from error


def _read(data: bytes, ports: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    at, results = 0, {}
    for port in ports:
        rank, dtype = len(port["shape"]), np.dtype(port["dtype"])
        shape = struct.unpack_from(f"<{rank}q", data, at)
        at += 8 * rank
        count = int(np.prod(shape))
        results[port["name"]] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    return results
