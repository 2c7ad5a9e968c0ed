"""Any-precision with tables per channel up to 5 bits, and cells that are divided uniformly above.

Tables of 6, 7 and 8 bits are 448 of the 504 centroids of a channel, and hardly better than what
uniform steps inside the cells of 5 bits give: cells are so small there that the density in them is
nearly constant. So ``anyprec3-8`` has tables of its own for every channel up to 5 bits, and one
byte ``h`` for each of the 32 cells above (`HALVES`): half the distance between neighbours at 8
bits. That is 90 bytes a channel with its scale, 1.9 bits a weight at K=384 and 0.5 at K=1536.

All centroids are integers c, 116 of which are the scale of the row. A cell of 5 bits has two halves
at 6, so that a table is never larger than 64 entries::

    T = c + (h + 2) // 4   where the sixth bit is set, else   c - (h + 1) // 4

    w = scale / 116 * T                                 6 bits
    w = scale / 1856 * (16 T + 2 h (2 l - 1))           7 bits, l = 0, 1: the last bit
    w = scale / 1856 * (16 T + h (2 l - 3))             8 bits, l = 0..3: the last two bits

T and ``h (2 l - 3)`` are bytes with a sign: 116 + (42 + 2) // 4 = 127, 3 * 42 = 126. So 7 and 8
bits are two products of bytes, the others one. Rounding a centroid to its integer moves a cell's
levels, which stay as dense: with 8 bits the error is a third of that of int8 centroids.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadScheme
from apq_tvm.types import F32, Scheme

CELL_BITS = 5
"""Bits of a cell."""

CELLS = 1 << CELL_BITS

HALVES = "halves"
"""Key in `QuantizedTensor.tables` of h, uint8 [N, 32]."""

UNITS = 116
"""Steps of centroids in the scale of a row."""

FINE = 16
"""Steps of 7 and 8 bits in one of them."""

MOST = 42
"""Largest h."""

_SPELLING = re.compile(r"anyprec\d-\d\Z")


def has_cells(scheme: Scheme) -> bool:
    """Whether it is spelled with neither ``c`` nor ``s``."""
    return scheme.family == "anyprec" and _SPELLING.match(scheme.weights) is not None


def table_widths(scheme: Scheme) -> tuple[int, ...]:
    """Widths that have a table: those up to 5 bits, and 5 where there are wider ones."""
    narrow = tuple(b for b in scheme.widths if b <= CELL_BITS)
    return narrow or (CELL_BITS,) if scheme.bits > CELL_BITS else narrow


def table_bytes(scheme: Scheme) -> int:
    """Bytes of one channel's tables."""
    entries = sum(1 << b for b in table_widths(scheme))
    return entries + (CELLS if scheme.bits > CELL_BITS else 0)


def check_halves(halves: NDArray[np.generic], blocks: int, name: str) -> None:
    """Refuse an array that is not h of so many channels."""
    if halves.dtype != np.uint8 or halves.shape != (blocks, CELLS):
        raise BadScheme(
            f"{name}: {HALVES} are {halves.dtype} {list(halves.shape)}, not uint8 {[blocks, CELLS]}"
        )
    if halves.size and int(halves.max()) > MOST:
        raise BadScheme(f"{name}: {HALVES} up to {int(halves.max())}; at most {MOST} fit bytes")


def integers(table: NDArray[np.float16]) -> NDArray[np.int8]:
    """int8 [T, E]: centroids as multiples of 1 / 116 of the row's scale."""
    return np.clip(np.rint(table.astype(np.float32) * UNITS), -UNITS, UNITS).astype(np.int8)


def restored(units: NDArray[np.int8]) -> NDArray[np.float16]:
    """float16 [T, E]: what `integers` gave; exact there and back."""
    return (units.astype(np.float32) / np.float32(UNITS)).astype(np.float16)


def snap(table: NDArray[np.float16]) -> NDArray[np.float16]:
    """Round every centroid to a multiple; a second time changes nothing."""
    return restored(integers(table))


def offsets(halves: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """int32 [T, 32, 2^(bits - 5)]: what is added to a cell's centroid, in 1 / `FINE` of a step."""
    h = halves.astype(np.int32)[..., None]
    half = np.concatenate([-((h + 1) >> 2), (h + 2) >> 2], axis=-1) * np.int32(FINE)  # [T, 32, 2]
    if bits == 6:
        return np.asarray(half)
    last = 2 * h * np.array([-1, 1]) if bits == 7 else h * np.array([-3, -1, 1, 3])
    return np.asarray(half[..., :, None] + last[..., None, :]).reshape(*halves.shape, -1)


def levels(table: NDArray[np.float16], halves: NDArray[np.uint8], bits: int) -> F32:
    """float32 [T, 2^bits]: what the codes of more than 5 bits stand for.

    Parameters
    ----------
    table : float16 [T, 32]
        Centroids of 5 bits.
    halves : uint8 [T, 32]
    bits : int
        6..8.
    """
    added = offsets(halves, bits).astype(np.float32) / np.float32(FINE * UNITS)
    return (table.astype(np.float32)[..., None] + added).reshape(len(table), -1)
