"""Depthwise convolution and pooling: tiles of pixels by vectors of channels in registers.

A task is a row of output pixels. Taps that fall outside the image are left out of the loops instead
of tested: along the last axis pixels whose windows lie inside run in tiles with the taps unrolled,
then the few at either end one by one. The last block of channels ends with the channels, so it may
repeat some: no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any

from tvm import sym, tirx

from apq_tvm.ops import math
from apq_tvm.ops.images.window_reduce import LOWEST, tap_range
from apq_tvm.ops.images.windows import NAMES, Geometry
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.panel import bind_all, is_const, loop, strides
from apq_tvm.schedules.graph.rewrites.loops import parallel_when
from apq_tvm.schedules.graph.rewrites.lowering import finish
from apq_tvm.schedules.graph.rewrites.vectorize import vectorize_loops
from apq_tvm.tensorize.exprs import Expr, Stmt, f32, i64
from apq_tvm.types import DeviceProfile

UNROLLED = 32
"""Most taps of the last axis that are unrolled."""


def schedule_window_reduce(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule `apq_tvm.ops.images.window_reduce`.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    profile : DeviceProfile
    decide : Decide
        ``pixels`` and ``vectors`` of the register tile, ``parallel_least`` (operations worth a
        second thread).

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    vectors = (2, 1, 3) if profile.vector_registers >= 32 else (1, 2)
    pixels = (4, 2, 6, 8)
    if "apq.inputs" in func.attrs:  # neighbouring vectors read other pixels' channels
        pixels, vectors = (8, 6, 4, 12), (1, 2)
    return schedule_tiles(Loops, func, profile, decide, pixels, vectors)


def schedule_tiles(
    kind: Callable[..., Loops], func: Any, profile: DeviceProfile, decide: Decide,
    pixels: Sequence[int], vectors: Sequence[int],
) -> Any:  # fmt: skip
    """Schedule by loops of one kind, in tiles of some of `pixels` by some of `vectors`."""
    tile = decide("pixels", pixels), decide("vectors", vectors)
    loops = kind(func, profile.vector_bytes // 4, *tile)
    lowered = vectorize_loops(loops.build(), profile.vector_bytes)
    return finish(parallel_when(lowered, loops.work, 1 << 17, decide))


@dataclass(frozen=True)
class _Taps:
    """Taps of the outer axes that lie inside, and the last axis's start and range of taps."""

    low: Expr
    high: Expr


