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

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, FloatLayout, InterleavedLayout
from apq_tvm.ops import math
from apq_tvm.ops.linear import LinearSpec, act_groups, unit_of
from apq_tvm.tensorize.unit import decode

STAGES = "apq.stages"
"""Annotation of the root block: names of the blocks whose innermost loop is one vector."""

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any


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
        Tiles of rows in a task.
    """

    m_tile: int
    vectors: int
    k_step: int
    k_block: int
    m_tiles: int

    @property
    def rows(self) -> int:
        """Rows of x in a task."""
        return self.m_tile * self.m_tiles


def _i64(value: int) -> Expr:
    return tirx.const(value, "int64")


def _ceil(a: Expr, divisor: int) -> Expr:
    return (a + _i64(divisor - 1)) // _i64(divisor)


def _argument(name: str, shape: tuple[Any, ...], dtype: str, align: int) -> Buffer:
    extents = [_i64(s) if isinstance(s, int) else s for s in shape]
    return b.match_buffer(b.arg(name, b.handle()), extents, dtype, align=align, offset_factor=1)


class _Gemm:
    """The loops that all GEMMs share; subclasses declare operands and fill the stages."""

    def __init__(self, spec: LinearSpec, blocking: GemmBlocking, lanes: int, k: int) -> None:
        self.spec, self.blocking, self.lanes, self.k = spec, blocking, lanes, k
        self.row_blocks = -(-spec.n // lanes)
        self.panels = -(-self.row_blocks // blocking.vectors)
        self.k_blocks = -(-k // blocking.k_block)
        self.sum_dtype = "float32"
        self.shared_columns = False  # True where two panels may compute a column: the later stores
        self.stages: list[str] = []

    # Subclass interface.
    def declare(self) -> None:
        """Declare x and the weights, in the order of the calling convention."""
        raise NotImplementedError

    def scratch(self) -> None:
        """Allocate what a task keeps between tiles."""

    def fill(self, kb: Expr) -> None:
        """Fill the panel of K block `kb`."""

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        """Add the K block's products to the tile's sums."""
        raise NotImplementedError

    def result(self, m: Expr, j: Expr, r: Expr, value: Expr) -> Expr:
        """Turn a sum into an element of x Wᵀ."""
        return value

    # Shared structure.
    def build(self) -> PrimFunc:
        """The PrimFunc: blocks ``task``, ``k_block``, ``tile`` and their stages."""
        spec, bl = self.spec, self.blocking
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name("gemm")
            b.func_attr({"apq.op": "linear", "op_pattern": 8, "tirx.noalias": True})
            self.m = tirx.Var("m", "int64")
            self.declare()
            whole = (self.m, spec.n)
            self.bias = _argument("bias", (spec.n,), "float32", 4) if spec.bias else None
            self.residual = _argument("residual", whole, "float32", 4) if spec.residual else None
            self.y = _argument("y", whole, "float32", 4)
            tasks = _ceil(self.m, bl.rows) * _i64(self.panels)
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
        self.first_row = b.bind(task // _i64(self.panels) * _i64(bl.rows))
        self.panel = b.bind(task % _i64(self.panels) * _i64(bl.vectors))
        tiles = b.bind(_ceil(tirx.min(_i64(bl.rows), self.m - self.first_row), bl.m_tile))
        self.scratch()
        self.waiting: Buffer | None = None
        if self.k_blocks > 1:
            shape = (bl.m_tiles, bl.m_tile, bl.vectors, self.lanes)
            self.waiting = b.sblock_alloc_buffer(shape, self.sum_dtype, align=64)
            with self._stage("clear", tiles, *shape[1:]) as (t, m, j, r):
                b.writes(self.waiting[t, m, j, r])
                b.buffer_store(self.waiting, tirx.const(0, self.sum_dtype), [t, m, j, r])
        with b.serial(0, self.k_blocks) as kb, b.sblock("k_block"):
            vkb = b.axis.opaque(self.k_blocks, kb)
            b.reads()
            b.writes()
            self.fill(vkb)
            with b.serial(0, tiles) as t, b.sblock("tile"):
                vt = b.axis.spatial(tiles, t)
                b.reads()
                b.writes()
                self._tile(vkb, vt)

    def _tile(self, kb: Expr, tile: Expr) -> None:
        bl = self.blocking
        self.row = b.bind(
            tirx.min(self.first_row + tile * _i64(bl.m_tile), self.m - _i64(bl.m_tile))
        )
        shape = (bl.m_tile, bl.vectors, self.lanes)
        sums = b.sblock_alloc_buffer(shape, self.sum_dtype, align=64)
        waiting = self.waiting
        with self._stage("load", *shape) as at:
            b.writes(sums[at])
            value: Expr = tirx.const(0, self.sum_dtype)
            if waiting is not None:
                value = waiting[(tile, *at)]
            b.reads(*[value] if waiting is not None else [])
            b.buffer_store(sums, value, list(at))
        self.multiply(kb, sums)
        if waiting is None:
            self._store(sums)
            return
        with b.If(kb == self.k_blocks - 1):
            with b.Then():
                self._store(sums)
            with b.Else(), self._stage("wait", *shape) as at:
                b.reads(sums[at])
                b.writes(waiting[(tile, *at)])
                b.buffer_store(waiting, sums[at], [tile, *at])

    def _store(self, sums: Buffer) -> None:
        """Write the tile: vector by vector where the last one is shorter or another panel's."""
        vectors, lanes, tail = self.blocking.vectors, self.lanes, self.spec.n % self.lanes
        if not tail and not self.shared_columns:
            self._store_vectors("store", sums, range(vectors), lanes)
            return
        for j in range(vectors):
            block = self.row_block(j)
            with b.If(block >= self.panel) if self.shared_columns else nullcontext():
                with b.Then() if self.shared_columns else nullcontext():
                    if not tail:
                        self._store_vectors(f"store{j}", sums, range(j, j + 1), lanes)
                        continue
                    with b.If(block == _i64(self.row_blocks - 1)):
                        with b.Then():
                            self._store_vectors(f"store_tail{j}", sums, range(j, j + 1), tail)
                        with b.Else():
                            self._store_vectors(f"store{j}", sums, range(j, j + 1), lanes)

    def _store_vectors(self, name: str, sums: Buffer, vectors: range, lanes: int) -> None:
        spec = self.spec
        with self._stage(name, self.blocking.m_tile, len(vectors), lanes) as (m, v, r):
            j = v + vectors.start
            row, col = self.row + m, self.row_block(j) * _i64(self.lanes) + r
            b.reads(sums[m, j, r])
            b.writes(self.y[row, col])
            value = self.result(m, j, r, sums[m, j, r])
            if self.bias is not None:
                value = value + self.bias[col]
            value = math.activation(spec.activation, value)
            if self.residual is not None:
                value = value + self.residual[row, col]
            b.buffer_store(self.y, value, [row, col])

    def row_block(self, j: Expr) -> Expr:
        """Row block of W of the panel's vector j: past the end the last one again."""
        index = self.panel + j
        if self.row_blocks % self.blocking.vectors:
            return tirx.min(index, _i64(self.row_blocks - 1))
        return index

    def count(self, per_block: int, total: int, kb: Expr) -> Any:
        """Of `total` things along K, `per_block` to a K block: how many block `kb` has."""
        if total % per_block == 0:
            return per_block
        return tirx.min(_i64(per_block), _i64(total) - kb * _i64(per_block))

    @contextmanager
    def _stage(self, name: str, *extents: Any) -> Iterator[tuple[Expr, ...]]:
        """A loop nest over `extents` around a block with one spatial axis for each."""
        self.stages.append(name)
        with b.sblock(f"{name}_stage"):
            b.reads()
            b.writes()
            with b.grid(*extents) as loops, b.sblock(name):
                loops = [loops] if len(extents) == 1 else loops
                yield tuple(
                    b.axis.spatial(extent, loop)
                    for extent, loop in zip(extents, loops, strict=True)
                )


