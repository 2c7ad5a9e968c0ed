"""Lookups and dot products on bitplanes, on Arm: pairs of meaning and instructions.

As `apq_tvm.tensorize.x86.planes`, with registers of 16 bytes. ``tbl`` looks up 16, 32 or 64
entries in one instruction and gives 0 for an index past them, so that 128 and 256 entries are two
and four lookups and an ``orr``; of more than 64 entries the tables do not fit the registers and
are loaded again. Centroids stay signed, as ``sdot`` takes them.

Bits of planes become indices by masked merges (``bsl``), as there; from the fifth bit on the upper
bits of two rows are brought side by side, and one shift that inserts (``sli``, ``sri``) per row
joins them with its lower nibble.

Arm Architecture Reference Manual, DDI 0487, SDOT, TBL, BSL, SLI, SRI, SMULL, ADDP, SADALP; LLVM's
IntrinsicsAArch64.td for names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.lookup import (
    BYTES,
    inserted_left,
    inserted_right,
    masked,
    merged,
    shifted,
    shuffled,
    splat,
    table_lookup,
)
from apq_tvm.tensorize.arm.planes_sums import Sums
from apq_tvm.tensorize.exprs import neon
from apq_tvm.tensorize.meaning.planes import ROWS, PlanesUnit
from apq_tvm.tensorize.pairs.planes import (
    codes_pair,
    dot_pair,
    lookup_pair,
    rows_pair,
    table_pair,
)
from apq_tvm.tensorize.registry import register

Expr = Any  # tvm is untyped
Buffer = Any

_HALF = ROWS // 2
_MOST = 64
"""Entries of one lookup."""


@dataclass(frozen=True)
class ArmPlanes:
    """How codes are looked up and multiplied.

    Parameters
    ----------
    name : str
    features : tuple of str
        LLVM features it needs, all of them.
    fused : bool
        Whether by ``sdot``, else by ``smull``.
    sve : bool
        Whether one register is looked up by SVE's instruction.
    chained : bool
        Whether lookups of a large table are one chain of ``tbx``, which leaves alone what is past
        its end. That is fewer instructions than ``tbl`` and ``orr``, but waits.
    """

    name: str
    features: tuple[str, ...]
    fused: bool
    sve: bool
    chained: bool = False

    vector = BYTES
    offset = 0

    def unit(self, bits: int, tables: int, k: int, group: int = 0) -> PlanesUnit:
        """A unit for this instruction."""
        return PlanesUnit(bits, tables, k, BYTES, 0, group)

    def dot(self, bits: int, tables: int, k: int, ahead: int = 0, group: int = 0) -> str:
        """Register (once) and name the product of one unit with one row of activations."""
        unit = self.unit(bits, tables, k, group)

        def implement(planes: Buffer, table: Buffer, x: Buffer, *more: Buffer) -> None:
            *scales, acc = more
            sums = Sums(self, unit, acc, scales, [[r] for r in range(ROWS)])
            with sums.steps() as steps:
                for at in steps:
                    xs = x.vload([at], "int8x16")
                    for r, w in enumerate(lookups(self, unit, planes, table, at)):
                        sums.add([r], w, xs)

        return register(f"apq_{self.name}_planes_{unit}", lambda: dot_pair(unit, implement))

    def codes(self, bits: int, k: int) -> str:
        """Register (once) and name the putting together of a unit's codes."""
        unit = self.unit(bits, 1, k)

        def implement(planes: Buffer, out: Buffer) -> None:
            with b.serial(0, tirx.const(unit.registers, "int64")) as loop:
                at = loop * tirx.const(BYTES, "int64")
                registers = [planes.vload([p, 0, at], "uint8x16") for p in reversed(range(bits))]
                for r, (index, _) in enumerate(_indices(registers)):
                    b.buffer_store(out, index, [r, tirx.Ramp(at, 1, BYTES)])

        return register(f"apq_{self.name}_codes_{unit}", lambda: codes_pair(unit, implement))

    def table_dot(self, bits: int, rows: int, k: int, group: int = 0) -> str:
        """Register (once) and name the product of looked up codes of rows that share a table.

        The table stays in registers; rows are taken two at a time.
        """
        unit = self.unit(bits, 1, k, group)

        def implement(codes: Buffer, table: Buffer, x: Buffer, *more: Buffer) -> None:
            *scales, acc = more
            for start in range(0, rows, 2):
                leads = [[r] if rows > 1 else [] for r in range(start, min(start + 2, rows))]
                sums = Sums(self, unit, acc, scales, leads)
                with sums.steps() as steps:
                    for at in steps:
                        for lead in leads:
                            index = codes.vload([*lead, at], "uint8x16")
                            w = _large_lookup(
                                lambda part: table.vload([part], "int8x16"),
                                unit,
                                index,
                                self.chained,
                            )
                            sums.add(lead, w, x.vload([at], "int8x16"))

        name = f"apq_{self.name}_table{rows}_{unit}"
        return register(name, lambda: table_pair(unit, rows, implement))

    def lookup(self, bits: int, tables: int, k: int, ahead: int = 0) -> str:
        """Register (once) and name the lookup of one unit."""
        unit = self.unit(bits, tables, k)

        def implement(planes: Buffer, table: Buffer, out: Buffer) -> None:
            with b.serial(0, tirx.const(unit.registers, "int64")) as loop:
                at = loop * tirx.const(BYTES, "int64")
                for r, w in enumerate(lookups(self, unit, planes, table, at)):
                    value = out.vload([r, at], "uint8x16") + tirx.reinterpret("uint8x16", w)
                    b.buffer_store(out, value, [r, tirx.Ramp(at, 1, BYTES)])

        return register(f"apq_{self.name}_lookup_{unit}", lambda: lookup_pair(unit, implement))

    def rows(self, m: int, rows: int, k: int, group: int = 0) -> str:
        """Register (once) and name the product of looked up bytes with rows of activations."""
        unit = self.unit(1, 1, k, group)

        def implement(w: Buffer, x: Buffer, *more: Buffer) -> None:
            *scales, acc = more
            for first in range(0, unit.registers, unit.together):
                steps = range(first * BYTES, (first + unit.together) * BYTES, BYTES)
                for i in range(m):
                    row = [[i, r] for r in range(rows)]
                    sums = Sums(self, unit, acc, scales, row)
                    with sums.group(first * BYTES, [i]):
                        for at in steps:
                            for lead in row:
                                byte = w.vload([lead[1], at], "uint8x16")
                                value = tirx.reinterpret("int8x16", byte)
                                sums.add(lead, value, x.vload([i, at], "int8x16"))

        name = f"apq_{self.name}_rows_{m}x{rows}x{k}{unit.suffix}"
        return register(name, lambda: rows_pair(unit, m, rows, implement))

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


