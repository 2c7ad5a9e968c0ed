"""Windows of images: what a convolution or a pooling reads, channels last.

An image is [N, *sizes, C] with one to three spatial axes. Output position o of an axis reads the
input at ``o * stride - begin + tap * dilation``; what lies outside the image is zero padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.blocks import argument, row_tasks
from apq_tvm.ops.graph.shapes import Dim, Symbols
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, f32, i64

NAMES = ("kernel", "strides", "dilations", "begins", "ends")


@dataclass(frozen=True)
class Geometry:
    """Where windows lie; one entry per spatial axis.

    Parameters
    ----------
    kernel, strides, dilations : tuple of int
    begins, ends : tuple of int
        Padding before and behind; empty where `auto` says it.
    auto : {"", "SAME_UPPER", "SAME_LOWER"}
        Padding such that the output has ``ceil(size / stride)`` positions, the odd one behind or
        before; for sizes that only a run knows.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    auto: str = ""

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> Geometry:
        """From the attributes of ``apq.Windows``, ``apq.Depthwise`` or ``apq.Pool``."""
        lists = {name: tuple(int(v) for v in attrs[name]) for name in NAMES}
        return cls(**lists, auto=str(attrs.get("auto", "")))

    @property
    def taps(self) -> int:
        """Positions of a window."""
        return reduce(mul, self.kernel, 1)

    @property
    def name(self) -> str:
        """An identifier that tells geometries apart."""
        parts = (self.kernel, self.strides, self.dilations, self.begins, self.ends)
        text = "_".join("x".join(map(str, part)) for part in parts)
        return f"{text}{self.auto.lower()}".replace("-", "m")

    def reach(self, axis: int) -> int:
        """Positions from the first to the last that a window covers."""
        return (self.kernel[axis] - 1) * self.dilations[axis] + 1

    def begin(self, axis: int, size: Expr) -> Expr:
        """Padding before an axis of the input that has `size` positions."""
        if not self.auto:
            return i64(self.begins[axis])
        total = self._padding(axis, size)
        return (total + 1) // 2 if self.auto == "SAME_LOWER" else total // 2

    def end(self, axis: int, size: Expr) -> Expr:
        """Padding behind."""
        if not self.auto:
            return i64(self.ends[axis])
        return self._padding(axis, size) - self.begin(axis, size)

    def _padding(self, axis: int, size: Expr) -> Expr:
        """Before and behind together, where `auto` says it."""
        covered = (self.extent(axis, size) - 1) * i64(self.strides[axis]) + i64(self.reach(axis))
        return tirx.max(covered - size, i64(0))

    def extent(self, axis: int, size: Expr) -> Expr:
        """Positions of the output, rounded down."""
        stride = i64(self.strides[axis])
        if self.auto:
            return (size + (stride - 1)) // stride
        free = size + i64(self.begins[axis] + self.ends[axis] - self.reach(axis))
        return free // stride + 1


