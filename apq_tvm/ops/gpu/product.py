"""``y = act(x Wᵀ + b) + residual`` by a GPU's ``mma``: weights are operand A, rows of x operand B.

A block of threads computes 16 rows of weights for 8, 16, ... rows of x. Its warps take turns along
K, a *chunk* (whole units, whole groups) at a time, and meet in shared memory at the end: else 8192
rows of weights give a multiprocessor four warps. A lane's 16-byte load *is* its fragments
(`apq_tvm.codegen.layouts.fragments`): nothing goes through shared memory, and up to 8 rows of x
cost the same. Codes are unsigned; zero points are taken off by sums of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts.fragments import STEP_K, FragmentLayout
from apq_tvm.formats.integer import ROW_SUMS
from apq_tvm.ops.linear.spec import LinearSpec, Operands, epilogue_of
from apq_tvm.tensorize.exprs import Expr, PrimFunc, f32, i32, i64

ROWS = 16
"""Rows of weights of an ``mma``."""

TILE = 8
"""Rows of x of an ``mma``."""


class Product:
    """Builds the PrimFunc of one layer.

    Parameters
    ----------
    spec : LinearSpec
        Integers on both sides, of groups of 32 and more.
    layout : FragmentLayout
    tiles : int
        Tiles of 8 rows of x that share what was read of the weights.
    warps : int
        Of a block of threads; they share K.
    call : callable
        ``(function, *arguments)`` → a call of a device function
        (`apq_tvm.tensorize.cuda.functions`).
    """

    def __init__(
        self,
        spec: LinearSpec,
        layout: FragmentLayout,
        tiles: int,
        warps: int,
        call: Callable[..., Any],
    ) -> None:
        self.spec, self.layout, self.tiles, self.warps = spec, layout, tiles, warps
        self.call = call
        self.kp = layout.padded_k(spec.k)
        self.chunk_k = max(layout.unit_k, layout.group_size)
        self.whole_rows = layout.group_size == -1
        self.group_k = layout.group_width(spec.k)

    def build(self) -> PrimFunc:
        """``(xq i32 [M, Kp / 4], xs f32 [M, Ga], xsum i32 [M, Gw], codes, scales, [zeros],
        [row_sums], [bias], [residual], y)``, threads bound."""
        spec, layout = self.spec, self.layout
        assert spec.scheme is not None
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            operands = Operands(spec)
            self.m = operands.m
            self.xq = operands.declare("xq", (self.m, self.kp // 4), "int32")
            self.xs, self.xsum = operands.factors(layout)
            self.weights = operands.weights(layout)
            self.bias, self.residual, self.y = operands.epilogue()
            blocks, tall = layout.row_blocks(spec.n), TILE * self.tiles
            down = (self.m + i64(tall - 1)) // i64(tall)
            with (
                b.thread_binding(0, i64(blocks), "blockIdx.x") as self.block,
                b.thread_binding(0, down, "blockIdx.y") as tile,
                b.thread_binding(0, self.warps, "threadIdx.y") as self.warp,
                b.thread_binding(0, 32, "threadIdx.x") as self.lane,
                b.sblock("tile"),
            ):
                b.reads()
                b.writes()
                self.first = tile * i64(tall)
                self._tile()
        return builder.get()

    # ---- one block's share ----

    def _tile(self) -> None:
        count = 4 * self.tiles
        self.sums = b.sblock_alloc_buffer((count,), "float32", scope="local")
        self.dots = b.sblock_alloc_buffer((count,), "int32", scope="local")
        self.words = b.sblock_alloc_buffer((4 * self.layout.unit_loads,), "uint32", scope="local")
        self._fill(self.sums, f32(0.0), count)
        if self.whole_rows:
            self._fill(self.dots, i32(0), count)
        chunks = self.kp // self.chunk_k
        with b.serial(0, -(-chunks // self.warps)) as turn:
            chunk = turn * self.warps + self.warp
            if chunks % self.warps:
                with b.If(chunk < chunks), b.Then():
                    self._chunk(chunk)
            else:
                self._chunk(chunk)
        if self.whole_rows:
            self._scale(i64(0))
        self._meet()

    def _fill(self, buffer: Any, value: Expr, count: int) -> None:
        with b.unroll(0, count) as i:
            b.buffer_store(buffer, value, [i])

    def _chunk(self, chunk: Expr) -> None:
        layout, units = self.layout, self.chunk_k // self.layout.unit_k
        steps = layout.unit_steps
        of_group = self.group_k // STEP_K  # steps
        for part in range(units):
            unit = chunk * units + part
            self._read(unit)
            for step in range(steps):
                at = part * steps + step  # in the chunk
                group = chunk * i64(self.chunk_k // self.group_k or 1) + i64(at // of_group)
                if not self.whole_rows and at % of_group == 0:
                    self._fill(self.dots, i32(0), 4 * self.tiles)
                self._multiply(unit, step)
                if not self.whole_rows and (at + 1) % of_group == 0:
                    self._scale(group)

    def _read(self, unit: Expr) -> None:
        codes = self.weights["codes"]
        for load in range(self.layout.unit_loads):
            source = codes[self.block, unit, load, self.lane, 0]
            b.evaluate(self.call("apq_read16", _address(self.words[4 * load]), _address(source)))

    def _multiply(self, unit: Expr, step: int) -> None:
        """One step of all tiles; what it decodes is decoded once."""
        fragment = [self._fragment(step, word) for word in range(4)]
        column = unit * (self.layout.unit_k // 4) + 8 * step + self.lane % 4 * 2
        for tile in range(self.tiles):
            row = self._row(tile, self.lane // 4)
            x = [self.xq[row, column + part].astype("uint32") for part in range(2)]
            b.evaluate(self.call("apq_mma_u8s8", _address(self.dots[4 * tile]), *fragment, *x))

    def _fragment(self, step: int, word: int) -> Expr:
        """uint32: four codes of a lane, a byte each."""
        out = None
        for field in self.layout.fields:
            load = self.layout.first_load(field) + step // field.per_byte
            bits: Expr = self.words[4 * load + word]
            place = step % field.per_byte * field.width
            if place:
                bits = bits >> _u32(place)
            if field.width < 8:
                bits = bits & _u32(0x01010101 * field.mask)
            if field.shift:
                bits = bits << _u32(field.shift)
            out = bits if out is None else out | bits
        assert out is not None
        return out

    def _row(self, tile: int, row: Expr) -> Expr:
        """Row of x, the last one where there is none: what comes of it is not stored."""
        return tirx.min(self.first + i64(TILE * tile) + row.astype("int64"), self.m - i64(1))

    def _scale(self, group: Expr) -> None:
        """Add a group's dots to the sums, times both scales."""
        layout, scheme = self.layout, self.spec.scheme
        assert scheme is not None
        pair = self.lane // 4 * 2
        for high in range(2):
            scale = self.weights["scales"][self.block, group, pair + high].astype("float32")
            zero = layout.zero(self.weights, self.block, group, pair + high)
            for tile in range(self.tiles):
                for odd in range(2):
                    row = self._row(tile, self.lane % 4 * 2 + odd)
                    at = 4 * tile + 2 * high + odd
                    taken = zero * self.xsum[row, group]
                    if self.whole_rows:  # the warps' sums are parts of one group
                        taken = tirx.Select(self.warp == 0, taken, i32(0))
                    dots = layout.centred(self.dots[at], taken)
                    factor = scale
                    if scheme.act_group != -1:
                        factor = factor * self.xs[row, group]
                    term = dots.astype("float32") * factor
                    b.buffer_store(self.sums, self.sums[at] + term, [at])

    # ---- the end ----

    def _meet(self) -> None:
        """Sum over warps in shared memory; each stores a part of the results."""
        count = 4 * self.tiles
        shared = b.sblock_alloc_buffer((self.warps, count, 32), "float32", scope="shared")
        with b.unroll(0, count) as i:
            b.buffer_store(shared, self.sums[i], [self.warp, i, self.lane])
        b.evaluate(tirx.call_intrin("void", "tirx.tvm_storage_sync", "shared"))
        with b.serial(0, -(-count // self.warps)) as turn:
            at = turn * self.warps + self.warp
            with b.If(at < count), b.Then():
                total = shared[0, at, self.lane]
                for warp in range(1, self.warps):
                    total = total + shared[warp, at, self.lane]
                self._store(at, total)

    def _store(self, at: Expr, total: Expr) -> None:
        spec, scheme = self.spec, self.spec.scheme
        assert scheme is not None
        tile, high, odd = at // 4, at // 2 % 2, at % 2
        column = self.block * i64(ROWS) + (self.lane // 4 + high * 8).astype("int64")
        row = self.first + (tile * TILE + self.lane % 4 * 2 + odd).astype("int64")
        inside = row < self.m
        if spec.n % ROWS:
            inside = tirx.all(inside, column < i64(spec.n))
        with b.If(inside), b.Then():
            shift = None
            if scheme.act_group == -1:
                total = total * self.xs[row, 0]
            if spec.asymmetric:
                shift = (self.xs[row, 1], self.weights[ROW_SUMS])
            value = epilogue_of(spec, total, self.bias, self.residual, row, column, shift)
            b.buffer_store(self.y, value, [row, column])


def _u32(value: int) -> Expr:
    return tirx.const(value, "uint32")


def _address(element: Expr) -> Expr:
    return tirx.address_of(element)