SDOT_SVE = ArmPlanes("sdot_sve", ("dotprod", "sve"), True, True)
SDOT = ArmPlanes("sdot", ("dotprod",), True, False)
SDOT_TBX = ArmPlanes("sdot_tbx", ("dotprod",), True, False, True)
"""For cores that issue in order, and tables of more than four registers."""

SMULL = ArmPlanes("smull", (), False, False)

INSTRUCTIONS = (SDOT_SVE, SDOT, SMULL)
"""In order of preference."""


def _pairs(q0: Expr, q1: Expr) -> tuple[Expr, Expr]:
    """2-bit codes: field f of the first register is row 2f, of the second row 2f + 1."""
    return merged(0x55, q0, shifted(q1, 1)), merged(0x55, shifted(q0, -1), q1)


def _nibbles(planes: list[Expr]) -> list[Expr]:
    """Codes of 3 or 4 bits: low nibble of register j is row j, high nibble row j + 4.

    The fourth bit of 3-bit codes is arbitrary.
    """
    low = _kept(_pairs(planes[0], planes[1]))
    if len(planes) == 3:
        high = [shifted(planes[2], s) for s in (2, 1, 0, -1)]
    else:
        even, odd = _kept(_pairs(planes[2], planes[3]))
        high = [shifted(even, 2), shifted(odd, 2), even, odd]
    down = [low[0], low[1], shifted(low[0], -2), shifted(low[1], -2)]
    return _kept([merged(0x33, a, c) for a, c in zip(down, high, strict=True)])


