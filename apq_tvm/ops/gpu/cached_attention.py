"""softmax(q kᵀ scale + mask) v over a decoder's cache, whose keys lie 16 tokens side by side.

A row is a head of a query; heads that share keys are rows of one tile, so that a key is read once
for all of them (Ainslie et al., arXiv:2305.13245). A lane has a key, so that what a warp reads of
16 tokens is one piece of memory; the softmax is streamed as in `apq_tvm.ops.gpu.attention`, and
what the mask hides from a tile is not read.

A decoder has few rows and many keys: where tiles are fewer than the GPU's multiprocessors hold, the
keys are cut into parts, each a block's own, and a second kernel joins them (Dao et al.,
"Flash-Decoding for long-context inference", 2023). How many parts there are follows from shapes in
a run; memory for their sums is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.blocks import argument
from apq_tvm.ops.gpu.attention_parts import Parts, join_parts
from apq_tvm.ops.gpu.team import WARP, Call, Team, local, meet, meet_warp, shared
from apq_tvm.ops.graph.attention import PACK, Attended
from apq_tvm.ops.graph.attention import attention as declared
from apq_tvm.ops.graph.shapes import Dim, Symbols, stored_index
from apq_tvm.ops.graph.softmax import LOWEST, broadcast_index, exp_of_nonpositive
from apq_tvm.tensorize.exprs import Expr, PrimFunc, f32, i32

ROWS = 8
"""Rows of a tile, where queries are many."""

WARPS = 4
"""Of a block; they share the keys of its part."""

WIDEST = 256
"""Columns of a head of keys or of values: their sums lie in 48 KiB of shared memory."""

HIDDEN, SEEN = -1e37, -1e36
"""A mask up to the first beside a score from the second on weighs exactly 0 in float32: exporters
hide keys by the least float, and a row that sees no key at all weighs them alike."""

READS = 32
"""Numbers of values that a thread reads before it uses the first, or half of that for many rows."""


def cached_attention(
    q: Sequence[Dim],
    keys: Sequence[Dim],
    values: Sequence[Dim],
    mask: Sequence[Dim] | None = None,
    *,
    blocks: int,
    call: Call,
    **attributes: Any,
) -> PrimFunc:
    """Build `apq_tvm.ops.graph.attention.attention`, with its arguments, threads bound.

    Parameters
    ----------
    q, keys, values, mask, **attributes
        Those of that function.
    blocks : int
        So many of threads are enough for the GPU: with fewer tiles the keys are cut.
    call : callable
        Device functions of teams.

    Raises
    ------
    NotApplicable
        As there; heads of more than 256 columns, or not of whole fours.
    """
    spec = Attended.of(declared(q, keys, values, mask, **attributes))
    if spec.sink:
        raise NotApplicable("attention of GPUs has no scores without values")
    width, out = int(keys[3]), int(values[spec.order_values[-1]])
    for columns in (width, out):
        if columns > WIDEST or columns % 4:
            raise NotApplicable(f"heads of {columns} columns: wanted fours, {WIDEST} at most")
    made = _Attention(spec, width, out, blocks, call)
    return made.build(q, keys, values, mask, str(attributes.get("dtype", "float32")))


@dataclass(frozen=True)
class Place:
    """Where a block is: a sequence, a head of keys, a tile of rows, a part of the keys."""

    seq: Expr
    head: Expr
    tile: Expr | None
    part: Expr | None


class _Attention:
    def __init__(self, spec: Attended, width: int, out: int, blocks: int, call: Call) -> None:
        self.spec, self.width, self.out, self.call = spec, width, out, call
        self.blocks = blocks
        self.along = -(-out // WARP)
        self.near = out % self.along == 0 and self.along in (
            1,
            2,
            4,
        )  # a lane's columns: neighbours
        few = -(-spec.group // -(-spec.group // ROWS))  # of one query's heads
        self.few = few if few < ROWS else ROWS

    def build(
        self,
        q: Sequence[Dim],
        keys: Sequence[Dim],
        values: Sequence[Dim],
        mask: Sequence[Dim] | None,
        dtype: str,
    ) -> PrimFunc:
        """The function."""
        spec, symbols = self.spec, Symbols()
        self.logical: list[Dim] = [q[p] for p in spec.order]
        self.scores: list[Dim] = [*self.logical[:-1], values[spec.order_values[0]]]
        self.mask_shape = mask
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name("cached_attention")
            b.func_attr({"apq.op": "cached_attention", "op_pattern": 8, "tirx.noalias": True})
            b.func_attr({"tirx.is_scheduled": True})
            self.q = argument("q", symbols.shape(q), "float32")
            self.keys = argument("keys", symbols.shape(keys), dtype)
            self.values = argument("values", symbols.shape(values), dtype)
            self.mask = None
            if mask is not None:
                self.mask = argument("mask", symbols.shape(mask), "float32")
            result = [*self.logical[:-1], self.out]
            self.y = argument("y", symbols.shape([result[p] for p in spec.order_out]), "float32")
            tokens = self.values.shape[spec.order_values[0]]
            self.heads, self.t = int(keys[2]), tokens.astype("int32")
            self.queries = symbols.shape((self.logical[-2],))[0].astype("int32")
            self.m = self.queries * i32(spec.group)
            self.batch = self.keys.shape[1].astype("int32")
            with b.sblock("root"):
                b.reads()
                b.writes()
                self._kernels()
        return builder.get()

    def _kernels(self) -> None:
        """For one query, for more of them, and what joins parts of either."""
        slots = self.blocks * ROWS
        self.totals = b.sblock_alloc_buffer((slots * self.out,), "float32")
        self.found = b.sblock_alloc_buffer((slots * 2,), "float32")
        heads = self.heads * self.batch
        sizes = [
            (Parts(rows, WARPS * WARP, self.blocks, self.m, self.t, heads), when)
            for rows, when in self._sizes()
        ]
        for parts, when in sizes:
            with self._blocks(parts, when) as (place, thread):
                _Tile(self, parts, place, thread).run()
        join_parts(self, sizes)

    def _sizes(self) -> list[tuple[int, Any]]:
        """Rows of a tile, and when it is that; None is always."""
        if isinstance(self.logical[-2], int):
            return [(self.few if self.logical[-2] == 1 else ROWS, None)]
        if self.few == ROWS:
            return [(ROWS, None)]
        alone = self.queries == i32(1)
        return [(self.few, alone), (ROWS, tirx.Not(alone))]

    @contextmanager
    def _blocks(self, parts: Parts, when: Any) -> Iterator[tuple[Place, Expr]]:
        """A kernel; its grid is empty where it is not meant."""
        count = parts.count if when is None else tirx.Select(when, parts.count, i32(0))
        with (
            b.thread_binding(0, count, "blockIdx.x") as part,
            b.thread_binding(0, parts.tiles, "blockIdx.y") as tile,
            b.thread_binding(0, parts.heads, "blockIdx.z") as number,
            b.thread_binding(0, WARPS * WARP, "threadIdx.x") as thread,
            b.sblock("tile"),
        ):
            b.reads()
            b.writes()
            yield self.place(number, tile, part), thread

    # ---- what the kernels share ----

    def place(self, number: Expr, tile: Expr | None = None, part: Expr | None = None) -> Place:
        """That of a head of all sequences."""
        return Place(number // i32(self.heads), number % i32(self.heads), tile, part)

    def at(self, place: Place, row: Expr) -> list[Expr]:
        """Logical indices of q, without columns, of a row of a head of keys; int64."""
        group = i32(self.spec.group)
        query, head = row // group, row % group
        indices = [place.seq, place.head * group + head, query]
        if len(self.logical) == 5:
            indices = [place.seq, place.head, head, query]
        elif len(self.logical) == 3:
            indices = [place.seq, query]
        return [index.astype("int64") for index in indices]

    def finish(self, place: Place, row: Expr, column: Expr, ends: Any) -> None:
        """Store an element of y: `ends` are all weights together, and what they weigh."""
        whole, total = ends
        if self.spec.zero_masked:
            whole = tirx.max(whole, f32(1e-30))
        logical = [*self.at(place, row), column.astype("int64")]
        b.buffer_store(self.y, total / whole, [logical[p] for p in self.spec.order_out])


class _Tile:
    """What a thread does for a tile of rows and a part of the keys."""

    def __init__(self, made: _Attention, parts: Parts, place: Place, thread: Expr) -> None:
        self.made, self.parts, self.place = made, parts, place
        self.rows, self.stride = parts.rows, -(-parts.rows // 4) * 4
        self.first = place.tile * i32(parts.rows)
        self.team, self.everyone = (
            Team(WARP, thread, made.call),
            Team(WARPS * WARP, thread, made.call),
        )
        self.warp, self.lane = thread // WARP, thread % WARP

    def run(self) -> None:
        """All of it."""
        made, rows = self.made, self.rows
        self.q = shared(rows * made.width, "float32")
        self.weights = shared(WARPS * WARP * self.stride, "float32")
        with self.everyone.share(rows * made.width) as at:
            row, column = at // made.width, at % made.width
            logical = [*made.at(self.place, self._row(row)), column.astype("int64")]
            b.buffer_store(self.q, made.q[tuple(stored_index(made.spec.order, logical))], [at])
        meet()
        self.most, self.sums = local(rows, "float32"), local(rows, "float32")
        self.fade, self.scores = local(rows, "float32"), local(rows, "float32")
        self.total = local(rows * made.along, "float32")
        for buffer, value in ((self.most, -float("inf")), (self.sums, 0.0), (self.total, 0.0)):
            for i in range(int(buffer.shape[0])):
                b.buffer_store(buffer, f32(value), [i])
        begin = self.place.part * self.parts.turns
        with b.serial(i32(0), self.parts.turns) as turn:
            first = ((begin + turn) * i32(WARPS) + self.warp) * i32(WARP)
            with b.If(first < made.t), b.Then():
                self._keys(first)
        self._finish()

    def _row(self, number: Any) -> Expr:
        """A row of the head of keys; past the last one that is repeated, and not stored."""
        return tirx.min(self.first + number, self.made.m - i32(1))

    def _keys(self, first: Expr) -> None:
        """The 32 keys of a warp, unless the mask hides them from all rows."""
        made, key = self.made, first + self.lane
        here = tirx.min(key, made.t - i32(1))
        if made.mask is None:
            self._both(first, key, here, None)
            return
        masked, seen = local(self.rows, "float32"), local(1, "int32")
        b.buffer_store(seen, i32(0), [0])
        for row in range(self.rows):
            indices = [*made.at(self.place, self._row(i32(row))), here.astype("int64")]
            place = broadcast_index(made.scores, made.mask_shape or (), indices)
            b.buffer_store(masked, made.mask[tuple(place)], [row])
            plain = tirx.Not(masked[row] <= f32(HIDDEN))
            first_seen = tirx.Not(self.most[row] > f32(SEEN))
            wanted = tirx.Or(plain, tirx.And(masked[row] > f32(-float("inf")), first_seen))
            b.buffer_store(seen, tirx.Select(wanted, i32(1), seen[0]), [0])
        with b.If(self.team.find("max", seen[0]) > i32(0)), b.Then():
            self._both(first, key, here, masked)

    def _both(self, first: Expr, key: Expr, here: Expr, masked: Any) -> None:
        self._products(here)
        self._softmax(key, masked)
        meet_warp(self.made.call)
        self._weigh(first)
        meet_warp(self.made.call)

    def _products(self, here: Expr) -> None:
        """A key for each lane: its products with all rows."""
        made, part = self.made, local(4, "float32")
        for row in range(self.rows):
            b.buffer_store(self.scores, f32(0.0), [row])
        block, lane = (here // i32(PACK)).astype("int64"), (here % i32(PACK)).astype("int64")
        seq, head = (i.astype("int64") for i in (self.place.seq, self.place.head))
        with b.serial(0, made.width // 4) as four:
            for i in range(4):
                column = (four * 4 + i).astype("int64")
                element = made.keys[block, seq, head, column, lane]
                b.buffer_store(part, element.astype("float32"), [i])
            for row in range(self.rows):
                total = self.scores[row]
                for i in range(4):
                    total = total + self.q[row * made.width + four * 4 + i] * part[i]
                b.buffer_store(self.scores, total, [row])

    def _softmax(self, key: Expr, masked: Any) -> None:
        """What the warp's keys weigh for each row, and what earlier ones still do."""
        spec = self.made.spec
        value, least = local(1, "float32"), local(1, "float32")
        for row in range(self.rows):
            score = self.scores[row] * f32(spec.scale)
            if spec.softcap:
                score = f32(spec.softcap) * tirx.tanh(score * f32(1.0 / spec.softcap))
            if masked is not None:
                score = score + masked[row]
            inside = key < self.made.t
            b.buffer_store(value, tirx.Select(inside, score, f32(-float("inf"))), [0])
            top = tirx.max(self.most[row], self.team.find("max", value[0]))
            b.buffer_store(least, tirx.max(top, f32(LOWEST)), [0])
            b.buffer_store(self.fade, exp_of_nonpositive(self.most[row] - least[0]), [row])
            b.buffer_store(self.most, top, [row])
            b.buffer_store(value, exp_of_nonpositive(value[0] - least[0]), [0])
            b.buffer_store(self.sums, self.sums[row] * self.fade[row] + value[0], [row])
            put = self.made.call("apq_warp_put", "void", self._weight(self.lane, row), value[0])
            b.evaluate(put)

    def _weight(self, key: Expr, row: int) -> Expr:
        """Where that of a key of the warp is."""
        at = (self.warp * WARP + key) * self.stride + row
        return tirx.address_of(self.weights[at])

    def _column(self, i: Any) -> Expr:
        """Of values: a lane's i-th."""
        along = self.made.along
        return self.lane * along + i if self.made.near else self.lane + WARP * i

    def _weigh(self, first: Expr) -> None:
        """Columns for each lane: what the warp's keys add to all rows."""
        made, along = self.made, self.made.along
        for row in range(self.rows):
            for i in range(along):
                at = row * along + i
                b.buffer_store(self.total, self.total[at] * self.fade[row], [at])
        reads = READS if self.rows < ROWS else READS // 2
        together = 1 << (min(8, max(1, reads // along)).bit_length() - 1)  # divides a warp's keys
        found, weight = local(together * along, "float32"), local(1, "float32")
        with b.serial(0, WARP // together) as turn:
            for j in range(together):
                token = tirx.min(first + turn * together + j, made.t - i32(1))
                self._read_values(found, j * along, token)
            for j in range(together):
                number = turn * together + j
                for row in range(self.rows):
                    place = self._weight(number, row)
                    b.buffer_store(weight, made.call("apq_warp_get", "float32", place), [0])
                    for i in range(along):
                        at = row * along + i
                        more = weight[0] * found[j * along + i]
                        b.buffer_store(self.total, self.total[at] + more, [at])

    def _read_values(self, found: Any, place: int, token: Expr) -> None:
        """A token's columns of this lane; those past the last one are other columns of it."""
        made, along = self.made, self.made.along
        where = [token, self.place.seq, self.place.head]
        if len(made.spec.order_values) == 3:
            where.pop()
        at = [index.astype("int64") for index in where]

        def read(i: Any, column: Expr) -> None:
            index = stored_index(made.spec.order_values, [*at, column.astype("int64")])
            b.buffer_store(found, made.values[tuple(index)].astype("float32"), [place + i])

        if made.near and along > 1:
            lane = tirx.min(self.lane, i32(made.out // along - 1))
            if str(made.values.dtype) == "float16":
                index = stored_index(made.spec.order_values, [*at, (lane * along).astype("int64")])
                places = tirx.address_of(found[place]), tirx.address_of(made.values[tuple(index)])
                b.evaluate(made.call(f"apq_read_halves{along}", "void", *places))
                return
            with b.vectorized(0, along) as i:
                read(i, lane * along + i)
            return
        for i in range(along):
            read(i, tirx.min(self._column(i), i32(made.out - 1)))

    def _finish(self) -> None:
        """The warps' sums as one: the result, or the sums of a part."""
        made, rows, out = self.made, self.rows, self.made.out
        meet()  # what comes now may lie where q and weights were
        sums, most = shared(WARPS * rows, "float32"), shared(WARPS * rows, "float32")
        totals = shared(WARPS * rows * out, "float32")
        for row in range(rows):
            whole = self.team.find("sum", self.sums[row])
            with b.If(self.lane == 0), b.Then():
                b.buffer_store(sums, whole, [self.warp * rows + row])
                b.buffer_store(most, self.most[row], [self.warp * rows + row])
            for i in range(made.along):
                column = self._column(i)
                place = (self.warp * rows + row) * out + column
                with b.If(column < out), b.Then():
                    b.buffer_store(totals, self.total[row * made.along + i], [place])
        meet()
        with self.everyone.share(rows * out) as at:
            row, column = at // out, at % out
            ends = self._joined(sums, most, totals, row, at)
            number = self.first + row
            with b.If(number < made.m), b.Then():
                with b.If(self.parts.count == i32(1)):
                    with b.Then():
                        made.finish(self.place, number, column, ends[1:])
                    with b.Else():
                        self._store_part(row, column, ends)

    def _joined(self, sums: Any, most: Any, totals: Any, row: Expr, at: Expr) -> Any:
        """A row's largest score, and sums of all warps, each by how far it is below that."""
        rows = [warp * self.rows + row for warp in range(WARPS)]
        top, whole, total = (local(1, "float32") for _ in range(3))
        b.buffer_store(top, reduce(tirx.max, [most[place] for place in rows], f32(LOWEST)), [0])
        b.buffer_store(whole, f32(0.0), [0])
        b.buffer_store(total, f32(0.0), [0])
        weight = local(1, "float32")
        for warp, place in enumerate(rows):
            b.buffer_store(weight, exp_of_nonpositive(most[place] - top[0]), [0])
            b.buffer_store(whole, whole[0] + weight[0] * sums[place], [0])
            part = totals[at + warp * self.rows * self.made.out]
            b.buffer_store(total, total[0] + weight[0] * part, [0])
        return top[0], whole[0], total[0]

    def _store_part(self, row: Expr, column: Expr, ends: Any) -> None:
        made, (top, whole, total) = self.made, ends
        number = self.place.seq * i32(made.heads) + self.place.head
        slot = self.parts.slot(number, self.place.tile, self.place.part) * i32(self.rows) + row
        b.buffer_store(made.totals, total, [slot * i32(made.out) + column])
        with b.If(column == i32(0)), b.Then():
            b.buffer_store(made.found, top, [slot * i32(2)])
            b.buffer_store(made.found, whole, [slot * i32(2) + i32(1)])
