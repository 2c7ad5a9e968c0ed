"""Large-M layers of 8-bit codes whose panels hold words: int16 times int16, two k at a time.

Codes are zero-extended once a panel, a tile's activations sign-extended once a panel and K block:
one instruction for 8 multiplications and additions a vector of columns.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K
from apq_tvm.ops.blocks import put
from apq_tvm.ops.many_rows.bytes import IntegerGemm
from apq_tvm.ops.many_rows.task import around
from apq_tvm.tensorize.exprs import Buffer, Expr
from apq_tvm.tensorize.meaning.interleaved import VECTORS
from apq_tvm.tensorize.meaning.scaffold import Meaning, View
from apq_tvm.tensorize.meaning.tile import Tile, word_products


class WordGemm(IntegerGemm):
    """Block ``pairs`` decodes a unit, stage ``widen`` the activations of a tile."""

    run, code_dtype = 2, "int16"

    def scratch(self) -> None:
        super().scratch()
        bl = self.blocking
        self.wide = b.sblock_alloc_buffer((bl.m_tile, bl.k_block), "int16", align=64)

    def decode_unit(self, kb: Expr, j: Expr, u: Expr) -> None:
        codes, size = self.weights["codes"], self.layout.unit.vector_bytes
        block, at = self.row_block(j), kb * (self.blocking.k_block // UNIT_K) + u
        with around("pairs", (VECTORS, VECTORS)) as (v,):
            fours = codes.vload([block, at, v * size], f"uint8x{size}")
            zeros = tirx.Broadcast(tirx.const(0, "uint8"), size)
            for half in range(2):
                # Bytes 0 and 1 of every four, or 2 and 3, each before a zero.
                order = [p // 4 * 4 + half * 2 + p % 4 // 2 for p in range(size)]
                order = [size if p % 2 else byte for p, byte in enumerate(order)]
                pairs = tirx.Shuffle([fours, zeros], [tirx.const(p, "int32") for p in order])
                words = tirx.reinterpret(f"int16x{size // 2}", pairs)
                place = [j, (u * VECTORS + v) * 2 + half, 0, tirx.Ramp(0, 1, size // 2)]
                b.buffer_store(self.decoded, words, place)

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        units = self.blocking.k_block // UNIT_K
        mine = self.count(units, self.k // UNIT_K, kb)
        with self.stage("widen", self.blocking.m_tile, mine, UNIT_K) as (m, u, e):
            code = self.xq[self.row + m, kb * self.blocking.k_block + u * UNIT_K + e]
            put(self.wide, (m, u * UNIT_K + e), code.astype("int16"), code)
        super().multiply(kb, sums)

    def products(self, tile: Tile) -> Meaning:
        return word_products(tile)

    def operand(self, kb: Expr, column: Expr) -> View:
        return View(self.wide, (0, column))
