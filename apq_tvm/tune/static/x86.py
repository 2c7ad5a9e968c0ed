"""What a kernel for x86-64 executes, counted where it runs: no emulator has all of AVX-512.

LLVM writes the kernel as assembly, and a counter goes in front of every straight piece of it, by
instructions that change no flag. The program is run once; its times would mean nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apq_tvm.bench.emulator import COMPILERS, kernel_arguments, kernel_main
from apq_tvm.bench.trace import Instruction, run, run_in
from apq_tvm.errors import BadTarget
from apq_tvm.types import Array, DeviceProfile

COUNTER = """\tleaq\t-128(%rsp), %rsp
\tpushq\t%rax
\tmovq\tapq_counts+{at}(%rip), %rax
\tleaq\t1(%rax), %rax
\tmovq\t%rax, apq_counts+{at}(%rip)
\tpopq\t%rax
\tleaq\t128(%rsp), %rsp
"""
"""Below the red zone of 128 bytes, which leaves of the call tree use without asking."""

_TABLE = """\t.bss
\t.globl\tapq_counts
\t.p2align\t6
apq_counts:
\t.zero\t{bytes}
\t.section\t.rodata
\t.globl\tapq_counts_size
\t.p2align\t3
apq_counts_size:
\t.quad\t{count}
"""

_LABEL = re.compile(r"^(\.LBB\w+|[A-Za-z_][\w.$]*):")
_TEXT = re.compile(r'^\t\.(text|section\t(\.text[\w.]*|"\.text[^"]*"))')
_OTHER = re.compile(r"^\t\.(section|data|bss)\b")
_LINES = re.compile(r"^\t\.(file|loc)\b")
"""Of LLVM's debugging information, which GNU's assembler reads only if told its version."""

_JUMP = re.compile(r"^j\w+\s+(\.LBB\w+)$")
_ENDS = re.compile(r"^(j\w+|ret\w*|ud2)\b")


def branch_target(instruction: Instruction) -> int | None:
    """Where a jump goes, as `pieces` numbers instructions; None for any other instruction."""
    match = re.search(r"# to (\d+)$", instruction.text)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Pieces:
    """Assembly, split into pieces that run as a whole.

    Parameters
    ----------
    counted : str
        The assembly with a counter in front of each.
    code : tuple of tuple of (str, str)
        Of each piece its instructions, with their function.
    places : mapping of str to int
        Labels → the number of the instruction that they stand before.
    """

    counted: str
    code: tuple[tuple[tuple[str, str], ...], ...]
    places: Mapping[str, int]


def pieces(assembly: str) -> Pieces:
    """Split assembly of LLVM's, in AT&T's syntax."""
    made: list[str] = []
    code: list[list[tuple[str, str]]] = []
    places: dict[str, int] = {}
    inside, fresh, function, number = False, True, "", 0
    for line in assembly.splitlines():
        inside = bool(_TEXT.match(line)) or (inside and not _OTHER.match(line))
        label = _LABEL.match(line)
        if label and inside:
            places[label[1]], fresh = number, True
            function = function if label[1].startswith(".L") else label[1]
        text = line.partition("#")[0].strip()
        if inside and line.startswith("\t") and text and not text.startswith("."):
            if fresh:
                made.append(COUNTER.format(at=8 * len(code)).rstrip("\n"))
                code.append([])
            code[-1].append((re.sub(r"\s+", " ", text), function))
            fresh, number = bool(_ENDS.match(text)), number + 1
        if not _LINES.match(line):
            made.append(line)
    made.append(_TABLE.format(bytes=8 * len(code) + 8, count=len(code)))
    return Pieces("\n".join(made), tuple(map(tuple, code)), places)


def executed(
    func: Any, profile: DeviceProfile, arrays: Sequence[Array], folder: Path
) -> list[Instruction]:
    """Run a kernel once on one thread, and count what it executes.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Scheduled.
    profile : DeviceProfile
        Whose code runs on this machine.
    arrays : sequence of ndarray
        Its arguments.
    folder : Path
        For the program.

    Returns
    -------
    list of Instruction
        Those that ran; their addresses are numbers, and jumps to places in the kernel say where to
        in a comment.

    Raises
    ------
    BadTarget
        This machine cannot run the code.
    BuildError
        A tool is missing or failed.
    """
    import tvm

    from apq_tvm.codegen.build.pipeline import build

    check_runs_here(profile)
    target = tvm.target.Target(dict(profile.target))
    mod = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
    plain, counted, program = folder / "kernel.s", folder / "counted.s", folder / "counted"
    build(mod, target, checked=False).write_to_file(str(plain), "asm")
    found = pieces(plain.read_text())
    counted.write_text(found.counted)
    sources = map(str, (kernel_main("x86_64"), counted, Path(__file__).with_name("counts.c")))
    run([COMPILERS["x86_64"], "-static", *sources, "-lm", "-o", str(program)])
    (folder / "calls").write_bytes(kernel_arguments(tuple(arrays)))
    run_in(folder, [str(program), "calls", "results"])
    counts = [int(line) for line in (folder / "counts").read_text().split()]
    return _ran(found, counts)


def _ran(found: Pieces, counts: Sequence[int]) -> list[Instruction]:
    """The instructions of pieces that ran."""
    number, instructions = 0, []
    for piece, count in zip(found.code, counts, strict=True):
        for text, function in piece:
            jump = _JUMP.match(text)
            to = found.places.get(jump[1]) if jump else None
            shown = text if to is None else f"{text} # to {to}"
            if count:
                instructions.append(Instruction(number, shown, function, count))
            number += 1
    return instructions


def check_runs_here(profile: DeviceProfile) -> None:
    """Refuse code that this machine has no instructions for.

    Raises
    ------
    BadTarget
        Names what is missing.
    """
    from apq_tvm.schedules.devices import find_profile

    if os.uname().machine != profile.arch:
        raise BadTarget(f"code for {profile.name} is counted where it runs, on {profile.arch}")
    lacks = sorted(profile.features - find_profile("host").features)
    if lacks:
        raise BadTarget(
            f"code for {profile.name} is counted where it runs, and this machine lacks "
            f"{', '.join(lacks)}: no emulator has all of it"
        )
