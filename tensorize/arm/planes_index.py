"""From planes to table indices in vectors of 16 bytes, by masked merges (``bsl``).

As `apq_tvm.tensorize.x86.planes_index`; from the fifth bit on the upper bits of two rows are
brought side by side, and one shift that inserts (``sli``, ``sri``) per row joins them with its
lower nibble.
"""

from __future__ import annotations

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
)
from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.planes import ROWS

_HALF = ROWS // 2


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


def indices(planes: list[Expr]) -> list[tuple[Expr, tuple[int, ...]]]:
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