class Gather:
    """Copies windows of an image to rows, inside a PrimFunc that is being built.

    Parameters
    ----------
    x : Buffer
        float32 [N, *sizes, C].
    geometry : Geometry
    first, count : int
        Channels that are read.
    """

    def __init__(self, x: Buffer, geometry: Geometry, first: int, count: int) -> None:
        self.x, self.geometry, self.first, self.count = x, geometry, first, count
        self.sizes = list(x.shape[1:-1])
        self.all = first == 0 and count == int(x.shape[-1])
        self.out = [geometry.extent(i, size) for i, size in enumerate(self.sizes)]

    def at(self, row: Expr) -> list[Expr]:
        """Image and position of output row `row`, bound to names."""
        index: list[Expr] = []
        for extent in reversed(self.out):
            index.insert(0, b.bind(row % extent))
            row = row // extent
        return [b.bind(row), *index]

    def copy(self, at: Sequence[Expr], target: Buffer, lead: Sequence[Expr]) -> None:
        """Copy the window at position `at` to ``target[*lead, :taps * count]``."""
        image, *position = at
        g = self.geometry
        starts = [
            b.bind(o * i64(g.strides[i]) - g.begin(i, self.sizes[i]))
            for i, o in enumerate(position)
        ]
        self._outer(image, starts, [], i64(0), tirx.const(True, "bool"), target, lead)

    def _outer(
        self, image: Expr, starts: Sequence[Expr], index: list[Expr], tap: Expr, inside: Expr,
        target: Buffer, lead: Sequence[Expr],
    ) -> None:  # fmt: skip
        """Taps of all axes but the last, then rows of the last."""
        axis, g = len(index), self.geometry
        if axis == len(starts) - 1:
            self._run(image, starts[axis], index, tap * i64(g.kernel[axis]), inside, target, lead)
            return
        with b.serial(0, i64(g.kernel[axis])) as t:
            where = b.bind(starts[axis] + t * i64(g.dilations[axis]))
            here = tirx.And(where >= i64(0), where < self.sizes[axis])
            number = tap * i64(g.kernel[axis]) + t
            both = here if axis == 0 else tirx.And(inside, here)
            self._outer(image, starts, [*index, where], number, both, target, lead)

    def _run(
        self, image: Expr, start: Expr, index: list[Expr], tap: Expr, inside: Expr,
        target: Buffer, lead: Sequence[Expr],
    ) -> None:  # fmt: skip
        """The taps of the last axis: one run of memory where nothing is outside."""
        g, c, size = self.geometry, self.count, self.sizes[-1]
        taps, step = g.kernel[-1], g.dilations[-1]

        def element(where: Expr, channel: Expr) -> Expr:
            return self.x[(image, *index, where, channel + i64(self.first))]

        def store(column: Expr, value: Expr) -> None:
            b.buffer_store(target, value, [*lead, tap * i64(c) + column])

        last = start + i64((taps - 1) * step)
        whole = tirx.And(start >= i64(0), last < size)
        with b.If(tirx.And(inside, whole)):
            with b.Then():
                if self.all and step == 1:
                    with b.serial(0, i64(taps * c)) as e:
                        store(e, element(start + e // i64(c), e % i64(c)))
                else:
                    with b.grid(taps, c) as (t, e):
                        store(t * i64(c) + e, element(start + t * i64(step), e))
            with b.Else(), b.serial(0, i64(taps)) as t:
                where = b.bind(start + t * i64(step))
                here = tirx.And(where >= i64(0), where < size)
                with b.If(tirx.And(inside, here)):
                    with b.Then(), b.serial(0, i64(c)) as e:
                        store(t * i64(c) + e, element(where, e))
                    with b.Else(), b.serial(0, i64(c)) as e:
                        store(t * i64(c) + e, f32(0.0))


def windows(
    shape: Sequence[Dim], out: Sequence[Dim], geometry: Geometry, first: int, count: int
) -> PrimFunc:
    """Windows of an image as rows of a matrix (im2col).

    Parameters
    ----------
    shape : sequence of int or str
        Of the image [N, *sizes, C]; strings are dynamic dimensions.
    out : sequence of int or str
        Of the result [N, *positions, taps * count].
    geometry : Geometry
    first, count : int
        Channels that are read.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x float32, y float32)``, attr ``apq.op`` = "windows"; a column is tap-major:
        ``tap * count + channel``.
    """
    symbols = Symbols()
    width = geometry.taps * count
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("windows")
        b.func_attr({"apq.op": "windows", "op_pattern": 8, "tirx.noalias": True})
        x = argument("x", symbols.shape(shape), "float32")
        y = argument("y", symbols.shape(out), "float32")
        gather = Gather(x, geometry, first, count)
        rows = reduce(mul, y.shape[1:-1], y.shape[0])
        with row_tasks(rows, max(1, 16384 // width)) as (start, mine):
            with b.serial(0, mine) as r, b.sblock("row"):
                row = b.axis.spatial(mine, r)
                b.reads()
                b.writes()
                at = gather.at(start + row)
                gather.copy(at, y, at)
    return builder.get()
