"""Dynamic quantization of whole rows, a vector of rows at a time, as unscheduled TensorIR.

Codes, scales, centres and sums are those of `apq_tvm.ops.activations.quantize` for rows with zero
points. What remains of a row after its last vector operation is one number, and finding it and the
row's factors takes as long as 300 of its codes: so as many rows as a vector has lanes are brought
to one vector of ends, of factors and of sums. Rows that fill no vector are rounded one by one.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.activations.normalize import Normalize
from apq_tvm.ops.activations.quantize import Quantize, checked_widths, negative_order
from apq_tvm.ops.blocks import each, reduce_rows
from apq_tvm.tensorize.exprs import (
    MAGIC,
    MAGIC_BITS,
    Buffer,
    Expr,
    PrimFunc,
    f32,
    i32,
    i64,
    prefetch_line,
)

LINE = 16
"""float32 in a cache line."""

ROUNDED = 32
"""Columns that are rounded together."""

NEAR = 16 << 10
"""Bytes of a bundle up to which the next one is asked for while it is rounded: both fit a first
cache of 48 KB. Of 256 columns in the third cache it takes 13 % less, of 1024 17 % more."""


def takes_bundles(k: int, act_group: int, weight_group: int, bits: int, asymmetric: bool) -> bool:
    """Whether rows share all that this wants them to, and are whole vectors."""
    rows = act_group == weight_group == -1
    return rows and bits == 8 and asymmetric and k % ROUNDED == 0


def quantize_row_bundles(
    k: int,
    lanes: int,
    row_block: int,
    normalize: Normalize | None = None,
    unsigned: bool = False,
) -> PrimFunc:
    """Quantize rows of float32 activations to int8, with zero points.

    Parameters
    ----------
    k : int
        Columns of x, a multiple of `ROUNDED`.
    lanes : int
        32-bit lanes of a vector.
    row_block : int
        Rows in one parallel task, a multiple of `lanes`.
    normalize, unsigned
        As in `apq_tvm.ops.activations.quantize.quantize_activations`.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], xq i8 [M, K], xs f32 [M, 2], xsum i32 [M, 1])``, M dynamic.
    """
    padded, width, sum_width = checked_widths(k, -1, -1, 8)
    assert padded == k and row_block % lanes == 0
    sizes = (k, padded, width, sum_width, ROUNDED, row_block)
    return RowBundles(lanes, *sizes, 8, True, unsigned).build(normalize)


class RowBundles(Quantize):
    """The loops: blocks ``bundle`` of so many rows, and ``row`` of those that are left."""

    name = "quantize_row_bundles"

    def __init__(self, together: int, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.together = together

    def task_rows(self, first: Expr, mine: Expr) -> None:
        count = b.bind(mine // i64(self.together))
        with each("bundle", count) as bundle:
            self._bundle(b.bind(first + bundle * i64(self.together)))
        done = b.bind(count * i64(self.together))
        super().task_rows(b.bind(first + done), b.bind(mine - done))

    def _bundle(self, first: Expr) -> None:
        """Everything of the rows from `first` on."""
        inverse, middle = self._factors(first, self._ends(first))
        sums = self._square() if self.summed else None
        with b.serial(0, i64(self.together)) as r:
            row, over, zero = b.bind(first + r), b.bind(inverse[r]), b.bind(middle[r])
            part = self._vector()
            # The pattern of a rounded float is its code and this, once for every code.
            start = -(self.k // self.together) * MAGIC_BITS
            if sums is not None:
                self._fill(part, i32((start + (1 << 31)) % (1 << 32) - (1 << 31)))
            with b.serial(0, i64(self.k // self.together)) as c, self._lanes() as e:
                column = c * i64(self.together) + e
                value = self.x[row, column] * over - zero + f32(MAGIC)
                pattern = tirx.reinterpret("int32", value)
                b.buffer_store(self.xq, pattern.astype("int8"), [row, column])
                if sums is not None:
                    b.buffer_store(part, part[e] + pattern, [e])
            self._ask_ahead(row)
            if sums is not None:
                self._keep(part, sums, r)
        if sums is not None:
            self._store_sums(first, sums)

    def _store_sums(self, first: Expr, sums: Buffer) -> None:
        total = reduce_rows("total_tree", "add", sums)
        most = i32(self.k * 127)
        with self._lanes() as e:
            # A NaN is no code: its row is NaN, whatever its codes are.
            bound = tirx.max(tirx.min(total[e], most), i32(-self.k * 127))
            b.buffer_store(self.xsum, bound, [first + e, 0])

    def _ask_ahead(self, row: Expr) -> None:
        """Ask for a row of the next bundle while one of this is rounded out of the first cache.

        A prefetch never faults, so it may lie past the end.
        """
        if 4 * self.k * self.together > NEAR:
            return
        with b.serial(0, i64(self.k // LINE)) as c:
            prefetch_line(self.x[row + i64(self.together), c * i64(LINE)])

    def _ends(self, first: Expr) -> list[Buffer]:
        """int32 [rows]: patterns of the ends of each row's range."""
        tops, lows = self._square(), self._square()
        with b.serial(0, i64(self.together)) as r:
            row = b.bind(first + r)
            top, low = self._vector(), self._vector()
            self._fill(top, i32(0))
            self._fill(low, i32(0))
            with b.serial(0, i64(self.k // self.together)) as c, self._lanes() as e:
                value = self.x[row, c * i64(self.together) + e]
                pattern = tirx.reinterpret("int32", value)
                b.buffer_store(top, tirx.max(top[e], pattern), [e])
                b.buffer_store(low, tirx.max(low[e], negative_order(pattern)), [e])
            self._keep(top, tops, r)
            self._keep(low, lows, r)
        return [reduce_rows("top_tree", "max", tops), reduce_rows("low_tree", "max", lows)]

    def _factors(self, first: Expr, ends: list[Buffer]) -> tuple[Buffer, Buffer]:
        """Store scales and centres; 1 / scale and the centre in scales."""
        inverse, middle, scale = (self._vector("float32") for _ in range(3))
        with self._lanes() as e:
            factors = self.range_factors(ends[0][e], ends[1][e])
            for kept, value in zip((scale, inverse, middle), factors, strict=True):
                b.buffer_store(kept, value, [e])
        with b.serial(0, i64(self.together)) as r:
            b.buffer_store(self.xs, scale[r], [first + r, 0])
            b.buffer_store(self.xs, scale[r] * middle[r], [first + r, 1])
        return inverse, middle

    def _lanes(self) -> Any:
        return b.vectorized(0, i64(self.together))

    def _vector(self, dtype: str = "int32") -> Buffer:
        return b.sblock_alloc_buffer((self.together,), dtype, align=64)

    def _square(self) -> Buffer:
        return b.sblock_alloc_buffer((self.together, self.together), "int32", align=64)

    def _fill(self, target: Buffer, value: Expr) -> None:
        with self._lanes() as e:
            b.buffer_store(target, value, [e])

    def _keep(self, source: Buffer, square: Buffer, row: Expr) -> None:
        with self._lanes() as e:
            b.buffer_store(square, source[e], [row, e])
