"""Executed instructions as straight pieces of code that repeat: what llvm-mca can judge."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from apq_tvm.bench.trace import Instruction

DOT = {
    "smmla": ("smmla", "ummla", "usmmla"),
    "sdot": ("sdot", "udot", "usdot"),
    "smull": ("smull", "smull2", "smlal", "smlal2", "umull", "umull2", "umlal", "umlal2"),
}
"""Mnemonics by the instruction of `DeviceProfile.macs_per_cycle` whose peak is theirs."""


@dataclass(frozen=True)
class Body:
    """Instructions of one loop that are executed equally often, in order of address.

    Blocks of a loop that run in only some of its iterations are bodies of their own; so is the code
    outside of all loops.
    """

    instructions: tuple[Instruction, ...]

    @property
    def count(self) -> int:
        """Times it is executed."""
        return self.instructions[0].count

    @property
    def function(self) -> str:
        """The function it is in."""
        return self.instructions[0].function

    def uses(self, mnemonics: Iterable[str]) -> int:
        """Instructions with one of these mnemonics."""
        wanted = set(mnemonics)
        return sum(mnemonic(i) in wanted for i in self.instructions)


def mnemonic(instruction: Instruction) -> str:
    """First word of an instruction."""
    return instruction.text.split(maxsplit=1)[0]


def bodies(
    instructions: Sequence[Instruction],
    target: Callable[[Instruction], int | None] | None = None,
) -> list[Body]:
    """Split executed instructions into bodies.

    Parameters
    ----------
    instructions : sequence of Instruction
        In order of address.
    target : callable, optional
        Where an instruction jumps to; A64's `branch_target` by default.

    A loop reaches from the target of a backward branch to the last branch back to it, as LLVM and
    gcc lay loops out; an instruction belongs to the smallest loop around it.
    """
    target = target or branch_target
    found: list[Body] = []
    for _, group in groupby(instructions, key=lambda i: i.function):
        code = list(group)
        loops = _loops(code, target)
        groups: dict[tuple[tuple[int, int], int], list[Instruction]] = {}
        for instruction in code:
            around = [(a, b) for a, b in loops if a <= instruction.address <= b]
            inner = min(around, key=lambda loop: loop[1] - loop[0], default=(0, 0))
            groups.setdefault((inner, instruction.count), []).append(instruction)
        found += [Body(tuple(group)) for group in groups.values()]
    return found


def branch_target(instruction: Instruction) -> int | None:
    """Where a direct branch goes, None for any other instruction (calls too)."""
    match = re.fullmatch(
        r"(?:b|b\.\w+|cbn?z \w+,|tbn?z \w+, #\w+,) (0x[0-9a-f]+)", instruction.text
    )
    return int(match[1], 16) if match else None


def _loops(
    code: Sequence[Instruction], jump: Callable[[Instruction], int | None]
) -> list[tuple[int, int]]:
    """First and last address of every loop of a function."""
    ends: dict[int, int] = {}
    addresses = {i.address for i in code}
    for instruction in code:
        target = jump(instruction)
        if target in addresses and target <= instruction.address:
            ends[target] = max(ends.get(target, 0), instruction.address)
    return list(ends.items())
