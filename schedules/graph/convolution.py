"""Convolution of float images: tiles of pixels by vectors of output channels in registers.

The loops over pixels are those of depthwise convolution; a step multiplies one input channel of
each pixel by vectors of weights. Where all taps of the last axis lie inside, they and their
channels are one run of memory and one loop. Weights that leave the second cache are taken in groups
of channels that do not, each for all pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm import tirx

from apq_tvm.ops import math
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.panel import bind_all, loop
from apq_tvm.schedules.graph.window_reduce import Loops, Pixels, schedule_tiles
from apq_tvm.tensorize.exprs import Expr, Stmt, f32, i64
from apq_tvm.types import DeviceProfile

SMALL_WEIGHT = 1 << 20
"""Bytes of weights that are near on any processor: they are read again for each few pixels."""

WIDE = 32
"""Pixels of a row that make larger ones worth it: of few, many lie outside of whole tiles."""


def _near(profile: DeviceProfile) -> int:
    return max(SMALL_WEIGHT, profile.l2_bytes * 3 // 4)


def pays(weight: Sequence[int], width: Any, profile: DeviceProfile) -> bool:
    """Whether a convolution is faster than the product of its windows as rows.

    Parameters
    ----------
    weight : sequence of int
        Its shape [blocks, K, lanes].
    width : int or str
        Pixels of a row of the result; a string is dynamic.
    profile : DeviceProfile
    """
    blocks, depth, lanes = weight
    wide = isinstance(width, int) and width >= WIDE
    return 4 * blocks * depth * lanes <= _near(profile) or wide


def schedule_convolution(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule `apq_tvm.ops.images.window_reduce.convolution`.

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
    wide = profile.vector_registers >= 32
    pixels, vectors = ((8, 6, 12), (3, 2, 1)) if wide else ((4, 6, 2), (2, 3, 1))
    kind = partial(_Loops, near=_near(profile))
    return schedule_tiles(kind, func, profile, decide, pixels, vectors)


class _Loops(Loops):
    def __init__(self, func: Any, lanes: int, pixels: int, vectors: int, *, near: int) -> None:
        super().__init__(func, lanes, pixels, vectors)
        self.channels = int(func.params[-1].shape[-1])  # of the result
        self.blocks, self.depth, self.lanes = (int(e) for e in func.params[1].shape)
        self.vectors = min(vectors, self.blocks)
        if self.blocks == 1:
            self.pixels = pixels + pixels // 2
        self.first, self.count = (int(c) for c in func.attrs["apq.channels"])
        self.all = self.count == int(func.params[0].shape[-1])
        self.tail = [name for name in str(func.attrs["apq.tail"]).split(",") if name]
        self.steps_of_pixel = self.channels * self.depth
        self.wide = self.channels // self.lanes // self.vectors  # tiles of whole vectors
        size = self.wide * 4 * self.vectors * self.depth * self.lanes
        self.groups = max(1, min(self.wide, -(-size // near)))

    def tile(self, *place: Any) -> Pixels:
        return _Pixels(self, *place)


class _Pixels(Pixels):
    """Output channels of a tile of pixels; a block of channels goes by its number."""

    loops: _Loops

    def _channels(self, block: Callable[[Expr, int], Stmt]) -> list[Stmt]:
        u = self.loops
        first, end = (i64(u.wide) * (u.group + i64(g)) // i64(u.groups) for g in (0, 1))
        parts = [loop(end - first, lambda i: block((first + i) * i64(u.vectors), u.vectors))]
        done = u.wide * u.vectors
        if done < u.blocks:
            rest = block(i64(done), u.blocks - done)
            last = u.group == i64(u.groups - 1)
            parts.append(rest if u.groups == 1 else tirx.IfThenElse(last, rest, None))
        return parts

    def _block(self, base: Expr, out: Expr, channel: Expr, pixels: int, vectors: int) -> Stmt:
        u, lanes = self.loops, self.loops.lanes
        acc = tirx.decl_buffer((pixels * vectors * lanes,), "float32", "acc")
        grid = [(p, v) for p in range(pixels) for v in range(vectors)]
        zero = tirx.Broadcast(f32(0.0), lanes)
        pixel = i64(u.geometry.strides[-1]) * u.steps[len(u.sizes)]

        def place(p: int, v: int) -> Expr:
            at = tirx.const((p * vectors + v) * lanes, "int32")
            return tirx.Ramp(at, tirx.const(1, "int32"), lanes)

        def step(row: Expr, at: Expr) -> Stmt:
            """Row `row` of the weights times what lies at `at` of each pixel's window."""
            rows = [((channel + i64(v)) * i64(u.depth) + row) * i64(lanes) for v in range(vectors)]
            loads = [tirx.BufferLoad(u.views[1], [tirx.Ramp(r, i64(1), lanes)]) for r in rows]
            binds, weights = bind_all(loads, "w")
            values = [
                tirx.BufferLoad(u.x, [base + at + i64(p) * pixel + i64(u.first)])
                for p in range(pixels)
            ]
            more, inputs = bind_all(values, "x")
            stores = [
                tirx.BufferStore(
                    acc,
                    tirx.BufferLoad(acc, [place(p, v)])
                    + tirx.Broadcast(inputs[p], lanes) * weights[v],
                    [place(p, v)],
                )
                for p, v in grid
            ]
            return tirx.stmt_seq(*binds, *more, *stores)

        body = self._taps(0, i64(0), i64(0), step)
        begin = [tirx.BufferStore(acc, zero, [place(p, v)]) for p, v in grid]
        end = []
        for p, v in grid:
            block = channel + i64(v)
            whole = not isinstance(channel, tirx.IntImm)
            count = lanes if whole else min(lanes, u.channels - (int(channel) + v) * lanes)
            end.append(self._result(acc, (p * vectors + v) * lanes, out, block, p, count))
        return tirx.stmt_seq(tirx.AllocBuffer(acc), *begin, body, *end)

    def _last_taps(self, number: Expr, offset: Expr, tap: Callable[[Expr, Expr], Stmt]) -> Stmt:
        u, g = self.loops, self.loops.geometry
        step = i64(g.dilations[-1]) * u.steps[len(u.sizes)]
        if self._range is None and u.all and g.dilations[-1] == 1:
            row = number * i64(u.count)
            return loop(i64(g.kernel[-1] * u.count), lambda e: tap(row + e, offset + e))
        low, high = self._range or (i64(0), i64(g.kernel[-1]))

        def one(t: Expr) -> Stmt:
            row, at = (number + (low + t)) * i64(u.count), offset + (low + t) * step
            return loop(i64(u.count), lambda c: tap(row + c, at + c))

        return loop(high - low, one)

    def _result(self, acc: Any, first: int, out: Expr, block: Expr, pixel: int, count: int) -> Stmt:
        """A vector of results, as a loop that is vectorized later."""
        u = self.loops
        lane = tirx.Var("e", "int64")
        column = block * i64(u.lanes) + lane
        where = out + i64(pixel * u.channels) + column
        value: Any = tirx.BufferLoad(acc, [i64(first) + lane])
        views = iter(u.views[2:])
        found = {name: next(views) for name in ("bias", "residual") if name in u.tail}
        for name in u.tail:
            if name in found:
                value = value + tirx.BufferLoad(
                    found[name], [where if name == "residual" else column]
                )
            else:
                value = math.activation(name, value)
        body = tirx.BufferStore(u.y, value, [where])
        return tirx.For(lane, i64(0), i64(count), tirx.ForKind.SERIAL, body)
