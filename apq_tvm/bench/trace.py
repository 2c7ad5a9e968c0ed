"""Which instructions of an aarch64 program one call executes, and how often: counted by qemu-user.

A small plugin (``trace_plugin.c``, compiled once per process) counts translated blocks between the
program's functions ``apq_trace_begin`` and ``apq_trace_end``. Counts repeat to the instruction.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BuildError

QEMU = "qemu-aarch64"
"""The dynamically linked qemu-user: the static one cannot load plugins."""

INSTALL = (
    "apt-get install qemu-user qemu-user-static gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
)
BINUTILS = "aarch64-linux-gnu-"

_WIDTH = 4  # bytes of every instruction of A64
_PLUGIN = Path(__file__).with_name("trace_plugin.c")
_TARGET = re.compile(r"^((?:bl?|b\.\w+|(?:cbn?z|adrp?) \w+,|tbn?z \w+, #\w+,)) ([0-9a-f]+)$")
_MARKERS = ("apq_trace_begin", "apq_trace_end")


@dataclass(frozen=True)
class Symbol:
    """A function of an ELF file: its name, first address and size in bytes."""

    name: str
    address: int
    size: int


@dataclass(frozen=True)
class Instruction:
    """One instruction that was executed.

    Parameters
    ----------
    address : int
        As the file says, not as it was loaded.
    text : str
        GNU assembler, branch targets as ``0x`` addresses.
    function : str
    count : int
        How often it was executed.
    """

    address: int
    text: str
    function: str
    count: int


@dataclass(frozen=True)
class Trace:
    """What ran between the two markers.

    Parameters
    ----------
    blocks : int64 [B, 3]
        Address of a block's first instruction, instructions, executions. Blocks may overlap.
    """

    blocks: NDArray[np.int64]

    @property
    def instructions(self) -> int:
        """How many instructions were executed."""
        return int((self.blocks[:, 1] * self.blocks[:, 2]).sum())

    def executions(self, start: int, stop: int) -> NDArray[np.int64]:
        """How often each instruction of the addresses [start, stop) ran, as int64.

        Parameters
        ----------
        start, stop : int
            As loaded.
        """
        size = (stop - start) // _WIDTH
        changes = np.zeros(size + 1, np.int64)
        first = (self.blocks[:, 0] - start) // _WIDTH
        np.add.at(changes, first.clip(0, size), self.blocks[:, 2])
        np.add.at(changes, (first + self.blocks[:, 1]).clip(0, size), -self.blocks[:, 2])
        counts: NDArray[np.int64] = np.cumsum(changes[:-1])
        return counts


def trace(
    program: Path, arguments: Sequence[str], folder: Path, options: Sequence[str] = ()
) -> Trace:
    """Run a program under qemu-user and count what it executes between the two markers.

    Except for instructions of ``main`` itself.

    Parameters
    ----------
    program : Path
        A non-relocatable aarch64 executable with both marker functions.
    arguments : sequence of str
        Of the program.
    folder : Path
        Receives the plugin's output.
    options : sequence of str
        Of qemu, such as ``-cpu``, ``max``.

    Raises
    ------
    BuildError
        qemu-user or a compiler is missing, or the program failed.
    """
    check_tools()
    found = {s.name: s for s in symbols(program)}
    begin, end = (found[name].address for name in _MARKERS)
    out = folder / "trace"
    out.unlink(missing_ok=True)
    plugin = f"{_plugin()},out={out},begin={begin:#x},end={end:#x}"
    run([QEMU, *options, "-plugin", plugin, str(program), *arguments])
    if not out.is_file():
        raise BuildError(f"{QEMU} wrote no trace of {program}")
    rows = [tuple(map(int, line.split())) for line in out.read_text().splitlines()]
    blocks = np.array(rows, np.int64).reshape(-1, 3)
    main = found["main"]
    own = (blocks[:, 0] >= main.address) & (blocks[:, 0] < main.address + main.size)
    return Trace(blocks[~own])


@functools.cache
def _plugin() -> str:
    """Path of the compiled plugin; its folder lives as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="apq-trace-")
    _plugin_folders.append(folder)
    path = Path(folder.name) / "trace.so"
    version = re.search(r"version (\d+)", run([QEMU, "--version"]))
    api = 1 if version and int(version[1]) <= 8 else 2
    run(["gcc", "-O2", "-shared", "-fPIC", f"-DAPI={api}", str(_PLUGIN), "-o", str(path)])
    return str(path)


