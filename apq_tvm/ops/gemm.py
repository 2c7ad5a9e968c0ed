"""Large-M linear layers with int8 activations: packed codes are decoded to bytes once a panel."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.gemm_task import GemmBlocking, GemmTask, argument
from apq_tvm.ops.linear_nest import act_groups
from apq_tvm.ops.linear_spec import LinearSpec
from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.unit import decode

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any


class _IntegerGemm(GemmTask):
    """int8 activations; sums stay int32 for whole-row scales, else float32 after every group."""

    def __init__(
        self, spec: LinearSpec, layout: InterleavedLayout, blocking: GemmBlocking, halves: bool
    ) -> None:
        super().__init__(spec, blocking, layout.rows, layout.padded_k(spec.k))
        assert spec.scheme is not None
        self.layout, self.halves = layout, halves
        self.group = layout.group_width(spec.k)
        self.groups = layout.padded_groups(spec.k)
        self.token_scale = spec.scheme.act_group == -1 or self.groups == 1
        # +-1 codes: 2 * code - 1, so that the offset is an integer.
        self.doubled = layout.bits == 1 and not layout.zero_points
        if self.groups == 1:
            self.sum_dtype = "int32"

    def declare(self) -> None:
        spec, layout = self.spec, self.layout
        assert spec.scheme is not None
        act = act_groups(layout, spec.scheme, spec.k)
        self.xq = argument("xq", (self.m, self.k), "int8", 4)
        self.xs = argument("xs", (self.m, act), "float32", 4)
        self.xsum = argument("xsum", (self.m, self.groups), "int32", 4)
        self.weights = {
            name: argument(name, shape, dtype, 64)
            for name, (shape, dtype) in layout.shapes(spec.n, spec.k).items()
        }

    def scratch(self) -> None:
        bl = self.blocking
        planes = (2,) if self.halves else ()
        shape = (bl.vectors, bl.k_block // 4, *planes, self.lanes, 4)
        self.decoded = b.sblock_alloc_buffer(shape, "uint8", align=64)
        if self.groups > 1:
            per_group = (bl.vectors, bl.k_block // self.group, self.lanes)
            self.scales = b.sblock_alloc_buffer(per_group, "float32", align=64)
            if self.layout.zero_points:
                self.zeros = b.sblock_alloc_buffer(per_group, "int32", align=64)

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
            for plane in range(2 if self.halves else 1):
                self._decode(kb, j, u, plane)
        if self.groups > 1:
            per_block = bl.k_block // self.group
            mine = self.count(per_block, self.groups, kb)
            self._per_group("scales", self.scales, mine, kb * per_block)
            if self.layout.zero_points:
                self._per_group("zeros", self.zeros, mine, kb * per_block)

    def _prefetch(self, kb: Expr, j: Expr, u: Expr) -> None:
        """Prefetch the unit in this place of the next K block, or of the next panel's first one.

        A prefetch never faults, so the address may lie past the end of the weights.
        """
        units = self.blocking.k_block // UNIT_K
        last = kb == self.k_blocks - 1
        step = i64(self.blocking.vectors)
        block = self.row_block(j) + tirx.Select(last, step, i64(0))
        unit = u + tirx.Select(last, tirx.const(0, "int32"), (kb + 1) * units)
        codes = self.weights["codes"]
        for line in range(0, int(codes.shape[2]), 64):
            address = tirx.address_of(codes[block, unit, line])
            arguments = [tirx.const(v, "int32") for v in (0, 3, 1)]  # read, all cache levels, data
            b.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, *arguments))

    def _decode(self, kb: Expr, j: Expr, u: Expr, plane: int) -> None:
        codes, unit = self.weights["codes"], self.layout.unit
        block, at = self.row_block(j), kb * (self.blocking.k_block // UNIT_K) + u
        with self.stage("decode_high" if plane else "decode", 8, unit.vector_bytes) as (v, e):
            b.reads(codes[block, at, 0 : unit.nbytes])
            code = decode(unit, lambda byte: codes[block, at, byte], v, e).astype("uint8")
            if self.doubled:
                code = code + code
            if self.halves:
                low = tirx.bitwise_and(code, tirx.const(15, "uint8"))
                code = tirx.shift_right(code, tirx.const(4, "uint8")) if plane else low
            target = [j, u * 8 + v, *((plane,) if self.halves else ()), e // 4, e % 4]
            b.writes(self.decoded[tuple(target)])
            b.buffer_store(self.decoded, code, target)

    def _per_group(self, name: str, target: Buffer, groups: Any, first: Expr) -> None:
        source = self.weights[name]
        with self.stage(name, self.blocking.vectors, groups, self.lanes) as (j, g, r):
            value = source[self.row_block(j), first + g, r]
            b.reads(value)
            b.writes(target[j, g, r])
            b.buffer_store(target, value.astype(target.dtype), [j, g, r])

    def _offset(self) -> Expr:
        """What a decoded code is too large by, where the layer has no zero points."""
        bits = self.layout.bits
        return tirx.const(1 if self.doubled else 1 << (bits - 1), "int32")

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        bl = self.blocking
        if self.groups == 1:
            steps = self.count(bl.k_block // bl.k_step, self.k // bl.k_step, kb)
            self._dots(kb, tirx.const(0, "int32"), steps, sums)
            return
        shape = (bl.m_tile, bl.vectors, self.lanes)
        dots = b.sblock_alloc_buffer(shape, "int32", align=64)
        per_block = bl.k_block // self.group
        with b.serial(0, self.count(per_block, self.groups, kb)) as g, b.sblock("group"):
            group = b.axis.opaque(per_block, g)
            b.reads()
            b.writes()
            absolute = kb * per_block + group
            with self.stage("start", *shape) as (m, j, r):
                total = self.xsum[self.row + m, absolute]
                b.reads(total)
                b.writes(dots[m, j, r])
                zero = self.zeros[j, group, r] if self.layout.zero_points else self._offset()
                b.buffer_store(dots, tirx.const(0, "int32") - zero * total, [m, j, r])
            self._dots(kb, group * self.group, self.group // bl.k_step, dots)
            with self.stage("sum", *shape) as (m, j, r):
                # `sums` is left out of the reads: TVM would not vectorize a running sum.
                b.reads(dots[m, j, r])
                b.writes(sums[m, j, r])
                factor = self.scales[j, group, r]
                if not self.token_scale:
                    factor = factor * self.xs[self.row + m, absolute]
                term = dots[m, j, r].astype("float32") * factor
                b.buffer_store(sums, sums[m, j, r] + term, [m, j, r])

    def _dots(self, kb: Expr, first: Expr, steps: Any, dots: Buffer) -> None:
        bl = self.blocking
        quads = bl.k_step // 4
        extents = (bl.m_tile, bl.vectors, self.lanes, quads, 4)
        with b.serial(0, steps) as s, b.grid(*extents) as loops, b.sblock("dot"):
            step = b.axis.spatial(steps, s)
            m, j, r, k, i = b.axis.remap("SSSRR", loops)
            x = self.xq[self.row + m, kb * bl.k_block + first + step * bl.k_step + k * 4 + i]
            at = first // 4 + step * quads + k
            w = self.decoded
            b.reads(dots[m, j, r], x, w[j, at, 0:2, r, i] if self.halves else w[j, at, r, i])
            b.writes(dots[m, j, r])
            if self.halves:
                high = w[j, at, 1, r, i].astype("int32") * tirx.const(16, "int32")
                code = w[j, at, 0, r, i].astype("int32") + high
            else:
                code = w[j, at, r, i].astype("int32")
            b.buffer_store(dots, dots[m, j, r] + x.astype("int32") * code, [m, j, r])

    def result(self, m: Expr, j: Expr, r: Expr, value: Expr) -> Expr:
        row = self.row + m
        if self.groups > 1:
            return value * self.xs[row, i64(0)] if self.token_scale else value
        block = self.row_block(j)
        zero = self._offset()
        if self.layout.zero_points:
            zero = self.weights["zeros"][block, i64(0), r].astype("int32")
        centred = (value - zero * self.xsum[row, i64(0)]).astype("float32")
        scale = self.weights["scales"][block, i64(0), r].astype("float32")
        return centred * (scale * self.xs[row, i64(0)])


def integer_gemm(
    spec: LinearSpec, layout: InterleavedLayout, blocking: GemmBlocking, halves: bool = False
) -> PrimFunc:
    """Linear layer with int8 activations, as `apq_tvm.ops.linear.integer_linear`.

    Parameters
    ----------
    spec : LinearSpec
        With 8-bit activations.
    layout : InterleavedLayout
    blocking : GemmBlocking
    halves : bool
        True to decode codes into two planes of nibbles (`apq_tvm.tensorize.x86_gemm.splits_codes`).

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, Ga], xsum i32 [M, Kp/gw], codes, scales, [zeros], [bias],
        [residual], y)``, M >= m_tile.
    """
    return _IntegerGemm(spec, layout, blocking, halves).build()
