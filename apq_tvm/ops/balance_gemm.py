"""Large-M ``W2*`` layers: codes are taken apart to bytes once a panel.

A panel is one row block of `apq_tvm.codegen.layouts.balance`: its three thirds are the panel's
three vectors of columns. The rest is `apq_tvm.ops.gemm`.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, BalanceLayout
from apq_tvm.formats.balance import CENTRE, TRIPLE
from apq_tvm.ops.balance import act_groups
from apq_tvm.ops.gemm import _IntegerGemm
from apq_tvm.ops.gemm_task import GemmBlocking, GemmTask, argument
from apq_tvm.ops.linear_spec import LinearSpec
from apq_tvm.tensorize.balance import VECTORS, digit, triple
from apq_tvm.tensorize.exprs import i64

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any


class _BalanceGemm(_IntegerGemm):
    """Stages that differ from those of uniform integers."""

    def __init__(self, spec: LinearSpec, layout: BalanceLayout, blocking: GemmBlocking) -> None:
        GemmTask.__init__(self, spec, blocking, layout.lanes, layout.padded_k(spec.k))
        assert spec.scheme is not None and blocking.vectors == TRIPLE
        self.layout: Any = layout
        self.halves = False
        self.group = layout.group_width(spec.k)
        self.groups = layout.padded_groups(spec.k)
        self.token_scale = spec.scheme.act_group == -1 or self.groups == 1
        # The last panel may have vectors past N: they are computed, but not stored.
        self.shared_columns = self.row_blocks % TRIPLE != 0
        if self.groups == 1:
            self.sum_dtype = "int32"

    def declare(self) -> None:
        spec, layout = self.spec, self.layout
        self.xq = argument("xq", (self.m, self.k), "int8", 4)
        self.xs = argument("xs", (self.m, act_groups(spec, layout)), "float32", 4)
        self.xsum = argument("xsum", (self.m, self.groups), "int32", 4)
        self.weights = {
            name: argument(name, shape, dtype, 64)
            for name, (shape, dtype) in layout.shapes(spec.n, spec.k).items()
        }

    def scratch(self) -> None:
        bl = self.blocking
        shape = (bl.vectors, bl.k_block // 4, self.lanes, 4)
        self.decoded = b.sblock_alloc_buffer(shape, "uint8", align=64)
        if self.groups > 1:
            per_group = (bl.vectors, bl.k_block // self.group, self.lanes)
            self.scales = b.sblock_alloc_buffer(per_group, "float32", align=64)

    @property
    def _block(self) -> Expr:
        """Row block of the layout."""
        return self.panel // i64(TRIPLE)

    def row_block(self, j: Expr) -> Expr:
        """Vector of L columns of the panel's third j, past the end in the last panel."""
        return self.panel + j

    def fill(self, kb: Expr) -> None:
        bl, layout, codes = self.blocking, self.layout, self.weights["codes"]
        units = bl.k_block // UNIT_K
        with b.serial(0, self.count(units, self.k // UNIT_K, kb)) as u0, b.sblock("unit"):
            u = b.axis.spatial(units, u0)
            b.reads()
            b.writes()
            at = kb * units + u
            if bl.prefetch:
                self._prefetch_unit(kb, u)
            extents = (TRIPLE, VECTORS, self.lanes, 4)
            with b.grid(*extents) as loops, b.sblock("digits"):
                part, v, r, i = b.axis.remap("SSSS", loops)
                b.reads(codes[self._block, at, 0 : layout.unit_bytes])
                target = [part, u * VECTORS + v, r, i]
                b.writes(self.decoded[tuple(target)])
                code = triple(
                    lambda byte: codes[self._block, at, byte], layout.vector_bytes, v, r * 4 + i
                )
                b.buffer_store(self.decoded, digit(code, part).astype("uint8"), target)
        if self.groups > 1:
            per_block = bl.k_block // self.group
            mine = self.count(per_block, self.groups, kb)
            self._per_group("scales", self.scales, mine, kb * per_block)

    def _prefetch_unit(self, kb: Expr, u: Expr) -> None:
        """Prefetch the unit in this place of the next K block, or of the next panel's first one.

        A prefetch never faults, so the address may lie past the end of the weights.
        """
        units = self.blocking.k_block // UNIT_K
        last = kb == self.k_blocks - 1
        block = self._block + tirx.Select(last, i64(1), i64(0))
        unit = u + tirx.Select(last, tirx.const(0, "int32"), (kb + 1) * units)
        codes = self.weights["codes"]
        for line in range(0, self.layout.unit_bytes, 64):
            address = tirx.address_of(codes[block, unit, line])
            arguments = [tirx.const(v, "int32") for v in (0, 3, 1)]  # read, all cache levels, data
            b.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, *arguments))

    def _per_group(self, name: str, target: Buffer, groups: Any, first: Expr) -> None:
        source = self.weights[name]
        with self.stage(name, TRIPLE, groups, self.lanes) as (j, g, r):
            value = source[self._block, first + g, j * self.lanes + r]
            b.reads(value)
            b.writes(target[j, g, r])
            b.buffer_store(target, value.astype(target.dtype), [j, g, r])

    def _offset(self) -> Expr:
        return tirx.const(CENTRE, "int32")

    def _write_vector(self, name: str, results: Buffer, m: Expr, j: Expr, lanes: int) -> None:
        if self.shared_columns and name == "store":
            with b.If(self.row_block(j) < i64(self.row_blocks)), b.Then():
                super()._write_vector(name, results, m, j, lanes)
        else:
            super()._write_vector(name, results, m, j, lanes)

    def result(self, m: Expr, j: Expr, r: Expr, value: Expr) -> Expr:
        row = self.row + m
        if self.groups > 1:
            return value * self.xs[row, i64(0)] if self.token_scale else value
        centred = (value - self._offset() * self.xsum[row, i64(0)]).astype("float32")
        scale = self.weights["scales"][self._block, i64(0), j * self.lanes + r].astype("float32")
        return centred * (scale * self.xs[row, i64(0)])


def balance_gemm(spec: LinearSpec, layout: BalanceLayout, blocking: GemmBlocking) -> PrimFunc:
    """Linear layer with integer activations, as `apq_tvm.ops.balance.balance_linear`.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations.
    layout : BalanceLayout
    blocking : GemmBlocking
        Of three vectors.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, Ga], xsum i32 [M, Kp/gw], codes, scales, [bias], [residual],
        y)``, M >= m_tile; codes are taken apart in the block ``digits``.
    """
    return _BalanceGemm(spec, layout, blocking).build()
