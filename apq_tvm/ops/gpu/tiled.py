"""``y = act(x Wᵀ + b) + residual`` on a GPU for weights in any layout and float32 x.

A block of threads decodes 32 rows of weights, a few columns at a time, into shared memory, puts
rows of x beside them and multiplies: what was decoded serves all its rows of x. Groups of 128
threads have columns of their own and meet at the end: few rows of weights are few blocks.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import WeightLayout
from apq_tvm.ops.gpu.team import WARP, last, local, meet, shared
from apq_tvm.ops.linear.spec import LinearSpec, Operands, epilogue_of
from apq_tvm.tensorize.exprs import Expr, PrimFunc, f32, i64

ROWS = 32
"""Rows of weights of a block."""

DEEP = 32
"""Columns of a group at a time."""

_WIDE, _HIGH = 4, 16
"""Rows of weights of a thread; threads along rows of x."""

_GROUP = ROWS // _WIDE * _HIGH
"""Threads of a group."""

_PAD = 4
"""Floats between rows of shared memory, so that four of one are aligned."""


class Tiled:
    """Builds the PrimFunc of one layer.

    Parameters
    ----------
    spec : LinearSpec
    layout : WeightLayout
        Without a sparse part.
    bits : int
        Width, where the scheme leaves a choice; 0 for the widest.
    tall : int
        Rows of x of a block, a multiple of 16.
    groups : int
        Of threads.
    """

    def __init__(
        self, spec: LinearSpec, layout: WeightLayout, bits: int, tall: int, groups: int
    ) -> None:
        self.spec, self.layout, self.bits = spec, layout, bits
        self.tall, self.groups, self.each = tall, groups, tall // _HIGH
        self.deep = DEEP * groups

    def build(self) -> PrimFunc:
        """``(x f32 [M, K], *packed arrays, [bias], [residual], y)``, threads bound."""
        spec = self.spec
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            operands = Operands(spec)
            self.m = operands.m
            self.x = operands.declare("x", (self.m, spec.k), "float32")
            self.arrays = operands.weights(self.layout)
            self.bias, self.residual, self.y = operands.epilogue()
            down = (self.m + i64(self.tall - 1)) // i64(self.tall)
            with (
                b.thread_binding(0, i64(-(-spec.n // ROWS)), "blockIdx.x") as column,
                b.thread_binding(0, down, "blockIdx.y") as tile,
                b.thread_binding(0, _GROUP * self.groups, "threadIdx.x") as thread,
                b.sblock("tile"),
            ):
                b.reads()
                b.writes()
                self.column, self.row = column * i64(ROWS), tile * i64(self.tall)
                self.thread = thread
                self._share()
        return builder.get()

    def _share(self) -> None:
        inner, self.group = self.thread % _GROUP, self.thread // _GROUP
        self.first_w, self.first_x = inner % (ROWS // _WIDE) * _WIDE, inner // (ROWS // _WIDE)
        self.first_x = self.first_x * self.each
        self.of_w = b.sblock_alloc_buffer((self.deep, ROWS + _PAD), "float32", scope="shared")
        self.of_x = b.sblock_alloc_buffer((self.deep, self.tall + _PAD), "float32", scope="shared")
        count = _WIDE * self.each
        self.sums, self.w = local(count, "float32"), local(_WIDE, "float32")
        self.mine = local(self.each, "float32")
        for at in range(count):
            b.buffer_store(self.sums, f32(0.0), [at])
        with b.serial(0, -(-self.spec.k // self.deep)) as turn:
            self._fill(turn.astype("int64") * i64(self.deep))
            meet()
            self._multiply()
            meet()
        self._store()

    def _fill(self, first: Expr) -> None:
        """Weights and x of the next columns: 8 columns a warp, 4 rows at once, which are all banks
        of shared memory."""
        warp, lane = self.thread // WARP, self.thread % WARP
        column, row = warp * 8 + lane % 8, lane // 8
        k = first + column.astype("int64")
        here, inside = last(i64(self.spec.k), k), k < i64(self.spec.k)
        rows, blocks = i64(self.layout.rows), i64(self.layout.row_blocks(self.spec.n))

        def put(to: Any, value: Expr, at: Expr) -> None:
            if self.spec.k % self.deep:
                value = tirx.if_then_else(inside, value, f32(0.0))
            b.buffer_store(to, value, [column, at])

        for turn in range(ROWS // 4):
            at = row + turn * 4
            n = self.column + at.astype("int64")
            block = last(blocks, n // rows)
            put(self.of_w, self.layout.weight(self.arrays, block, n % rows, here, self.bits), at)
        with b.unroll(0, self.tall // 4) as turn:
            at = row + turn * 4
            put(self.of_x, self.x[last(self.m, self.row + at.astype("int64")), here], at)

    def _multiply(self) -> None:
        """A group's columns, one after the other."""
        with b.serial(0, DEEP) as at:
            k = self.group * DEEP + at
            with b.vectorized(0, _WIDE) as i:
                b.buffer_store(self.w, self.of_w[k, self.first_w + i], [i])
            with b.vectorized(0, self.each) as i:
                b.buffer_store(self.mine, self.of_x[k, self.first_x + i], [i])
            for j in range(self.each):
                for i in range(_WIDE):
                    place = j * _WIDE + i
                    more = self.w[i] * self.mine[j]
                    b.buffer_store(self.sums, self.sums[place] + more, [place])

    def _store(self) -> None:
        """The groups' sums as one."""
        count = _WIDE * self.each
        if self.groups > 1:
            self.parts = shared(self.groups * _GROUP * count, "float32")
            for at in range(count):
                place = (self.group * count + at) * _GROUP + self.thread % _GROUP
                b.buffer_store(self.parts, self.sums[at], [place])
            meet()
        # Each group stores some of the results, if there are enough.
        share = self.groups if count % self.groups == 0 else 1
        with b.If(self.group < share), b.Then(), b.unroll(0, count // share) as turn:
            at = turn * share + self.group if share > 1 else turn
            self._store_one(at, self._total(at))

    def _total(self, at: Expr) -> Expr:
        if self.groups == 1:
            return self.sums[at]
        count, inner = _WIDE * self.each, self.thread % _GROUP
        places = [(group * count + at) * _GROUP + inner for group in range(self.groups)]
        total = self.parts[places[0]]
        for place in places[1:]:
            total = total + self.parts[place]
        return total

    def _store_one(self, at: Expr, total: Expr) -> None:
        spec = self.spec
        column = self.column + (self.first_w + at % _WIDE).astype("int64")
        row = self.row + (self.first_x + at // _WIDE).astype("int64")
        inside = row < self.m
        if spec.n % ROWS:
            inside = tirx.all(inside, column < i64(spec.n))
        with b.If(inside), b.Then():
            value = epilogue_of(spec, total, self.bias, self.residual, row, column)
            b.buffer_store(self.y, value, [row, column])


def tiled_linear(spec: LinearSpec, layout: WeightLayout, bits: int, tall: int, groups: int) -> Any:
    """The PrimFunc of `Tiled`."""
    return Tiled(spec, layout, bits, tall, groups).build()
