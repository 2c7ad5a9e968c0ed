"""A batch of candidates as one static C program and its file of tensors, and what it prints.

``program.c`` says what the lines mean. The runtime beside it is a module's own, so that threads and
scratch memory are what they will be.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apq_tvm.codegen.build.library import compile_sources
from apq_tvm.codegen.build.toolchain import Toolchain, run
from apq_tvm.codegen.package.folder import COMMON, RUNTIME
from apq_tvm.codegen.templates.tensors import DL_CODES
from apq_tvm.errors import BuildError
from apq_tvm.types import Array

SOURCE = Path(__file__).with_suffix(".c")

_THREADS = "cores forks launch openmp places pool team threads tiles workspace worth".split()
"""Sources of the runtime that kernels need: parallel loops, scratch memory, AMX's tiles."""

INPUT, WEIGHTS, SCRATCH = range(3)
"""Kinds of `Operand`."""


@dataclass(frozen=True)
class Operand:
    """A tensor that candidates' calls name by its place in the list.

    Parameters
    ----------
    kind : int
        `INPUT` has an array for every set of inputs, `WEIGHTS` one, which is copied so that calls
        find it out of the caches, `SCRATCH` none: results and what one call leaves for the next.
    arrays : tuple of ndarray
        Of one shape and type; of `SCRATCH` one, for shape and type alone.
    """

    kind: int
    arrays: tuple[Array, ...]


@dataclass(frozen=True)
class Call:
    """A call of a kernel.

    Parameters
    ----------
    function : str
        Its symbol in some object file.
    args : tuple of int
        Operands.
    work : float
        Nanoseconds on one thread, roughly: few are not shared among threads.
    """

    function: str
    args: tuple[int, ...]
    work: float


@dataclass(frozen=True)
class Expected:
    """What a set of inputs gives.

    Parameters
    ----------
    want : float32 [rows, columns]
    tolerance : float32 [rows]
        Largest error that is right, of each row.
    """

    want: Array
    tolerance: Array


