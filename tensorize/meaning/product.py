"""The scaffold of a meaning: its pair of PrimFuncs, and its loops over the buffers of an op.

An intrinsic's desc and the block that it is to replace are the same loops: over operands of their
own there, over `View`s of the op's buffers here. A meaning says what is summed; the loops' text is
`product`'s alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from apq_tvm.tensorize.exprs import i64, operand, whole

Expr = Any  # tvm is untyped
Buffer = Any
Index = tuple[Expr, ...]


@dataclass(frozen=True)
class Operand:
    """A buffer of a pair.

    Parameters
    ----------
    name : str
    shape : tuple of int
    dtype : str
    align : int
        Bytes.
    strided : bool
        Whether its first axis may have any stride.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    align: int
    strided: bool = False

    @property
    def everywhere(self) -> tuple[slice, ...]:
        """The index of all of it."""
        return tuple(slice(0, extent) for extent in self.shape)

    def declare(self) -> Buffer:
        """The argument of the PrimFunc that is being built."""
        strides: list[Any] = [f"{self.name}_stride"]
        for at in range(1, len(self.shape)):
            inner = 1
            for extent in self.shape[at + 1 :]:
                inner *= extent
            strides.append(i64(inner))
        found = strides if self.strided else None
        return operand(self.name, self.shape, self.dtype, self.align, found)


class View:
    """An operand as a part of a buffer.

    Parameters
    ----------
    buffer : Buffer
    at : PrimExpr or slice
        Per axis of the buffer: an index, or, where it is an axis of the operand, where that begins
        (``slice(first, None)``).
    """

    def __init__(self, buffer: Buffer, *at: Any) -> None:
        self.buffer, self._at = buffer, at

    @classmethod
    def whole(cls, buffer: Buffer) -> View:
        """All of a buffer."""
        return cls(buffer, *[slice(0, None)] * len(buffer.shape))

    def index(self, *inside: Any) -> list[Any]:
        """Index into the buffer of an element, or of a region where some are slices."""
        found, left = [], list(inside)
        for at in self._at:
            if not isinstance(at, slice):
                found.append(at)
                continue
            each, first = left.pop(0), at.start
            if isinstance(each, slice):
                each = slice(first + each.start, first + each.stop)
            else:
                each = each if isinstance(first, int) and first == 0 else first + each
            found.append(each)
        assert not left, "an index has more axes than its operand"
        return found

    def __getitem__(self, inside: Any) -> Expr:
        index = inside if isinstance(inside, tuple) else (inside,)
        return self.buffer[tuple(self.index(*index))]

    def store(self, value: Expr, at: Index) -> None:
        """Store one element."""
        from tvm.tirx.script.builder import ir as b

        b.buffer_store(self.buffer, value, self.index(*at))


Views = Mapping[str, View]


class Meaning(ABC):
    """``acc[spatial] += Σ over the reduced axes of a term``."""

    index: ClassVar[str] = "int64"
    """dtype of the loops."""

    @property
    @abstractmethod
    def operands(self) -> tuple[Operand, ...]:
        """In the order of the pair's arguments; the last one is ``acc``."""

    @property
    @abstractmethod
    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the spatial and of the reduced axes."""

    @abstractmethod
    def term(self, views: Views, at: Index, inner: Index) -> tuple[list[Any], Expr]:
        """What is read besides ``acc``, and what is added to it."""


def row_at(dot: Any, row: int, *index: Any) -> list[Expr]:
    """Index of one row of x, whose axis is left out where `dot` has one row."""
    lead = [row] if dot.m > 1 else []
    return [i64(i) if isinstance(i, int) else i for i in (*lead, *index)]


def product(meaning: Meaning, views: Views, name: str) -> None:
    """The loops around block `name`, over all operands as `views`."""
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    spatial, reduced = meaning.extents
    extents = [tirx.const(e, meaning.index) for e in (*spatial, *reduced)]
    with b.grid(*extents) as loops, b.sblock(name):
        kinds = "S" * len(spatial) + "R" * len(reduced)
        axes = b.axis.remap(kinds, [loops] if len(extents) == 1 else loops)
        axes = (axes,) if len(extents) == 1 else tuple(axes)
        at, inner = axes[: len(spatial)], axes[len(spatial) :]
        reads, term = meaning.term(views, at, inner)
        before = views["acc"][at]
        b.reads(before, *reads)
        b.writes(before)
        views["acc"].store(before + term, at)


def make_pair(meaning: Meaning, implement: Callable[..., None]) -> tuple[Any, Any]:
    """(desc, impl); `implement` emits the instructions for buffers by their operands' names."""

    def plain(**buffers: Buffer) -> None:
        product(meaning, {n: View.whole(buffer) for n, buffer in buffers.items()}, "dot")

    return _member(meaning, plain), _member(meaning, implement)


def _member(meaning: Meaning, body: Callable[..., None]) -> Any:
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("intrinsic")
        buffers = {each.name: each.declare() for each in meaning.operands}
        *inputs, acc = map(whole, buffers.values())
        with b.sblock("root"):
            b.reads(acc, *inputs)
            b.writes(acc)
            body(**buffers)
    return builder.get()
