"""Large-M layers with weights in small groups: values become bytes once a panel.

Codes are looked up where the layout has a table; the sums of a group stay integers, and the group's
scale, that of its span times its sub-scale, is a float of the panel. The rest is
`apq_tvm.ops.gemm`.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, SpanLayout
from apq_tvm.ops.codebook_linear import lookup_of
from apq_tvm.ops.gemm import _IntegerGemm
from apq_tvm.ops.gemm_task import GemmBlocking, GemmTask, argument
from apq_tvm.ops.linear_spec import LinearSpec
from apq_tvm.tensorize.unit import decode

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any


class _SpanGemm(_IntegerGemm):
    """Stages that differ from those of uniform integers."""

    def __init__(self, spec: LinearSpec, layout: SpanLayout, blocking: GemmBlocking) -> None:
        GemmTask.__init__(self, spec, blocking, layout.rows, layout.padded_k(spec.k))
        assert spec.scheme is not None
        self.layout: Any = layout
        self.halves = False
        self.group, self.groups = layout.group, layout.groups(spec.k)
        assert spec.scheme.act_group == layout.group

    def declare(self) -> None:
        spec, layout = self.spec, self.layout
        self.xq = argument("xq", (self.m, self.k), "int8", 4)
        self.xs = argument("xs", (self.m, self.groups), "float32", 4)
        self.xsum = argument("xsum", (self.m, self.groups), "int32", 4)
        self.weights = {
            name: argument(name, shape, dtype, 64)
            for name, (shape, dtype) in layout.shapes(spec.n, spec.k).items()
        }

    def scratch(self) -> None:
        bl = self.blocking
        self.decoded = b.sblock_alloc_buffer(
            (bl.vectors, bl.k_block // 4, self.lanes, 4), "uint8", align=64
        )
        per_group = (bl.vectors, bl.k_block // self.group, self.lanes)
        self.scales = b.sblock_alloc_buffer(per_group, "float32", align=64)
        if self.layout.minima:
            self.least = b.sblock_alloc_buffer(per_group, "float32", align=64)

    def fill(self, kb: Expr) -> None:
        bl = self.blocking
        units = bl.k_block // UNIT_K
        mine = self.count(units, self.k // UNIT_K, kb)
        with b.grid(bl.vectors, mine) as (j0, u0), b.sblock("unit"):
            j, u = b.axis.spatial(bl.vectors, j0), b.axis.spatial(units, u0)
            b.reads()
            b.writes()
            if bl.prefetch:
                self._prefetch(kb, j, u)
            if self.layout.entries:
                self._lookup(kb, j, u)
            else:
                self._codes(kb, j, u)
        per_block = bl.k_block // self.group
        self._group_values("scales", self.scales, self._scale, kb, per_block)
        if self.layout.minima:
            self._group_values("least", self.least, self._minimum, kb, per_block)

    def _codes(self, kb: Expr, j: Expr, u: Expr) -> None:
        """Codes that are values themselves."""
        codes, unit = self.weights["codes"], self.layout.unit
        block, at = self.row_block(j), kb * (self.blocking.k_block // UNIT_K) + u
        with self.stage("decode", 8, unit.vector_bytes) as (v, e):
            b.reads(codes[block, at, 0 : unit.nbytes])
            code = decode(unit, lambda byte: codes[block, at, byte], v, e).astype("uint8")
            target = [j, u * 8 + v, e // 4, e % 4]
            b.writes(self.decoded[tuple(target)])
            b.buffer_store(self.decoded, code, target)

    def _lookup(self, kb: Expr, j: Expr, u: Expr) -> None:
        """Codes of a table, looked up by the intrinsic of block ``lookup``."""
        layout, codes, table = self.layout, self.weights["codes"], self.weights["table"]
        unit, lanes = layout.unit, self.lanes
        block, at = self.row_block(j), kb * (self.blocking.k_block // UNIT_K) + u
        per_unit = unit.groups
        first = at * per_unit if per_unit > 1 else at // (layout.group // UNIT_K)
        book = None
        if layout.book(self.weights, block, first, 0) is not None:
            shape = (per_unit, lanes) if per_unit > 1 else (lanes,)
            book = b.sblock_alloc_buffer(shape, "uint8", align=64)
            with self.stage("book", *shape) as index:
                group = first + index[0] if per_unit > 1 else first
                b.reads()
                b.writes(book[index])
                value = layout.book(self.weights, block, group, index[-1])
                b.buffer_store(book, value, list(index))
        with self.stage("empty", 8, lanes * 4) as (v, e):
            target = [j, u * 8 + v, e // 4, e % 4]
            b.writes(self.decoded[tuple(target)])
            b.buffer_store(self.decoded, tirx.const(0, "uint8"), target)
        dot = lookup_of(layout, 1)
        with b.grid(8, lanes, 4, layout.entries) as loops, b.sblock("lookup"):
            v, r, c, entry = b.axis.remap("SSSR", loops)
            at_byte = (j, u * 8 + v, r, c)
            chosen = None
            if book is not None:
                chosen = book[v // unit.vectors, r] if per_unit > 1 else book[r]
            reads = [self.decoded[at_byte], codes[block, at, 0 : unit.nbytes], table[entry]]
            b.reads(*reads, *([] if chosen is None else [chosen]))
            b.writes(self.decoded[at_byte])
            where = (v, r * 4 + c, entry)
            term = dot.choose(lambda byte: codes[block, at, byte], chosen, table[entry], where)
            b.buffer_store(self.decoded, self.decoded[at_byte] + term, list(at_byte))

    def _group_values(
        self, name: str, target: Buffer, value: Any, kb: Expr, per_block: int
    ) -> None:
        mine = self.count(per_block, self.groups, kb)
        with self.stage(name, self.blocking.vectors, mine, self.lanes) as (j, g, r):
            b.reads()
            b.writes(target[j, g, r])
            found = value(self.row_block(j), kb * per_block + g, r)
            b.buffer_store(target, found, [j, g, r])

    def _scale(self, block: Expr, group: Expr, r: Expr) -> Expr:
        layout = self.layout
        scale = layout.scale(self.weights, block, group // layout.span_groups, r)
        sub = layout.sub(self.weights, block, group, r)
        scale = scale * tirx.const(layout.unit_scale, "float32")
        return scale if sub is None else scale * sub.astype("float32")

    def _minimum(self, block: Expr, group: Expr, r: Expr) -> Expr:
        layout = self.layout
        scale = layout.min_scale(self.weights, block, group // layout.span_groups, r)
        return scale * layout.minimum(self.weights, block, group, r).astype("float32")

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        bl = self.blocking
        shape = (bl.m_tile, bl.vectors, self.lanes)
        dots = b.sblock_alloc_buffer(shape, "int32", align=64)
        per_block = bl.k_block // self.group
        offset = tirx.const(-self.layout.offset, "int32")
        with b.serial(0, self.count(per_block, self.groups, kb)) as g, b.sblock("group"):
            group = b.axis.opaque(per_block, g)
            b.reads()
            b.writes()
            absolute = kb * per_block + group
            with self.stage("start", *shape) as (m, j, r):
                total = self.xsum[self.row + m, absolute]
                b.reads(total)
                b.writes(dots[m, j, r])
                b.buffer_store(dots, offset * total, [m, j, r])
            self._dots(kb, group * self.group, self.group // bl.k_step, dots)
            with self.stage("sum", *shape) as (m, j, r):
                # `sums` is left out of the reads: TVM would not vectorize a running sum.
                b.reads(dots[m, j, r])
                b.writes(sums[m, j, r])
                term = dots[m, j, r].astype("float32") * self.scales[j, group, r]
                if self.layout.minima:
                    total = self.xsum[self.row + m, absolute].astype("float32")
                    term = term - total * self.least[j, group, r]
                term = term * self.xs[self.row + m, absolute]
                b.buffer_store(sums, sums[m, j, r] + term, [m, j, r])

    def result(self, m: Expr, j: Expr, r: Expr, value: Expr) -> Expr:
        return value


def span_gemm(spec: LinearSpec, layout: SpanLayout, blocking: GemmBlocking) -> PrimFunc:
    """Linear layer with integer activations, as `apq_tvm.ops.codebook_linear.span_linear`.

    Returns
    -------
    tvm.tirx.PrimFunc
        Of the same arguments, M >= m_tile.
    """
    return _SpanGemm(spec, layout, blocking).build()
