"""``y = act(x Wᵀ + b) + residual`` for many rows of x, as unscheduled TensorIR.

A *task* is a block of rows of x by a panel of `vectors` x R columns; tasks are independent. It
walks K in blocks of `k_block`: the panel's packed weights are decoded once into a scratch that
stays in cache, and every tile of `m_tile` rows is multiplied with it. Sums of a tile wait in
another scratch between K blocks. There are no predicates in the inner loops:

- M is covered by tiles of `m_tile` rows; the last one starts at ``M - m_tile`` and repeats rows.
  M must be at least `m_tile`.
- Past the last row block of W a panel repeats it; those columns are written twice with one value.
- Loops over K run to the block's own end, so any K works.

The tile's shape is part of the PrimFunc because TensorIR cannot split a dynamic M without
predicates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.formats.integer import ROW_SUMS
from apq_tvm.ops.blocks import STAGES, argument, loops, put, stage
from apq_tvm.ops.linear.spec import LinearSpec, epilogue_of
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, i64
from apq_tvm.tensorize.meaning.tile import Tile

SHORT = ("", "relu", "relu6")
"""Activations that a copy of for every vector of a tile is little code."""


@dataclass(frozen=True)
class GemmBlocking:
    """Tile and cache block sizes.

    Parameters
    ----------
    m_tile : int
        Rows of x in a micro-kernel.
    vectors : int
        Vectors of R columns in a micro-kernel: a panel.
    k_step : int
        K of a micro-kernel; divides the group and `k_block`, or K for float weights.
    k_block : int
        K of a decoded panel, a multiple of 32 and of the group.
    m_tiles : int
        Tiles of rows in a task, at most.
    prefetch : bool
        Whether packed codes are prefetched a K block ahead, by every tile some of them.
    """

    m_tile: int
    vectors: int
    k_step: int
    k_block: int
    m_tiles: int
    prefetch: bool = False

    def tile(self, lanes: int) -> Tile:
        """A micro-kernel of vectors of so many columns."""
        return Tile(self.m_tile, self.vectors, lanes, self.k_step)

    @property
    def rows(self) -> int:
        """Rows of x in a task, at most."""
        return self.m_tile * self.m_tiles


def _ceil(a: Expr, divisor: int) -> Expr:
    return (a + i64(divisor - 1)) // i64(divisor)


def arguments(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Buffer]:
    """Declare packed arrays."""
    return {name: argument(name, shape, dtype, 64) for name, (shape, dtype) in shapes.items()}


@contextmanager
def around(name: str, *axes: tuple[Any, Any], opaque: bool = False) -> Iterator[tuple[Expr, ...]]:
    """A block around others, in loops of ``(iterations, extent of the axis)``."""
    with loops([count for count, _ in axes]) as variables, b.sblock(name):
        make = b.axis.opaque if opaque else b.axis.spatial
        every = tuple(make(extent, i) for (_, extent), i in zip(axes, variables, strict=True))
        b.reads()
        b.writes()
        yield every


class GemmTask(ABC):
    """The loops that all GEMMs share; subclasses declare operands and fill the stages."""

    clears = True
    """Whether sums of the first K block are added to what waits, which is cleared before. Else they
    start in registers, in code of its own."""

    def __init__(self, spec: LinearSpec, blocking: GemmBlocking, lanes: int, k: int) -> None:
        self.spec, self.blocking, self.lanes, self.k = spec, blocking, lanes, k
        self.row_blocks = -(-spec.n // lanes)
        self.panels = -(-self.row_blocks // blocking.vectors)
        self.k_blocks = -(-k // blocking.k_block)
        self.sum_dtype = "float32"
        self.tile_shape: tuple[int, ...] = blocking.tile(lanes).sums
        self.parts = 1  # of a tile, whose sums wait for each other
        self.shared_columns = False  # True where two panels may compute a column: the later stores
        self.read_for: Callable[[Expr, Expr, Expr], Expr] | None = None  # what a result is made of
        self.stages: list[str] = []

    @abstractmethod
    def declare(self) -> None:
        """Declare x and the weights, in the order of the calling convention."""

    def scratch(self) -> None:  # noqa: B027 - not every GEMM needs any
        """Allocate what a task keeps between tiles."""

    def fill(self, kb: Expr) -> None:  # noqa: B027 - float weights are their own panel
        """Fill the panel of K block `kb`."""

    def ask_ahead(self, kb: Expr, tile: Expr, tiles: Expr) -> None:  # noqa: B027 - some decode
        """Ask for what one of `tiles` tiles can, of what the next K block fills its panel with."""

    def finish(self) -> None:  # noqa: B027 - few have what they must give back
        """What ends a task."""

    @abstractmethod
    def multiply(self, kb: Expr, sums: Buffer) -> None:
        """Add the K block's products to the tile's sums."""

    def centre(self, row: Expr) -> Expr | None:
        """float32: centre of a row of asymmetric codes; None where activations are floats."""
        return None

    def begins_with(self, m: Expr, j: Expr, r: Expr) -> tuple[Expr, ...]:
        """What a sum begins with, unless it waits in memory that was cleared; what that reads."""
        return (tirx.const(0, self.sum_dtype),)

    def result(self, m: Expr, j: Expr, r: Expr, value: Expr) -> Expr:
        """Turn a sum into an element of x Wᵀ."""
        return value

    def build(self) -> PrimFunc:
        """The PrimFunc: blocks ``task``, ``k_block``, ``tile`` and their stages."""
        spec, bl = self.spec, self.blocking
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name("gemm")
            b.func_attr({"apq.op": "linear", "op_pattern": 8, "tirx.noalias": True})
            self.m = tirx.Var("m", "int64")
            self.declare()
            whole = (self.m, spec.n)
            self.row_sums = argument(ROW_SUMS, (spec.n,), "float32", 4) if spec.asymmetric else None
            self.bias = argument("bias", (spec.n,), "float32", 4) if spec.bias else None
            self.residual = argument("residual", whole, "float32", 4) if spec.residual else None
            self.y = argument("y", whole, "float32", 4)
            tasks = _ceil(self.m, bl.rows) * i64(self.panels)
            with b.sblock("root"):
                b.reads()
                b.writes()
                with b.serial(0, tasks) as t, b.sblock("task"):
                    task = b.axis.spatial(tasks, t)
                    b.reads()
                    b.writes(self.y[0 : self.m, 0 : spec.n])
                    self._task(task)
                b.sblock_attr({STAGES: self.stages})
        return builder.get()

    def _task(self, task: Expr) -> None:
        bl = self.blocking
        # A block has as many tiles as any other, or one less: threads get shares of one size.
        all_tiles, blocks = b.bind(_ceil(self.m, bl.m_tile)), _ceil(self.m, bl.rows)
        most = b.bind((all_tiles + blocks - 1) // blocks)
        first = b.bind(task // i64(self.panels) * most)
        self.first_row = first * i64(bl.m_tile)
        self.panel = b.bind(task % i64(self.panels) * i64(bl.vectors))
        tiles = b.bind(tirx.min(most, all_tiles - first))
        self.scratch()
        self.waiting: Buffer | None = None
        if self.k_blocks > 1 or self.parts > 1:
            shape = (bl.m_tiles, *self.tile_shape)
            self.waiting = b.sblock_alloc_buffer(shape, self.sum_dtype, align=64)
            # At least a vector: TVM allocates a buffer in the innermost loop around its uses.
            cleared = (tiles, *shape[1:]) if self.clears else (1, 1, 1, shape[-1])
            with self.stage("clear", *cleared) as (t, m, j, r):
                put(self.waiting, (t, m, j, r), tirx.const(0, self.sum_dtype))
        with around("k_block", (self.k_blocks, self.k_blocks), opaque=True) as (kb,):
            self.fill(kb)
            with around("tile", (tiles, tiles)) as (t,):
                self.ask_ahead(kb, t, tiles)
                self._tile(kb, t)
        self.finish()

    def _tile(self, kb: Expr, tile: Expr) -> None:
        self.row = b.bind(self.tile_row(self.first_row + tile * i64(self.blocking.m_tile)))
        self.sum_tile(kb, tile)

    def sum_tile(self, kb: Expr, tile: Expr) -> None:
        """Sums of one tile: those of earlier K blocks, what this one adds, where they go."""
        shape = self.tile_shape
        sums = b.sblock_alloc_buffer(shape, self.sum_dtype, align=64)
        waiting = self.waiting

        def begin() -> None:
            with self.stage("load" if waiting is None else "load_none", *shape) as at:
                value, *read = self.begins_with(*at)
                put(sums, at, value, *read)

        def go_on(waiting: Buffer) -> None:
            with self.stage("load", *shape) as at:
                put(sums, at, waiting[(tile, *at)], waiting[(tile, *at)])

        if waiting is None:
            begin()
        elif self.clears:
            go_on(waiting)
        else:
            with b.If(kb == 0):
                with b.Then():
                    begin()
                with b.Else():
                    go_on(waiting)
        self.multiply(kb, sums)
        if waiting is None:
            self.store(sums)
            return
        with b.If(kb == self.k_blocks - 1):
            with b.Then():
                self.store(sums)
            with b.Else(), self.stage("wait", *shape) as at:
                put(waiting, (tile, *at), sums[at], sums[at])

    def tile_row(self, row: Expr) -> Expr:
        """First row of the tile that is to hold `row`: the last tile ends at M."""
        return tirx.min(row, self.m - i64(self.blocking.m_tile))

    def store(self, sums: Buffer) -> None:
        """Write the tile: out of registers, or by way of a buffer where that takes much code.

        Registers have constant indices, so a copy of the epilogue for every vector of the tile.
        """
        shape = self.tile_shape
        whole = not (self.spec.n % self.lanes or self.shared_columns)
        if whole and self.spec.activation in SHORT:
            with self.stage("store", *shape) as (m, j, r):
                b.reads(sums[m, j, r])
                self._write(m, j, r, self.result(m, j, r, sums[m, j, r]))
            return
        results = b.sblock_alloc_buffer(shape, "float32", align=64)
        with self.stage("spill", *shape) as (m, j, r):
            put(results, (m, j, r), self.result(m, j, r, sums[m, j, r]), sums[m, j, r])
        self.store_rows(lambda m, j, r: results[m, j, r], shape[0])

    def store_rows(self, results: Callable[[Expr, Expr, Expr], Expr], rows: Any) -> None:
        """Write the first `rows` rows of the tile, whose elements `results` gives."""
        tail, vectors = self.spec.n % self.lanes, self.blocking.vectors
        with around("vector", (rows, rows), (vectors, vectors)) as (m, j):
            with b.If(self.stored(j)), b.Then():
                if tail:
                    last = i64(self.row_blocks - 1)
                    with b.If(self.row_block(j) == last), b.Then():
                        self._write_vector("store_tail", results, m, j, tail)
                    with b.If(self.row_block(j) < last), b.Then():
                        self._write_vector("store", results, m, j, self.lanes)
                else:
                    self._write_vector("store", results, m, j, self.lanes)

    def stored(self, j: Expr) -> Expr:
        """Whether the panel's vector j is written: where two panels share it, by the later one."""
        return self.row_block(j) >= self.panel

    def _write_vector(
        self, name: str, results: Callable[[Expr, Expr, Expr], Expr], m: Expr, j: Expr, lanes: int
    ) -> None:
        with self.stage(name, lanes) as (r,):
            b.reads((self.read_for or results)(m, j, r))
            self._write(m, j, r, results(m, j, r))

    def _write(self, m: Expr, j: Expr, r: Expr, value: Expr) -> None:
        """The epilogue of one element of x Wᵀ."""
        row, col = self.row + m, self.row_block(j) * i64(self.lanes) + r
        centre = self.centre(row) if self.row_sums is not None else None
        shift = None if centre is None else (centre, self.row_sums)
        value = epilogue_of(self.spec, value, self.bias, self.residual, row, col, shift)
        b.writes(self.y[row, col])
        b.buffer_store(self.y, value, [row, col])

    def row_block(self, j: Expr) -> Expr:
        """Row block of W of the panel's vector j: past the end the last one again."""
        index = self.panel + j
        if self.row_blocks % self.blocking.vectors:
            return tirx.min(index, i64(self.row_blocks - 1))
        return index

    def count(self, per_block: int, total: int, kb: Expr) -> Any:
        """Of `total` things along K, `per_block` to a K block: how many block `kb` has."""
        if total % per_block == 0:
            return per_block
        return tirx.min(i64(per_block), i64(total) - kb * i64(per_block))

    @contextmanager
    def stage(self, name: str, *extents: Any) -> Iterator[tuple[Expr, ...]]:
        """A loop nest over `extents` around a block with one spatial axis for each."""
        with stage(self.stages, name, *extents) as at:
            yield at
