"""Panels of centred int8 weights of any format: what decoding one unit means, and its operands.

The panel's order is that of `apq_tvm.tensorize.meaning.centred`. TensorIR cannot match an index
that depends on data, so a lookup is a loop over the entries of a table, of which the one that the
code names is stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import whole

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any

Load = Callable[..., Expr]


@dataclass(frozen=True)
class Source:
    """What a unit is decoded from.

    Parameters
    ----------
    load : callable
        Element by its index in the operand.
    region : BufferRegion
        All of the operand.
    """

    load: Load
    region: Any


@dataclass(frozen=True)
class DecodedUnit(ABC):
    """Rows and columns that one intrinsic decodes, and what its bytes mean."""

    @property
    @abstractmethod
    def operands(self) -> dict[str, tuple[tuple[int, ...], str, int]]:
        """Shape, dtype and alignment in bytes of what is read."""

    @abstractmethod
    def code(self, load: Mapping[str, Load], row: Expr, k: Expr) -> Expr:
        """int32: the weight of a row and column, or which entry of the table it is."""

    @property
    def vectors(self) -> int:
        """Vectors of 4 rows."""
        return 1

    @property
    def k(self) -> int:
        """Columns."""
        return 32

    @property
    def entries(self) -> int:
        """Entries of a table; 0 where codes are weights."""
        return 0

    def entry(self, load: Mapping[str, Load], row: Expr, e: Expr) -> Expr:
        """int32: what an entry of a row's table stands for."""
        raise NotImplementedError

    def shape(self, pairs: bool) -> tuple[int, int, int, int]:
        """Shape of the unit's part of a panel."""
        if pairs:
            return self.k // 8, 2 * self.vectors, 2, 8
        return self.k // 4, self.vectors, 4, 4

    def loops(self, pairs: bool) -> tuple[int, ...]:
        """Extents of the loops of `decode_loops`: none is 1."""
        shape = tuple(extent for extent in self.shape(pairs) if extent > 1)
        return (*shape, self.entries) if self.entries else shape


def decode_loops(
    unit: DecodedUnit,
    pairs: bool,
    sources: Mapping[str, Source],
    out: Load,
    store: Callable[[tuple[Expr, ...], Expr], None],
    name: str = "unpack",
) -> None:
    """Decode a unit.

    Parameters
    ----------
    unit : DecodedUnit
    pairs : bool
        Order of the panel.
    sources : mapping
        One for each of the unit's operands.
    out : callable
        Element of the unit's part of the panel.
    store : callable
        ``(index in that part, int8 value)``.
    name : str
        Of the block.
    """
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    extents = unit.loops(pairs)
    kinds = "S" * (len(extents) - 1) + ("R" if unit.entries else "S")
    with b.grid(*extents) as loops, b.sblock(name):
        at = list(b.axis.remap(kinds, loops))
        entry = at.pop() if unit.entries else None
        if len(at) == 3:
            at.insert(1, tirx.const(0, "int32"))
        e, c, r, i = at
        row, k = (c * 2 + r, e * 8 + i) if pairs else (c * 4 + r, e * 4 + i)
        load = {name: source.load for name, source in sources.items()}
        regions = [source.region for source in sources.values()]
        b.reads(*([out(*at), *regions] if unit.entries else regions))
        b.writes(out(*at))
        value = unit.code(load, row, k)
        if entry is not None:
            meant, kept = unit.entry(load, row, entry), out(*at).astype("int32")
            value = tirx.Select(value == entry.astype("int32"), meant, kept)
        store(tuple(at), value.astype("int8"))


def decode_pair(
    unit: DecodedUnit, pairs: bool, body: Callable[[Mapping[str, Buffer], Buffer], None]
) -> tuple[PrimFunc, PrimFunc]:
    """(desc, impl) of the decoding of a unit: its operands, then its part of the panel, int8."""

    def meaning(buffers: Mapping[str, Buffer], out: Buffer) -> None:
        from tvm.tirx.script.builder import ir as b

        decode_loops(
            unit,
            pairs,
            {name: Source(_loader(buffer), whole(buffer)) for name, buffer in buffers.items()},
            lambda *at: out[at],
            lambda at, value: b.buffer_store(out, value, list(at)),
        )

    return _member(unit, pairs, meaning, False), _member(unit, pairs, body, True)


def _loader(buffer: Buffer) -> Load:
    return lambda *at: buffer[at]


def _member(unit: DecodedUnit, pairs: bool, emit: Callable[..., None], strided: bool) -> PrimFunc:
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    def operand(name: str, shape: tuple[int, ...], dtype: str, align: int, outer: int) -> Buffer:
        """With open strides of the first `outer` axes."""
        extents: list[Any] = list(shape)
        strides: list[Any] | None = None
        if strided and outer:
            extents = [tirx.const(extent, "int64") for extent in shape]  # of the strides' type
            strides = [tirx.Var(f"{name}{axis}", "int64") for axis in range(outer)]
            for axis in range(outer, len(shape)):
                inner = 1
                for extent in shape[axis + 1 :]:
                    inner *= extent
                strides.append(tirx.const(inner, "int64"))
        handle = b.arg(name, b.handle())
        return b.match_buffer(handle, extents, dtype, strides=strides, align=align, offset_factor=1)

    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("decode")
        buffers = {
            name: operand(name, shape, dtype, align, len(shape) - 1)
            for name, (shape, dtype, align) in unit.operands.items()
        }
        out = operand("b", unit.shape(pairs), "int8", 16, 1)
        with b.sblock("root"):
            regions = [whole(buffer) for buffer in buffers.values()]
            b.reads(*([whole(out), *regions] if unit.entries else regions))
            b.writes(whole(out))
            emit(buffers, out)
    return builder.get()
