"""Machine code of a GPU's image: its instructions, its innermost loop over weights, what it takes.

By NVIDIA's own disassembler (``nvdisasm`` and ``cuobjdump``, CUDA Binary Utilities), from PyPI or
``PATH``; neither wants a GPU.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from apq_tvm.codegen.build.toolchain import run
from apq_tvm.errors import BuildError

WEIGHT_LOAD_BYTES = 16
"""A lane's load of weights."""

_WEIGHT_LOAD = re.compile(r"LDG\.\S*LTC(?:128|256)B\S*\.128")
"""``apq_read_weights`` of ``mma_s8.cuh`` alone asks for long lines of the second cache."""

_PIPES = {
    "tensor": r"[HIBDQ]MMA|HGMMA|IGMMA",
    "memory": r"LD|ST|RED|ATOM|CCTL|MEMBAR|SHFL",
    "float": r"F(?!2|LO)|HFMA|HADD|HMUL|HMNMX|MUFU",
    "convert": r"I2F|F2I|F2F|I2I|FRND|POPC|FLO|BREV",
    "control": r"BRA|EXIT|BAR|BSSY|BSYNC|WARPSYNC|CALL|RET|NOP|DEPBAR|ERRBAR|YIELD|JMP|BREAK",
}
"""Beginnings of mnemonics; all others compute integers and addresses (CUDA Binary Utilities,
"Instruction Set Reference")."""


@dataclass(frozen=True)
class Loop:
    """The innermost loop with weights, or the whole kernel where none has any.

    Parameters
    ----------
    instructions : tuple of str
    repeats : bool
        False: it is no loop.
    """

    instructions: tuple[str, ...]
    repeats: bool

    @property
    def weight_loads(self) -> int:
        """16-byte loads of weights by a lane."""
        return sum(map(_is_weight_load, self.instructions))

    @property
    def pipes(self) -> Mapping[str, int]:
        """Instructions by what executes them."""
        return Counter(map(_pipe, self.instructions))

    @property
    def loads_in_flight(self) -> int:
        """Most weight loads of a lane that nothing has used yet."""
        rounds = 2 if self.repeats else 1
        waiting: list[int] = []  # their first registers
        most = 0
        for text in self.instructions * rounds:
            used = {int(r) for r in re.findall(r"\bR(\d+)", text)}
            if _is_weight_load(text):
                first = _registers(text)[0]
                waiting = [r for r in waiting if not used & set(range(r, r + 4))]
                waiting.append(first)
                most = max(most, len(waiting))
            else:
                waiting = [r for r in waiting if not used & set(range(r, r + 4))]
        return most


@dataclass(frozen=True)
class Kernel:
    """One kernel of an image.

    Parameters
    ----------
    name : str
    registers : int
        Of a thread.
    local_bytes : int
        Of a thread, in memory: spilled registers and arrays.
    shared_bytes : int
        Of a block.
    loop : Loop
    text : str
        Disassembled.
    """

    name: str
    registers: int
    local_bytes: int
    shared_bytes: int
    loop: Loop
    text: str


def disassemble(image: bytes) -> dict[str, Kernel]:
    """Read every kernel of an image.

    Raises
    ------
    BuildError
        A tool is missing; with the line that installs it.
    """
    with tempfile.TemporaryDirectory(prefix="apq-sass-") as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(image)
        text = run([find_tool("nvdisasm"), "-c", str(path)])
        usage = run([find_tool("cuobjdump"), "-res-usage", str(path)])
    resources = dict(re.findall(r"Function (\S+):\s*\n\s*(REG:.*)", usage))
    kernels = {}
    for section in re.split(r"\n\s*\.section\s+\.text\.", text)[1:]:
        name = re.split(r"[,\s]", section, maxsplit=1)[0]
        found = {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", resources.get(name, ""))}
        local = found.get("LOCAL", 0) + found.get("STACK", 0)
        shared, registers = found.get("SHARED", 0), found.get("REG", 0)
        kernels[name] = Kernel(name, registers, local, shared, _weight_loop(section), section)
    return kernels


def find_tool(name: str) -> str:
    """Path of one of CUDA's binary utilities.

    Raises
    ------
    BuildError
        It is not installed.
    """
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(place).glob(f"*/bin/{name}")):
            return str(path)
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"{name} is not installed: pip install 'apq-tvm[sass]'")
    return found


def _weight_loop(section: str) -> Loop:
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in section.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        if instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            lines.append(instruction[1])
    loops = []
    for at, text in enumerate(lines):
        jump = re.search(r"BRA.*`\((\.L_\w+)\)", text)
        if jump and labels.get(jump[1], at + 1) <= at:
            loops.append(Loop(tuple(lines[labels[jump[1]] : at + 1]), True))
    loops = [loop for loop in loops if loop.weight_loads]
    if loops:
        return max(loops, key=lambda loop: (loop.weight_loads, -len(loop.instructions)))
    return Loop(tuple(lines), False)


def _is_weight_load(text: str) -> bool:
    return _WEIGHT_LOAD.search(text) is not None


def _registers(text: str) -> Sequence[int]:
    return [int(r) for r in re.findall(r"\bR(\d+)", text)]


def _pipe(text: str) -> str:
    mnemonic = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]
    for pipe, beginning in _PIPES.items():
        if re.match(beginning, mnemonic):
            return pipe
    return "integer"
