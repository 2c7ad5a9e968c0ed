"""Large-M linear layers with float32 activations: integer weights decoded, or float32 weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, FloatLayout, InterleavedLayout
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.task import GemmBlocking, GemmTask, argument
from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.meaning.interleaved import decode
from apq_tvm.tensorize.meaning.tile import add_product, dequantize

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any


class _DequantizedGemm(GemmTask):
    """float32 activations: the panel is decoded to float32."""

    def __init__(self, spec: LinearSpec, layout: InterleavedLayout, blocking: GemmBlocking) -> None:
        super().__init__(spec, blocking, layout.rows, spec.k)
        self.layout = layout
        self.group = layout.group_width(spec.k)
        self.groups = layout.padded_groups(spec.k)

    def declare(self) -> None:
        spec = self.spec
        self.x = argument("x", (self.m, spec.k), "float32", 4)
        self.weights = {
            name: argument(name, shape, dtype, 64)
            for name, (shape, dtype) in self.layout.shapes(spec.n, spec.k).items()
        }

    def scratch(self) -> None:
        bl, lanes = self.blocking, self.lanes
        self.decoded = b.sblock_alloc_buffer((bl.vectors, bl.k_block, lanes), "float32", align=64)

    def fill(self, kb: Expr) -> None:
        bl, lanes, layout = self.blocking, self.lanes, self.layout
        units = bl.k_block // UNIT_K
        total = layout.padded_k(self.spec.k) // UNIT_K
        with b.grid(bl.vectors, self.count(units, total, kb)) as (j0, u0), b.sblock("unit"):
            j, u = b.axis.spatial(bl.vectors, j0), b.axis.spatial(units, u0)
            b.reads()
            b.writes()
            block, at = self.row_block(j), kb * units + u
            codes, unit = self.weights["codes"], layout.unit
            bytes_ = b.sblock_alloc_buffer((8, lanes, 4), "uint8", align=64)
            with self.stage("decode", 8, unit.vector_bytes) as (v, e):
                b.reads(codes[block, at, 0 : unit.nbytes])
                b.writes(bytes_[v, e // 4, e % 4])
                code = decode(unit, lambda byte: codes[block, at, byte], v, e)
                b.buffer_store(bytes_, code.astype("uint8"), [v, e // 4, e % 4])
            width = min(self.group, UNIT_K)
            for part in range(UNIT_K // width):
                group = at * (UNIT_K // width) + part
                if self.group > UNIT_K:
                    group = at // (self.group // UNIT_K)
                self._convert(part, width // 4, j, u, block, group, bytes_)

    def _convert(
        self, part: int, quads: int, j: Expr, u: Expr, block: Expr, group: Expr, bytes_: Buffer
    ) -> None:
        """Convert `quads` x 4 k of one group; `part` tells the two groups of a unit apart."""
        lanes, bits = self.lanes, self.layout.bits
        scale = b.sblock_alloc_buffer((lanes,), "float32", align=64)
        zero = b.sblock_alloc_buffer((lanes,), "float32", align=64)
        doubled = bits == 1 and not self.layout.zero_points
        with self.stage(f"scales{part}", lanes) as (r,):
            value = self.weights["scales"][block, group, r].astype("float32")
            b.reads(self.weights["scales"][block, group, r])
            b.writes(scale[r])
            b.buffer_store(scale, value * tirx.const(2.0, "float32") if doubled else value, [r])
        with self.stage(f"zeros{part}", lanes) as (r,):
            offset: Expr = tirx.const(2.0 ** (bits - 1) if bits > 1 else 0.5, "float32")
            if self.layout.zero_points:
                offset = self.weights["zeros"][block, group, r].astype("float32")
            b.reads()
            b.writes(zero[r])
            b.buffer_store(zero, offset, [r])
        with b.grid(quads, 4, lanes) as loops, b.sblock(f"convert{part}"):
            q, i, r = b.axis.remap("SSS", loops)
            code, quad = bytes_[part * quads + q, r, i], u * 8 + part * quads + q
            dequantize(self.decoded, (j, quad * 4 + i, r), code, zero[r], scale[r])

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        float_dots(self, kb, sums, self.x, lambda j, k, r: self.decoded[j, k, r])


class _FloatGemm(GemmTask):
    """float32 weights, read where they lie: a panel's row blocks follow each other."""

    def __init__(self, spec: LinearSpec, layout: FloatLayout, blocking: GemmBlocking) -> None:
        super().__init__(spec, blocking, layout.rows, spec.k)
        self.layout = layout
        self.shared_columns = self.row_blocks % blocking.vectors != 0

    def declare(self) -> None:
        spec = self.spec
        ((shape, dtype),) = self.layout.shapes(spec.n, spec.k).values()
        self.x = argument("x", (self.m, spec.k), "float32", 4)
        self.weight = argument("weight", shape, dtype, 64)

    def scratch(self) -> None:
        # The last panel is moved back to end with W.
        last = self.row_blocks - self.blocking.vectors
        self.start = b.bind(tirx.min(self.panel, i64(last)))

    def row_block(self, j: Expr) -> Expr:
        return self.start + j

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        def weight(j: Expr, k: Expr, r: Expr) -> Expr:
            return self.weight[self.start + j, kb * self.blocking.k_block + k, r]

        float_dots(self, kb, sums, self.x, weight)


def float_dots(
    gemm: GemmTask, kb: Expr, sums: Buffer, x: Buffer, weight: Callable[[Expr, Expr, Expr], Expr]
) -> None:
    """Products of a tile with a block of K; `weight` gives one by (vector, column, lane)."""
    bl = gemm.blocking
    steps = gemm.count(bl.k_block // bl.k_step, gemm.k // bl.k_step, kb)
    kinds, extents = bl.tile(gemm.lanes).axes(False)
    with b.serial(0, steps) as s, b.grid(*extents) as loops, b.sblock("dot"):
        step = b.axis.spatial(steps, s)
        m, j, r, k = b.axis.remap(kinds, loops)
        at = step * bl.k_step + k
        add_product(sums, (m, j, r), x[gemm.row + m, kb * bl.k_block + at], weight(j, at, r))


def dequantized_gemm(
    spec: LinearSpec, layout: InterleavedLayout, blocking: GemmBlocking
) -> PrimFunc:
    """Linear layer with float32 activations and packed integer weights.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], codes, scales, [zeros], [bias], [residual], y)``, M >= m_tile.
    """
    return _DequantizedGemm(spec, layout, blocking).build()


def float_gemm(spec: LinearSpec, layout: FloatLayout, blocking: GemmBlocking) -> PrimFunc:
    """Linear layer with float32 weights; `blocking.vectors` may not exceed the row blocks of W.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], weight, [bias], [residual], y)``, M >= m_tile.
    """
    return _FloatGemm(spec, layout, blocking).build()
