"""Large-M linear layers with float32 activations: weights decoded to float32, or float32 weights.

They build PrimFuncs ``(x f32 [M, K], *packed arrays, [bias], [residual], y)`` for M >= m_tile.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, FloatLayout, InterleavedLayout, WeightLayout
from apq_tvm.ops.blocks import argument, put
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.task import GemmBlocking, GemmTask, arguments, around
from apq_tvm.tensorize.exprs import Buffer, Expr, i64
from apq_tvm.tensorize.meaning.interleaved import decode
from apq_tvm.tensorize.meaning.scaffold import View, product
from apq_tvm.tensorize.meaning.tile import dequantization, float_products, tile_loops


class _FloatTask(GemmTask):
    """`lanes` are those of the float vectors."""

    def __init__(
        self, spec: LinearSpec, layout: Any, blocking: GemmBlocking, lanes: int = 0
    ) -> None:
        super().__init__(spec, blocking, lanes or layout.rows, spec.k)
        self.layout = layout

    def declare(self) -> None:
        spec = self.spec
        self.x = argument("x", (self.m, spec.k), "float32", 4)
        self.weights = arguments(self.layout.shapes(spec.n, spec.k))

    def scratch(self) -> None:
        shape = (self.blocking.vectors, self.blocking.k_block, self.lanes)
        self.decoded = b.sblock_alloc_buffer(shape, "float32", align=64)

    def weights_of(self, kb: Expr) -> tuple[Buffer, Expr, Expr]:
        """Weights of a K block [vector, column, lane], the panel's first vector and column."""
        return self.decoded, 0, 0

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        bl, (panel, vector, column) = self.blocking, self.weights_of(kb)
        steps = self.count(bl.k_block // bl.k_step, self.k // bl.k_step, kb)

        def views(step: Expr) -> tuple[View, ...]:
            at = step * bl.k_step
            x = View(self.x, (self.row, kb * bl.k_block + at))
            return x, View(panel, (vector, column + at, 0)), View(sums, (0, 0, 0))

        with b.serial(0, steps) as s:
            tile_loops(float_products(bl.tile(self.lanes)), views, [(s, steps)])


class DequantizedGemm(_FloatTask):
    """Integer weights: units become bytes, then floats."""

    layout: InterleavedLayout

    def fill(self, kb: Expr) -> None:
        bl, lanes, layout = self.blocking, self.lanes, self.layout
        group_width = layout.group_width(self.spec.k)
        units = bl.k_block // UNIT_K
        mine = self.count(units, layout.padded_k(self.spec.k) // UNIT_K, kb)
        with around("unit", (bl.vectors, bl.vectors), (mine, units)) as (j, u):
            block, at = self.row_block(j), kb * units + u
            codes, unit = self.weights["codes"], layout.unit
            bytes_ = b.sblock_alloc_buffer((8, lanes, 4), "uint8", align=64)
            with self.stage("decode", 8, unit.vector_bytes) as (v, e):
                code = decode(unit, lambda byte: codes[block, at, byte], v, e).astype("uint8")
                put(bytes_, (v, e // 4, e % 4), code, codes[block, at, 0 : unit.nbytes])
            width = min(group_width, UNIT_K)
            for part in range(UNIT_K // width):
                group = at * (UNIT_K // width) + part
                if group_width > UNIT_K:
                    group = at // (group_width // UNIT_K)
                self._convert(part, width // 4, j, u, block, group, bytes_)

    def _convert(
        self, part: int, quads: int, j: Expr, u: Expr, block: Expr, group: Expr, bytes_: Buffer
    ) -> None:
        """Convert `quads` x 4 k of one group; `part` tells the two groups of a unit apart."""
        lanes, bits, weights = self.lanes, self.layout.bits, self.weights
        scale = b.sblock_alloc_buffer((lanes,), "float32", align=64)
        zero = b.sblock_alloc_buffer((lanes,), "float32", align=64)
        doubled = bits == 1 and not self.layout.zero_points
        with self.stage(f"scales{part}", lanes) as (r,):
            stored = weights["scales"][block, group, r]
            value = stored.astype("float32")
            put(scale, (r,), value * tirx.const(2.0, "float32") if doubled else value, stored)
        with self.stage(f"zeros{part}", lanes) as (r,):
            offset: Expr = tirx.const(2.0 ** (bits - 1) if bits > 1 else 0.5, "float32")
            if self.layout.zero_points:
                offset = weights["zeros"][block, group, r].astype("float32")
            put(zero, (r,), offset)

        def views(q: Expr) -> tuple[View, ...]:
            quad = part * quads + q
            code, out = View(bytes_, (quad, 0, 0)), View(self.decoded, (j, (u * 8 + quad) * 4, 0))
            return code, View(zero, (0,)), View(scale, (0,)), out

        product(dequantization(lanes), f"convert{part}", views, spatial=[quads])


class DecodedGemm(_FloatTask):
    """Weights in any layout, by its own TensorIR expression (`WeightLayout.weight`).

    A block of the layout may be several vectors of lanes high. `bits` is the width, where the
    scheme leaves a choice, 0 for the widest.
    """

    layout: WeightLayout

    def __init__(
        self, spec: LinearSpec, layout: WeightLayout, blocking: GemmBlocking, lanes: int, bits: int
    ) -> None:
        super().__init__(spec, layout, blocking, lanes)
        self.bits = bits
        # Vectors of a block. As parts of a tile they make sums wait that need not.
        self.parts = layout.rows // lanes

    def fill(self, kb: Expr) -> None:
        bl, lanes, parts = self.blocking, i64(self.lanes), i64(self.parts)
        mine = self.count(bl.k_block, self.spec.k, kb)
        with self.stage("weights", bl.vectors, mine, self.lanes) as (j, k, r):
            vector = self.row_block(j)
            block, lane = vector // parts, vector % parts * lanes + r
            at = kb * i64(bl.k_block) + k
            value = self.layout.weight(self.weights, block, lane, at, self.bits)
            put(self.decoded, (j, k, r), value)


class FloatGemm(_FloatTask):
    """float32 weights, read where they lie: a panel's row blocks follow each other.

    `blocking.vectors` may not exceed the row blocks of W.
    """

    layout: FloatLayout

    def __init__(self, spec: LinearSpec, layout: FloatLayout, blocking: GemmBlocking) -> None:
        super().__init__(spec, layout, blocking)
        self.shared_columns = self.row_blocks % blocking.vectors != 0

    def scratch(self) -> None:
        # The last panel is moved back to end with W.
        last = self.row_blocks - self.blocking.vectors
        self.start = b.bind(tirx.min(self.panel, i64(last)))

    def row_block(self, j: Expr) -> Expr:
        return self.start + j

    def weights_of(self, kb: Expr) -> tuple[Buffer, Expr, Expr]:
        return self.weights["weight"], self.start, kb * self.blocking.k_block
