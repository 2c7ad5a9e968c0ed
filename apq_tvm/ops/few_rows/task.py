"""``y = act(x Wᵀ + b) + residual`` for few rows of x, in the order it runs.

For products of several kinds, or of stretches of K of several kinds, which reduction blocks of
TensorIR do not take (`apq_tvm.ops.linear.nest` has those). A *task* is a bundle of row blocks, one
of each stream; it takes the tiles of rows of x one after the other. M tiles and streams are as in
that nest. All that the loops keep is small and has constant indices, so that it lives in registers:
loops over it are *stages*, which schedules unroll and vectorize.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.blocks import STAGES, each, put, stage
from apq_tvm.ops.linear.spec import LinearSpec, Operands, epilogue_of
from apq_tvm.ops.linear.streams import Streams, first_row, tiles_of
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, i64
from apq_tvm.tensorize.meaning.scaffold import Meaning, View, product

DOTS = "apq.dots"
"""Annotation of the root block: names of the blocks for an intrinsic."""


class FewRows(ABC):
    """The loops; a family says what its operands are and what is summed.

    Parameters
    ----------
    spec : LinearSpec
    layout : WeightLayout
        In row blocks.
    m_tile : int
        Rows of x per tile.
    streams : int
        Row blocks read at once.
    """

    def __init__(self, spec: LinearSpec, layout: Any, m_tile: int, streams: int) -> None:
        self.spec, self.layout, self.m_tile = spec, layout, m_tile
        self.streams = Streams(layout.row_blocks(spec.n), streams)
        self.shape = (streams, m_tile, layout.rows)
        self.stages: list[str] = []
        self.dots: list[str] = []

    @abstractmethod
    def declare(self, operands: Operands) -> None:
        """Declare the activations."""

    @abstractmethod
    def products(self) -> None:
        """Add up a tile's products, in `sums` and what else is kept."""

    @abstractmethod
    def value(self, kept: Sequence[Buffer], s: Expr, m: Expr, r: Expr) -> Expr:
        """An element of x Wᵀ, from what is kept."""

    def kept(self) -> list[Buffer]:
        """Sums that `value` reads, all of `shape`."""
        return [self.sums]

    def build(self) -> PrimFunc:
        """The PrimFunc: blocks ``task`` and ``tile``."""
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            operands = Operands(self.spec)
            self.m = operands.m
            self.declare(operands)
            self.arrays = operands.weights(self.layout)
            self.bias, self.residual, self.y = operands.epilogue()
            bundles = i64(self.streams.bundles)
            with b.sblock("root"):
                b.reads()
                b.writes()
                with b.serial(0, bundles) as t, b.sblock("task"):
                    self.bundle = b.axis.spatial(bundles, t)
                    b.reads()
                    b.writes(self.y[0 : self.m, 0 : self.spec.n])
                    with each("tile", tiles_of(self.m, self.m_tile)) as tile:
                        self.row = b.bind(first_row(self.m, self.m_tile, tile))
                        self.sums = self.cleared("sums", "float32")
                        self.products()
                        self._store()
                b.sblock_attr({STAGES: self.stages, DOTS: self.dots})
        return builder.get()

    @contextmanager
    def stage(self, name: str, *extents: int) -> Iterator[tuple[Expr, ...]]:
        """A loop nest over `extents` around a block with one spatial axis for each."""
        with stage(self.stages, name, *map(i64, extents)) as at:
            yield at

    def cleared(self, name: str, dtype: str, *shape: int) -> Buffer:
        """A scratch of zeros, of `shape` or as the sums."""
        shape = shape or self.shape
        made = b.sblock_alloc_buffer(shape, dtype, align=64)
        with self.stage(f"clear_{name}", *shape) as at:
            b.writes(made[at])
            b.buffer_store(made, tirx.const(0, dtype), list(at))
        return made

    def rows_of(self, buffer: Buffer, *first: Expr) -> View:
        """A tile's rows of activations, or of what comes with them, from index `first` on."""
        return View(buffer, (self.row, *first))

    def product(self, meaning: Meaning, views: Sequence[View], name: str) -> None:
        """The block `name`, for an intrinsic."""
        self.dots.append(name)
        product(meaning, name, lambda: views)

    def block(self, stream: Expr) -> Expr:
        """Row block to read: past the end the last one."""
        return self.streams.within(self._index(stream))

    def _index(self, stream: Expr) -> Expr:
        return self.streams.index(self.bundle, stream)

    def _store(self) -> None:
        spec, rows, kept = self.spec, self.layout.rows, self.kept()
        tail = spec.n % rows
        if not tail and not self.streams.ragged:
            with self.stage("store", *self.shape) as (s, m, r):
                self._write(kept, s, m, r)
            return
        copies = [b.sblock_alloc_buffer(self.shape, str(k.dtype), align=64) for k in kept]
        for number, (source, copy) in enumerate(zip(kept, copies, strict=True)):
            with self.stage(f"spill{number}", *self.shape) as at:
                put(copy, at, source[at], source[at])
        with b.grid(*map(i64, self.shape[:2])) as (s0, m0), b.sblock("vector"):
            s, m = b.axis.spatial(self.shape[0], s0), b.axis.spatial(self.shape[1], m0)
            b.reads()
            b.writes()
            with b.If(self._index(s) < i64(spec.n // rows)), b.Then():
                with self.stage("store", rows) as (r,):
                    self._write(copies, s, m, r)
            if tail:
                with b.If(self._index(s) == i64(spec.n // rows)), b.Then():
                    with b.serial(0, i64(tail)) as r0, b.sblock("store_tail"):
                        self._write(copies, s, m, b.axis.spatial(i64(tail), r0))

    def _write(self, kept: Sequence[Buffer], s: Expr, m: Expr, r: Expr) -> None:
        """The epilogue of one sum."""
        row, col = self.row + m, self._index(s) * i64(self.layout.rows) + r
        value = self.value(kept, s, m, r)
        value = epilogue_of(self.spec, value, self.bias, self.residual, row, col)
        put(self.y, [row, col], value, *(buffer[s, m, r] for buffer in kept))
