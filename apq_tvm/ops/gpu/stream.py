"""The skeleton of products on GPUs: weights stream through tensor cores, rows of x stand still.

A warp computes 16 rows of weights, or thirds of 16 whose codes are stored together, or several
blocks of them (`Plan.stacked`), for some rows of x. Warps of a block of threads take turns along K,
a *chunk* at a time, and meet in shared memory at the end: else 8192 rows of weights give a
multiprocessor four warps. A lane's 16-byte load *is* its fragments
(`apq_tvm.codegen.layouts.fragments`): nothing goes through shared memory.

With few rows of x weights are what is read. With many it is x, once for every warp's rows of
weights: then warps stand side by side along N (`Plan.side`), begin each round together, and what
one has read of x the others find in the first cache.

A round of several chunks reads all its weights before it uses the first of them: memory is a
thousand cycles away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts.fragments import FragmentLayout
from apq_tvm.formats.integer import ROW_SUMS
from apq_tvm.ops.gpu.team import meet
from apq_tvm.ops.linear.spec import LinearSpec, Operands, epilogue_of
from apq_tvm.tensorize.exprs import Expr, PrimFunc, f32, i32, i64

WARP = 32


@dataclass(frozen=True)
class Plan:
    """How threads share a layer.

    Parameters
    ----------
    warps : int
        Of a block of threads that take turns along K.
    chunks : int
        Of a round.
    side : int
        As many times `warps` a block of threads has, each for other rows of weights.
    stacked : int
        Blocks of the layout that a warp multiplies what it reads of x by.
    """

    warps: int
    chunks: int
    side: int = 1
    stacked: int = 1


class Stream(ABC):
    """Builds the PrimFunc of one layer; what is done with a chunk is a subclass's.

    Parameters
    ----------
    spec : LinearSpec
        Integers on both sides.
    layout : FragmentLayout
    tall : int
        Rows of x of a block of threads.
    results : int
        Sums of a lane, of 16 rows of weights.
    plan : Plan
    call : callable
        ``(function, *arguments)`` → a call of a device function
        (`apq_tvm.tensorize.cuda.functions`).
    """

    def __init__(
        self,
        spec: LinearSpec,
        layout: FragmentLayout,
        tall: int,
        results: int,
        plan: Plan,
        call: Callable[..., Any],
    ) -> None:
        self.spec, self.layout, self.call = spec, layout, call
        self.tall, self.results, self.plan = tall, results, plan
        self.warps, self.chunks = plan.warps, plan.chunks
        self.thirds, self.parts = layout.thirds, layout.thirds * plan.stacked
        self.whole_rows = layout.group_size == -1
        self.units = layout.chunk_k // layout.unit_k
        self.groups = 0 if self.whole_rows else layout.chunk_k // layout.group_size

    def build(self) -> PrimFunc:
        """``(*x, codes, scales, [zeros], [row_sums], [bias], [residual], y)``, threads bound."""
        spec, layout = self.spec, self.layout
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            operands = Operands(spec)
            m = self.m = operands.m
            self.declare(operands)
            self.weights = operands.weights(layout)
            self.bias, self.residual, self.y = operands.epilogue()
            down = (m + i64(self.tall - 1)) // i64(self.tall)
            self.blocks, wide = layout.row_blocks(spec.n), self.plan.side * self.plan.stacked
            with (
                b.thread_binding(0, i64(-(-self.blocks // wide)), "blockIdx.x") as column,
                b.thread_binding(0, down, "blockIdx.y") as tile,
                b.thread_binding(0, self.warps * self.plan.side, "threadIdx.y") as warp,
                b.thread_binding(0, WARP, "threadIdx.x") as self.lane,
                b.sblock("tile"),
            ):
                b.reads()
                b.writes()
                self.first = tile * i64(self.tall)
                self._stand(column, warp)
                self._share()
        return builder.get()

    # ---- what products differ in ----

    @abstractmethod
    def declare(self, operands: Operands) -> None:
        """Declare the arrays of x."""

    @abstractmethod
    def begin(self) -> None:
        """Allocate what a lane keeps and clear its sums."""

    @abstractmethod
    def chunk(self, chunk: Expr, number: int) -> None:
        """Multiply a chunk, the round's `number`, whose weights `word` has."""

    @abstractmethod
    def end(self) -> None:
        """Leave a lane's sums in `sums`, third by third."""

    @abstractmethod
    def place(self, at: Expr) -> tuple[Expr, Expr, Expr | None]:
        """Of a lane's sum `at` of a third: row of x in the block, row of weights in the third, and
        whether it is this lane that has all of it (None: always)."""

    @abstractmethod
    def factor(self, row: Expr, column: int) -> Expr:
        """float32: the scale (0) or the centre (1) of a row of x as a whole."""

    # ---- one block's share ----

    def _stand(self, column: Expr, warp: Expr) -> None:
        """A warp's turn along K, the first warp of those it meets, its first block of weights."""
        self.warp, self.leader, self.block = warp, i32(0), column
        if self.plan.side > 1:
            self.warp, side = warp % self.warps, warp // self.warps
            self.leader = side * self.warps
            self.block = column * i64(self.plan.side) + side.astype("int64")
        if self.plan.stacked > 1:
            self.block = self.block * i64(self.plan.stacked)

    def block_of(self, part: int) -> Expr:
        """Where weights of 16 rows are; the last block where there is none: what comes of it is
        not stored."""
        if self.plan.side * self.plan.stacked == 1:
            return self.block
        return tirx.min(self.block + i64(part // self.thirds), i64(self.blocks - 1))

    def _share(self) -> None:
        self.sums = local(self.parts * self.results, "float32")
        fill(self.sums, f32(0.0), 0, self.parts * self.results)
        self.scales = local(self.layout.together * self.parts)
        self.pair = local(2, "float32")
        self.begin()
        self.words = local(self.plan.stacked * self._words)
        if self.thirds > 1:
            self.unpacked = local(4 * self.thirds * len(self.layout.fields))
        chunks = self.layout.padded_k(self.spec.k) // self.layout.chunk_k
        turns, alone = divmod(chunks, self.warps)
        rounds, single = divmod(turns, self.chunks)
        if rounds == 1:
            self._round(self.warp, self.chunks)
        elif rounds:
            self._rounds(rounds)
        done = rounds * self.chunks * self.warps
        if single:
            self._round(self.warp + done, single)
            done += single * self.warps
        if alone:
            with b.If(self.warp < alone), b.Then():
                self._round(self.warp + done, 1)
        self.end()
        self._meet()

    def _rounds(self, rounds: int) -> None:
        """Weights of a round are read in the one before, as soon as there is a place for them:
        the compiler moves no read to its use across the end of a loop."""
        for number in range(self.chunks):
            self._read(self.warp + number * self.warps, number)
        # Else the compiler unrolls short loops whole, and asks for weights later.
        with b.serial(0, rounds, annotations={"disable_unroll": True}) as turn:
            if self.plan.side > 1:
                meet()
            for number in range(self.chunks):
                chunk = (turn * self.chunks + number) * self.warps + self.warp
                self.chunk(chunk, number)
                with b.If(turn < rounds - 1), b.Then():
                    self._read(chunk + self.chunks * self.warps, number)

    def _round(self, first: Expr, count: int) -> None:
        """Chunks `first` and `count` - 1 more, each ``warps`` after the other."""
        for number in range(count):
            self._read(first + number * self.warps, number)
        for number in range(count):
            self.chunk(first + number * self.warps, number)

    def _read(self, chunk: Expr, number: int) -> None:
        """All weights of a chunk."""
        codes, loads = self.weights["codes"], self.layout.unit_loads
        for stacked, unit, load in product(*map(range, (self.plan.stacked, self.units, loads))):
            at = stacked * self._words + 4 * ((number * self.units + unit) * loads + load)
            block = self.block_of(stacked * self.thirds)
            source = codes[block, chunk * self.units + unit, load, self.lane, 0]
            self.read("apq_read_weights", self.words[at], source)

    @property
    def _words(self) -> int:
        """Of a lane, of the weights of a block in a round."""
        return 4 * self.layout.unit_loads * self.units * self.chunks

    def unpack(self, number: int) -> None:
        """Make `word` know the round's unit `number`, where thirds of a block share codes."""
        if self.thirds > 1:
            assert self.units == self.plan.stacked == 1
            first = address(self.words[4 * self.layout.unit_loads * number])
            self.do("apq_unpack_quinary", address(self.unpacked[0]), first)

    def word(self, number: int, load: int, word: int, part: int) -> Expr:
        """uint32: a lane's word of a load of the round's unit `number`, of 16 rows of weights."""
        if self.thirds > 1:
            return self.unpacked[4 * (part * len(self.layout.fields) + load) + word]
        first = part * self._words
        return self.words[first + 4 * (number * self.layout.unit_loads + load) + word]

    def scale_place(self, part: int, number: Expr, high: int) -> tuple[Any, ...]:
        """Index of the scale of a lane's first or other row of 16 rows of weights."""
        third = part % self.thirds
        row = self.lane // 4 + third * 8 if third else self.lane // 4
        return self.layout.scale_place(self.block_of(part), number, row, high)

    def take_scales(self, group: int, number: Expr, part: int) -> None:
        """Leave the scales of a lane's two rows of weights in `pair`; `number` is the group's, of
        which `together` are read at once."""
        together = self.layout.together
        slot, first = group % together, together * part
        if slot == 0:
            place = self.scale_place(part, number, 0)
            self.read(f"apq_read{together}", self.scales[first], self.weights["scales"][place])
        self.do("apq_floats", address(self.pair[0]), self.scales[first + slot])

    def read(self, function: str, to: Expr, source: Expr) -> None:
        """A device function that reads `source` and what follows it."""
        self.do(function, address(to), address(source))

    def do(self, function: str, *given: Expr) -> None:
        """A device function that gives nothing back."""
        b.evaluate(self.call(function, *given))

    def row_within(self, row: Expr) -> Expr:
        """Row of x, the last one where there is none: what comes of it is not stored."""
        return tirx.min(self.first + row.astype("int64"), self.m - i64(1))

    # ---- the end ----

    def _meet(self) -> None:
        """Sum over warps in shared memory; each stores a part of the results. One warp has them."""
        count = self.parts * self.results
        if self.warps == 1:
            with b.unroll(0, count) as at:
                self._store(at, self.sums[at])
            return
        side, leader = self.plan.side, self.leader
        shared = b.sblock_alloc_buffer((side * self.warps, count, 32), "float32", scope="shared")
        for i in range(count):
            b.buffer_store(shared, self.sums[i], [leader + self.warp, i, self.lane])
        meet()
        with b.serial(0, -(-count // self.warps)) as turn:
            at = turn * self.warps + self.warp
            with b.If(at < count), b.Then():
                total = shared[leader, at, self.lane]
                for warp in range(1, self.warps):
                    total = total + shared[leader + warp, at, self.lane]
                self._store(at, total)

    def _store(self, at: Expr, total: Expr) -> None:
        spec, scheme = self.spec, self.spec.scheme
        assert scheme is not None
        of_x, of_weights, mine = self.place(at if self.parts == 1 else at % self.results)
        if self.parts > 1:
            of_weights = of_weights + at // self.results * 16
        column = self.block * i64(self.layout.rows) + of_weights.astype("int64")
        row = self.first + of_x.astype("int64")
        inside = row < self.m
        if spec.n % (self.layout.rows * self.plan.side * self.plan.stacked):
            inside = tirx.all(inside, column < i64(spec.n))
        if mine is not None:
            inside = tirx.all(inside, mine)
        with b.If(inside), b.Then():
            shift = None
            if scheme.act_group == -1:
                total = total * self.factor(row, 0)
            if spec.asymmetric:
                shift = (self.factor(row, 1), self.weights[ROW_SUMS])
            value = epilogue_of(spec, total, self.bias, self.residual, row, column, shift)
            b.buffer_store(self.y, value, [row, column])


def local(count: int, dtype: str = "uint32") -> Any:
    """A thread's own array."""
    return b.sblock_alloc_buffer((count,), dtype, scope="local")


def fill(buffer: Any, value: Expr, first: int, count: int) -> None:
    """Store `value` `count` times."""
    for at in range(first, first + count):
        b.buffer_store(buffer, value, [at])


def address(element: Expr) -> Expr:
    """Of an element of a buffer."""
    return tirx.address_of(element)