class Loops:
    """The loops over rows of pixels, in as many groups of channels as there are."""

    groups = 1
    group: Expr = i64(0)  # the one at hand

    def __init__(self, func: Any, lanes: int, pixels: int, vectors: int) -> None:
        attrs = func.attrs
        self.func = func
        self.geometry = Geometry.of({n: attrs[f"apq.{n}"] for n in (*NAMES, "auto")})
        self.op = str(attrs["apq.op"])
        self.largest = self.op == "pool" and str(attrs["apq.kind"]) == "max"
        x, y = func.params[0], func.params[-1]
        self.sizes, self.out = list(x.shape[1:-1]), list(y.shape[1:-1])
        self.channels = int(y.shape[-1])
        self.inputs = int(attrs.get("apq.inputs", 0))
        self.outputs = self.channels * self.inputs // int(x.shape[-1])
        self.steps = strides(x.shape)
        self.out_steps = strides(y.shape)
        self.steps_of_pixel = self.channels * self.geometry.taps * max(self.inputs, 1)
        while lanes > self.channels or (self.inputs and self.outputs % lanes):
            lanes //= 2
        self.lanes, self.pixels, self.vectors = lanes, pixels, vectors

    def build(self) -> Any:
        """The loops; `work` is what `parallel_when` asks for."""
        func, views = self.func, []
        declared: list[Stmt] = []
        for p in func.params:
            size = reduce(mul, p.shape, i64(1))
            view = tirx.decl_buffer((size,), p.dtype, f"{p.name}_flat", data=p.data)
            declared.append(tirx.DeclBuffer(view, data=p.data))
            views.append(view)
        self.views, self.x, self.y = views, views[0], views[-1]
        self.w = views[1] if self.op == "depthwise" else None
        self.bias = views[2] if self.op == "depthwise" and func.attrs["apq.bias"] else None
        lead = [func.params[-1].shape[0], *self.out[:-1]]
        rows = reduce(mul, lead, i64(1))

        def task(number: Expr) -> Stmt:
            if self.groups == 1:
                return self._row(number, lead)
            self.group = number // rows
            return self._row(number % rows, lead)

        body = loop(i64(self.groups) * rows, task, tirx.ForKind.PARALLEL)
        self.work = rows * self.out[-1] * i64(self.steps_of_pixel)
        return func.with_body(tirx.stmt_seq(*declared, body))

    def tile(self, *place: Any) -> Pixels:
        """What writes the pixels of a row, of which a tile is held in registers."""
        return Pixels(self, *place)

    def _row(self, row: Expr, lead: Sequence[Expr]) -> Stmt:
        """One row of output pixels along the last axis."""
        g, last = self.geometry, len(self.sizes) - 1
        index: list[Expr] = []
        for extent in reversed(lead[1:]):
            index.insert(0, row % extent)
            row = row // extent
        binds, (image, *position) = bind_all([row, *index], "at")
        ranges = [tap_range(g, i, o, self.sizes[i]) for i, o in enumerate(position)]
        more, bounds = bind_all([e for span in ranges for e in span], "tap")
        spans = [_Taps(*bounds[2 * i : 2 * i + 2]) for i in range(last)]
        starts = [o * i64(g.strides[i]) - g.begin(i, self.sizes[i]) for i, o in enumerate(position)]
        base = image * self.steps[0]
        base = sum((s * self.steps[1 + i] for i, s in enumerate(starts)), base)
        out = image * self.out_steps[0]
        out = sum((o * self.out_steps[1 + i] for i, o in enumerate(position)), out)
        # Pixels from `first` to `end` have windows that lie inside along the last axis.
        size, stride, begin = (
            self.sizes[last],
            i64(g.strides[last]),
            g.begin(last, self.sizes[last]),
        )
        width = self.out[last]
        first = tirx.min(tirx.max((begin + stride - 1) // stride, i64(0)), width)
        room = size + begin - i64(g.reach(last))
        end = tirx.Select(room >= i64(0), room // stride + 1, i64(0))
        end = tirx.min(tirx.max(end, first), width)
        simplify = sym.Analyzer().simplify
        named, (base, out) = bind_all([simplify(base), simplify(out)], "p")
        first, end = simplify(first), simplify(end)
        if not (is_const(first) and is_const(end)):
            more_named, (first, end) = bind_all([first, end], "within")
            named += more_named
        slots, counts = self.counted(list(enumerate(position)))
        pixel = self.tile(base, out, spans, counts)
        return tirx.stmt_seq(*binds, *more, *named, *slots, *self._pixels(pixel, first, end, width))

    def _pixels(self, pixel: Pixels, first: Expr, end: Expr, width: Expr) -> list[Stmt]:
        simplify = sym.Analyzer().simplify
        within, tile = simplify(end - first), i64(self.pixels)
        whole = self.geometry.kernel[-1] <= UNROLLED
        # The last tile ends with the pixels within, so it may repeat some.
        many = within >= tile
        tiles = simplify(tirx.Select(many, (within + (tile - 1)) // tile, i64(0)))
        rest = simplify(tirx.Select(many, i64(0), within))
        last = simplify(tirx.max(within - tile, i64(0)))

        def start(t: Expr) -> Expr:
            return first + tirx.min(t * tile, last)

        inner = [
            loop(tiles, lambda t: pixel.at(start(t), self.pixels, whole)),
            loop(rest, lambda t: pixel.at(first + t, 1, whole)),
        ]

        def place(t: Expr) -> Expr:
            return tirx.Select(t < first, t, t + within)

        return [*inner, loop(width - within, lambda t: pixel.at(place(t), 1, False))]

    def counted(self, places: Sequence[tuple[int, Expr]]) -> tuple[list[Stmt], list[Expr]]:
        """float32: positions that a mean counts, each along an axis at a position.

        They come out of slots: of a number that is the same everywhere TVM 0.27 makes an integer
        constant of type float32, and fails.
        """
        if self.op != "pool" or self.largest:
            return [], [f32(1.0)] * len(places)
        padding = bool(self.func.attrs["apq.padding"])
        slots = tirx.decl_buffer((max(1, len(places)),), "int64", "counts")
        stores: list[Stmt] = [tirx.AllocBuffer(slots)]
        for number, (axis, position) in enumerate(places):
            low, high = tap_range(self.geometry, axis, position, self.sizes[axis], padding)
            stores.append(tirx.BufferStore(slots, high - low, [tirx.const(number, "int32")]))
        loads = [
            tirx.BufferLoad(slots, [tirx.const(n, "int32")]).astype("float32")
            for n in range(len(places))
        ]
        return stores, loads


class Pixels:
    """The channels of a tile of pixels."""

    def __init__(
        self, loops: Loops, base: Expr, out: Expr, spans: Sequence[_Taps], counts: Sequence[Expr]
    ) -> None:
        self.loops, self.base, self.out = loops, base, out
        self.spans, self.counts = spans, counts

    def at(self, first: Expr, pixels: int, inside: bool) -> Stmt:
        """Pixels from `first` on; `inside`: their windows are, along the last axis."""
        u, channels = self.loops, self.loops.channels
        g, last = u.geometry, len(u.sizes) - 1
        start = first * i64(g.strides[last]) - g.begin(last, u.sizes[last])
        low, high = tap_range(g, last, first, u.sizes[last])
        values = [
            self.base + start * u.steps[1 + last],
            self.out + first * i64(channels),
            low,
            high,
        ]
        binds, (base, out, low, high) = bind_all(values, "q")
        self._range = None if inside else (low, high)
        scales: list[Stmt] = []
        self._counts: list[Expr] = []
        if u.op == "pool" and not u.largest:
            slots, each = u.counted([(last, first + i64(p)) for p in range(pixels)])
            named, self._counts = bind_all([reduce(mul, self.counts, c) for c in each], "n")
            scales = [*slots, *named]

        def block(channel: Expr, vectors: int) -> Stmt:
            return self._block(base, out, channel, pixels, vectors)

        return tirx.stmt_seq(*binds, *scales, *self._channels(block))

    def _channels(self, block: Callable[[Expr, int], Stmt]) -> list[Stmt]:
        """All channels, in blocks of several vectors and at most one that is narrower.

        The last block of either kind ends with the channels and may repeat some.
        """
        lanes, channels = self.loops.lanes, self.loops.channels
        vectors = min(self.loops.vectors, channels // lanes)
        wide = vectors * lanes
        rest = channels % wide
        narrow = -(-rest // lanes)
        if narrow == vectors:  # as good as another wide one
            rest = narrow = 0
        blocks = -(-(channels - rest) // wide)

        def start(c: Expr) -> Expr:
            if blocks * wide + rest <= channels:
                return c * i64(wide)
            return tirx.min(c * i64(wide), i64(channels - wide))

        parts = [loop(i64(blocks), lambda c: block(start(c), vectors))]
        if narrow:
            parts.append(block(i64(channels - narrow * lanes), narrow))
        return parts

    def _block(self, base: Expr, out: Expr, channel: Expr, pixels: int, vectors: int) -> Stmt:
        u, lanes = self.loops, self.loops.lanes
        g, last = u.geometry, len(u.sizes) - 1
        acc = tirx.decl_buffer((pixels * vectors * lanes,), "float32", "acc")
        grid = [(p, v) for p in range(pixels) for v in range(vectors)]

        def place(p: int, v: int) -> Expr:
            at = tirx.const((p * vectors + v) * lanes, "int32")
            return _vector(at, lanes)

        start = _splat(f32(LOWEST if u.largest else 0.0), lanes)
        begin = [tirx.BufferStore(acc, start, [place(p, v)]) for p, v in grid]
        step = i64(g.strides[last]) * u.steps[1 + last]

        def taps_of_group(number: Expr, offset: Expr) -> Stmt:
            """The same pixel of each channel of a group, times weights of all its outputs."""
            starts = [(channel + i64(v * lanes)) // i64(u.outputs) for v in range(vectors)]
            groups, firsts = bind_all([start * i64(u.inputs) for start in starts], "first")

            def add(i: Expr) -> Stmt:
                def value(p: int, v: int) -> Expr:
                    at = base + offset + i64(p) * step + firsts[v] + i
                    return _splat(tirx.BufferLoad(u.x, [at]), lanes)

                return taken(number * i64(u.inputs) + i, value)

            return tirx.stmt_seq(*groups, loop(i64(u.inputs), add))

        def tap(number: Expr, offset: Expr) -> Stmt:
            def value(p: int, v: int) -> Expr:
                at = base + offset + i64(p) * step + channel + i64(v * lanes)
                return tirx.BufferLoad(u.x, [_vector(at, lanes)])

            return taken(number, value)

        def taken(row: Expr, value_of: Callable[[int, int], Expr]) -> Stmt:
            """A vector of each pixel into its sums, times a row of the weights if there are any."""
            weights: list[Stmt] = []
            factors: list[Any] = []
            if u.w is not None:
                at = [row * i64(u.channels) + channel + i64(v * lanes) for v in range(vectors)]
                loads = [tirx.BufferLoad(u.w, [_vector(a, lanes)]) for a in at]
                weights, factors = bind_all(loads, "w")
            stores = []
            for p, v in grid:
                value = value_of(p, v)
                old = tirx.BufferLoad(acc, [place(p, v)])
                if u.w is not None:
                    value = old + value * factors[v]
                else:
                    value = tirx.max(old, value) if u.largest else old + value
                stores.append(tirx.BufferStore(acc, value, [place(p, v)]))
            return tirx.stmt_seq(*weights, *stores)

        body = self._taps(0, i64(0), i64(0), taps_of_group if u.inputs else tap)
        end = [
            self._store(acc, (p * vectors + v) * lanes, out, channel + i64(v * lanes), p)
            for p, v in grid
        ]
        return tirx.stmt_seq(tirx.AllocBuffer(acc), *begin, body, *end)

    def _taps(
        self, axis: int, number: Expr, offset: Expr, tap: Callable[[Expr, Expr], Stmt]
    ) -> Stmt:
        """Loops over the taps, the last axis unrolled where all of them lie inside."""
        u, g = self.loops, self.loops.geometry
        last = len(u.sizes) - 1
        step = i64(g.dilations[axis]) * u.steps[1 + axis]
        if axis < last:
            span = self.spans[axis]

            def outer(t: Expr) -> Stmt:
                at = span.low + t
                following = (number + at) * i64(g.kernel[axis + 1])
                return self._taps(axis + 1, following, offset + at * step, tap)

            return loop(span.high - span.low, outer)
        return self._last_taps(number, offset, tap)

    def _last_taps(self, number: Expr, offset: Expr, tap: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """Those of the last axis."""
        u, g = self.loops, self.loops.geometry
        step = i64(g.dilations[-1]) * u.steps[len(u.sizes)]
        if self._range is not None:
            low, high = self._range
            return loop(high - low, lambda t: tap(number + (low + t), offset + (low + t) * step))
        every = [tap(number + i64(t), offset + i64(t) * step) for t in range(g.kernel[-1])]
        return tirx.stmt_seq(*every)

    def _store(self, acc: Any, first: int, out: Expr, column: Expr, pixel: int) -> Stmt:
        """One vector of results, as a loop that is vectorized later."""
        u = self.loops
        lane = tirx.Var("e", "int64")
        value: Any = tirx.BufferLoad(acc, [i64(first) + lane])
        if self._counts:
            value = value / self._counts[pixel]
        if u.bias is not None:
            value = value + tirx.BufferLoad(u.bias, [column + lane])
        if u.op == "depthwise":
            value = math.activation(str(u.func.attrs["apq.activation"]), value)
        body = tirx.BufferStore(u.y, value, [out + i64(pixel * u.channels) + column + lane])
        return tirx.For(lane, i64(0), i64(u.lanes), tirx.ForKind.SERIAL, body)


def _vector(first: Expr, lanes: int) -> Expr:
    """Where a vector lies; of one channel it is a number."""
    return first if lanes == 1 else tirx.Ramp(first, tirx.const(1, str(first.ty)), lanes)


def _splat(value: Expr, lanes: int) -> Expr:
    return value if lanes == 1 else tirx.Broadcast(value, lanes)