@dataclass(frozen=True)
class Batch:
    """Candidates with what they are called on; the first is the default.

    Parameters
    ----------
    operands : tuple of Operand
    candidates : tuple of tuple of Call
        All are called to be checked.
    result : int
        The operand that holds every candidate's result.
    expected : tuple of tuple of Expected
        References, each with what every set of inputs gives.
    threads : int
    timed : tuple of (int, int)
        Of each candidate, the first of its calls that is timed and past the last; all by default.
    references : tuple of int
        Of each candidate, by which of the references it is right; the first by default.
    """

    operands: tuple[Operand, ...]
    candidates: tuple[tuple[Call, ...], ...]
    result: int
    expected: tuple[tuple[Expected, ...], ...]
    threads: int = 1
    timed: tuple[tuple[int, int], ...] = ()
    references: tuple[int, ...] = ()

    def functions(self) -> list[str]:
        """Symbols that are called, each once."""
        return list(dict.fromkeys(call.function for calls in self.candidates for call in calls))

    def write(self, path: Path, cold_bytes: int) -> None:
        """Write the program's data; weights are copied until they fill `cold_bytes`."""
        weights = sum(o.arrays[0].nbytes for o in self.operands if o.kind == WEIGHTS)
        copies = max(2, -(-cold_bytes // weights)) if weights else 1
        rows, columns = self.expected[0][0].want.shape
        sizes = (self.operands, self.candidates, self.expected, self.expected[0])
        counts = (*map(len, sizes), copies)
        functions = {name: i for i, name in enumerate(self.functions())}
        with path.open("wb") as file:
            file.write(b"APQTUNE1" + struct.pack("<6i2q", self.threads, *counts, rows, columns))
            for operand in self.operands:
                array = operand.arrays[0]
                code, bits = DL_CODES[array.dtype.kind], 8 * array.dtype.itemsize
                head = struct.pack("<iBBHi", operand.kind, code, bits, 1, array.ndim)
                file.write(head + struct.pack(f"<{array.ndim}qQ", *array.shape, array.nbytes))
                for stored in operand.arrays if operand.kind != SCRATCH else ():
                    file.write(np.ascontiguousarray(stored).data)
            spans = self.timed or [(0, len(calls)) for calls in self.candidates]
            references = self.references or [0] * len(self.candidates)
            for calls, span, reference in zip(self.candidates, spans, references, strict=True):
                file.write(struct.pack("<5i", len(calls), self.result, *span, reference))
                for call in calls:
                    numbers = (functions[call.function], len(call.args), call.work, *call.args)
                    file.write(struct.pack(f"<2id{len(call.args)}i", *numbers))
            for expected in (each for sets in self.expected for each in sets):
                file.write(np.ascontiguousarray(expected.want, np.float32).data)
                file.write(np.ascontiguousarray(expected.tolerance, np.float32).data)


class Linker:
    """Links programs for one system; what they share is compiled once.

    Parameters
    ----------
    tools : Toolchain
    folder : Path
        For the shared objects and the programs.
    """

    def __init__(self, tools: Toolchain, folder: Path) -> None:
        self.tools, self._folder = tools, folder
        sources = [SOURCE, COMMON / "errors.c", *(RUNTIME / "cpu" / f"{n}.c" for n in _THREADS)]
        with compile_sources(tools, sources, folder, (str(COMMON),)) as compiled:
            self._runtime = tuple(compiled())

    def link(
        self, name: str, functions: Sequence[str], kernels: Sequence[Path]
    ) -> tuple[Path, tuple[Path, ...]]:
        """Link a program that calls `functions`; it and what it was linked from."""
        table, program = self._folder / f"{name}_table.c", self._folder / name
        table.write_text(_table(functions))
        made = table.with_suffix(".o")
        flags = ["-O1", "-fPIC", f"-I{COMMON}", "-c", str(table), "-o", str(made)]
        run([*self.tools.cc, *flags])
        objects = (*self._runtime, made, *kernels)
        static = ["-static", "-Wl,--gc-sections", "-z", "noexecstack"]
        libraries = self.tools.link_libraries
        run([*self.tools.cc, *static, *map(str, objects), *libraries, "-o", str(program)])
        return program, objects


def _table(functions: Sequence[str]) -> str:
    """The C source that names the kernels, and the program's start."""
    declared = [f"int {f}(void *, const apq_any *, int32_t, apq_any *);" for f in functions]
    listed = ", ".join(functions)
    return "\n".join([
        '#include "apq_runtime.h"',
        "int apq_tune_main(int argc, char **argv);",
        *declared,
        f"const apq_kernel apq_tune_functions[] = {{{listed}}};",
        f"const int32_t apq_tune_num_functions = {len(functions)};",
        "int main(int argc, char **argv) { return apq_tune_main(argc, argv); }",
        "",
    ])  # fmt: skip


class Report:
    """What a program's lines say.

    Attributes
    ----------
    errors : dict of int to float
        Candidate → its largest error over the tolerance; up to 1 it is right.
    failed : dict of int to str
        Candidate → the error that its kernel reported.
    pairs : dict of int to list of (float, float)
        Candidate → (nanoseconds of the default beside it, its own) of every sample.
    at : int or None
        The candidate that was checked or timed last, None before any.
    done : bool
        Whether the program came to its end.
    odd : int
        Samples of no time or less, which were left out: the clock jumped.
    """

    def __init__(self) -> None:
        self.errors: dict[int, float] = {}
        self.failed: dict[int, str] = {}
        self.pairs: dict[int, list[tuple[float, float]]] = {}
        self.at: int | None = None
        self.done = False
        self.odd = 0
        self._default: float | None = None
        self._open: tuple[int, float, float | None] | None = None

    def hear(self, line: str) -> int | None:
        """Take a line; the candidate of which more is known by it, None where there is none.

        Raises
        ------
        BuildError
            The line is none of a program's.
        """
        word, _, rest = line.strip().partition(" ")
        try:
            return self._heard(word, rest)
        except (ValueError, IndexError) as error:
            raise BuildError(f"the program printed {line[:80]!r}: {error}") from error

    def _heard(self, word: str, rest: str) -> int | None:
        if word == "at":
            self.at = int(rest.split()[1])
        elif word == "checked":
            number, error = rest.split()
            self.errors[int(number)] = float(error)
            return int(number) if not float(error) <= 1 else None
        elif word == "failed":
            number, _, text = rest.partition(" ")
            self.failed[int(number)] = text or "no message"
            return int(number)
        elif word == "t":
            number, time = rest.split()
            return self._sample(int(number), float(time))
        elif word == "done":
            self.done = True
        elif word not in ("apq-tune", ""):
            raise ValueError("not a line of a program that tunes")
        return None

    def _sample(self, number: int, time: float) -> int | None:
        """Samples alternate: the default, a candidate, the default; both neighbours count."""
        if number == 0:
            ended = self._close(time)
            self._default = time
        else:
            ended = self._close(None)
            self._open, self._default = (number, time, self._default), None
        return ended

    def _close(self, after: float | None) -> int | None:
        """Note the sample that is open; its candidate, None where nothing is to be noted."""
        if self._open is None:
            return None
        (number, time, before), self._open = self._open, None
        beside = [t for t in (before, after) if t is not None]
        if not beside or not all(0 < t < float("inf") for t in (time, *beside)):
            self.odd += 1
            return None
        self.pairs.setdefault(number, []).append((sum(beside) / len(beside), time))
        return number

    def end(self) -> None:
        """No sample of the last candidate follows."""
        self._close(None)


def read_report(lines: Iterable[str]) -> Report:
    """Read the lines of a program, of one that ended early too.

    Raises
    ------
    BuildError
        A line is none of a program's.
    """
    report = Report()
    for line in lines:
        report.hear(line)
    report.end()
    return report
