"""``y = act(x Wᵀ + b) + residual`` by a GPU's ``mma``: weights are operand A, rows of x operand B.

A block of threads computes 16 rows of weights for 8, 16, ... rows of x. Its warps take turns along
K, a *chunk* at a time, and meet in shared memory at the end: else 8192 rows of weights give a
multiprocessor four warps. A lane's 16-byte load *is* its fragments
(`apq_tvm.codegen.layouts.fragments`): nothing goes through shared memory, and up to 8 rows of x
cost the same. Codes are unsigned; zero points are taken off by sums of x, with which the sums
begin (`apq_tvm.ops.gpu.rows`).

A round of several chunks reads all its weights before it uses the first of them: memory is a
thousand cycles away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.formats.integer import ROW_SUMS
from apq_tvm.ops.gpu.rows import MAGIC, PAIRS, RowFactors, pair_of
from apq_tvm.ops.gpu.steps import Step
from apq_tvm.ops.linear.spec import LinearSpec, Operands, epilogue_of
from apq_tvm.tensorize.exprs import Expr, PrimFunc, f32, i32, i64

WARP = 32

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
    factors : RowFactors
        How x lies; `factors.steps.tiles` tiles of 8 rows share what was read of the weights.
    warps : int
        Of a block of threads; they share K.
    chunks : int
        Of a round.
    call : callable
        ``(function, *arguments)`` → a call of a device function
        (`apq_tvm.tensorize.cuda.functions`).
    """

    def __init__(
        self,
        spec: LinearSpec,
        factors: RowFactors,
        warps: int,
        chunks: int,
        call: Callable[..., Any],
    ) -> None:
        self.spec, self.factors, self.warps, self.chunks = spec, factors, warps, chunks
        self.steps, self.layout = factors.steps, factors.steps.layout
        self.tiles, self.call = self.steps.tiles, call
        self.whole_rows = self.layout.group_size == -1
        self.units = self.layout.chunk_k // self.layout.unit_k
        self.groups = 0 if self.whole_rows else self.layout.chunk_k // self.layout.group_size

    @property
    def zeros_at_once(self) -> bool:
        """True if zero points are read with the scales: a byte for each group touches two sectors
        where scales of four lie together. Several tiles are short of instructions, and bytes want
        fewer."""
        return self.layout.zero_points and self.layout.together > 2 and self.tiles == 1

    def build(self) -> PrimFunc:
        """``(xq, xs, start, codes, scales, [zeros], [row_sums], [bias], [residual], y)``, threads
        bound."""
        spec, layout, factors = self.spec, self.layout, self.factors
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            operands = Operands(spec)
            m = self.m = operands.m
            self.xq = operands.declare("xq", factors.words(m), "int32")
            self.xs = operands.declare("xs", factors.scales(m), "float32")
            self.start = operands.declare("start", factors.starts(m), "int32")
            self.weights = operands.weights(layout)
            self.bias, self.residual, self.y = operands.epilogue()
            blocks, tall = layout.row_blocks(spec.n), TILE * self.tiles
            down = (m + i64(tall - 1)) // i64(tall)
            with (
                b.thread_binding(0, i64(blocks), "blockIdx.x") as self.block,
                b.thread_binding(0, down, "blockIdx.y") as tile,
                b.thread_binding(0, self.warps, "threadIdx.y") as self.warp,
                b.thread_binding(0, WARP, "threadIdx.x") as self.lane,
                b.sblock("tile"),
            ):
                b.reads()
                b.writes()
                self.first = tile * i64(tall)
                self._tile()
        return builder.get()

    # ---- one block's share ----

    def _tile(self) -> None:
        steps = self.steps.groups
        self.places = [sorted({step.place for step in group}) for group in steps]
        chains = max(map(len, self.places))
        self.sums = _local(4 * self.tiles, "float32")
        self.dots = _local(4 * self.tiles * chains, "int32")
        self.words = _local(4 * self.layout.unit_loads * self.units * self.chunks)
        self.x = _local(2 * self.factors.steps_at_once * self.tiles)
        self.scales = _local(max(self.layout.together, 1))
        self.zeros = _local(2)
        self.row_scales = _local(2 * self.factors.paired * self.tiles, "float32")
        self.pair = _local(2, "float32")
        _fill(self.sums, f32(0.0), 0, 4 * self.tiles)
        if self.whole_rows:
            _fill(self.dots, i32(0), 0, 4 * self.tiles * chains)
        chunks = self.factors.padded // self.layout.chunk_k
        turns, alone = divmod(chunks, self.warps)
        rounds, single = divmod(turns, self.chunks)
        if rounds == 1:
            self._round(self.warp, self.chunks)
        elif rounds:
            self._rounds(rounds)
        done = rounds * self.chunks * self.warps
        if single:
            self._round(self.warp + done, single)
            done += single * self.warps
        if alone:
            with b.If(self.warp < alone), b.Then():
                self._round(self.warp + done, 1)
        if self.whole_rows:
            self._end(0, i32(0), i64(0))
        self._meet()

    def _rounds(self, rounds: int) -> None:
        """Weights of a round are read in the one before, as soon as there is a place for them:
        the compiler moves no read to its use across the end of a loop."""
        for number in range(self.chunks):
            self._read(self.warp + number * self.warps, number)
        with b.serial(0, rounds) as turn:
            for number in range(self.chunks):
                chunk = (turn * self.chunks + number) * self.warps + self.warp
                self._chunk(chunk, number)
                with b.If(turn < rounds - 1), b.Then():
                    self._read(chunk + self.chunks * self.warps, number)

    def _round(self, first: Expr, count: int) -> None:
        """Chunks `first` and `count` - 1 more, each ``warps`` after the other."""
        for number in range(count):
            self._read(first + number * self.warps, number)
        for number in range(count):
            self._chunk(first + number * self.warps, number)

    def _read(self, chunk: Expr, number: int) -> None:
        """All weights of a chunk."""
        codes, loads = self.weights["codes"], self.layout.unit_loads
        for unit in range(self.units):
            for load in range(loads):
                at = 4 * ((number * self.units + unit) * loads + load)
                source = codes[self.block, chunk * self.units + unit, load, self.lane, 0]
                self._call("apq_read_weights", self.words[at], source)

    def _chunk(self, chunk: Expr, number: int) -> None:
        for group, steps in enumerate(self.steps.groups):
            if self.groups:
                self._begin(group, chunk)
            for step in steps:
                self._multiply(chunk, number, group, step)
            if self.groups:
                self._end(group, chunk, (chunk * self.groups + group).astype("int64"))

    def _begin(self, group: int, chunk: Expr) -> None:
        """Sums of the largest products begin with the zero point's part, others with 0."""
        places = self.places[group]
        for chain, lies in enumerate(places):
            for tile in range(self.tiles):
                at = self._dot(chain, tile)
                if lies != places[-1]:
                    _fill(self.dots, i32(0), at, 4)
                elif self.factors.ready:
                    number = (chunk * self.groups + group).astype("int64")
                    place = self.factors.start_place(*self._pair(tile), number, i64(0))
                    self._call("apq_read4", self.dots[at], self.start[place])
                else:
                    _fill(self.dots, self._magic(group), at, 4)

    def _multiply(self, chunk: Expr, number: int, group: int, step: Step) -> None:
        """One step of all tiles; what it decodes is decoded once."""
        layout = self.layout
        fragment = [self._fragment(number, step, word) for word in range(4)]
        chain = self.places[group].index(step.place)
        at_once = self.factors.steps_at_once
        for tile in range(self.tiles):
            mine = 2 * at_once * tile
            if step.number % at_once == 0:  # what is read for the next step too is kept
                number_of_steps = (chunk * self.units + step.unit) * layout.unit_steps + step.number
                column = number_of_steps * 8 + self.lane % 4 * (2 * at_once)
                source = self.xq[self._row(tile), column]
                self._call(f"apq_read{2 * at_once}", self.x[mine], source)
            first = mine + step.number % at_once * 2
            pair = [self.x[first + i] for i in range(2)]
            dots = _address(self.dots[self._dot(chain, tile)])
            b.evaluate(self.call("apq_mma_u8s8", dots, *fragment, *pair))

    def _fragment(self, number: int, step: Step, word: int) -> Expr:
        """uint32: four codes of a lane, a byte each, times 2^place."""
        out, loads = None, self.layout.unit_loads
        unit = (number * self.units + step.unit) * loads
        for field in self.layout.fields:
            load = unit + self.layout.first_load(field) + step.number // field.per_byte
            bits: Expr = self.words[4 * load + word]
            lies, wanted = step.number % field.per_byte * field.width, step.place + field.shift
            if lies > wanted:
                bits = bits >> _u32(lies - wanted)
            elif lies < wanted:
                bits = bits << _u32(wanted - lies)
            if field.width < 8:
                bits = bits & _u32(0x01010101 * (field.mask << wanted))
            out = bits if out is None else out | bits
        assert out is not None
        return out

    def _dot(self, chain: int, tile: int) -> int:
        return 4 * (chain * self.tiles + tile)

    def _row(self, tile: int) -> Expr:
        """Row of x, the last one where there is none: what comes of it is not stored."""
        row = self.first + (TILE * tile + self.lane // 4).astype("int64")
        return tirx.min(row, self.m - i64(1))

    def _pair(self, tile: int) -> tuple[Expr, Expr]:
        """The tile and the pair in it that a lane has sums of, the last ones where there are none;
        all lanes of a warp are in one tile."""
        number = self.first // i64(TILE) + i64(tile)
        number = tirx.min(number, tirx.floordiv(self.m - i64(1), i64(TILE)))
        last = tirx.floordiv(self.m - i64(1), i64(2)) - number * i64(PAIRS)
        return number, tirx.min((self.lane % 4).astype("int64"), last)

    def _end(self, group: int, chunk: Expr, number: Expr) -> None:
        """Add a group's products to the sums, times both scales; `number` is the group's."""
        layout, places = self.layout, self.places[group]
        slot = group % layout.together
        if slot == 0:
            first = self.weights["scales"][
                layout.scale_place(self.block, number, self.lane // 4, 0)
            ]
            self._call(f"apq_read{layout.together}", self.scales[0], first)
            if self.zeros_at_once:
                zeros = self.weights["zeros"]
                first = zeros[layout.scale_place(self.block, number, self.lane // 4, 0)]
                self._call("apq_read2", self.zeros[0], first)
        b.evaluate(self.call("apq_floats", _address(self.pair[0]), self.scales[slot]))
        if not self.factors.folded and self.steps.exponent(group):
            for high in range(2):
                scale = self.pair[high] * f32(0.5 ** self.steps.exponent(group))
                b.buffer_store(self.pair, scale, [high])
        kind = "exact" if self.steps.exact(group) else "large"
        for tile in range(self.tiles):
            last = self._dot(len(places) - 1, tile)
            for at in range(4):
                total: Any = self.dots[last + at]
                for chain, place in enumerate(places[:-1]):
                    part = self.dots[self._dot(chain, tile) + at]
                    total = total + (part << i32(places[-1] - place))
                if not self.factors.ready:
                    total = total - self._taken(group, tile, number, *divmod(at, 2))
                b.buffer_store(self.dots, total, [last + at])
            given = [self.sums[4 * tile], self.dots[last], self.pair[0]]
            by_group = self._row_scales(tile, group, number)
            if by_group is not None:
                given.append(self.row_scales[by_group])
            function = f"apq_add_{kind}" + ("" if by_group is None else "_scaled")
            b.evaluate(self.call(function, *map(_address, given)))

    def _row_scales(self, tile: int, group: int, number: Expr) -> int | None:
        """Where the scales of x for a group lie; read with the first of their groups."""
        factors = self.factors
        if factors.act_group == -1:
            return None
        first, column = 2 * factors.paired * tile, group * self.layout.group_size
        if column % (factors.paired * factors.act_group) == 0:
            of_x = number // i64(factors.act_group // self.layout.group_size)
            place = factors.scale_place(*self._pair(tile), of_x, i64(0))
            self._call(f"apq_read{2 * factors.paired}", self.row_scales[first], self.xs[place])
        return first + column // factors.act_group % factors.paired * 2

    def _magic(self, group: int) -> Expr:
        return i32(MAGIC if self.steps.exact(group) else 0)

    def _taken(self, group: int, tile: int, number: Expr, high: int, odd: int) -> Expr:
        """The zero point's part of a sum that began without it."""
        zero: Any = i32(self.steps.zero(group))
        if self.zeros_at_once:
            word, byte = divmod(group % self.layout.together * 2 + high, 4)
            zero = (self.zeros[word] >> _u32(8 * byte) & _u32(255)).astype("int32")
        elif self.layout.zero_points:
            place = self.layout.scale_place(self.block, number, self.lane // 4, high)
            zero = self.layout.zero(self.weights, place)
        if self.layout.zero_points:
            zero = zero << i32(self.steps.exponent(group))
        taken = zero * self.start[self.factors.start_place(*self._pair(tile), number, i64(odd))]
        if self.whole_rows:  # the warps' sums are parts of one group
            taken = tirx.Select(self.warp == 0, taken, i32(0))
        return taken

    def _call(self, function: str, to: Expr, source: Expr) -> None:
        """A device function that reads `source` and what follows it."""
        b.evaluate(self.call(function, _address(to), _address(source)))

    # ---- the end ----

    def _meet(self) -> None:
        """Sum over warps in shared memory; each stores a part of the results."""
        count = 4 * self.tiles
        shared = b.sblock_alloc_buffer((self.warps, count, 32), "float32", scope="shared")
        for i in range(count):
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
                total = total * self.xs[self.factors.scale_place(*pair_of(row), i64(0), row % 2)]
            if spec.asymmetric:
                middle = self.xs[self.factors.scale_place(*pair_of(row), i64(1), row % 2)]
                shift = (middle, self.weights[ROW_SUMS])
            value = epilogue_of(spec, total, self.bias, self.residual, row, column, shift)
            b.buffer_store(self.y, value, [row, column])


def _local(count: int, dtype: str = "uint32") -> Any:
    return b.sblock_alloc_buffer((count,), dtype, scope="local")


def _fill(buffer: Any, value: Expr, first: int, count: int) -> None:
    for at in range(first, first + count):
        b.buffer_store(buffer, value, [at])


def _u32(value: int) -> Expr:
    return tirx.const(value, "uint32")


def _address(element: Expr) -> Expr:
    return tirx.address_of(element)
