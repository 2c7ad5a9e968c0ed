"""The scaffold of intrinsics: a meaning is written once, for their plain loops and for operators.

A `Meaning` says which operands there are, over which axes it goes and what is added at each place.
`pair` makes of it the two halves of an intrinsic; `product` emits its loops in an operator, whose
buffers stand for the operands by `View`. Both come from one text, so that one tensorizes the other.
An instruction set adds what `pair` calls `implement`, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, i64

Load = Callable[..., Expr]


@dataclass(frozen=True)
class Operand:
    """One operand of an intrinsic.

    Parameters
    ----------
    name : str
    shape : tuple of int
        Leading axes of extent 1 may be left out: what a term says about them is dropped.
    dtype : str
    align : int
        Bytes.
    strided : bool
        Whether the strides of all axes but the innermost are open.
    compact : int
        Innermost axes that lie without gaps even so.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    align: int
    strided: bool = False
    compact: int = 1


@dataclass(frozen=True)
class Meaning:
    """What an intrinsic computes.

    Parameters
    ----------
    name : str
    operands : tuple of Operand
        The last is written, at the place that the spatial axes name.
    spatial, reduced : tuple of int
        Extents of its axes. There are no loops of extent 1, which tensorization would not find.
    term : callable
        ``(axes, *loads of the operands but the last)`` → what is stored.
    adds : bool
        Whether it is added to what is there.
    index : str
        Type of its axes.
    """

    name: str
    operands: tuple[Operand, ...]
    spatial: tuple[int, ...]
    reduced: tuple[int, ...]
    term: Callable[..., Expr]
    adds: bool = True
    index: str = "int64"


@dataclass(frozen=True)
class View:
    """The part of a buffer that stands for an operand.

    Parameters
    ----------
    buffer : Buffer
    first : tuple of PrimExpr
        Where it begins; axes that the operand has not are fixed there.
    """

    buffer: Buffer
    first: tuple[Expr, ...]

    def at(self, rank: int, axes: Sequence[Expr]) -> tuple[Expr, ...]:
        """Index of one element of an operand of `rank` axes.

        An axis may be a tuple of summands.
        """
        fixed = len(self.first) - rank
        inner = zip(self.first[fixed:], axes[len(axes) - rank :], strict=True)
        return (
            *self.first[:fixed],
            *(sum(a, start) if isinstance(a, tuple) else start + a for start, a in inner),
        )

    def region(self, shape: tuple[int, ...]) -> Any:
        """All that an operand of `shape` covers."""
        fixed = len(self.first) - len(shape)
        inner = zip(self.first[fixed:], shape, strict=True)
        parts = (slice(start, start + extent) for start, extent in inner)
        return self.buffer[(*self.first[:fixed], *parts)]


def product(
    meaning: Meaning,
    name: str,
    views: Callable[..., Sequence[View]],
    around: Sequence[tuple[Expr, Any]] = (),
    spatial: Sequence[Any] = (),
    reduced: Sequence[Any] = (),
    init: bool | Callable[[Sequence[Expr]], Expr] = False,
) -> None:
    """Emit the loops of a meaning.

    Parameters
    ----------
    meaning : Meaning
    name : str
        Of the block.
    views : callable
        Gives what stands for the operands, by all the axes that follow.
    around : sequence of (PrimExpr, int)
        Variables and extents of loops that are there, whose block this is.
    spatial, reduced : sequence of int
        Extents of further loops, each kind around the meaning's own.
    init : bool or callable
        Whether sums start from 0; or from what, by the meaning's own spatial axes.
    """
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    def index(value: int) -> Expr:
        return tirx.const(value, meaning.index)

    own = [[index(e) for e in extents if e > 1] for extents in (meaning.spatial, meaning.reduced)]
    parts = [("S", spatial), ("S", own[0]), ("R", reduced), ("R", own[1])]
    every = [extent for _, extents in parts for extent in extents]
    with b.grid(*every) as loops, b.sblock(name):
        loops = [loops] if len(every) == 1 else list(loops)
        there = [b.axis.spatial(extent, loop) for loop, extent in around]
        outer, own_spatial, outer_reduced, own_reduced = (
            _axes(kind, [loops.pop(0) for _ in extents]) for kind, extents in parts
        )
        *sources, target = views(*there, *outer, *outer_reduced)
        inner = iter(own_spatial + own_reduced)
        extents = (*meaning.spatial, *meaning.reduced)
        axes = [next(inner) if extent > 1 else index(0) for extent in extents]
        at = target.at(len(meaning.operands[-1].shape), axes[: len(meaning.spatial)])
        place = target.buffer[at]
        regions = [v.region(o.shape) for v, o in zip(sources, meaning.operands, strict=False)]
        b.reads(*([place] if meaning.adds and not init else []), *regions)
        b.writes(place)
        if init:
            with b.init():
                zero = tirx.const(0, target.buffer.dtype)
                start = init(axes[: len(meaning.spatial)]) if callable(init) else zero
                b.buffer_store(target.buffer, start, list(at))
        loads = [_load(v, o) for v, o in zip(sources, meaning.operands, strict=False)]
        value = meaning.term(axes, *loads)
        b.buffer_store(target.buffer, place + value if meaning.adds else value, list(at))


