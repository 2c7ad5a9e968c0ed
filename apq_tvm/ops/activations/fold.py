"""Dynamic quantization of activations to int8, folded (`apq_tvm.tensorize.meaning.spans.fold`).

Scales are of a whole row or of one group of weights; what belongs to them (zero groups, NaN,
infinities) is as in `apq_tvm.ops.activations.quantize`. A scale keeps 22 bits, so that MAGIC times
it is exact.

What the kernel of a chunk starts from is computed here, once for all rows of the weights:

- ``(MAGIC_BITS >> shift) - C`` as the integer sum; C is what the sum of unsigned codes is too large
  by. In units of the lowest place it is a fraction where activations are folded, rounded to nearest
  even: an error of at most half the step of *one* activation times one step of a code, per chunk.
- ``-MAGIC xs`` for the conversion to float.

Results are unrolled for vectors of 4; a schedule has nothing to choose but the rows of a task.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.activations.quantize import range_factors, scale_and_inverse
from apq_tvm.ops.blocks import argument, row_tasks
from apq_tvm.ops.few_rows.folded import chunk_units, fold_of
from apq_tvm.tensorize.exprs import MAGIC, MAGIC_BITS, Buffer, Expr, PrimFunc, f32, i64, whole
from apq_tvm.tensorize.meaning.interleaved import VECTORS
from apq_tvm.tensorize.pairs.folded_dot import STARTS


def fold_activations(
    k: int,
    layout: InterleavedLayout,
    per_token: bool,
    copies: int,
    row_block: int = 1,
    asymmetric: bool = False,
) -> PrimFunc:
    """Quantize rows of float32 activations for `apq_tvm.ops.few_rows.folded`.

    Parameters
    ----------
    k : int
        Columns of x.
    layout : InterleavedLayout
        Of the weights: it says how codes are stored and which of them share a scale.
    per_token : bool
        True for one scale per row, False for one per group of the weights.
    copies : int
        Row blocks that the kernel reads at once.
    row_block : int
        Rows in one parallel task.
    asymmetric : bool
        Whether rows have zero points.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], xq i8 [M, Kp], starts f32 [M, chunks, copies, 8], factors f32 [M, chunks,
        4 or 8], [centres f32 [M, 1]])``.
    """
    return FoldActivations(k, layout, per_token, copies, row_block, asymmetric=asymmetric).build()


class FoldActivations:
    """Emits the PrimFunc; where results are stored may be overridden."""

    name = "fold_activations"
    together = 1
    """Rows of x in a row of results."""

    def __init__(
        self,
        k: int,
        layout: InterleavedLayout,
        per_token: bool,
        copies: int,
        row_block: int,
        unfolded: bool = False,
        asymmetric: bool = False,
    ) -> None:
        self.asymmetric = asymmetric
        self.k, self.padded = k, layout.padded_k(k)
        self.fold = replace(fold_of(layout), unfolded=unfolded)
        self.chunk = UNIT_K * chunk_units(layout, k)
        self.group = self.padded if per_token else layout.group_width(k)
        self.copies, self.row_block = copies, row_block

    def build(self) -> PrimFunc:
        """The whole PrimFunc."""
        m = tirx.Var("m", "int64")
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name(self.name)
            attributes = {"apq.op": "fold_activations", "op_pattern": 8, "tirx.noalias": True}
            b.func_attr(attributes)
            x = argument("x", (m, self.k), "float32")
            slots = self.declare(m)
            if self.asymmetric:
                self.centres = argument("centres", (m, 1), "float32")
            read = x[0:m, 0 : self.k]
            with row_tasks(slots, self.row_block, [read], [whole(self.xq)]) as (first, mine):
                with b.serial(0, mine) as r:
                    self._row(first + r, self.source(first + r, m), x)
        return builder.get()

    def declare(self, m: Expr) -> Expr:
        """Declare the results; how many rows of x they hold."""
        chunks, together = self.padded // self.chunk, i64(self.together)
        rows = (m + i64(self.together - 1)) // together if self.together > 1 else m
        self.xq = argument("xq", (rows, self.x_bytes()), "int8")
        self.starts = argument("starts", (rows, chunks, self.copies, STARTS), "float32")
        self.factors = argument("factors", (rows, chunks, self.fold.factors), "float32")
        return rows * together if self.together > 1 else m

    def x_bytes(self) -> int:
        """Of a row of `xq`."""
        return self.padded

    def source(self, row: Expr, m: Expr) -> Expr:
        """The row of x that a row of results is of."""
        return row

    def store_codes(self, row: Expr, k: Expr, fours: list[Expr]) -> None:
        """Store the codes of 16 columns from `k` on, int32 [4] each."""
        lanes = [tirx.const(lane, "int32") for lane in range(16)]
        sixteen = tirx.Shuffle(fours, lanes).astype("int8x16")
        b.buffer_store(self.xq, sixteen, [row, ramp(k, 16)])

    def store_floats(self, target: Buffer, lead: list[Expr], index: int, value: Expr) -> None:
        """Store one float, as often as vectors of sums want it."""
        b.buffer_store(target, _four(value), [*lead, _lanes(index)])

    def _row(self, row: Expr, source_row: Expr, x: Buffer) -> None:
        source = _Row(x, source_row)
        if self.padded != self.k:
            copy = b.sblock_alloc_buffer((self.padded,), "float32", align=64)
            with b.serial(0, i64(self.padded)) as c:
                value = tirx.if_then_else(c < i64(self.k), x[source_row, c], f32(0.0))
                b.buffer_store(copy, value, [c])
            source = _Row(copy, None)
        largest = b.sblock_alloc_buffer((8 if self.asymmetric else 4,), "int32", align=16)
        scale = b.sblock_alloc_buffer((3 if self.asymmetric else 2,), "float32", align=16)
        with b.serial(0, i64(self.padded // self.group)) as g:
            first = g * i64(self.group)
            for half in range(1 + self.asymmetric):
                b.buffer_store(largest, _four(tirx.const(0, "int32")), [_lanes(4 * half)])
            find = self._ends if self.asymmetric else self._largest
            with b.serial(0, i64(self.group // UNIT_K)) as u:
                find(source, first + u * i64(UNIT_K), largest)
            self._scale(largest, scale)
            if self.asymmetric:
                b.buffer_store(self.centres, scale[0] * scale[2], [source_row, i64(0)])
            with b.serial(0, i64(self.group // self.chunk)) as c:
                chunk = g * i64(self.group // self.chunk) + c
                self._chunk(source, row, chunk, scale)

    def _largest(self, source: _Row, first: Expr, largest: Buffer) -> None:
        """Largest pattern of |x_t - 2^-w x_(t+1)|: NaN above infinity."""
        step, top = self.fold.vectors, largest[_lanes(0)]
        for j in range(VECTORS):
            value = source.four(first, j)
            if j + step < VECTORS:
                above = source.four(first, j + step)
                value = _fma(above, _four(f32(-(2.0**-self.fold.width))), value)
            pattern = tirx.reinterpret("int32x4", value)
            size = tirx.bitwise_and(pattern, _four(tirx.const(0x7FFFFFFF, "int32")))
            top = tirx.max(top, size)
        b.buffer_store(largest, top, [_lanes(0)])

    def _ends(self, source: _Row, first: Expr, largest: Buffer) -> None:
        """Patterns of the largest value and, in their order, of the lowest."""
        top, low = largest[_lanes(0)], largest[_lanes(4)]
        sign = _four(tirx.const(-(1 << 31), "int32"))
        for j in range(VECTORS):
            pattern = tirx.reinterpret("int32x4", source.four(first, j))
            top, low = tirx.max(top, pattern), tirx.max(low, tirx.bitwise_xor(pattern, sign))
        b.buffer_store(largest, top, [_lanes(0)])
        b.buffer_store(largest, low, [_lanes(4)])

    def _scale(self, largest: Buffer, scale: Buffer) -> None:
        """scale[0] = xs, scale[1] = 127 / largest; both 0 for a group that counts as zero.

        Asymmetric ones hold what lies over the middle of the range (scale[2] scales) and its share
        of a neighbour that is folded into it.
        """
        reduce = "llvm.vector.reduce.smax.v4i32"
        if self.asymmetric:
            top, low = (
                tirx.call_llvm_pure_intrin("int32", reduce, largest[_lanes(4 * half)])
                for half in range(2)
            )
            room = 1.0 + (2.0**-self.fold.width if self.fold.vectors < VECTORS else 0.0)
            for i, value in enumerate(range_factors(top, low, room, short=True)):
                b.buffer_store(scale, value, [i])
            return
        pattern = tirx.call_llvm_pure_intrin("int32", reduce, largest[_lanes(0)])
        size = tirx.reinterpret("float32", pattern)
        for i, value in enumerate(scale_and_inverse(size, 127.0, short=True)):
            b.buffer_store(scale, value, [i])

    def _chunk(self, source: _Row, row: Expr, chunk: Expr, scale: Buffer) -> None:
        fold = self.fold
        parts = len(fold.places)
        sums = b.sblock_alloc_buffer((parts, 4), "int32", align=16)
        for part in range(parts):
            b.buffer_store(sums, _four(tirx.const(0, "int32")), [part, _lanes(0)])
        with b.serial(0, i64(self.chunk // UNIT_K)) as u:
            self._codes(source, row, chunk * i64(self.chunk) + u * i64(UNIT_K), scale, sums)
        add = "llvm.vector.reduce.add.v4i32"
        totals = [
            tirx.call_llvm_pure_intrin("int32", add, sums[part, _lanes(0)]) for part in range(parts)
        ]
        xs = scale[0] * f32(2.0**-fold.shift)
        for copy in range(self.copies):
            start = tirx.const(MAGIC_BITS >> fold.shift, "int32") - self._correction(totals)
            lead = [row, chunk, i64(copy)]
            self.store_floats(self.starts, lead, 0, tirx.reinterpret("float32", start))
            self.store_floats(self.starts, lead, 4, xs * f32(-MAGIC))
        self.store_floats(self.factors, [row, chunk], 0, xs)
        if fold.zeros:
            total = tirx.reinterpret("float32", _weighted(totals, fold.weights))
            self.store_floats(self.factors, [row, chunk], 4, total)

    def _codes(self, source: _Row, row: Expr, first: Expr, scale: Buffer, sums: Buffer) -> None:
        """Codes of one unit, and their sums by part."""
        fold = self.fold
        values = b.sblock_alloc_buffer((VECTORS, 4), "float32", align=16)  # x', exact in float32
        codes = b.sblock_alloc_buffer((VECTORS, 4), "int32", align=16)
        for j in reversed(range(VECTORS)):
            value = source.four(first, j) * _four(scale[1])
            if self.asymmetric:
                value = value - _four(scale[2])
            above, step = j + fold.vectors, _four(f32(2.0**-fold.width))
            if above < VECTORS:
                value = _fma(values[above, _lanes(0)], -step, value)
            rounded = _nearest(value)
            b.buffer_store(values, rounded, [j, _lanes(0)])
            b.buffer_store(codes, rounded.astype("int32x4"), [j, _lanes(0)])
            part = fold.part(j)
            total = sums[part, _lanes(0)] + codes[j, _lanes(0)]
            b.buffer_store(sums, total, [part, _lanes(0)])
            if above < VECTORS and fold.part(j):
                meant = _fma(values[above, _lanes(0)], step, values[j, _lanes(0)])
                b.buffer_store(values, meant, [j, _lanes(0)])
        for j in range(0, VECTORS, 4):
            fours = [codes[j + i, _lanes(0)] for i in range(4)]
            self.store_codes(row, first + 4 * j, fours)

    def _correction(self, totals: list[Expr]) -> Expr:
        """C, rounded to nearest even."""
        fold = self.fold
        value = _weighted(totals, fold.corrections)
        if not fold.shift:
            return value
        shift, one = tirx.const(fold.shift, "int32"), tirx.const(1, "int32")
        odd = tirx.bitwise_and(tirx.shift_right(value, shift), one)
        half = tirx.const((1 << (fold.shift - 1)) - 1, "int32")
        return tirx.shift_right(value + half + odd, shift)


class _Row:
    """One row of x, of a matrix or alone."""

    def __init__(self, buffer: Buffer, row: Expr | None) -> None:
        self._buffer, self._lead = buffer, [] if row is None else [row]

    def four(self, first: Expr, vector: int) -> Expr:
        """float32 [4]."""
        return self._buffer[(*self._lead, ramp(first + i64(4 * vector), 4))]


def _weighted(totals: list[Expr], weights: tuple[int, ...]) -> Expr:
    value: Expr = tirx.const(0, "int32")
    for total, weight in zip(totals, weights, strict=True):
        if weight:
            value = value + total * tirx.const(weight, "int32")
    return value


def _nearest(value: Expr) -> Expr:
    return tirx.call_llvm_pure_intrin("float32x4", "llvm.roundeven.v4f32", value)


def _fma(x: Expr, y: Expr, z: Expr) -> Expr:
    return tirx.call_llvm_pure_intrin("float32x4", "llvm.fma.v4f32", x, y, z)


def _four(value: Expr) -> Expr:
    return tirx.Broadcast(value, 4)


def ramp(first: Expr, lanes: int) -> Expr:
    """Neighbouring elements."""
    return tirx.Ramp(first, i64(1), lanes)


def _lanes(first: int) -> Expr:
    return ramp(i64(first), 4)
