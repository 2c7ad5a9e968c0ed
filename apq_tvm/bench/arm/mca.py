"""Cycles of straight code on a core's pipeline, by LLVM's machine code analyser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apq_tvm.bench.arm.loops import Body
from apq_tvm.errors import BadInput, BuildError

VERSION = 22
"""Scheduling models change between versions of LLVM, and with them every figure."""

INSTALL = "make arm-tools (or --mca PATH, or APQ_LLVM_MCA)"
INSTALLED = Path.home() / ".local" / "share" / "apq_tvm" / "llvm-22" / "llvm-mca-22"
"""Where ``.ci/install-arm-tools`` puts it."""

# Cycles per iteration are taken between these two, when the pipeline is full.
_WARM, _LONG = 50, 150


@dataclass(frozen=True)
class Analyser:
    """llvm-mca for one core.

    Parameters
    ----------
    path : str
        Of llvm-mca.
    mcpu : str
        LLVM's name of the core.
    arch : str
        First part of LLVM's triple.
    iterations : (int, int)
        Of a piece of code; cycles are taken between the two.
    """

    path: str
    mcpu: str
    arch: str = "aarch64"
    iterations: tuple[int, int] = (_WARM, _LONG)

    def model(self) -> str:
        """Whose scheduling model LLVM uses for the core, ``"A57"`` for a Cortex-A76."""
        resources: list[str] = self._run("nop\n", 1)["TargetInfo"]["Resources"]
        return resources[0].split("Unit")[0]

    def cycles(self, judged: Sequence[Body]) -> list[float]:
        """Cycles of one execution of each body, repeated without end, from the level-1 cache."""
        return self._steady(assembly(judged, comment="#" if self.arch == "x86_64" else "//"))

    def _steady(self, text: str) -> list[float]:
        """Cycles per iteration of every region of `text`, once the pipeline is full."""
        fewer, more = self.iterations
        warm, long = (self._run(text, count)["CodeRegions"] for count in self.iterations)
        return [
            (b["SummaryView"]["TotalCycles"] - a["SummaryView"]["TotalCycles"]) / (more - fewer)
            for a, b in zip(warm, long, strict=True)
        ]

    def _run(self, text: str, iterations: int) -> dict[str, Any]:
        command = [self.path, f"-mtriple={self.arch}", f"-mcpu={self.mcpu}", "-json",
                   f"-iterations={iterations}", "-"]  # fmt: skip
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"llvm-mca for {self.mcpu}: {done.stderr.strip()[:2000]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def find_analyser(mcpu: str, path: str = "", arch: str = "aarch64") -> Analyser:
    """llvm-mca by `path`, ``APQ_LLVM_MCA``, on PATH, or as ``make arm-tools`` installs it.

    Raises
    ------
    BadInput
        It is missing, or of another version.
    """
    named = path or os.environ.get("APQ_LLVM_MCA", "")
    found = shutil.which(named) if named else (shutil.which("llvm-mca-22") or str(INSTALLED))
    if found is None or not Path(found).is_file():
        raise BadInput(f"llvm-mca {named or VERSION} not found; {INSTALL}")
    done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"LLVM version (\d+)", done.stdout)
    if match is None or int(match[1]) != VERSION:
        version = match[1] if match else "unknown"
        raise BadInput(
            f"{found} is of LLVM {version}, whose models differ from {VERSION}'s; {INSTALL}"
        )
    return Analyser(found, mcpu, arch)


def assembly(judged: Sequence[Body], cycles: Sequence[float] = (), comment: str = "//") -> str:
    """Write bodies as regions of llvm-mca, with their cycles, if known, in a comment.

    Branches jump to themselves: where they go does not matter to llvm-mca.
    """
    lines = []
    for i, body in enumerate(judged):
        note = f"; {cycles[i]:g} cycles each" if cycles else ""
        lines.append(f"{comment} {body.function}: executed {body.count} times{note}")
        lines.append(f"{comment} LLVM-MCA-BEGIN {_region(i)}")
        for instruction in body.instructions:
            lines.append("\t" + re.sub(r"(?<!#)0x[0-9a-f]+$", ".", instruction.text))
        lines.append(f"{comment} LLVM-MCA-END {_region(i)}")
    return "\n".join(lines) + "\n"


def _region(i: int) -> str:
    return f"body{i}"