def _axes(kind: str, loops: list[Expr]) -> list[Expr]:
    from tvm.tirx.script.builder import ir as b

    if not loops:
        return []
    axes = b.axis.remap(kind * len(loops), loops)
    return [axes] if len(loops) == 1 else list(axes)


def _load(view: View, operand: Operand) -> Load:
    return lambda *axes: view.buffer[view.at(len(operand.shape), axes)]


def pair(
    meaning: Meaning, implement: Callable[..., None], fresh: bool = False
) -> tuple[PrimFunc, PrimFunc]:
    """(desc, impl) of an intrinsic.

    Parameters
    ----------
    meaning : Meaning
    implement : callable
        Emits instructions, given the buffers of the operands in their order.
    fresh : bool
        Whether sums start from 0: it is for the block of a `fresh_product`.
    """

    def plain(*buffers: Buffer) -> None:
        views = [View(buffer, (0,) * len(buffer.shape)) for buffer in buffers]
        (_fresh if fresh else product)(meaning, meaning.name, lambda: views)

    header = replace(meaning, adds=meaning.adds and not fresh)
    return _member(header, plain, False), _member(header, implement, True)


def fresh_product(meaning: Meaning, name: str, views: Sequence[View]) -> None:
    """Emit block ``{name}_fresh`` of a meaning whose sums start from 0.

    Its intrinsic takes the block, since TVM would part the sums' start from their loops.
    """
    from tvm.tirx.script.builder import ir as b

    *sources, target = (
        view.region(o.shape) for view, o in zip(views, meaning.operands, strict=True)
    )
    with b.sblock(f"{name}_fresh"):
        b.reads(*sources)
        b.writes(target)
        _fresh(meaning, name, lambda: views)


def _fresh(meaning: Meaning, name: str, views: Callable[[], Sequence[View]]) -> None:
    zeros = replace(
        meaning,
        operands=meaning.operands[-1:],
        reduced=(),
        term=lambda axes: _zero(meaning.operands[-1].dtype),
        adds=False,
    )
    product(zeros, f"{name}_zero", lambda: views()[-1:])
    product(meaning, name, views)


def _zero(dtype: str) -> Expr:
    from tvm import tirx

    return tirx.const(0, dtype)


@dataclass(frozen=True)
class Rows:
    """What a meaning of rows of x and vectors of rows of weights is of."""

    m: int
    lanes: int


class Bound:
    """The buffers of an intrinsic, as attributes by the names of their operands; all in `arrays`.

    Parameters
    ----------
    dot : object
        What the meaning is of; the axis of its `m` rows of x is left out where there is one.
    meaning : Meaning
    buffers : sequence of Buffer
    """

    def __init__(self, dot: Any, meaning: Meaning, buffers: Sequence[Buffer]) -> None:
        self.dot = dot
        self.arrays = {o.name: buffer for o, buffer in zip(meaning.operands, buffers, strict=True)}

    def __getattr__(self, name: str) -> Buffer:
        try:
            return self.arrays[name]
        except KeyError:
            raise AttributeError(name) from None

    def at(self, row: int, *index: Any) -> list[Expr]:
        """Index into what belongs to one row of x."""
        lead = [row] if self.dot.m > 1 else []
        return [i64(i) if isinstance(i, int) else i for i in (*lead, *index)]

    def sums_at(self, group: int, row: int) -> list[Expr]:
        """Index of all lanes of the sums of one group of a unit and row of x."""
        from tvm import tirx

        unit = self.dot.unit
        lead = [i64(group)] if unit.groups > 1 else []
        return [*lead, *self.at(row, tirx.Ramp(i64(0), i64(1), unit.rows))]


def bound_pair(
    dot: Any, meaning: Meaning, implement: Callable[[Bound], None]
) -> tuple[PrimFunc, PrimFunc]:
    """As `pair`, whose buffers are given as `Bound`."""
    return pair(meaning, lambda *buffers: implement(Bound(dot, meaning, buffers)))


def _member(meaning: Meaning, emit: Callable[..., None], strided: bool) -> PrimFunc:
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name(meaning.name)
        buffers = [_argument(o, strided and o.strided) for o in meaning.operands]
        with b.sblock("root"):
            *sources, target = (
                View(buffer, (0,) * len(o.shape)).region(o.shape)
                for buffer, o in zip(buffers, meaning.operands, strict=True)
            )
            b.reads(*([target] if meaning.adds else []), *sources)
            b.writes(target)
            emit(*buffers)
    return builder.get()


def _argument(operand: Operand, strided: bool) -> Buffer:
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    strides = None
    if strided:
        opened = len(operand.shape) - operand.compact
        inner = [prod(operand.shape[axis + 1 :]) for axis in range(opened, len(operand.shape))]
        names = (f"{operand.name}{axis}" for axis in range(opened))
        strides = [*(tirx.Var(name, "int64") for name in names), *map(i64, inner)]
    return b.match_buffer(
        b.arg(operand.name, b.handle()),
        [i64(extent) for extent in operand.shape],
        operand.dtype,
        strides=strides,
        offset_factor=1,
        align=operand.align,
    )
