"""Lookups and dot products on bitplanes, on Arm.

As `apq_tvm.tensorize.x86.planes`, with registers of 16 bytes. ``tbl`` looks up 16, 32 or 64
entries in one instruction and gives 0 for an index past them, so that 128 and 256 entries are two
and four lookups and an ``orr``; of more than 64 entries the tables do not fit the registers and
are loaded again. Centroids stay signed, as ``sdot`` takes them.

Indices are those of `apq_tvm.tensorize.arm.planes_index`; where cells are divided, digits those of
`apq_tvm.tensorize.arm.planes_cells`.

Arm Architecture Reference Manual, DDI 0487, SDOT, TBL, BSL, SLI, SRI, SMULL, ADDP, SADALP; LLVM's
IntrinsicsAArch64.td for names.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.lookup import BYTES, table_lookup
from apq_tvm.tensorize.arm.planes_cells import digits, row_digits
from apq_tvm.tensorize.arm.planes_index import indices
from apq_tvm.tensorize.arm.planes_sums import Sums
from apq_tvm.tensorize.exprs import Buffer, Expr, i64, neon, shuffled, splat
from apq_tvm.tensorize.meaning.planes import ROWS, PlanesStep
from apq_tvm.tensorize.pairs.planes import PlanesInstruction

_MOST = 64
"""Entries of one lookup."""


@dataclass(frozen=True)
class ArmPlanes(PlanesInstruction):
    """Lookups in registers of 128 bits.

    Parameters
    ----------
    fused : bool
        Whether products are added by ``sdot``, else by ``smull``.
    sve : bool
        Whether one register is looked up by SVE's instruction.
    chained : bool
        Whether lookups of a large table are one chain of ``tbx``, which leaves alone what is past
        its end. That is fewer instructions than ``tbl`` and ``orr``, but waits.
    """

    fused: bool
    sve: bool = False
    chained: bool = False

    def emit_dot(self, step: PlanesStep, ahead: int, *buffers: Buffer) -> None:
        planes, table, *halves, x, scales, acc = self._operands(step, buffers)
        sums = Sums(self, step, acc, scales, [[r] for r in range(ROWS)])
        with sums.steps() as steps:
            if step.divided:
                found = [digits(step, planes, table, halves[0], at) for at in steps]
                for r, i in product(range(ROWS), range(step.digits)):
                    for at, rows in zip(steps, found, strict=True):
                        sums.add([r], rows[r][i], x.vload([at], "int8x16"), i)
                return
            for at in steps:
                xs = x.vload([at], "int8x16")
                for r, w in enumerate(lookups(step, planes, table, at, self.sve)):
                    sums.add([r], w, xs)

    @staticmethod
    def _operands(step: PlanesStep, buffers: tuple[Buffer, ...]) -> tuple[Any, ...]:
        """The same, with the scales, if there are any, as one list."""
        *tables, acc = buffers
        scales = [tables.pop()] if step.group else []
        return (*tables, scales, acc)

    def emit_codes(self, step: PlanesStep, *buffers: Buffer) -> None:
        planes, out = buffers
        with b.serial(0, i64(step.registers)) as loop:
            at = loop * i64(BYTES)
            for r, (index, _) in enumerate(indices(_registers(step, planes, at))):
                b.buffer_store(out, index, [r, tirx.Ramp(at, 1, BYTES)])

    def emit_table_dot(self, step: PlanesStep, rows: int, *buffers: Buffer) -> None:
        """The table stays in registers; rows are taken two at a time."""
        codes, table, *halves, x, scales, acc = self._operands(step, buffers)
        if step.divided:
            sums = Sums(self, step, acc, scales, [[]])
            with sums.steps() as steps:
                found = [
                    row_digits(step, codes.vload([at], "uint8x16"), table, halves[0])
                    for at in steps
                ]
                for i in range(step.digits):
                    for at, each in zip(steps, found, strict=True):
                        sums.add([], each[i], x.vload([at], "int8x16"), i)
            return
        for start in range(0, rows, 2):
            leads = [[r] if rows > 1 else [] for r in range(start, min(start + 2, rows))]
            sums = Sums(self, step, acc, scales, leads)
            with sums.steps() as steps:
                for at in steps:
                    for lead in leads:
                        index = codes.vload([*lead, at], "uint8x16")
                        w = _large_lookup(step, table, [], index, self.chained)
                        sums.add(lead, w, x.vload([at], "int8x16"))

    def emit_lookup(self, step: PlanesStep, ahead: int, digit: int, *buffers: Buffer) -> None:
        planes, table, *halves, out = buffers
        with b.serial(0, i64(step.registers)) as loop:
            at = loop * i64(BYTES)
            if step.divided:
                found = [each[digit] for each in digits(step, planes, table, halves[0], at)]
            else:
                found = lookups(step, planes, table, at, self.sve)
            for r, w in enumerate(found):
                value = out.vload([r, at], "uint8x16") + tirx.reinterpret("uint8x16", w)
                b.buffer_store(out, value, [r, tirx.Ramp(at, 1, BYTES)])

    def emit_rows(self, step: PlanesStep, m: int, rows: int, *buffers: Buffer) -> None:
        w, x, *scales, acc = buffers
        for first in range(0, step.registers, step.together):
            steps = range(first * BYTES, (first + step.together) * BYTES, BYTES)
            for i in range(m):
                row = [[i, r] for r in range(rows)]
                sums = Sums(self, step, acc, scales, row)
                with sums.group(first * BYTES, [i]):
                    for at in steps:
                        for lead in row:
                            value = tirx.reinterpret("int8x16", w.vload([lead[1], at], "uint8x16"))
                            sums.add(lead, value, x.vload([i, at], "int8x16"))

    def multiply(self, before: Expr, w: Expr, x: Expr) -> Expr:
        """Four sums and the products of four columns each."""
        if self.fused:
            return neon("int32x4", "sdot.v4i32.v16i8", before, w, x)
        halves = []
        for half in range(2):
            order = range(8 * half, 8 * half + 8)
            operands = (shuffled(v, BYTES, order) for v in (w, x))
            halves.append(neon("int16x8", "smull.v8i16", *operands))
        pairs = neon("int16x8", "addp.v8i16", *halves)  # 2 * 127 * 127 fits
        return before + neon("int32x4", "saddlp.v4i32.v8i16", pairs)


SDOT_SVE = ArmPlanes("sdot_sve", BYTES, 0, ("dotprod", "sve"), True, sve=True)
SDOT = ArmPlanes("sdot", BYTES, 0, ("dotprod",), True)
SDOT_TBX = ArmPlanes("sdot_tbx", BYTES, 0, ("dotprod",), True, chained=True)
"""For cores that issue in order, and tables of more than four registers."""

SMULL = ArmPlanes("smull", BYTES, 0, (), False)

INSTRUCTIONS = (SDOT_SVE, SDOT, SMULL)
"""In order of preference."""


def _registers(step: PlanesStep, planes: Buffer, at: Expr) -> list[Expr]:
    """Planes from column `at` on, least significant first."""
    return [planes.vload([p, 0, at], "uint8x16") for p in reversed(range(step.bits))]


def lookups(
    step: PlanesStep, planes: Buffer, table: Buffer, at: Expr, sve: bool = False
) -> list[Expr]:
    """int8 [16] centroids of the eight rows."""
    return [
        _centroids(step, table, row * step.tables // ROWS, index, places, sve)
        for row, (index, places) in enumerate(indices(_registers(step, planes, at)))
    ]


def _centroids(
    step: PlanesStep, table: Buffer, which: int, index: Expr, places: tuple[int, ...], sve: bool
) -> Expr:
    entries = step.entries
    if entries > BYTES:
        return _large_lookup(step, table, [which], index)
    value = table.vload([which, 0], f"int8x{entries}")
    codes = [sum((e >> p & 1) << i for i, p in enumerate(places)) for e in range(BYTES)]
    return table_lookup([shuffled(value, entries, codes)], index, sve)


def _large_lookup(
    step: PlanesStep, table: Buffer, which: list[int], index: Expr, chained: bool = False
) -> Expr:
    """int8 [16] entries of a table of more than one register."""
    found: Expr = None
    for start in range(0, step.entries, _MOST):
        parts = range(start, min(start + _MOST, step.entries), BYTES)
        tables = [table.vload([*which, part], "int8x16") for part in parts]
        moved = index - splat(start, "uint8") if start else index
        if chained and found is not None:
            moved = tirx.reinterpret("int8x16", moved)
            found = neon("int8x16", "tbx4.v16i8", found, *tables, moved)
            continue
        value = table_lookup(tables, moved)
        found = value if found is None else tirx.bitwise_or(found, value)
    return found
