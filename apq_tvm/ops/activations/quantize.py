"""Dynamic quantization of activations to 1..8 bits in int8, as unscheduled TensorIR.

Per row and group: ``scale = absmax / 127``, ``code = round(x * (127 / absmax))`` to nearest even,
clamped to [-127, 127], and the sum of codes per *weight* group, which zero points and the symmetric
offset of integer kernels multiply (ONNX DynamicQuantizeLinear is the asymmetric uint8 cousin).

- Fewer bits p: ``2^(p-1) - 1`` in the place of 127. One bit: codes -1 and +1 (for x >= 0), and the
  scale is the mean magnitude of the group, which is the one of least error.
- Columns past K are quantized as zeros.
- A group whose largest magnitude is below 2^-100 counts as zero: scale 0, codes 0. So
  127 / absmax stays finite.
- A NaN or an infinity makes its group's scale NaN or infinite (the largest magnitude is found on
  the bit patterns, where NaN is largest), so that everything computed from the group is NaN or
  infinite; the codes are some values in [-127, 127].
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K
from apq_tvm.errors import NotApplicable
from apq_tvm.tensorize.exprs import f32, i64, magnitude_bits
from apq_tvm.tensorize.meaning.reduce import reduce_loop

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any

TINY = 2.0**-100
"""Largest magnitudes below this count as zero."""


def quantize_activations(
    k: int,
    act_group: int,
    weight_group: int,
    lanes: int = 32,
    row_block: int = 1,
    bits: int = 8,
) -> PrimFunc:
    """Quantize rows of float32 activations to int8, or to fewer bits in int8.

    Parameters
    ----------
    k : int
        Columns of x.
    act_group : int
        Columns that share a scale; -1 for a whole row.
    weight_group : int
        Columns that share a sum of codes; -1 for a whole row. Divides the activation group.
    lanes : int
        Columns handled together (16 where a group has 16), rows of which are independent.
    row_block : int
        Rows in one parallel task.
    bits : int
        1..8: codes lie in [-(2^(bits-1) - 1), 2^(bits-1) - 1]; 1 bit is -1 or +1.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], xq i8 [M, Kp], xs f32 [M, Ga], xsum i32 [M, Gw])``, M dynamic, Kp as in
        `apq_tvm.codegen.layouts.InterleavedLayout.padded_k`.

    Raises
    ------
    NotApplicable
        The groups do not divide each other.
    """
    padded, width, sum_width = checked_widths(k, act_group, weight_group, bits)
    return Quantize(k, padded, width, sum_width, min(lanes, sum_width), row_block, bits).build()


def checked_widths(k: int, act_group: int, weight_group: int, bits: int) -> tuple[int, int, int]:
    """Padded K, columns that share a scale and columns that share a sum.

    Raises
    ------
    NotApplicable
        The groups do not divide each other, or there are no such bits.
    """
    if not 1 <= bits <= 8:
        raise NotApplicable(f"activations of {bits} bits; 1..8 are possible")
    step = max(UNIT_K, weight_group)
    padded = -(-k // step) * step
    sum_width = padded if weight_group == -1 else weight_group
    width = padded if act_group == -1 else act_group
    if padded % width or width % sum_width:
        raise NotApplicable(
            f"K={k}: activation groups of {width} and weight groups of {sum_width} do not nest; "
            "use one group size for both or whole rows of activations"
        )
    return padded, width, sum_width


class Quantize:
    """The loops; a subclass may store codes in another way."""

    name = "quantize_activations"

    def __init__(
        self,
        k: int,
        padded: int,
        width: int,
        sum_width: int,
        lanes: int,
        row_block: int,
        bits: int,
    ) -> None:
        self.k, self.padded, self.width, self.sum_width = k, padded, width, sum_width
        self.lanes, self.row_block = lanes, row_block
        self.bits = bits
        self.most = float((1 << (bits - 1)) - 1)

    def build(self) -> PrimFunc:
        """The PrimFunc: blocks ``task``, ``row``, ``group`` and their steps."""
        m = tirx.Var("m", "int64")
        rows = self.row_block
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name(self.name)
            b.func_attr({"apq.op": self.name, "op_pattern": 8, "tirx.noalias": True})
            self.x = argument("x", (m, self.k), "float32")
            self.xq = self.declare_codes(m)
            self.xs = self.declare_factors("xs", m, self.padded // self.width, "float32")
            self.xsum = self.declare_factors("xsum", m, self.padded // self.sum_width, "int32")
            self.declare_more(m)
            tasks = (m + i64(rows - 1)) // i64(rows)
            with b.sblock("root"):
                b.reads()
                b.writes()
                with b.serial(0, tasks) as t, b.sblock("task"):
                    task = b.axis.spatial(tasks, t)
                    b.reads(self.x[0:m, 0 : self.k])
                    b.writes(self.xq[tuple(slice(0, extent) for extent in self.xq.shape)])
                    first = b.bind(task * i64(rows))
                    mine = b.bind(tirx.min(i64(rows), m - first))
                    with b.serial(0, mine) as r, b.sblock("row"):
                        row = b.axis.spatial(mine, r)
                        b.reads()
                        b.writes()
                        self._row(first + row)
                    self.pad_rows(m, first + mine)
        return builder.get()

    def declare_codes(self, m: Expr) -> Buffer:
        """Declare the argument that receives the codes."""
        return argument("xq", (m, self.padded), "int8")

    def declare_factors(self, name: str, m: Expr, groups: int, dtype: str) -> Buffer:
        """Declare the argument that receives a number for each row and group."""
        return argument(name, (m, groups), dtype)

    def keep(self, target: Buffer, row: Expr, group: Expr, value: Expr) -> None:
        """Store such a number."""
        b.buffer_store(target, value, [row, group])

    def kept(self, target: Buffer, row: Expr, group: Expr) -> Any:
        """The region of `target` that `keep` writes."""
        return target[row, group]

    def pad_rows(self, m: Expr, end: Expr) -> None:
        """Fill what follows row ``m - 1``, where a task's rows end at `end`."""

    def declare_more(self, m: Expr) -> None:
        """Declare what follows the sums."""

    def store_codes(self, row: Expr, chunk: Expr, codes: Buffer, suffix: str) -> None:
        """Store the codes int32 [lanes] of one stretch of `lanes` columns."""
        with b.serial(0, self.lanes) as e0, b.sblock(f"store{suffix}"):
            e = b.axis.spatial(self.lanes, e0)
            at = chunk * self.lanes + e
            b.reads(codes[e])
            b.writes(self.xq[row, at])
            b.buffer_store(self.xq, codes[e].astype("int8"), [row, at])

    def _row(self, row: Expr) -> None:
        groups = self.padded // self.width
        # Groups that reach past K read a padded copy, so that no lane needs a predicate.
        whole = self.k // self.width
        if whole:
            with b.serial(0, whole) as g, b.sblock("group"):
                group = b.axis.spatial(whole, g)
                b.reads()
                b.writes()
                self._group(row, group, lambda c: self.x[row, group * self.width + c], "")
        if whole < groups:
            copy = b.sblock_alloc_buffer(((groups - whole) * self.width,), "float32", align=64)
            with b.serial(0, copy.shape[0]) as c, b.sblock("pad"):
                col = b.axis.spatial(copy.shape[0], c)
                b.reads()
                b.writes(copy[col])
                at = col + whole * self.width
                zero = tirx.const(0.0, "float32")
                value = tirx.if_then_else(at < self.k, self.x[row, at], zero)
                b.buffer_store(copy, value, [col])
            with b.serial(0, groups - whole) as g, b.sblock("tail_group"):
                tail = b.axis.spatial(groups - whole, g)
                b.reads()
                b.writes()
                self._group(row, tail + whole, lambda c: copy[tail * self.width + c], "_tail")

    def _group(self, row: Expr, group: Expr, x: Any, suffix: str) -> None:
        lanes = self.lanes
        chunks = self.width // lanes
        signs = self.bits == 1
        dtype = "float32" if signs else "int32"
        largest = b.sblock_alloc_buffer((lanes,), dtype, align=64)
        top = b.sblock_alloc_buffer((1,), dtype, align=64)
        inverse = b.sblock_alloc_buffer((1,), "float32", align=64)
        with b.grid(chunks, lanes) as (c0, e0), b.sblock(f"largest{suffix}"):
            e, c = b.axis.spatial(lanes, e0), b.axis.reduce(chunks, c0)
            b.reads(x(c * lanes + e))
            b.writes(largest[e])
            with b.init():
                b.buffer_store(largest, tirx.const(0, dtype), [e])
            pattern = magnitude_bits(x(c * lanes + e))
            if signs:
                total = largest[e] + tirx.reinterpret("float32", pattern)
                b.buffer_store(largest, total, [e])
            else:
                b.buffer_store(largest, tirx.max(largest[e], pattern), [e])
        reduce_loop(f"top{suffix}", "add" if signs else "max", largest, top)
        with b.sblock(f"factors{suffix}"):
            b.reads(top[0])
            b.writes(inverse[0], self.kept(self.xs, row, group))
            size = top[0] / self._columns(group) if signs else tirx.reinterpret("float32", top[0])
            scale, over = scale_and_inverse(size, self.most or 1.0)
            self.keep(self.xs, row, group, scale)
            b.buffer_store(inverse, over, [0])
        parts = self.width // self.sum_width
        with b.serial(0, parts) as p, b.sblock(f"part{suffix}"):
            part = b.axis.spatial(parts, p)
            b.reads()
            b.writes()
            self.codes(row, group * parts + part, part * self.sum_width, x, inverse, suffix)

    def _columns(self, group: Expr) -> Expr:
        """float32: columns of a group that are not padding, at least 1."""
        left = tirx.max(i64(1), i64(self.k) - group.astype("int64") * i64(self.width))
        return tirx.min(i64(self.width), left).astype("float32")

    def _sign(self, value: Expr, column: Expr | None) -> Expr:
        """-1 or +1; 0 in columns past K, which only groups with a `column` have."""
        one, zero = tirx.const(1, "int32"), tirx.const(0, "int32")
        sign = tirx.Select(value >= tirx.const(0.0, "float32"), one, tirx.const(-1, "int32"))
        return sign if column is None else tirx.Select(column < self.k, sign, zero)

    def codes(
        self, row: Expr, sum_group: Expr, first: Expr, x: Any, inverse: Buffer, suffix: str
    ) -> None:
        """Codes and their sum of the columns that share a sum."""
        lanes = self.lanes
        chunks = self.sum_width // lanes
        codes = b.sblock_alloc_buffer((lanes,), "int32", align=64)
        sums = b.sblock_alloc_buffer((lanes,), "int32", align=64)
        total = b.sblock_alloc_buffer((1,), "int32", align=64)
        with b.serial(0, lanes) as e0, b.sblock(f"clear{suffix}"):
            e = b.axis.spatial(lanes, e0)
            b.reads()
            b.writes(sums[e])
            b.buffer_store(sums, tirx.const(0, "int32"), [e])
        with b.serial(0, chunks) as c0, b.sblock(f"chunk{suffix}"):
            c = b.axis.spatial(chunks, c0)
            b.reads()
            b.writes()
            with b.serial(0, lanes) as e0, b.sblock(f"code{suffix}"):
                e = b.axis.spatial(lanes, e0)
                b.reads(x(first + c * lanes + e), inverse[0])
                b.writes(codes[e])
                at = first + c * lanes + e
                if self.bits == 1:
                    column = (sum_group * self.sum_width + c * lanes + e) if suffix else None
                    b.buffer_store(codes, self._sign(x(at), column), [e])
                else:
                    value = tirx.nearbyint(x(at) * inverse[0])
                    most = tirx.const(self.most, "float32")
                    value = tirx.max(tirx.min(value, most), tirx.const(-self.most, "float32"))
                    b.buffer_store(codes, value.astype("int32"), [e])
            self.store_codes(row, sum_group * chunks + c, codes, suffix)
            with b.sblock(f"add_stage{suffix}"):
                b.reads()
                b.writes()
                with b.serial(0, lanes) as e0, b.sblock(f"add{suffix}"):
                    e = b.axis.spatial(lanes, e0)
                    # `sums` is left out of the reads: TVM would not vectorize a running sum.
                    b.reads(codes[e])
                    b.writes(sums[e])
                    b.buffer_store(sums, sums[e] + codes[e], [e])
        reduce_loop(f"total{suffix}", "add", sums, total)
        with b.sblock(f"sum{suffix}"):
            b.reads(total[0])
            b.writes(self.kept(self.xsum, row, sum_group))
            self.keep(self.xsum, row, sum_group, total[0])


def scale_and_inverse(size: Expr, most: float) -> tuple[Expr, Expr]:
    """float32: the scale of codes up to `most`, and `most` over the largest magnitude `size`.

    Both are 0 where `size` is below `TINY`.
    """
    tiny = size < f32(TINY)
    return (
        tirx.Select(tiny, f32(0.0), size * f32(1 / most)),
        tirx.Select(tiny, f32(0.0), f32(most) / size),
    )


def argument(name: str, shape: tuple[Any, ...], dtype: str) -> Buffer:
    """Declare the next buffer argument."""
    extents = [i64(s) if isinstance(s, int) else s for s in shape]
    return b.match_buffer(b.arg(name, b.handle()), extents, dtype, align=4, offset_factor=1)