def _kept(vectors: Any) -> list[Expr]:
    """The same in a buffer: an expression used often would be compiled for each use."""
    values = list(vectors)
    buffer = b.alloc_buffer((len(values), BYTES), "uint8", align=16)
    for i, value in enumerate(values):
        b.buffer_store(buffer, value, [i, tirx.Ramp(0, 1, BYTES)])
    return [buffer.vload([i, 0], "uint8x16") for i in range(len(values))]


def _indices(planes: list[Expr]) -> list[tuple[Expr, tuple[int, ...]]]:
    """Per row its index, clean above the code's bits or above bit 3, and where the bits are.

    Parameters
    ----------
    planes : list of PrimExpr
        1 to 8 registers, least significant plane first.
    """
    bits = len(planes)
    if bits <= 2:
        registers = _kept(_pairs(*planes)) if bits == 2 else planes
        halves = _kept([half for v in registers for half in (masked(v, 15), shifted(v, -4))])
        indices = []
        for r in range(ROWS):
            place = r // bits * bits
            places = tuple(place % 4 + i for i in range(bits))
            indices.append((halves[r % bits * 2 + place // 4], places))
        return indices
    natural, low = tuple(range(bits)), _nibbles(planes[:4])
    if bits <= 4:
        both = [masked(v, 15) for v in low] + [shifted(v, -4) for v in low]
        return [(v, natural) for v in _kept(both)]
    upper = _kept(_upper(planes[4:]))
    first = [inserted_left(v, h, 4) for v, h in zip(low, upper, strict=True)]
    second = [inserted_right(h, v, 4) for v, h in zip(low, upper, strict=True)]
    return [(v, natural) for v in _kept(first + second)]


def _upper(planes: list[Expr]) -> list[Expr]:
    """Bits above the fourth: low nibble of register j is row j, high nibble row j + 4; clean."""
    bits = len(planes)
    if bits == 1:
        return [masked(shifted(planes[0], -j), 0x11) for j in range(_HALF)]
    if bits == 2:
        top = _kept(_pairs(*planes))
        return [masked(shifted(top[j % 2], j // 2 * -2), 0x33) for j in range(_HALF)]
    top = _nibbles(planes)
    return top if bits == 4 else [masked(v, 0x77) for v in top]


def lookups(
    how: ArmPlanes, unit: PlanesUnit, planes: Buffer, table: Buffer, at: Expr
) -> list[Expr]:
    """int8 [16] centroids of the eight rows."""
    registers = [planes.vload([p, 0, at], "uint8x16") for p in reversed(range(unit.bits))]
    return [
        _centroids(how, unit, table, row, index, places)
        for row, (index, places) in enumerate(_indices(registers))
    ]


def _centroids(
    how: ArmPlanes,
    unit: PlanesUnit,
    table: Buffer,
    row: int,
    index: Expr,
    places: tuple[int, ...],
) -> Expr:
    which, entries = row * unit.tables // ROWS, unit.entries
    if entries <= BYTES:
        value = table.vload([which, 0], f"int8x{entries}")
        codes = [sum((e >> p & 1) << i for i, p in enumerate(places)) for e in range(BYTES)]
        return table_lookup([shuffled(value, entries, codes)], index, how.sve)
    return _large_lookup(lambda part: table.vload([which, part], "int8x16"), unit, index)


def _large_lookup(
    load: Callable[[int], Expr], unit: PlanesUnit, index: Expr, chained: bool = False
) -> Expr:
    """int8 [16] entries of a table of more than one register, which `load` loads."""
    found: Expr = None
    for start in range(0, unit.entries, _MOST):
        parts = range(start, min(start + _MOST, unit.entries), BYTES)
        tables = [load(part) for part in parts]
        moved = index - splat(start, "uint8") if start else index
        if chained and found is not None:
            moved = tirx.reinterpret("int8x16", moved)
            found = neon("int8x16", "tbx4.v16i8", found, *tables, moved)
            continue
        value = table_lookup(tables, moved)
        found = value if found is None else tirx.bitwise_or(found, value)
    return found
