"""Straight pieces of 64-bit Arm assembly: registers for values, and an order for short windows.

LLVM's order and registers are not to be had otherwise: it moves loads of four vectors so far up
that other vectors are spilled, copies masks that ``bsl`` overwrites, and does not know that a
Cortex-A55 completes in order. A `Straight` is written with values; `lines` gives them registers.

The order is made for a Cortex-A55: instructions are issued in order, two a cycle, none completes
before one that was issued earlier, and latencies and pipes are those of LLVM's AArch64SchedA55.td.
It also brings independent instructions together for cores that see only some of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class Value:
    """A vector that one instruction makes; ``{v}`` prints as ``v7``, ``{v:z}`` as ``z7``.

    Parameters
    ----------
    operand : int or None
        Number of an operand of the assembly which it is.
    register : int or None
        The register that it always is in.
    """

    def __init__(self, operand: int | None = None, register: int | None = None) -> None:
        self.operand = operand
        self.given = operand is not None or register is not None
        self.register = -1 if register is None else register
        self.run: list[Value] = [self]
        """Values in registers one after another, this one among them."""

    def __format__(self, kind: str) -> str:
        if self.operand is not None:
            return f"${{{self.operand}:z}}" if kind == "z" else f"${self.operand}"
        return f"{kind or 'v'}{self.register}"


@dataclass
class Instruction:
    """Some text with places for values.

    Parameters
    ----------
    text : str
        ``{d}`` or ``{d0}`` and on for what it makes, ``{0}`` and on for what it reads.
    made, read : list of Value
    tied : Value or None
        What is read and overwritten.
    """

    text: str
    made: list[Value]
    read: list[Value]
    tied: Value | None = None

    @property
    def mnemonic(self) -> str:
        """Of its last line."""
        return self.text.rpartition("\n")[2].split()[0]

    def line(self) -> str:
        """The text, once all values have registers."""
        names = {f"d{i}": v for i, v in enumerate(self.made)}
        if self.made:
            names["d"] = self.made[0]
        return self.text.format(*self.read, **names)


class Straight:
    """A program without branches."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []

    def make(self, text: str, *read: Value) -> Value:
        """What an instruction makes of some values."""
        made = Value()
        self.instructions.append(Instruction(text, [made], list(read)))
        return made

    def change(self, text: str, old: Value, *read: Value) -> Value:
        """The same, in the register of `old`, of which this is the last use."""
        made = Value()
        self.instructions.append(Instruction(text, [made], [old, *read], old))
        return made

    def make_run(self, text: str, count: int) -> list[Value]:
        """Values in registers one after another, made by one instruction."""
        made = together([Value() for _ in range(count)])
        self.instructions.append(Instruction(text, made, []))
        return made

    def make_into(self, made: Value, text: str, *read: Value) -> None:
        """As `make`, into one of `together`."""
        self.instructions.append(Instruction(text, [made], list(read)))

    def write(self, text: str, *read: Value) -> None:
        """An instruction that changes an operand."""
        self.instructions.append(Instruction(text, [], list(read)))

    def lines(self, registers: int, ahead: int = 0, spare: int = 0) -> list[str]:
        """Assembly in registers v0 and on.

        Parameters
        ----------
        registers : int
        ahead : int
            How many instructions are looked at for the next one; 0 leaves them as written.
        spare : int
            Registers left to the instruction that is next as written.

        Raises
        ------
        RuntimeError
            There are too few: a mistake in a program.
        """
        if ahead:
            self.instructions = _ordered(self.instructions, registers, ahead, spare)
        _allocate(self.instructions, registers)
        return [line for i in self.instructions for line in i.line().split("\n")]


def together(values: list[Value]) -> list[Value]:
    """Values that need registers one after another."""
    for value in values:
        value.run = values
    return values


def _last_uses(instructions: Sequence[Instruction]) -> dict[Value, int]:
    last: dict[Value, int] = {}
    for at, each in enumerate(instructions):
        for value in (*each.made, *each.read):
            last[value] = at
    return last


