"""Dynamic quantization of activations to 1..8 bits in int8, as unscheduled TensorIR.

Per row and group: ``scale = absmax / 127``, ``code = round(x * (127 / absmax))`` to nearest even,
clamped to [-127, 127], and the sum of codes per *weight* group, which zero points and the symmetric
offset of integer kernels multiply (ONNX DynamicQuantizeLinear is the asymmetric uint8 cousin).

- Fewer bits p: ``2^(p-1) - 1`` in the place of 127. One bit: codes -1 and +1 (for x >= 0), and the
  scale is the mean magnitude of the group, which is the one of least error.
- Asymmetric, of 8 bits and whole rows: ``scale = (top - low) / 253`` where top is the largest value
  and low the least, 0 at least and at most; ``centre = scale * round((top + low) / 2 / scale)``,
  which is minus the scale times the zero point; ``code = round(x / scale - centre / scale)``. So 0
  is a code. `xs` holds scale and centre.
- Unsigned, of asymmetric ones: codes are 1 to `PAIR_INPUT`, so that 213 steps take the place of
  253, and lie `UNSIGNED` higher, the centre as many scales lower. Their products need no sums:
  there is no `xsum`.
- Columns past K are quantized as zeros.
- A group whose largest magnitude is below 2^-100 counts as zero: scale 0, codes 0. So
  127 / absmax stays finite.
- A NaN or an infinity makes its group's scale NaN or infinite (the largest magnitude is found on
  the bit patterns, where NaN is largest), so that everything computed from the group is NaN or
  infinite; the codes are some values in [-127, 127].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K
from apq_tvm.errors import NotApplicable
from apq_tvm.formats.integer import PAIR_INPUT
from apq_tvm.ops.activations.normalize import OP, Normalize
from apq_tvm.ops.blocks import argument, each, put, reduce_all, row_tasks
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, f32, i32, i64, magnitude_bits, whole

Load = Callable[[Expr], Expr]

TINY = 2.0**-100
"""Largest magnitudes below this count as zero."""


def quantize_activations(
    k: int,
    act_group: int,
    weight_group: int,
    lanes: int = 32,
    row_block: int = 1,
    bits: int = 8,
    asymmetric: bool = False,
    normalize: Normalize | None = None,
    unsigned: bool = False,
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
    asymmetric : bool
        Of 8 bits and a scale per row: with a zero point.
    normalize : Normalize or None
        What makes x; its arguments come first.
    unsigned : bool
        Of asymmetric ones: codes are 1..`PAIR_INPUT`, without sums.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], xq i8 [M, Kp], xs f32 [M, Ga or 2], xsum i32 [M, Gw])``, M dynamic,
        Kp as in `apq_tvm.codegen.layouts.InterleavedLayout.padded_k`.

    Raises
    ------
    NotApplicable
        The groups do not divide each other.
    """
    padded, width, sum_width = checked_widths(k, act_group, weight_group, bits)
    lanes = min(lanes, sum_width)
    made = Quantize(k, padded, width, sum_width, lanes, row_block, bits, asymmetric, unsigned)
    return made.build(normalize)


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
        asymmetric: bool = False,
        unsigned: bool = False,
    ) -> None:
        assert not asymmetric or (bits == 8 and width == padded)
        assert asymmetric or not unsigned
        self.asymmetric, self.above = asymmetric, float(UNSIGNED if unsigned else 0)
        self.summed = not unsigned
        self.k, self.padded, self.width, self.sum_width = k, padded, width, sum_width
        self.lanes, self.row_block = lanes, row_block
        self.bits = bits
        self.most = float(UNSIGNED if unsigned else 1 << (bits - 1)) - 1

    def build(self, normalize: Normalize | None = None) -> PrimFunc:
        """The PrimFunc: blocks ``task``, ``row``, ``group`` and their steps.

        `normalize` makes x, and its arguments come first.
        """
        m, name = tirx.Var("m", "int64"), self.name if normalize is None else OP + self.name
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name(name)
            b.func_attr({"apq.op": name, "op_pattern": 8, "tirx.noalias": True})
            source = None if normalize is None else normalize.declare(m)
            self.x = argument("x", (m, self.k), "float32")
            self.xq = self.declare_codes(m)
            self.xs = self.declare_scales(m)
            self.declare_sums(m)
            self.declare_more(m)
            reads, writes = [whole(self.x if source is None else source)], [whole(self.xq)]
            with row_tasks(m, self.row_block, reads, writes) as (first, mine):
                if normalize is None:
                    self.task_rows(first, mine)
                else:
                    normalize.then(self.x, first, mine, self.task_rows)
                self.pad_rows(m, first + mine)
        return builder.get()

    def task_rows(self, first: Expr, mine: Expr) -> None:
        """Quantize the rows of a task."""
        with each("row", mine) as row:
            self._row(first + row)

    def declare_codes(self, m: Expr) -> Buffer:
        """Declare the argument that receives the codes."""
        return argument("xq", (m, self.padded), "int8")

    def declare_factors(self, name: str, m: Expr, groups: int, dtype: str) -> Buffer:
        """Declare the argument that receives a number for each row and group."""
        return argument(name, (m, groups), dtype)

    def declare_scales(self, m: Expr) -> Buffer:
        """Declare the scales, with the centres of rows behind them."""
        groups = self.padded // self.width + int(self.asymmetric)
        return self.declare_factors("xs", m, groups, "float32")

    def declare_sums(self, m: Expr) -> None:
        """Declare the sums of codes, unless there are none."""
        if self.summed:
            self.xsum = self.declare_factors("xsum", m, self.padded // self.sum_width, "int32")

    def keep(self, target: Buffer, row: Expr, group: Expr, value: Expr) -> None:
        """Store such a number."""
        b.buffer_store(target, value, [row, group])

    def kept(self, target: Buffer, row: Expr, group: Any) -> Any:
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
            put(self.xq, [row, at], codes[e].astype("int8"), codes[e])

    def _row(self, row: Expr) -> None:
        def group(number: Expr, x: Load, suffix: str) -> None:
            self._group(row, number, x, suffix)

        each_part(self.x, row, (self.k, self.padded, self.width), ("group", "tail_group"), group)

    def _group(self, row: Expr, group: Expr, x: Any, suffix: str) -> None:
        scaled = self._range if self.asymmetric else self._magnitude
        inverse = scaled(row, group, x, suffix)
        parts = self.width // self.sum_width
        with each(f"part{suffix}", parts) as part:
            self.codes(row, group * parts + part, part * self.sum_width, x, inverse, suffix)

    def _range(self, row: Expr, group: Expr, x: Any, suffix: str) -> Buffer:
        """Store scale and centre of a row; 1 / scale and -zero."""
        lanes = self.lanes
        chunks = self.width // lanes
        largest, lowest = (b.sblock_alloc_buffer((lanes,), "int32", align=64) for _ in range(2))
        top, low = (b.sblock_alloc_buffer((1,), "int32", align=64) for _ in range(2))
        inverse = b.sblock_alloc_buffer((2,), "float32", align=64)
        with b.grid(chunks, lanes) as (c0, e0), b.sblock(f"largest{suffix}"):
            e, c = b.axis.spatial(lanes, e0), b.axis.reduce(chunks, c0)
            b.reads(x(c * lanes + e))
            b.writes(largest[e], lowest[e])
            with b.init():
                b.buffer_store(largest, i32(0), [e])
                b.buffer_store(lowest, i32(0), [e])
            pattern = tirx.reinterpret("int32", x(c * lanes + e))
            b.buffer_store(largest, tirx.max(largest[e], pattern), [e])
            b.buffer_store(lowest, tirx.max(lowest[e], negative_order(pattern)), [e])
        reduce_all(f"top{suffix}", "max", largest, top)
        reduce_all(f"low{suffix}", "max", lowest, low)
        with b.sblock(f"factors{suffix}"):
            b.reads(top[0], low[0])
            b.writes(inverse[0:2], self.kept(self.xs, row, slice(0, 2)))
            scale, over, middle = self.range_factors(top[0], low[0])
            b.buffer_store(inverse, over, [0])
            b.buffer_store(inverse, middle, [1])
            self.keep(self.xs, row, i64(0), scale)
            self.keep(self.xs, row, i64(1), scale * middle)
        return inverse

    def range_factors(self, top: Expr, low: Expr) -> tuple[Expr, ...]:
        """`range_factors` of a row, by which its codes become what they are to be."""
        scale, over, middle = range_factors(top, low, steps=self.most - 0.5)
        return scale, over, middle - f32(self.above) if self.above else middle

    def _magnitude(self, row: Expr, group: Expr, x: Any, suffix: str) -> Buffer:
        """Store the scale of a group; 1 / scale."""
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
        reduce_all(f"top{suffix}", "add" if signs else "max", largest, top)
        with b.sblock(f"factors{suffix}"):
            b.reads(top[0])
            b.writes(inverse[0], self.kept(self.xs, row, group))
            size = top[0] / self._columns(group) if signs else tirx.reinterpret("float32", top[0])
            scale, over = scale_and_inverse(size, self.most or 1.0)
            self.keep(self.xs, row, group, scale)
            b.buffer_store(inverse, over, [0])
        return inverse

    def _columns(self, group: Expr) -> Expr:
        """float32: columns of a group that are not padding, at least 1."""
        left = tirx.max(i64(1), i64(self.k) - group.astype("int64") * i64(self.width))
        return tirx.min(i64(self.width), left).astype("float32")

    def _sign(self, value: Expr, column: Expr | None) -> Expr:
        """-1 or +1; 0 in columns past K, which only groups with a `column` have."""
        one, zero = tirx.const(1, "int32"), tirx.const(0, "int32")
        sign = tirx.Select(value >= tirx.const(0.0, "float32"), one, tirx.const(-1, "int32"))
        return sign if column is None else tirx.Select(column < self.k, sign, zero)

    def rounded(self, value: Expr, middle: Expr | None) -> Expr:
        """int32: the nearest code, of a value less the row's centre."""
        value = value if middle is None else value - middle
        least, most = (f32(self.above + end) for end in (-self.most, self.most))
        value = tirx.max(tirx.min(tirx.nearbyint(value), most), least)
        return value.astype("int32")

    def codes(
        self, row: Expr, sum_group: Expr, first: Expr, x: Any, inverse: Buffer, suffix: str
    ) -> None:
        """Codes and their sum of the columns that share a sum."""
        lanes = self.lanes
        chunks = self.sum_width // lanes
        codes = b.sblock_alloc_buffer((lanes,), "int32", align=64)
        if self.summed:
            sums = b.sblock_alloc_buffer((lanes,), "int32", align=64)
            total = b.sblock_alloc_buffer((1,), "int32", align=64)
            with b.serial(0, lanes) as e0, b.sblock(f"clear{suffix}"):
                e = b.axis.spatial(lanes, e0)
                put(sums, [e], tirx.const(0, "int32"))
        with each(f"chunk{suffix}", chunks) as c:
            with b.serial(0, lanes) as e0, b.sblock(f"code{suffix}"):
                e = b.axis.spatial(lanes, e0)
                b.reads(x(first + c * lanes + e), inverse[0 : int(inverse.shape[0])])
                b.writes(codes[e])
                at = first + c * lanes + e
                if self.bits == 1:
                    column = (sum_group * self.sum_width + c * lanes + e) if suffix else None
                    b.buffer_store(codes, self._sign(x(at), column), [e])
                else:
                    middle = inverse[1] if self.asymmetric else None
                    b.buffer_store(codes, self.rounded(x(at) * inverse[0], middle), [e])
            self.store_codes(row, sum_group * chunks + c, codes, suffix)
            if self.summed:
                self._add(codes, sums, suffix)
        if self.summed:
            reduce_all(f"total{suffix}", "add", sums, total)
            with b.sblock(f"sum{suffix}"):
                b.reads(total[0])
                b.writes(self.kept(self.xsum, row, sum_group))
                self.keep(self.xsum, row, sum_group, total[0])

    def _add(self, codes: Buffer, sums: Buffer, suffix: str) -> None:
        """Add a stretch of codes to their running sums."""
        with b.sblock(f"add_stage{suffix}"):
            b.reads()
            b.writes()
            with b.serial(0, self.lanes) as e0, b.sblock(f"add{suffix}"):
                e = b.axis.spatial(self.lanes, e0)
                # `sums` is left out of the reads: TVM would not vectorize a running sum.
                put(sums, [e], sums[e] + codes[e], codes[e])


UNSIGNED = (PAIR_INPUT + 1) // 2
"""The middle of unsigned codes."""

ASYMMETRIC = 126.5
"""Steps from the middle of a row's range to its ends; codes are up to 127, as the middle is rounded
to a step so that 0 is a code."""


def negative_order(pattern: Expr) -> Expr:
    """int32 that is largest for the lowest float (NaN before -infinity), negative for no sign."""
    return tirx.bitwise_xor(pattern, i32(-(1 << 31)))


def range_factors(
    top: Expr, low: Expr, room: float = 1.0, short: bool = False, steps: float = ASYMMETRIC
) -> tuple[Expr, ...]:
    """float32: scale, its inverse and how many scales 0 lies below the middle of a row's range.

    Parameters
    ----------
    top : PrimExpr
        int32: largest pattern, 0 at least.
    low : PrimExpr
        int32: largest `negative_order`, 0 at least.
    room : float
        By how much scales are larger than the range asks for.
    short : bool
        Whether the scale is to be `shortened`.
    steps : float
        From the middle of the range to its ends.
    """
    half_top, half_low = (
        tirx.reinterpret("float32", pattern) * f32(0.5) for pattern in (top, negative_order(low))
    )
    scale, over = scale_and_inverse((half_top - half_low) * f32(room), steps, short)
    return scale, over, tirx.nearbyint((half_top + half_low) * over)


def scale_and_inverse(size: Expr, most: float, short: bool = False) -> tuple[Expr, Expr]:
    """float32: the scale of codes up to `most`, and `most` over the largest magnitude `size`.

    Both are 0 where `size` is below `TINY`; the scale may be `shortened`.
    """
    tiny, scale = size < f32(TINY), size * f32(1 / most)
    return (
        tirx.Select(tiny, f32(0.0), shortened(scale) if short else scale),
        tirx.Select(tiny, f32(0.0), f32(most) / size),
    )


def each_part(
    x: Buffer,
    row: Expr,
    sizes: tuple[int, int, int],
    names: tuple[str, str],
    emit: Callable[[Expr, Load, str], None],
) -> None:
    """Emit something for every part of a row of x.

    Parts that reach past K read a copy with zeros (block ``pad``): no lane needs a predicate.

    Parameters
    ----------
    x, row
    sizes : tuple of int
        K, with zeros up to whole parts, and the columns of a part.
    names : tuple of str
        Of the blocks of parts within K and past it.
    emit : callable
        Given the part's number, its columns and the suffix of its blocks: ``_tail`` past K.
    """
    k, padded, width = sizes
    whole, parts = k // width, padded // width
    if whole:
        with each(names[0], whole) as part:
            emit(part, lambda c: x[row, part * width + c], "")
    if whole < parts:
        copy = b.sblock_alloc_buffer(((parts - whole) * width,), "float32", align=64)
        with b.serial(0, copy.shape[0]) as c, b.sblock("pad"):
            col = b.axis.spatial(copy.shape[0], c)
            at = col + whole * width
            put(copy, [col], tirx.if_then_else(at < k, x[row, at], f32(0.0)))
        with each(names[1], parts - whole) as tail:
            emit(tail + whole, lambda c: copy[tail * width + c], "_tail")


def copy_row(x: Buffer, target: Buffer, row: Expr, k: int) -> None:
    """Copy one row of x, in block ``copy``."""
    lanes = max(n for n in (16, 8, 4, 2, 1) if k % n == 0)
    with b.serial(0, k // lanes) as c, b.vectorized(0, lanes) as e, b.sblock("copy"):
        column = b.axis.spatial(k, c * lanes + e)
        put(target, [row, column], x[row, column], x[row, column])


def shortened(scale: Expr) -> Expr:
    """float32 of 22 significant bits: times `apq_tvm.tensorize.exprs.MAGIC` it is exact."""
    return tirx.reinterpret("float32", tirx.reinterpret("int32", scale) & i32(~3))
