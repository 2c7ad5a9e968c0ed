"""A batch of candidates as one static C program and its file of tensors, and what it prints.

``program.c`` says what the lines mean. The runtime beside it is a module's own, so that threads and
scratch memory are what they will be.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from apq_tvm.bench.clib import TYPE_CODES
from apq_tvm.codegen.build.library import compile_sources
from apq_tvm.codegen.build.toolchain import Toolchain, run
from apq_tvm.codegen.package.folder import COMMON, RUNTIME
from apq_tvm.errors import BuildError
from apq_tvm.types import Array

SOURCE = Path(__file__).with_suffix(".c")

_THREADS = (
    *("cores", "forks", "launch", "openmp", "places", "pool", "team", "threads", "workspace"),
    "worth",
)
"""Sources of the runtime that kernels need: parallel loops and scratch memory."""

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
    expected : tuple of Expected
        For each set of inputs.
    threads : int
    timed : tuple of (int, int)
        Of each candidate, the first of its calls that is timed and past the last; all by default.
    """

    operands: tuple[Operand, ...]
    candidates: tuple[tuple[Call, ...], ...]
    result: int
    expected: tuple[Expected, ...]
    threads: int = 1
    timed: tuple[tuple[int, int], ...] = ()

    def functions(self) -> list[str]:
        """Symbols that are called, each once."""
        return list(dict.fromkeys(call.function for calls in self.candidates for call in calls))

    def write(self, path: Path, cold_bytes: int) -> None:
        """Write the program's data; weights are copied until they fill `cold_bytes`."""
        weights = sum(o.arrays[0].nbytes for o in self.operands if o.kind == WEIGHTS)
        copies = max(2, -(-cold_bytes // weights)) if weights else 1
        rows, columns = self.expected[0].want.shape
        counts = (len(self.operands), len(self.candidates), len(self.expected), copies)
        functions = {name: i for i, name in enumerate(self.functions())}
        with path.open("wb") as file:
            file.write(b"APQTUNE1" + struct.pack("<5i2q", self.threads, *counts, rows, columns))
            for operand in self.operands:
                array = operand.arrays[0]
                code, bits = TYPE_CODES[array.dtype.kind], 8 * array.dtype.itemsize
                head = struct.pack("<iBBHi", operand.kind, code, bits, 1, array.ndim)
                file.write(head + struct.pack(f"<{array.ndim}qQ", *array.shape, array.nbytes))
                for stored in operand.arrays if operand.kind != SCRATCH else ():
                    file.write(np.ascontiguousarray(stored).data)
            spans = self.timed or [(0, len(calls)) for calls in self.candidates]
            for calls, span in zip(self.candidates, spans, strict=True):
                file.write(struct.pack("<4i", len(calls), self.result, *span))
                for call in calls:
                    numbers = (functions[call.function], len(call.args), call.work, *call.args)
                    file.write(struct.pack(f"<2id{len(call.args)}i", *numbers))
            for expected in self.expected:
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


@dataclass
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

    errors: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    pairs: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    at: int | None = None
    done: bool = False
    odd: int = 0


def read_report(lines: Iterable[str]) -> Report:
    """Read the lines of a program, of one that ended early too.

    Raises
    ------
    BuildError
        A line is none of a program's.
    """
    report, samples = Report(), list[tuple[int, float]]()
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        try:
            _read_line(report, samples, word, rest)
        except ValueError as error:
            raise BuildError(f"the program printed {line[:80]!r}: {error}") from error
    _pair(report, samples)
    return report


def _read_line(report: Report, samples: list[tuple[int, float]], word: str, rest: str) -> None:
    if word == "at":
        report.at = int(rest.split()[1])
    elif word == "checked":
        number, error = rest.split()
        report.errors[int(number)] = float(error)
    elif word == "failed":
        number, _, text = rest.partition(" ")
        report.failed[int(number)] = text or "no message"
    elif word == "t":
        number, time = rest.split()
        samples.append((int(number), float(time)))
    elif word == "done":
        report.done = True
    elif word not in ("apq-tune", ""):
        raise ValueError("not a line of a program that tunes")


def _pair(report: Report, samples: Sequence[tuple[int, float]]) -> None:
    """Samples alternate: the default, a candidate, the default, ...; both neighbours count."""
    for i in range(1, len(samples), 2):
        beside = [time for number, time in samples[i - 1 : i + 2 : 2] if number == 0]
        number, time = samples[i]
        if not beside or not all(0 < t < float("inf") for t in (time, *beside)):
            report.odd += 1
            continue
        report.pairs.setdefault(number, []).append((sum(beside) / len(beside), time))