def check_tools() -> None:
    """Look for what tracing needs, before minutes of work.

    Raises
    ------
    BuildError
        qemu-user or a compiler is missing; with how to install it.
    """
    for tool in (QEMU, "gcc", f"{BINUTILS}gcc", f"{BINUTILS}objdump"):
        if shutil.which(tool) is None:
            raise BuildError(f"{tool} is not on PATH: {INSTALL}")


_plugin_folders: list[tempfile.TemporaryDirectory[str]] = []


def symbols(path: Path, kinds: str = "tTwW") -> list[Symbol]:
    """The functions that an object file, program or library defines, in order of address.

    Parameters
    ----------
    path : Path
    kinds : str
        Letters of nm: local, global and weak ones by default.
    """
    found = {}
    for options in ((), ("--dynamic",)):  # a stripped library has only dynamic ones
        text = run([f"{BINUTILS}nm", "--defined-only", "--print-size", *options, str(path)])
        for line in text.splitlines():
            match = re.fullmatch(r"([0-9a-f]+) ([0-9a-f]+) ([tTwW]) (\S+)", line)
            if match and match[3] in kinds:
                found[match[4]] = Symbol(match[4], int(match[1], 16), int(match[2], 16))
    return sorted(found.values(), key=lambda s: s.address)


def functions(path: Path, offset: int) -> list[Symbol]:
    """Split the code of an object file by its functions.

    What lies between two of them belongs to functions without a name, such as the bodies of TVM's
    parallel loops. Weak functions lie in sections of their own.

    Parameters
    ----------
    path : Path
    offset : int
        Where its code is in the linked program.
    """
    sizes = re.findall(r"(?m)^\.text +(\d+)", run([f"{BINUTILS}size", "-A", str(path)]))
    end, found = 0, []
    for symbol in [*symbols(path, "tT"), Symbol("", int(sizes[0]), 0)]:
        if symbol.address > end:
            found.append(Symbol(f"unnamed_{end:x}", offset + end, symbol.address - end))
        if symbol.size:
            found.append(Symbol(symbol.name, offset + symbol.address, symbol.size))
        end = symbol.address + symbol.size
    return found


def executed(
    path: Path, functions: Sequence[Symbol], counted: Trace, base: int = 0
) -> list[Instruction]:
    """Disassemble what a trace executed of some functions.

    Parameters
    ----------
    path : Path
        The ELF file that holds them.
    functions : sequence of Symbol
    counted : Trace
    base : int
        Where the file was loaded, 0 for a program with fixed addresses.
    """
    instructions = []
    for function in functions:
        start, stop = function.address, function.address + function.size
        counts = counted.executions(base + start, base + stop)
        if not counts.any():
            continue
        texts = _disassemble(path, start, stop)
        instructions += [
            Instruction(address, texts[address], function.name, int(count))
            for address, count in zip(range(start, stop, _WIDTH), counts, strict=True)
            if count
        ]
    return instructions


def _disassemble(path: Path, start: int, stop: int) -> Mapping[int, str]:
    """Instructions by address."""
    command = [f"{BINUTILS}objdump", "--disassemble", "--no-show-raw-insn",
               f"--start-address={start}", f"--stop-address={stop}", str(path)]  # fmt: skip
    texts = {}
    for line in run(command).splitlines():
        match = re.fullmatch(r"\s*([0-9a-f]+):\s+(.*)", line)
        if match:
            text = re.sub(r"\s*(//.*|<[^>]*>.*)$", "", match[2]).replace("\t", " ").strip()
            texts[int(match[1], 16)] = _TARGET.sub(r"\1 0x\2", text)
    return texts


def run(command: Sequence[str]) -> str:
    """Run a tool where this process is, and return what it printed.

    Raises
    ------
    BuildError
        It is missing or failed; with the end of its message.
    """
    return run_in(None, command)


def run_in(folder: Path | None, command: Sequence[str]) -> str:
    """Run a tool in a folder and return what it printed.

    Raises
    ------
    BuildError
        It is missing or failed; with the end of its message.
    """
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BuildError(f"{command[0]} is not on PATH: {INSTALL}") from error
    if done.returncode != 0:
        text = done.stderr.strip()[-2000:]
        raise BuildError(f"{command[0]} ended with {done.returncode}: {text}")
    return done.stdout
