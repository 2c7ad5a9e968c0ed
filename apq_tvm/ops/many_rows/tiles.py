"""Large-M layers of whole-row scales whose products are of tiles in registers (AMX).

Sums are in memory between the micro-kernel and the epilogue, which therefore is a loop over rows.
Codes of 8 bits are multiplied where they lie; fewer bits become units of bytes in a panel first.
The last panel ends at the last row block; columns that it shares with the one before are its own.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.blocks import put
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.bytes import IntegerGemm
from apq_tvm.ops.many_rows.task import GemmBlocking, around
from apq_tvm.tensorize.exprs import Expr, i64, prefetch_line
from apq_tvm.tensorize.meaning.interleaved import VECTORS, decode
from apq_tvm.tensorize.meaning.scaffold import Meaning, View, fresh_product, product
from apq_tvm.tensorize.meaning.tile import unit_products
from apq_tvm.tensorize.meaning.tile_registers import (
    CONFIG,
    Registers,
    cleared,
    described,
)


def in_place(layout: InterleavedLayout) -> bool:
    """Whether codes are multiplied where they lie."""
    return layout.bits == 8


class TiledGemm(IntegerGemm):
    """Blocks ``shapes`` and ``release`` are what a device does before and after a task's tiles."""

    def __init__(self, spec: LinearSpec, layout: InterleavedLayout, blocking: GemmBlocking) -> None:
        super().__init__(spec, layout, blocking)
        assert self.whole and self.k % blocking.k_block == 0
        assert blocking.vectors <= self.row_blocks
        self.in_place = in_place(layout)
        self.shared_columns = self.row_blocks % blocking.vectors > 0

    def scratch(self) -> None:
        bl = self.blocking
        last = i64(self.row_blocks - bl.vectors)
        self.first = b.bind(tirx.min(self.panel, last)) if self.shared_columns else self.panel
        if not self.in_place:
            shape = (bl.vectors, bl.k_block // UNIT_K, VECTORS * self.layout.unit.vector_bytes)
            self.decoded = b.sblock_alloc_buffer(shape, "uint8", align=64)
        self.config = b.sblock_alloc_buffer((CONFIG,), "uint8", align=64)
        self._state(described(Registers(bl.tile(self.lanes))), "shapes")

    def finish(self) -> None:
        self._state(cleared(), "release")

    def _state(self, meaning: Meaning, name: str) -> None:
        product(meaning, name, lambda *_: [View(self.config, (0,))])

    def row_block(self, j: Expr) -> Expr:
        return self.first + j

    def fill_units(self, kb: Expr) -> None:
        if not self.in_place:
            super().fill_units(kb)

    def decode_unit(self, kb: Expr, j: Expr, u: Expr) -> None:
        codes, unit = self.weights["codes"], self.layout.unit
        block, at = self.row_block(j), kb * (self.blocking.k_block // UNIT_K) + u
        with self.stage("decode", VECTORS, unit.vector_bytes) as (v, e):
            code = decode(unit, lambda byte: codes[block, at, byte], v, e).astype("uint8")
            code = code + code if self.doubled else code
            target = (j, u, v * unit.vector_bytes + e)
            put(self.decoded, target, code, codes[block, at, 0 : unit.nbytes])

    def sum_tile(self, kb: Expr, tile: Expr) -> None:
        """Sums wait where they are; those of a single K block start in the registers."""
        shape, waiting = self.tile_shape, self.waiting
        meaning, views = unit_products(self.blocking.tile(self.lanes)), self._operands(kb)
        if waiting is None:
            sums = b.sblock_alloc_buffer(shape, self.sum_dtype, align=64)
            fresh_product(meaning, "dot", [*views, View(sums, (0, 0, 0))])
            self._store(lambda *at: sums[at])
            return
        product(meaning, "dot", lambda *_: [*views, View(waiting, (tile, 0, 0, 0))])
        with b.If(kb == self.k_blocks - 1), b.Then():
            self._store(lambda *at: waiting[(tile, *at)])

    def _operands(self, kb: Expr) -> list[View]:
        bl = self.blocking
        x = View(self.xq, (self.row, kb * bl.k_block))
        if not self.in_place:
            return [x, View(self.decoded, (0, 0, 0))]
        first = (self.first, kb * (bl.k_block // UNIT_K), 0)
        return [x, View(self.weights["codes"], first)]

    def _store(self, sums: Callable[..., Expr]) -> None:
        shape = self.tile_shape
        if self.spec.n % self.lanes or self.shared_columns:
            self.read_for = sums
            self.store_rows(lambda m, j, r: self.result(m, j, r, sums(m, j, r)), shape[0])
            return
        rows, vectors, _ = shape
        with around("vector", (rows, rows), (vectors, vectors)) as (m, j):
            self._ask_ahead(m, j)
            with self.stage("store", self.lanes) as (r,):
                b.reads(sums(m, j, r))
                self._write(m, j, r, self.result(m, j, r, sums(m, j, r)))

    def _ask_ahead(self, m: Expr, j: Expr) -> None:
        """Ask for what the next tile reads and writes in this place: its rows are too far apart for
        the processor to see that it is next."""
        at = self.row + self.blocking.m_tile + m, self.row_block(j) * i64(self.lanes)
        if self.residual is not None:
            prefetch_line(self.residual[at])
        prefetch_line(self.y[at], write=True)
