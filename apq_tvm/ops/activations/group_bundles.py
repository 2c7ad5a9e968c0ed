"""Dynamic quantization of groups of columns, a vector of groups at a time, as unscheduled TensorIR.

Codes, scales and sums are those of `apq_tvm.ops.activations.quantize`. What remains of a group
after its last vector operation is one number, and finding it and the group's factors takes longer
than its codes: so as many groups as a vector has lanes are brought to one vector of largest
magnitudes, of factors and of sums. Groups of a task count through its rows, so that short rows fill
vectors too; those that are left are rounded one by one.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K
from apq_tvm.ops.activations.normalize import Normalize
from apq_tvm.ops.activations.quantize import checked_widths, scale_and_inverse
from apq_tvm.ops.activations.row_bundles import RowBundles
from apq_tvm.ops.blocks import each, reduce_rows
from apq_tvm.tensorize.exprs import MAGIC, MAGIC_BITS, Buffer, Expr, PrimFunc, f32, i32, i64


def takes_group_bundles(k: int, act_group: int, weight_group: int, bits: int, lanes: int) -> bool:
    """Whether groups are whole vectors of whole rows, each with one scale and one sum."""
    same = act_group == weight_group > 0
    whole = k % max(UNIT_K, act_group) == 0  # of groups of 16 an odd number is padded
    return same and bits > 1 and whole and act_group % lanes == 0


def quantize_group_bundles(
    k: int,
    group: int,
    lanes: int,
    row_block: int,
    bits: int = 8,
    normalize: Normalize | None = None,
) -> PrimFunc:
    """Quantize groups of float32 activations to int8, or to fewer bits in int8.

    Parameters
    ----------
    k : int
        Columns of x.
    group : int
        Columns that share a scale and a sum; divides `k`.
    lanes : int
        32-bit lanes of a vector; divides `group`.
    row_block : int
        Rows in one parallel task.
    bits : int
        2..8.
    normalize : Normalize or None
        As in `apq_tvm.ops.activations.quantize.quantize_activations`.

    Returns
    -------
    tvm.tirx.PrimFunc
        As `apq_tvm.ops.activations.quantize.quantize_activations`.
    """
    padded, width, sum_width = checked_widths(k, group, group, bits)
    assert padded == k and group % lanes == 0 and bits > 1
    one = min(32, group)
    return GroupBundles(lanes, k, padded, width, sum_width, one, row_block, bits).build(normalize)


class GroupBundles(RowBundles):
    """The loops: blocks ``bundle`` of so many groups, and ``row`` of those that are left."""

    name = "quantize_group_bundles"

    def task_rows(self, first: Expr, mine: Expr) -> None:
        groups = self.k // self.width
        whole = b.bind(mine * i64(groups))
        count = b.bind(whole // i64(self.together))
        with each("bundle", count) as bundle:
            self._groups(first, b.bind(bundle * i64(self.together)))
        done = b.bind(count * i64(self.together))
        with each("row", whole - done) as rest:
            number = b.bind(done + rest)
            row, group = b.bind(first + number // i64(groups)), b.bind(number % i64(groups))
            with each("group", 1) as one:
                at = group + one
                self._group(row, at, lambda c: self.x[row, at * self.width + c], "")

    def _place(self, first: Expr, number: Expr) -> tuple[Expr, Expr]:
        """Row and group of the `number`-th group of a task."""
        groups = i64(self.k // self.width)
        return b.bind(first + number // groups), b.bind(number % groups)

    def _groups(self, first: Expr, start: Expr) -> None:
        """Everything of the groups from `start` of a task on."""
        inverse = self._scales(first, start, self._largest(first, start))
        sums, vectors = self._square(), self.width // self.together
        with b.serial(0, i64(self.together)) as r:
            row, group = self._place(first, start + r)
            over, part = b.bind(inverse[r]), self._vector()
            # The pattern of a rounded float is its code and this, once for every code.
            self._fill(part, i32((-vectors * MAGIC_BITS + (1 << 31)) % (1 << 32) - (1 << 31)))
            with b.serial(0, i64(vectors)) as c, self._lanes() as e:
                column = group * i64(self.width) + c * i64(self.together) + e
                # The bound keeps product and sum apart: fused they would round another way.
                value = tirx.min(self.x[row, column] * over, f32(self.most))
                pattern = tirx.reinterpret("int32", value + f32(MAGIC))
                b.buffer_store(self.xq, pattern.astype("int8"), [row, column])
                b.buffer_store(part, part[e] + pattern, [e])
            self._keep(part, sums, r)
        total = reduce_rows("total_tree", "add", sums)
        most, bound = int(self.width * self.most), self._vector()
        with self._lanes() as e:
            # A NaN is no code: its group is NaN, whatever its codes are.
            value = tirx.max(tirx.min(total[e], i32(most)), i32(-most))
            b.buffer_store(bound, value, [e])
        with b.serial(0, i64(self.together)) as r:
            row, group = self._place(first, start + r)
            b.buffer_store(self.xsum, bound[r], [row, group])

    def _largest(self, first: Expr, start: Expr) -> Buffer:
        """int32 [groups]: patterns of the largest magnitudes."""
        tops, vectors = self._square(), self.width // self.together
        with b.serial(0, i64(self.together)) as r:
            row, group = self._place(first, start + r)
            top = self._vector()
            self._fill(top, i32(0))
            with b.serial(0, i64(vectors)) as c, self._lanes() as e:
                value = self.x[row, group * i64(self.width) + c * i64(self.together) + e]
                pattern = tirx.bitwise_and(tirx.reinterpret("int32", value), i32(0x7FFFFFFF))
                b.buffer_store(top, tirx.max(top[e], pattern), [e])
            self._keep(top, tops, r)
        return reduce_rows("top_tree", "max", tops)

    def _scales(self, first: Expr, start: Expr, tops: Buffer) -> Buffer:
        """Store scales; 1 / scale."""
        inverse, scale = self._vector("float32"), self._vector("float32")
        with self._lanes() as e:
            size: Any = tirx.reinterpret("float32", tops[e])
            factors = scale_and_inverse(size, self.most)
            for kept, value in zip((scale, inverse), factors, strict=True):
                b.buffer_store(kept, value, [e])
        with b.serial(0, i64(self.together)) as r:
            row, group = self._place(first, start + r)
            b.buffer_store(self.xs, scale[r], [row, group])
        return inverse
