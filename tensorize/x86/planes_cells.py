"""Codes of 6 to 8 bits whose cells of 5 bits are divided uniformly, on x86: one or two bytes.

(`apq_tvm.formats.anyprec_cells`; every row has its own centroids and steps.) No lookup is in more
than 64 entries:

- the first byte, T, is looked up by the cell and the sixth bit: entry ``cell + 32 up`` of
  ``[c - (h + 1) / 4, c + (h + 2) / 4]``, which are made of both tables before the loop over K;
- the second is ``±2h`` by the seventh bit, or the sum of that and of ``±h`` by the eighth. By
  *vpermb* each is a lookup of its own, of ``[-2h, 2h]``, where the plane of its bit takes the place
  of the sixth's. By *pshufb* h is looked up once and gets the signs by vpsignb.

Tables of 128 and 256 centroids would be two vpermi2b (three uops each on Intel's cores) and a
blend, or 16 pshufb and 15 blends.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, Expr, splat, x86
from apq_tvm.tensorize.meaning.planes import ROWS, PlanesStep
from apq_tvm.tensorize.x86.planes_index import nibble_indices, nibbles, pairs
from apq_tvm.tensorize.x86.vectors import lanes_of, merged, shifted

CELLS = 32
_HALF = 16


def wide_digits(
    step: PlanesStep, planes: list[Expr], table: Buffer, halves: Buffer
) -> list[list[Expr]]:
    """Digits of the eight rows by vpermb, int8 [64] and offset by 128.

    Parameters
    ----------
    step : PlanesStep
    planes : list of PrimExpr
        Registers, most significant plane first.
    table, halves : Buffer
        int8 and uint8 [tables, 32].
    """
    size = step.vector
    kept = b.alloc_buffer((ROWS + 2 * len(planes[5:]), size), "uint8", align=64)

    def keep(at: int, value: Expr) -> Expr:
        """The same in a register: what is used often would be computed for each use."""
        b.buffer_store(kept, value, [at, tirx.Ramp(0, 1, size)])
        return kept.vload([at, 0], f"uint8x{size}")

    low = nibbles(planes[4:0:-1])
    low = [keep(j, value) for j, value in enumerate(low)]
    low += [keep(4 + j, shifted(value, -4)) for j, value in enumerate(low)]
    # The cell's upper bit and the bit after it, side by side: of even rows, of odd ones.
    tops = [
        [keep(ROWS + 2 * i + j, value) for j, value in enumerate(pairs(planes[0], plane))]
        for i, plane in enumerate(planes[5:])
    ]

    def index(top: list[Expr], r: int) -> Expr:
        return merged(0x0F, low[r], shifted(top[r % 2], 4 - r // 2 * 2))

    rows = []
    for r in range(ROWS):
        c, h = _row(table, halves, r, 0, CELLS)
        found = [
            x86(
                "int8x64",
                "avx512.permvar.qi.512",
                _joined(*pair, flip=i < 2),
                index(tops[i], r),
            )
            for i, pair in enumerate(_pairs(c, h, len(tops)))
        ]
        rows.append([found[0], found[1] + found[2]] if len(found) == 3 else found)
    return rows


def _pairs(c: Expr, h: Expr, count: int) -> list[tuple[Expr, Expr]]:
    """What cells become where a bit is 0 and where it is 1, for each bit after the fifth."""
    pairs = [_first(c, h)]
    if count > 1:
        pairs.append((_negative(h + h), h + h))
    if count > 2:
        pairs.append((_negative(h), h))
    return pairs


def _first(c: Expr, h: Expr) -> tuple[Expr, Expr]:
    """T of both halves of cells."""
    lanes = lanes_of(h)

    def quarter(more: int) -> Expr:
        raised = tirx.reinterpret(f"uint8x{lanes}", h) + splat(more, "uint8", lanes)
        return tirx.reinterpret(f"int8x{lanes}", tirx.shift_right(raised, splat(2, "uint8", lanes)))

    return c - quarter(1), c + quarter(2)


def _negative(value: Expr) -> Expr:
    lanes = lanes_of(value)
    return splat(0, "int8", lanes) - value


def _row(table: Buffer, halves: Buffer, row: int, first: int, count: int) -> tuple[Expr, Expr]:
    """int8: centroids and steps of a row's cells."""
    h = tirx.reinterpret(f"int8x{count}", halves.vload([row, first], f"uint8x{count}"))
    return table.vload([row, first], f"int8x{count}"), h


def _joined(low: Expr, high: Expr, *, flip: bool) -> Expr:
    value = tirx.Shuffle([low, high], [tirx.const(i, "int32") for i in range(2 * CELLS)])
    return tirx.bitwise_xor(value, splat(-128, "int8", 2 * CELLS)) if flip else value


def narrow_digits(
    step: PlanesStep, planes: list[Expr], table: Buffer, halves: Buffer
) -> list[list[Expr]]:
    """Digits of the eight rows by pshufb, int8 [32]; parameters as in `wide_digits`."""
    size = step.vector
    indices = nibble_indices(planes[4:0:-1])
    kept = b.alloc_buffer((ROWS, size), "uint8", align=32)
    for r, index in enumerate(indices):
        assert index.places == (0, 1, 2, 3)
        b.buffer_store(kept, index.vector, [r, tirx.Ramp(0, 1, size)])
    rows = []
    for r in range(ROWS):
        at = kept.vload([r, 0], f"uint8x{size}")
        both = [_row(table, halves, r, first, _HALF) for first in (0, _HALF)]
        firsts = [_first(*pair) for pair in both]
        top, up, *signs = (_bit(plane, r) for plane in (planes[0], *planes[5:]))
        halved = [_blended([pair[i] for pair in firsts], at, top) for i in range(2)]
        digits = [x86("int8x32", "avx2.pblendvb", *halved, up)]
        if signs:
            h = _blended([_negative(pair[1]) for pair in both], at, top)
            one = splat(1, "int8", size)
            signed = [
                x86("int8x32", "avx2.psign.b", factor, tirx.bitwise_or(sign, one))
                for factor, sign in zip((h + h, h), signs, strict=False)
            ]
            digits.append(signed[0] + signed[1] if len(signed) > 1 else signed[0])
        rows.append(digits)
    return rows


def _bit(plane: Expr, row: int) -> Expr:
    """int8 [32]: the plane's bit of a row as the sign."""
    return tirx.reinterpret("int8x32", shifted(plane, 7 - row))


def _blended(tables: list[Expr], index: Expr, top: Expr) -> Expr:
    """int8 [32]: entries of two tables of 16, by the index and the cell's upper bit."""
    order = [tirx.const(i % _HALF, "int32") for i in range(2 * _HALF)]
    low, high = (x86("int8x32", "avx2.pshuf.b", tirx.Shuffle([t, t], order), index) for t in tables)
    return x86("int8x32", "avx2.pblendvb", low, high, top)