class _IntegerGemm(_Gemm):
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
        self.xq = _argument("xq", (self.m, self.k), "int8", 4)
        self.xs = _argument("xs", (self.m, act), "float32", 4)
        self.xsum = _argument("xsum", (self.m, self.groups), "int32", 4)
        self.weights = {
            name: _argument(name, shape, dtype, 64)
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
        codes, unit = self.weights["codes"], unit_of(self.layout)
        for plane in range(2 if self.halves else 1):
            name = "decode_high" if plane else "decode"
            with self._stage(name, bl.vectors, mine, 8, unit.vector_bytes) as (j, u, v, e):
                block, at = self.row_block(j), kb * units + u
                b.reads(codes[block, at, 0 : unit.nbytes])
                code = decode(unit, lambda byte, s=(block, at): codes[(*s, byte)], v, e)
                code = code.astype("uint8")
                if self.doubled:
                    code = code + code
                if self.halves:
                    low = tirx.bitwise_and(code, tirx.const(15, "uint8"))
                    code = tirx.shift_right(code, tirx.const(4, "uint8")) if plane else low
                target = [j, u * 8 + v, *((plane,) if self.halves else ()), e // 4, e % 4]
                b.writes(self.decoded[tuple(target)])
                b.buffer_store(self.decoded, code, target)
        if self.groups > 1:
            per_block = bl.k_block // self.group
            mine = self.count(per_block, self.groups, kb)
            self._per_group("scales", self.scales, mine, kb * per_block)
            if self.layout.zero_points:
                self._per_group("zeros", self.zeros, mine, kb * per_block)

    def _per_group(self, name: str, target: Buffer, groups: Any, first: Expr) -> None:
        source = self.weights[name]
        with self._stage(name, self.blocking.vectors, groups, self.lanes) as (j, g, r):
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
            with self._stage("start", *shape) as (m, j, r):
                total = self.xsum[self.row + m, absolute]
                b.reads(total)
                b.writes(dots[m, j, r])
                zero = self.zeros[j, group, r] if self.layout.zero_points else self._offset()
                b.buffer_store(dots, tirx.const(0, "int32") - zero * total, [m, j, r])
            self._dots(kb, group * self.group, self.group // bl.k_step, dots)
            with self._stage("sum", *shape) as (m, j, r):
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
            return value * self.xs[row, _i64(0)] if self.token_scale else value
        block = self.row_block(j)
        zero = self._offset()
        if self.layout.zero_points:
            zero = self.weights["zeros"][block, _i64(0), r].astype("int32")
        centred = (value - zero * self.xsum[row, _i64(0)]).astype("float32")
        scale = self.weights["scales"][block, _i64(0), r].astype("float32")
        return centred * (scale * self.xs[row, _i64(0)])


class _DequantizedGemm(_Gemm):
    """float32 activations: the panel is decoded to float32."""

    def __init__(self, spec: LinearSpec, layout: InterleavedLayout, blocking: GemmBlocking) -> None:
        super().__init__(spec, blocking, layout.rows, spec.k)
        self.layout = layout
        self.group = layout.group_width(spec.k)
        self.groups = layout.padded_groups(spec.k)

    def declare(self) -> None:
        spec = self.spec
        self.x = _argument("x", (self.m, spec.k), "float32", 4)
        self.weights = {
            name: _argument(name, shape, dtype, 64)
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
            codes, unit = self.weights["codes"], unit_of(layout)
            bytes_ = b.sblock_alloc_buffer((8, lanes, 4), "uint8", align=64)
            with self._stage("decode", 8, unit.vector_bytes) as (v, e):
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
        with self._stage(f"scales{part}", lanes) as (r,):
            value = self.weights["scales"][block, group, r].astype("float32")
            b.reads(self.weights["scales"][block, group, r])
            b.writes(scale[r])
            b.buffer_store(scale, value * tirx.const(2.0, "float32") if doubled else value, [r])
        with self._stage(f"zeros{part}", lanes) as (r,):
            offset: Expr = tirx.const(2.0 ** (bits - 1) if bits > 1 else 0.5, "float32")
            if self.layout.zero_points:
                offset = self.weights["zeros"][block, group, r].astype("float32")
            b.reads()
            b.writes(zero[r])
            b.buffer_store(zero, offset, [r])
        with b.grid(quads, 4, lanes) as loops, b.sblock(f"convert{part}"):
            q, i, r = b.axis.remap("SSS", loops)
            code, quad = bytes_[part * quads + q, r, i], u * 8 + part * quads + q
            target = [j, quad * 4 + i, r]
            b.reads(code, zero[r], scale[r])
            b.writes(self.decoded[tuple(target)])
            b.buffer_store(self.decoded, (code.astype("float32") - zero[r]) * scale[r], target)

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        _float_dots(self, kb, sums, self.x, lambda j, k, r: self.decoded[j, k, r])


class _FloatGemm(_Gemm):
    """float32 weights, read where they lie: a panel's row blocks follow each other."""

    def __init__(self, spec: LinearSpec, layout: FloatLayout, blocking: GemmBlocking) -> None:
        super().__init__(spec, blocking, layout.rows, spec.k)
        self.layout = layout
        self.shared_columns = self.row_blocks % blocking.vectors != 0

    def declare(self) -> None:
        spec = self.spec
        ((shape, dtype),) = self.layout.shapes(spec.n, spec.k).values()
        self.x = _argument("x", (self.m, spec.k), "float32", 4)
        self.weight = _argument("weight", shape, dtype, 64)

    def scratch(self) -> None:
        # The last panel is moved back to end with W.
        last = self.row_blocks - self.blocking.vectors
        self.start = b.bind(tirx.min(self.panel, _i64(last)))

    def row_block(self, j: Expr) -> Expr:
        return self.start + j

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        def weight(j: Expr, k: Expr, r: Expr) -> Expr:
            return self.weight[self.start + j, kb * self.blocking.k_block + k, r]

        _float_dots(self, kb, sums, self.x, weight)


def _float_dots(
    gemm: _Gemm, kb: Expr, sums: Buffer, x: Buffer, weight: Callable[[Expr, Expr, Expr], Expr]
) -> None:
    bl = gemm.blocking
    steps = gemm.count(bl.k_block // bl.k_step, gemm.k // bl.k_step, kb)
    extents = (bl.m_tile, bl.vectors, gemm.lanes, bl.k_step)
    with b.serial(0, steps) as s, b.grid(*extents) as loops, b.sblock("dot"):
        step = b.axis.spatial(steps, s)
        m, j, r, k = b.axis.remap("SSSR", loops)
        at = step * bl.k_step + k
        a, w = x[gemm.row + m, kb * bl.k_block + at], weight(j, at, r)
        b.reads(sums[m, j, r], a, w)
        b.writes(sums[m, j, r])
        b.buffer_store(sums, sums[m, j, r] + a * w, [m, j, r])


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
