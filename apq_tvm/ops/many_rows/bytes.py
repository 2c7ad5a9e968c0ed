"""What large-M layers share whose panels hold unsigned bytes: int8 activations times bytes.

A panel's codes become bytes once; what they are too large by is taken off by sums of activations.
Subclasses say how a unit is decoded, and what belongs to a group. They build PrimFuncs ``(xq i8 [M,
Kp], xs f32 [M, Ga], xsum i32 [M, Kp/gw], *packed arrays, [bias], [residual], y)`` for M >= m_tile.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.blocks import argument, put
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.task import GemmBlocking, GemmTask, arguments, around
from apq_tvm.tensorize.exprs import Buffer, Expr, i64, prefetch_line
from apq_tvm.tensorize.meaning.interleaved import decode
from apq_tvm.tensorize.meaning.scaffold import Meaning, View
from apq_tvm.tensorize.meaning.tile import Tile, byte_products, tile_loops


class ByteGemm(GemmTask):
    """Sums stay int32 for whole-row scales, else they become float32 after every group.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations.
    layout : Layout
        Of a family: subclasses know which.
    blocking : GemmBlocking
    lanes : int
        Columns of a vector.
    group, groups : int
        Width of the groups of K, and how many there are.
    """

    run, code_dtype = 4, "uint8"
    """k of a column that lie together in a panel, and their type."""

    by_groups = False
    """Whether sums become float32 after every group even where there is one."""

    def __init__(
        self,
        spec: LinearSpec,
        layout: Any,
        blocking: GemmBlocking,
        lanes: int,
        group: int,
        groups: int,
    ) -> None:
        super().__init__(spec, blocking, lanes, layout.padded_k(spec.k))
        assert spec.scheme is not None
        self.layout, self.group, self.groups = layout, group, groups
        self.strands = blocking.vectors  # of units, side by side, in a panel
        self.whole = groups == 1 and not self.by_groups
        self.token_scale = spec.scheme.act_group == -1 or self.whole
        if self.whole:
            self.sum_dtype = "int32"

    def declare(self) -> None:
        spec, act = self.spec, 1 if self.token_scale else self.groups
        self.xq = argument("xq", (self.m, self.k), "int8", 4)
        self.xs = argument("xs", (self.m, act + spec.centres), "float32", 4)
        self.xsum = argument("xsum", (self.m, self.groups), "int32", 4)
        self.weights = arguments(self.layout.shapes(spec.n, spec.k))

    def centre(self, row: Expr) -> Expr:
        return self.xs[row, i64(1)]

    def scratch(self) -> None:
        bl = self.blocking
        shape = (bl.vectors, bl.k_block // self.run, self.lanes, self.run)
        self.decoded = b.sblock_alloc_buffer(shape, self.code_dtype, align=64)
        self.scratch_of_groups()

    def scratch_of_groups(self) -> None:
        """Allocate what the panel's groups need."""
        if not self.whole:
            self.scales = self.per_group("float32")

    def per_group(self, dtype: str) -> Buffer:
        """Scratch for one value per column and group of the panel."""
        bl = self.blocking
        shape = (bl.vectors, bl.k_block // self.group, self.lanes)
        return b.sblock_alloc_buffer(shape, dtype, align=64)

    def fill(self, kb: Expr) -> None:
        self.fill_units(kb)
        if not self.whole:
            per_block = self.blocking.k_block // self.group
            self.fill_groups(self.count(per_block, self.groups, kb), kb * per_block)

    def fill_units(self, kb: Expr) -> None:
        """Decode the panel's units of K block `kb`."""
        bl = self.blocking
        units = bl.k_block // UNIT_K
        mine = self.count(units, self.k // UNIT_K, kb)
        with around("unit", (bl.vectors, bl.vectors), (mine, units)) as (j, u):
            self.decode_unit(kb, j, u)

    def ask_ahead(self, kb: Expr, tile: Expr, tiles: Expr) -> None:
        """Every tile asks for its share of the units: a processor waits for many at once."""
        if not self.blocking.prefetch:
            return
        each = self.blocking.k_block // UNIT_K
        units = i64(self.strands * each)
        first = b.bind(tile * units // tiles)
        with b.serial(0, (tile + 1) * units // tiles - first) as i:
            unit = first + i
            self.prefetch(kb, unit // i64(each), unit % i64(each))

    @abstractmethod
    def decode_unit(self, kb: Expr, j: Expr, u: Expr) -> None:
        """Decode unit u of the K block for vector j of the panel's columns to `decoded`."""

    def fill_groups(self, mine: Any, first: Expr) -> None:
        """Fill `scales` with those of `mine` groups from `first` on."""
        self.fill_group("scales", self.scales, mine, first)

    def fill_group(self, name: str, target: Buffer, mine: Any, first: Expr) -> None:
        """Fill `target` with the values of a packed array."""
        with self.stage(name, self.blocking.vectors, mine, self.lanes) as (j, g, r):
            value = self.of_group(name, j, first + g, r)
            put(target, (j, g, r), value.astype(target.dtype), value)

    def of_group(self, name: str, j: Expr, group: Expr, r: Expr) -> Expr:
        """Element of a packed array of groups, of the panel's column (j, r)."""
        return self.weights[name][self.row_block(j), group, r]

    def decode_codes(
        self, kb: Expr, j: Expr, u: Expr, byte_of: Callable[[Expr], Expr] = lambda code: code
    ) -> None:
        """Decode a unit (`apq_tvm.tensorize.meaning.interleaved`) to `byte_of` its codes."""
        codes, unit = self.weights["codes"], self.layout.unit
        block, at = self.row_block(j), kb * (self.blocking.k_block // UNIT_K) + u
        with self.stage("decode", 8, unit.vector_bytes) as (v, e):
            code = decode(unit, lambda byte: codes[block, at, byte], v, e).astype("uint8")
            target = (j, u * 8 + v, e // 4, e % 4)
            put(self.decoded, target, byte_of(code), codes[block, at, 0 : unit.nbytes])

    def prefetch(self, kb: Expr, j: Expr, u: Expr) -> None:
        """Prefetch the unit in this place of the next K block, or of the next panel's first one.

        A prefetch never faults, so the address may lie past the end of the weights.
        """
        codes = self.weights["codes"]
        block, unit = self.following(kb, self.row_block(j), self.blocking.vectors, u)
        self.prefetch_lines(lambda byte: codes[block, unit, byte], int(codes.shape[2]))

    def following(self, kb: Expr, block: Expr, step: int, u: Expr) -> tuple[Expr, Expr]:
        """Row block and unit that come a K block later; a panel is `step` row blocks."""
        units = self.blocking.k_block // UNIT_K
        last = kb == self.k_blocks - 1
        unit = u + tirx.Select(last, tirx.const(0, "int32"), (kb + 1) * units)
        return block + tirx.Select(last, i64(step), i64(0)), unit

    @staticmethod
    def prefetch_lines(place: Any, nbytes: int) -> None:
        """Prefetch `nbytes` from ``place(0)`` on into the second cache: the first holds a panel."""
        for line in range(0, nbytes, 64):
            prefetch_line(place(line), first=False)

    @abstractmethod
    def offset(self, j: Expr, group: Expr, r: Expr) -> Expr:
        """What decoded bytes of a group of the K block are too large by, int32."""

    def term(self, dot: Expr, m: Expr, j: Expr, group: Expr, absolute: Expr, r: Expr) -> Expr:
        """What a group's sum adds to the float32 sum; `group` counts within the K block."""
        factor = self.scales[j, group, r]
        if not self.token_scale:
            factor = factor * self.xs[self.row + m, absolute]
        return dot * factor

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        bl = self.blocking
        if self.whole:
            steps = self.count(bl.k_block // bl.k_step, self.k // bl.k_step, kb)
            self._dots(kb, tirx.const(0, "int32"), steps, sums)
            return
        shape = (bl.m_tile, bl.vectors, self.lanes)
        dots = b.sblock_alloc_buffer(shape, "int32", align=64)
        per_block = bl.k_block // self.group
        mine = self.count(per_block, self.groups, kb)
        with around("group", (mine, per_block), opaque=True) as (group,):
            absolute = kb * per_block + group
            with self.stage("start", *shape) as (m, j, r):
                total = self.xsum[self.row + m, absolute]
                start = tirx.const(0, "int32") - self.offset(j, group, r) * total
                put(dots, (m, j, r), start, total)
            self._dots(kb, group * self.group, self.group // bl.k_step, dots)
            with self.stage("sum", *shape) as (m, j, r):
                # `sums` is left out of the reads: TVM would not vectorize a running sum.
                dot = dots[m, j, r].astype("float32")
                term = self.term(dot, m, j, group, absolute, r)
                put(sums, (m, j, r), sums[m, j, r] + term, dots[m, j, r])

    def _dots(self, kb: Expr, first: Expr, steps: Any, dots: Buffer) -> None:
        bl = self.blocking

        def views(step: Expr) -> tuple[View, ...]:
            x = self.operand(kb, first + step * bl.k_step)
            return x, self.codes(kb, first, step), View(dots, (0, 0, 0))

        with b.serial(0, steps) as s:
            tile_loops(self.products(bl.tile(self.lanes)), views, [(s, steps)])

    def codes(self, kb: Expr, first: Expr, step: Expr) -> View:
        """The panel's codes of a step, where steps count from column `first` of the K block on."""
        at = first // self.run + step * (self.blocking.k_step // self.run)
        return View(self.decoded, (0, at, 0, 0))

    def products(self, tile: Tile) -> Meaning:
        """What the micro-kernel means."""
        return byte_products(tile)

    def operand(self, kb: Expr, column: Expr) -> View:
        """The tile's activations from a column of the K block on."""
        return View(self.xq, (self.row, kb * self.blocking.k_block + column))

    def whole_offset(self, j: Expr, r: Expr) -> Expr:
        """`offset` where rows have one scale, and the sums are of the whole K."""
        return self.offset(j, i64(0), r)

    def result(self, m: Expr, j: Expr, r: Expr, value: Expr) -> Expr:
        row = self.row + m
        if not self.whole:
            return value * self.xs[row, i64(0)] if self.token_scale else value
        zero = self.whole_offset(j, r)
        centred = (value - zero * self.xsum[row, i64(0)]).astype("float32")
        scale = self.of_group("scales", j, i64(0), r).astype("float32")
        return centred * (scale * self.xs[row, i64(0)])


class IntegerGemm(ByteGemm):
    """Uniform codes."""

    def __init__(self, spec: LinearSpec, layout: InterleavedLayout, blocking: GemmBlocking) -> None:
        k = spec.k
        super().__init__(
            spec, layout, blocking, layout.rows, layout.group_width(k), layout.padded_groups(k)
        )
        # +-1 codes: 2 * code - 1, so that the offset is an integer.
        self.doubled = layout.bits == 1 and not layout.zero_points

    def scratch_of_groups(self) -> None:
        super().scratch_of_groups()
        if self.layout.zero_points and not self.whole:
            self.zeros = self.per_group("int32")

    def decode_unit(self, kb: Expr, j: Expr, u: Expr) -> None:
        if self.doubled:
            self.decode_codes(kb, j, u, lambda code: code + code)
        else:
            self.decode_codes(kb, j, u)

    def fill_groups(self, mine: Any, first: Expr) -> None:
        super().fill_groups(mine, first)
        if self.layout.zero_points:
            self.fill_group("zeros", self.zeros, mine, first)

    def offset(self, j: Expr, group: Expr, r: Expr) -> Expr:
        if self.layout.zero_points:
            return self.zeros[j, group, r]
        return tirx.const(1 if self.doubled else 1 << (self.layout.bits - 1), "int32")

    def whole_offset(self, j: Expr, r: Expr) -> Expr:
        if self.layout.zero_points:
            return self.of_group("zeros", j, i64(0), r).astype("int32")
        return super().whole_offset(j, r)
