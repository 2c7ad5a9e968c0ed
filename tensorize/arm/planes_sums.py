"""Sums of kernels on bitplanes on Arm: of integers, or of integers times scales of activations.

With groups the integers of a group, or of a part of it, start from 0; ``scvtf`` and ``fmla`` bring
them to float32 sums. (Starting from what one subtraction makes a float of, as other kernels do,
gains 3 % at most with groups of 32 and loses up to 11 % with wider ones: llvm-mca 22, 4 bits,
Neoverse N1 and V1, Cortex-A55.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.lookup import BYTES
from apq_tvm.tensorize.exprs import Buffer, Expr, i64, llvm, splat
from apq_tvm.tensorize.meaning.planes import FINE_BITS, QUAD, PlanesStep


class Multiplier(Protocol):
    """How registers are multiplied."""

    def multiply(self, before: Expr, w: Expr, x: Expr) -> Expr:
        """Four sums and the products of four columns each."""


class Sums:
    """Sums of some rows, in integers or, with groups, in float32.

    Parameters
    ----------
    how : Multiplier
    step : PlanesStep
    acc : Buffer
        Of the sums.
    scales : list of Buffer
        Of activations; none without groups.
    leads : list of list of int
        Where in `acc` each row's sums are.
    """

    def __init__(
        self,
        how: Multiplier,
        step: PlanesStep,
        acc: Buffer,
        scales: list[Buffer],
        leads: list[list[int]],
    ) -> None:
        self._how, self._step, self._acc, self._scales = how, step, acc, scales
        self._leads = leads
        self._parts: dict[tuple[tuple[int, ...], int], Expr] = {}

    @contextmanager
    def steps(self) -> Iterator[list[Expr]]:
        """A loop over a step; columns at which its body's registers begin."""
        count = self._step.together
        with b.serial(0, i64(self._step.registers // count)) as loop:
            first = loop * i64(count * BYTES)
            with self.group(first, []):
                yield [first + i64(i * BYTES) for i in range(count)]

    @contextmanager
    def group(self, first: Expr, row: list[int]) -> Iterator[None]:
        """What is added inside shares the scale of column `first` of a row of x."""
        self._parts = {}
        yield
        for lead in dict.fromkeys(lead for lead, _ in self._parts):
            part: Expr = self._parts.get((lead, 1), self._parts[lead, 0])
            if not self._scales:
                whole = self._acc.vload([*lead, 0], "int32x4") + part
                b.buffer_store(self._acc, whole, [*lead, tirx.Ramp(0, 1, 4)])
                continue
            scale = self._scales[0].vload([*row, first // QUAD], "float32x4")
            before = self._acc.vload([*lead, 0], "float32x4")
            floats = part.astype("float32x4")
            value = llvm("float32x4", "llvm.fma.v4f32", floats, scale, before)
            b.buffer_store(self._acc, value, [*lead, tirx.Ramp(0, 1, 4)])

    def add(self, lead: list[int], w: Expr, x: Expr, digit: int = 0) -> None:
        """Add the products of a register to a row's sums.

        Those of a second digit start from 16 times the first's, which come before.
        """
        if not self._scales and not self._step.two_digits:
            value = self._how.multiply(self._acc.vload([*lead, 0], "int32x4"), w, x)
            b.buffer_store(self._acc, value, [*lead, tirx.Ramp(0, 1, 4)])
            return
        key = (tuple(lead), digit)
        if digit and key not in self._parts:
            self._parts[key] = self._parts[key[0], 0] * splat(1 << FINE_BITS, "int32", 4)
        zero = tirx.Broadcast(tirx.const(0, "int32"), 4)
        before = self._parts.get(key, zero)
        self._parts[key] = self._how.multiply(before, w, x)
