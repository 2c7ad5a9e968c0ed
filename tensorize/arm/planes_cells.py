"""Codes of 6 to 8 bits whose cells of 5 bits are divided uniformly, on Arm: one or two bytes.

(`apq_tvm.formats.anyprec_cells`; every row has its own centroids and steps.) The first byte, T, is
one ``tbl`` of four registers, ``[c - (h + 1) / 4, c + (h + 2) / 4]``, by the cell and the next bit.
The second is h, a ``tbl`` of two registers, times what the last bits stand for, a ``tbl`` of
constants. Tables of 128 and 256 centroids are two and four ``tbl`` of four, and 8 or 16 registers
that are loaded again for every row.
"""

from __future__ import annotations

from tvm import tirx

from apq_tvm.tensorize.arm.lookup import BYTES, masked, shifted, table_lookup
from apq_tvm.tensorize.arm.planes_index import indices
from apq_tvm.tensorize.exprs import Buffer, Expr, i64, splat
from apq_tvm.tensorize.meaning.planes import CELL_BITS, ROWS, PlanesStep

FACTORS = {7: (-2, 2), 8: (-3, -1, 1, 3)}
"""What h is multiplied by, for the bits after the sixth."""


def digits(
    step: PlanesStep, planes: Buffer, table: Buffer, halves: Buffer, at: Expr
) -> list[list[Expr]]:
    """int8 [16] digits of the eight rows, from column `at` on."""
    loaded = [planes.vload([p, 0, at], "uint8x16") for p in range(step.bits)]
    cells = indices([*loaded[CELL_BITS - 1 :: -1], loaded[CELL_BITS]])
    last = indices(loaded[:CELL_BITS:-1]) if step.two_digits else []
    rows = []
    for r in range(ROWS):
        index, _ = cells[r]
        found = [table_lookup(_halves(table, halves, r), index)]
        if last:
            steps = [_steps(halves, r, part) for part in range(2)]
            h = table_lookup(steps, masked(index, (1 << CELL_BITS) - 1))
            found.append(h * _factor(step.bits, *last[r]))
        rows.append(found)
    return rows


def row_digits(step: PlanesStep, code: Expr, table: Buffer, halves: Buffer) -> list[Expr]:
    """int8 [16] digits of codes of one row, uint8 [16], by its centroids and steps [32]."""
    last = step.bits - CELL_BITS - 1
    found = [table_lookup(_pairs(table, halves), shifted(code, -last))]
    if step.two_digits:
        steps = [tirx.reinterpret("int8x16", halves.vload([at], "uint8x16")) for at in (0, BYTES)]
        h = table_lookup(steps, shifted(code, -last - 1))
        bits = masked(code, (1 << last) - 1)
        found.append(h * _factor(step.bits, bits, tuple(range(last))))
    return found


def _pairs(table: Buffer, halves: Buffer) -> list[Expr]:
    """Four registers: T of both halves of each cell, side by side."""
    both = _lower_upper(table, halves, [])
    found = []
    for low, high in zip(*both, strict=True):
        for first in (0, BYTES // 2):
            order = [i for e in range(first, first + BYTES // 2) for i in (e, BYTES + e)]
            found.append(tirx.Shuffle([low, high], [tirx.const(i, "int32") for i in order]))
    return found


def _steps(halves: Buffer, row: int, part: int) -> Expr:
    return tirx.reinterpret("int8x16", halves.vload([row, part * BYTES], "uint8x16"))


def _halves(table: Buffer, halves: Buffer, row: int) -> list[Expr]:
    """Four registers: T of the lower halves of the cells, then of the upper ones."""
    low, high = _lower_upper(table, halves, [row])
    return low + high


def _lower_upper(table: Buffer, halves: Buffer, lead: list[int]) -> tuple[list[Expr], list[Expr]]:
    """T of the lower and of the upper halves of the cells, two registers each."""
    low: list[Expr] = []
    high: list[Expr] = []
    for part in (0, BYTES):
        c, h = table.vload([*lead, part], "int8x16"), halves.vload([*lead, part], "uint8x16")
        down, up = (
            tirx.reinterpret("int8x16", shifted(h + splat(more, "uint8"), -2)) for more in (1, 2)
        )
        low.append(c - down)
        high.append(c + up)
    return low, high


def _factor(bits: int, index: Expr, places: tuple[int, ...]) -> Expr:
    """int8 [16]: the factors that indices of 4 bits stand for."""
    values = FACTORS[bits]
    entries = [
        values[sum((e >> place & 1) << i for i, place in enumerate(places))] for e in range(BYTES)
    ]
    return table_lookup([_constants(entries)], index)


def _constants(values: list[int]) -> Expr:
    """int8 [16] of 16 constants, as two integers of 64 bits."""
    words = [
        int.from_bytes(bytes(v & 255 for v in values[at : at + 8]), "little", signed=True)
        for at in (0, 8)
    ]
    pair = tirx.Shuffle([i64(word) for word in words], [tirx.const(i, "int32") for i in range(2)])
    return tirx.reinterpret("int8x16", pair)
