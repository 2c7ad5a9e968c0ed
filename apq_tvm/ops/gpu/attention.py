"""softmax(q kᵀ scale + mask) v in one kernel, for every head and 8 rows of q a block of threads.

Scores never reach memory: warps take turns along the keys, 32 at a time, and keep for each row the
largest score so far, the sum of exponentials and the sum of what those weigh (Milakov and
Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867; in blocks as Dao et al.,
"FlashAttention", arXiv:2205.14135). At the end the warps' sums meet in shared memory. One row, as a
decoder has, costs as much as 8: keys and values are read once for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from operator import mul
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.blocks import argument
from apq_tvm.ops.gpu.quantize import GroupQuantizer
from apq_tvm.ops.gpu.team import WARP, Call, Team, last, local, meet, shared
from apq_tvm.ops.graph.batch_matmul import broadcast_shapes
from apq_tvm.ops.graph.shapes import Dim, Symbols, stored_index
from apq_tvm.ops.graph.softmax import LOWEST, broadcast_index, exp_of_nonpositive
from apq_tvm.tensorize.exprs import Expr, PrimFunc, f32, i64

ROWS = 8
"""Rows of q of a block."""

WARPS = 4
"""Of a block; they share the keys."""

WIDEST = 256
"""Columns of q, k and v of a head: their sums lie in 48 KiB of shared memory."""


def attention(
    shapes: Sequence[Sequence[Dim]],
    orders: Sequence[Sequence[int]],
    order_out: Sequence[int],
    mask: Sequence[Dim] | None = None,
    scale: float = 1.0,
    zero_masked: bool = False,
    firsts: Sequence[int] = (0, 0, 0),
    heads: int = 0,
    quantizer: GroupQuantizer | None = None,
    *,
    call: Call,
) -> PrimFunc:
    """Build ``(q, k, v, [mask], y, [xq, xs, start])``, float32, threads bound.

    Parameters
    ----------
    shapes : three sequences of int or str
        Of q, k and v as stored; strings are dynamic dimensions.
    orders : three sequences of int
        As ONNX Transpose, to ``[*batch, rows, D]``, ``[*batch, D, keys]``, ``[*batch, keys, E]``.
    order_out : sequence of int
        From ``[*batch, rows, E]`` to y.
    mask : sequence of int or str, optional
        Shape of what is added to scores; broadcasts to ``[*batch, rows, keys]``.
    scale : float
        Multiplies scores.
    zero_masked : bool
        A row whose scores are all -inf is 0 instead of NaN.
    firsts : three ints
        Of the last batch axis of q, k and v: where theirs begins in what is stored.
    heads : int
        Extent of the last batch axis; 0 is what is stored.
    quantizer : GroupQuantizer, optional
        Of rows of y, whose last two axes are a head and its columns.
    call : callable
        Device functions of teams.

    Raises
    ------
    NotApplicable
        Heads of more than 256 columns, or not of whole fours; dimensions that do not match; groups
        of the quantizer that are not parts of a head.
    """
    made = _Attention(shapes, orders, order_out, mask, scale, zero_masked, firsts, heads)
    func = made.build(quantizer, call)
    arguments = {
        **{"shapes": shapes, "orders": orders, "order_out": order_out, "mask": mask},
        **{"scale": scale, "zero_masked": zero_masked, "firsts": firsts, "heads": heads},
    }
    return func.with_attr("apq.arguments", json.dumps(arguments))


def with_quantizer(func: PrimFunc, quantizer: GroupQuantizer) -> PrimFunc:
    """The function of `attention` with one."""
    arguments = json.loads(str(func.attrs["apq.arguments"]))
    return attention(**arguments, quantizer=quantizer, call=quantizer.call)


class _Operand:
    """One of q, k and v: an element by logical indices."""

    def __init__(self, order: Sequence[int], batch: Sequence[Dim], first: int) -> None:
        self.order, self.batch, self.first = order, batch, first
        self.buffer: Any = None

    def at(self, batch: Sequence[Expr], *inner: Expr) -> list[Expr]:
        """Where ``[*batch, *inner]`` is stored; axes of extent 1 repeat."""
        used = batch[len(batch) - len(self.batch) :]
        logical = [i64(0) if d == 1 else i for d, i in zip(self.batch, used, strict=True)]
        if self.first:
            logical[-1] = logical[-1] + i64(self.first)
        logical += inner
        return stored_index(self.order, logical)


class _Attention:
    def __init__(
        self,
        shapes: Sequence[Sequence[Dim]],
        orders: Sequence[Sequence[int]],
        order_out: Sequence[int],
        mask: Sequence[Dim] | None,
        scale: float,
        zero_masked: bool,
        firsts: Sequence[int],
        heads: int,
    ) -> None:
        self.shapes, self.order_out, self.mask_shape = shapes, order_out, mask
        self.scale, self.zero_masked = scale, zero_masked
        q, k, v = ([shape[p] for p in order] for shape, order in zip(shapes, orders, strict=True))
        for one in (q, k, v):
            if heads:
                one[-3] = heads
        if q[-1] != k[-2] or k[-1] != v[-2]:
            raise NotApplicable(f"q {tuple(q)}, k {tuple(k)} and v {tuple(v)} do not match")
        self.batch = broadcast_shapes(broadcast_shapes(q[:-2], k[:-2]), v[:-2])
        self.rows, self.width, self.keys, self.out = q[-2], q[-1], k[-1], v[-1]
        for columns in (self.width, self.out):
            if not isinstance(columns, int) or columns > WIDEST or columns % 4:
                raise NotApplicable(f"heads of {columns} columns: wanted fours, {WIDEST} at most")
        self.operands = [
            _Operand(order, one[:-2], first)
            for order, one, first in zip(orders, (q, k, v), firsts, strict=True)
        ]
        if mask is not None:
            whole = (*self.batch, self.rows, self.keys)
            broadcast_index(whole, mask, [i64(0)] * len(whole))
        self.along = -(-int(self.out) // WARP)
        self.straight = orders[1][-2] == len(orders[1]) - 1  # a key's columns are neighbours

    def build(self, quantizer: GroupQuantizer | None, call: Call) -> PrimFunc:
        if quantizer is not None:
            self._check(quantizer)
        symbols = Symbols()
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name("attention")
            op = "attention" if quantizer is None else "attention_quantize_words"
            b.func_attr({"apq.op": op, "op_pattern": 8, "tirx.noalias": True})
            b.func_attr({"tirx.is_scheduled": True})
            for name, operand, shape in zip("qkv", self.operands, self.shapes, strict=True):
                operand.buffer = argument(name, symbols.shape(shape), "float32")
            self.mask = None
            if self.mask_shape is not None:
                self.mask = argument("mask", symbols.shape(self.mask_shape), "float32")
            batch = symbols.shape(self.batch)
            self.m, self.t = symbols.shape((self.rows, self.keys))
            logical = (*batch, self.m, i64(int(self.out)))
            self.y = argument("y", [logical[p] for p in self.order_out], "float32")
            if quantizer is not None:
                quantizer.declare(reduce(mul, (*batch[:-1], self.m)))
            tiles = (self.m + i64(ROWS - 1)) // i64(ROWS)
            blocks = reduce(mul, batch, tiles)
            with (
                b.thread_binding(0, blocks, "blockIdx.x") as block,
                b.thread_binding(0, WARPS * WARP, "threadIdx.x") as thread,
                b.sblock("rows"),
            ):
                b.reads()
                b.writes()
                self.team, self.warp = Team(WARP, thread, call), thread // WARP
                self.everyone, self.lane = Team(WARPS * WARP, thread, call), thread % WARP
                self.first, rest = block % tiles * i64(ROWS), block // tiles
                at: list[Expr] = []
                for extent in reversed(batch):
                    at.insert(0, rest % extent)
                    rest = rest // extent
                self.at = at
                self._rows(quantizer, batch)
        return builder.get()

    def _check(self, quantizer: GroupQuantizer) -> None:
        rank, width = len(self.order_out), quantizer.width
        head_last = (*range(rank - 3), rank - 2, rank - 3, rank - 1)
        heads = self.batch[-1] if self.batch else 0
        if tuple(self.order_out) != head_last or not isinstance(heads, int):
            raise NotApplicable("rows of y are no rows of all heads")
        whole = heads * int(self.out)
        if whole != quantizer.factors.k or whole != quantizer.factors.padded:
            raise NotApplicable(f"{heads} heads are not the {quantizer.factors.padded} columns")
        if int(self.out) % width:
            raise NotApplicable(f"groups of {width} are not parts of heads of {self.out} columns")

    def _row(self, number: Any) -> Expr:
        return last(self.m, self.first + number)

    def _rows(self, quantizer: GroupQuantizer | None, batch: Sequence[Expr]) -> None:
        width, out = int(self.width), int(self.out)
        self.q = shared(ROWS * width, "float32")
        self.weights = shared(WARPS * WARP * ROWS, "float32")
        with self.everyone.share(ROWS * width) as at:
            row, column = at // width, at % width
            index = self.operands[0].at(
                self.at, self._row(row.astype("int64")), column.astype("int64")
            )
            b.buffer_store(self.q, self.operands[0].buffer[tuple(index)], [at])
        meet()
        self.most, self.sums = local(ROWS, "float32"), local(ROWS, "float32")
        self.fade, self.scores = local(ROWS, "float32"), local(ROWS, "float32")
        self.total = local(ROWS * self.along, "float32")
        for buffer, value in ((self.most, -float("inf")), (self.sums, 0.0), (self.total, 0.0)):
            for i in range(int(buffer.shape[0])):
                b.buffer_store(buffer, f32(value), [i])
        each = WARPS * WARP
        with b.serial(i64(0), (self.t + i64(each - 1)) // i64(each)) as turn:
            first = turn * i64(each) + (self.warp * WARP).astype("int64")
            self._score(first + self.lane.astype("int64"))
            meet()
            self._weigh(first)
            meet()
        self._finish(quantizer, batch, out)

    def _score(self, key: Expr) -> None:
        """A key for each lane: scores of all rows, and what they weigh."""
        here, part = last(self.t, key), local(4, "float32")
        for row in range(ROWS):
            b.buffer_store(self.scores, f32(0.0), [row])
        with b.serial(0, int(self.width) // 4) as four:
            kind = b.vectorized if self.straight else b.unroll
            with kind(0, 4) as i:
                column = (four * 4 + i).astype("int64")
                index = self.operands[1].at(self.at, column, here)
                b.buffer_store(part, self.operands[1].buffer[tuple(index)], [i])
            for row in range(ROWS):
                total = self.scores[row]
                for i in range(4):
                    total = total + self.q[row * int(self.width) + four * 4 + i] * part[i]
                b.buffer_store(self.scores, total, [row])
        value, least = local(1, "float32"), local(1, "float32")
        for row in range(ROWS):
            score = self.scores[row] * f32(self.scale)
            if self.mask is not None:
                whole = (*self.batch, self.rows, self.keys)
                indices = [*self.at, self._row(i64(row)), here]
                place = broadcast_index(whole, self.mask_shape or (), indices)
                score = score + self.mask[tuple(place)]
            b.buffer_store(value, tirx.Select(key < self.t, score, f32(-float("inf"))), [0])
            top = tirx.max(self.most[row], self.team.find("max", value[0]))
            b.buffer_store(least, tirx.max(top, f32(LOWEST)), [0])
            b.buffer_store(self.fade, exp_of_nonpositive(self.most[row] - least[0]), [row])
            b.buffer_store(self.most, top, [row])
            b.buffer_store(value, exp_of_nonpositive(value[0] - least[0]), [0])
            b.buffer_store(self.sums, self.sums[row] * self.fade[row] + value[0], [row])
            place = (self.warp * WARP + self.lane) * ROWS + row
            b.buffer_store(self.weights, value[0], [place])

    def _weigh(self, first: Expr) -> None:
        """Columns for each lane: what the warp's keys add to all rows."""
        for row in range(ROWS):
            for i in range(self.along):
                at = row * self.along + i
                b.buffer_store(self.total, self.total[at] * self.fade[row], [at])
        found = local(1, "float32")
        with b.serial(0, WARP) as number:
            key = first + number.astype("int64")
            for i in range(self.along):
                column = (self.lane + WARP * i).astype("int64")
                inside = key < self.t
                if int(self.out) % WARP:
                    inside = tirx.all(inside, column < i64(int(self.out)))
                index = self.operands[2].at(self.at, key, column)
                element = self.operands[2].buffer[tuple(index)]
                b.buffer_store(found, tirx.if_then_else(inside, element, f32(0.0)), [0])
                for row in range(ROWS):
                    at, place = row * self.along + i, (self.warp * WARP + number) * ROWS + row
                    more = self.weights[place] * found[0]
                    b.buffer_store(self.total, self.total[at] + more, [at])

    def _finish(self, quantizer: GroupQuantizer | None, batch: Sequence[Expr], out: int) -> None:
        """The warps' sums as one."""
        sums, most = shared(WARPS * ROWS, "float32"), shared(WARPS * ROWS, "float32")
        totals = shared(WARPS * ROWS * out, "float32")
        result = shared(ROWS * out, "float32") if quantizer is not None else None
        for row in range(ROWS):
            whole = self.team.find("sum", self.sums[row])
            with b.If(self.lane == 0), b.Then():
                b.buffer_store(sums, whole, [self.warp * ROWS + row])
                b.buffer_store(most, self.most[row], [self.warp * ROWS + row])
            for i in range(self.along):
                column = self.lane + WARP * i
                place = (self.warp * ROWS + row) * out + column
                with b.If(column < out), b.Then():
                    b.buffer_store(totals, self.total[row * self.along + i], [place])
        meet()
        value = local(1, "float32")
        with self.everyone.share(ROWS * out) as at:
            row, column = at // out, at % out
            b.buffer_store(value, _joined(sums, most, totals, row, at, out, self.zero_masked), [0])
            if result is not None:
                b.buffer_store(result, value[0], [at])
            number = self.first + row.astype("int64")
            with b.If(number < self.m), b.Then():
                logical = [*self.at, number, column.astype("int64")]
                b.buffer_store(self.y, value[0], [logical[p] for p in self.order_out])
        if quantizer is not None and result is not None:
            meet()
            self._quantize(quantizer, result, batch, out)

    def _quantize(
        self, quantizer: GroupQuantizer, result: Any, batch: Sequence[Expr], out: int
    ) -> None:
        """Groups of these rows, a warp each."""
        groups = out // quantizer.width
        with b.serial(0, ROWS * groups // WARPS) as turn:
            task = turn * WARPS + self.warp
            row, number = task // groups, (task % groups).astype("int64")
            inside = self.first + row.astype("int64") < self.m
            flat: Any = i64(0)
            for extent, i in zip(batch[:-1], self.at[:-1], strict=True):
                flat = flat * extent + i
            flat = flat * self.m + self._row(row.astype("int64"))
            head = self.at[-1] * i64(out)
            group = self.at[-1] * i64(groups) + number

            def value(column: Expr, row: Expr = row, head: Expr = head) -> Expr:
                return result[row * out + (column - head).astype("int32")]

            quantizer.write(self.team, flat, group, value, inside)


def _joined(
    sums: Any, most: Any, totals: Any, row: Expr, at: Expr, out: int, zero_masked: bool
) -> Expr:
    """A row's element of all warps: sums, each by how far its largest is below the largest."""
    rows = [warp * ROWS + row for warp in range(WARPS)]
    top = reduce(tirx.max, [most[place] for place in rows], f32(LOWEST))
    weights = [exp_of_nonpositive(most[place] - top) for place in rows]
    parts = [totals[at + warp * ROWS * out] for warp in range(WARPS)]
    total = reduce(lambda x, y: x + y, [w * part for w, part in zip(weights, parts, strict=True)])
    whole = reduce(lambda x, y: x + y, [w * sums[p] for w, p in zip(weights, rows, strict=True)])
    if zero_masked:
        whole = tirx.max(whole, f32(1e-30))
    return total / whole