def _allocate(instructions: Sequence[Instruction], registers: int) -> None:
    last, free = _last_uses(instructions), set(range(registers))
    for at, each in enumerate(instructions):
        dying = {v for v in each.read if not v.given and last[v] == at}
        if each.tied is not None:
            assert each.tied in dying, f"used again after {each.text}"
            dying.discard(each.tied)
            (made,) = each.made
            made.register = each.tied.register
        free |= {v.register for v in dying}
        for value in each.made:
            if value.register >= 0:
                continue
            start = _place(free, len(value.run))
            if start is None:
                raise RuntimeError(f"more than {registers} vectors live at {each.text}")
            for i, one in enumerate(value.run):
                one.register = start + i
                free.discard(start + i)
        free |= {v.register for v in each.made if last[v] == at}


def _place(free: set[int], count: int) -> int | None:
    """The first of so many free registers in a row: in the shortest stretch, to spare long ones."""
    firsts = [r for r in free if r - 1 not in free]
    lengths = {r: next(n for n in range(1, 33) if r + n not in free) for r in firsts}
    fitting = [(length, r) for r, length in lengths.items() if length >= count]
    return min(fitting)[1] if fitting else None


_LATENCIES = {"and": 1, "mov": 1, "orr": 1, "ushr": 2, "shl": 2, "sshr": 2}
_HALVES = {"ushr", "shl", "fmla", "fmul", "fcvtl", "sshr"}
"""Instructions of which there may be two in a cycle."""


def _dependencies(
    instructions: Sequence[Instruction],
) -> tuple[dict[int, set[int]], dict[Value, int]]:
    """What each instruction comes after, both by ``id``, and how often values are read."""
    maker = {v: i for i in instructions for v in i.made}
    before: dict[int, set[int]] = {id(i): set() for i in instructions}
    readers: dict[Value, list[Instruction]] = {}
    last: Instruction | None = None
    for each in instructions:
        for value in each.read:
            if value in maker:
                before[id(each)].add(id(maker[value]))
            readers.setdefault(value, []).append(each)
        if not each.made:  # changes an operand: in turn
            if last is not None:
                before[id(each)].add(id(last))
            last = each
    for each in instructions:
        if each.tied is not None:
            before[id(each)] |= {id(r) for r in readers[each.tied] if r is not each}
    return before, {v: len(r) for v, r in readers.items()}


def _ordered(
    instructions: list[Instruction], registers: int, ahead: int, spare: int
) -> list[Instruction]:
    """An order in which few of them wait, with as many values alive as there are registers."""
    before, left = _dependencies(instructions)
    finish: dict[int, int] = {}
    order: list[Instruction] = []
    waiting, cycle, completed, live = list(instructions), 0, 0, 0
    slots, vector, loads = 2, 2, 1
    while waiting:
        best = None
        for each in waiting[:ahead]:
            if not all(b in finish for b in before[id(each)]):
                continue
            grows = _growth(each, left)
            most = registers if each is waiting[0] else registers - spare
            if grows > 0 and live + grows > most:
                continue
            latency = _LATENCIES.get(each.mnemonic, 4)
            ready = max([finish[b] for b in before[id(each)]], default=0)
            start = max(cycle, ready, completed - latency)
            if start == cycle and not _fits(each, slots, vector, loads):
                start += 1
            if best is None or start < best[0]:
                best = (start, each, latency, grows)
            if start == cycle:
                break
        if best is None:
            raise RuntimeError(f"more than {registers} vectors live")
        start, each, latency, grows = best
        if start > cycle:
            cycle, slots, vector, loads = start, 2, 2, 1
        slots -= 1
        if each.mnemonic == "ldr":
            loads -= 1
        else:
            vector -= 1 if each.mnemonic in _HALVES else 2
        finish[id(each)] = cycle + latency
        completed = max(completed, cycle + latency)
        live += grows
        for value in set(each.read):
            if value in left:
                left[value] -= each.read.count(value)
        waiting.remove(each)
        order.append(each)
    return order


def _fits(each: Instruction, slots: int, vector: int, loads: int) -> bool:
    if each.mnemonic == "ldr":
        return slots > 0 and loads > 0
    return slots > 0 and vector >= (1 if each.mnemonic in _HALVES else 2)


def _growth(each: Instruction, left: dict[Value, int]) -> int:
    """Registers that an instruction takes, less those it sets free."""
    taken = 0
    for value in each.made:
        if value.run[0] is value or len(value.run) == 1:
            taken += len(value.run)
    freed = sum(not v.given and left[v] == each.read.count(v) for v in set(each.read))
    return taken - freed
