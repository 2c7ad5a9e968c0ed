"""Groups of 4-bit codes and one table for cores that issue in order, as written assembly.

A Cortex-A55 completes in order: a mask (1 cycle) behind a lookup or a product (4 cycles) waits for
it (`apq_tvm.tensorize.arm.written.in_order`). So all indices of two units are made at once, then
there are their lookups and products, four lookups ahead, and beside them the loads for the next
units. The two belong to two groups: a sum has time for its last addition.

A group's sum begins at `MAGIC` and becomes ``xs sum`` by one ``fmla``
(`apq_tvm.tensorize.arm.nonlinear.units_intrinsic`), another one adds it times the weights' scale;
both stand among the lookups of the next units. The unit of the whole is put in with the last sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from apq_tvm.tensorize.arm.written.codebook_asm import in_order_load, in_order_start
from apq_tvm.tensorize.arm.written.straight import Straight, Value
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.lookup_span import EXTRA

POINTERS = ("codes", "scales", "x", "xs", "extra")
"""Operands 1 and on; 0 is the sums."""

CONSTANTS = ("table", "nibble", "unit")
"""Vectors after them."""

LONGEST = 8
"""Units of a program."""

GROUPS = (2, 4, 5, 6, 8)
"""Of a program: loads of several scales then end with the last one."""

REGISTERS = 31 - len(CONSTANTS)
"""Vectors that it overwrites."""

_ABREAST = 2
"""Groups at a time."""

_WAITING = 3
"""Lookups before the product with the first of them."""

_FIRST_LOAD = 10
"""Lookups and products before the first load for the next units: it needs a register."""

_SCALING = (0, 0, 1, 1, 5, 9)
"""Lookups and products before the instructions that scale two sums."""


def program(groups: int, units: int) -> list[str]:
    """The lines of assembly.

    Parameters
    ----------
    groups : int
    units : int
        Of a group.
    """
    return _Program(groups, units).lines()


_Write = Callable[[], None]


@dataclass
class _Step:
    """A unit of each of some groups: what is loaded for it."""

    groups: list[int]
    unit: int
    codes: dict[int, list[Value]] = field(default_factory=dict)
    x: dict[int, list[Value]] = field(default_factory=dict)


class _Program:
    def __init__(self, groups: int, units: int) -> None:
        self.code, self.groups, self.units, self.early = Straight(), groups, units, True
        self.pointer = {n: f"${i + 1}" for i, n in enumerate(POINTERS)}
        first = 1 + len(POINTERS)
        self.constant = {n: Value(first + i) for i, n in enumerate(CONSTANTS)}
        self.total: Value | None = None
        self.sums: dict[int, Value] = {}
        self.factors: dict[tuple[str, int], Value] = {}
        self.steps = [
            _Step(list(range(first, min(groups, first + _ABREAST))), unit)
            for first in range(0, groups, _ABREAST)
            for unit in range(units)
        ]

    def load(self, name: str, offset: int, nbytes: int = 16) -> Value:
        """A vector, or the rest of one."""
        if self.early:
            text = f"ldr {{d:q}}, [{self.pointer[name]}, #{offset}]"
        else:
            text = in_order_load(name, self.pointer[name], offset)
        kind = {16: "q", 8: "d", 4: "s"}[min(16, nbytes)]
        return self.code.make(text.replace("{d:q}", f"{{d:{kind}}}"))

    def lines(self) -> list[str]:
        """All of it, in order."""
        s, scaling = self.code, list[_Write]()
        others = in_order_start(self.pointer)
        for write in self.loads(self.steps[0]):
            write()
            if others:
                s.write(others.pop(0))
        for line in others:
            s.write(line)
        self.early = False
        for at, step in enumerate(self.steps):
            loads = self.loads(self.steps[at + 1]) if at + 1 < len(self.steps) else []
            last = step.unit + 1 == self.units
            if last:
                loads += self.factor_loads(step.groups)
            starts = [self.start(g) for g in step.groups] if step.unit == 0 else []
            self.multiply(step, starts, loads, scaling)
            scaling = self.scaling(step.groups) if last else []
        for write in scaling:
            write()
        assert self.total is not None
        s.write("fmla $0.4s, {0}.4s, {1}.4s", self.total, self.constant["unit"])
        return s.lines(REGISTERS)

    def loads(self, step: _Step) -> list[_Write]:
        """What writes the loads of a step, one each."""

        def codes(g: int, i: int) -> _Write:
            at = 64 * (g * self.units + step.unit) + 16 * i
            return lambda: step.codes.setdefault(g, []).append(self.load("codes", at))

        def x(g: int, half: int) -> _Write:
            at = UNIT_K * (g * self.units + step.unit) + 16 * half
            return lambda: step.x.setdefault(g, []).append(self.load("x", at))

        found = [codes(g, i) for i in range(4) for g in step.groups]
        return found + [x(g, half) for half in range(2) for g in step.groups]

    def start(self, g: int) -> _Write:
        """What writes the load of what a sum begins at."""
        return lambda: self.sums.update({g: self.load("extra", 4 * EXTRA * g)})

    def multiply(
        self, step: _Step, starts: list[_Write], loads: list[_Write], scaling: list[_Write]
    ) -> None:
        """Indices, lookups and products, with loads and what scales the sums before these."""
        s, c = self.code, self.constant
        low, high = {}, {}
        order = [(g, i) for i in range(4) for g in step.groups]
        for g, i in order:
            code = step.codes[g][i]
            low[g, i] = s.make("and {d}.16b, {0}.16b, {1}.16b", code, c["nibble"])
        for g, i in order:
            high[g, i] = s.change("ushr {d}.16b, {0}.16b, #4", step.codes[g][i])
        lookups = [(half, g, i) for i in range(4) for half in range(2) for g in step.groups]
        waiting: list[tuple[int, int, int, Value]] = []
        places, count = list(_SCALING), 0

        def between() -> None:
            nonlocal count
            while scaling and places[0] <= count:
                places.pop(0)
                scaling.pop(0)()
            count += 1
            if starts:
                starts.pop(0)()
            elif loads and count > _FIRST_LOAD:
                loads.pop(0)()

        def product() -> None:
            half, g, i, value = waiting.pop(0)
            text = f"sdot {{d}}.4s, {{1}}.16b, {{2}}.4b[{i}]"
            self.sums[g] = s.change(text, self.sums[g], value, step.x[g][half])
            between()

        for half, g, i in lookups:
            if len(waiting) == _WAITING:
                product()
            index = (low, high)[half][g, i]
            value = s.make("tbl {d}.16b, {{{0}.16b}}, {1}.16b", c["table"], index)
            waiting.append((half, g, i, value))
            between()
        while waiting:
            product()
        for write in (*scaling, *loads):
            write()

    def factor_loads(self, groups: list[int]) -> list[_Write]:
        """What writes the loads of what scales sums."""
        found: dict[tuple[str, int], int] = {}
        for g in groups:
            found |= {("extra", 4 * EXTRA * g + 16): 16}
            found |= {("scales", g // 2 * 16): 8 * (self.groups - g // 2 * 2)}
            found |= {("xs", g // 4 * 16): 4 * (self.groups - g // 4 * 4)}

        def load(at: tuple[str, int]) -> _Write:
            return lambda: self.factors.update({at: self.load(*at, found[at])})

        return [load(at) for at in found if at not in self.factors]

    def scaling(self, groups: list[int]) -> list[_Write]:
        """What writes the instructions that add sums of some groups to the total."""
        s, loaded = self.code, self.factors
        scales: dict[int, Value] = {}
        values: dict[int, Value] = {}

        def widen(g: int) -> None:
            wide = ("fcvtl {d}.4s, {0}.4h", "fcvtl2 {d}.4s, {0}.8h")[g % 2]
            scales[g] = s.make(wide, loaded["scales", g // 2 * 16])

        def times(g: int) -> None:
            less, xs = loaded["extra", 4 * EXTRA * g + 16], loaded["xs", g // 4 * 16]
            text = f"fmla {{d}}.4s, {{1}}.4s, {{2}}.s[{g % 4}]"
            values[g] = s.change(text, less, self.sums[g], xs)

        def add(g: int) -> None:
            if self.total is None:
                self.total = s.make("fmul {d}.4s, {0}.4s, {1}.4s", values[g], scales[g])
            else:
                text = "fmla {d}.4s, {1}.4s, {2}.4s"
                self.total = s.change(text, self.total, values[g], scales[g])

        return [partial(write, g) for write in (times, widen, add) for g in groups]
