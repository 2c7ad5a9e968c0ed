"""Panels of centred int8 weights of any format: what decoding one unit means, and its operands.

The panel's order is that of `apq_tvm.tensorize.meaning.centred`. TensorIR cannot match an index
that depends on data, so a lookup is a loop over the entries of a table, of which the one that the
code names is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, i32, member
from apq_tvm.tensorize.meaning.scaffold import Operand, View


@dataclass(frozen=True)
class DecodedUnit:
    """Rows and columns that one intrinsic decodes, and what its bytes mean.

    Parameters
    ----------
    kind : str
        Which format, for those who implement it.
    data : tuple
        What they are told of it.
    operands : tuple of Operand
        What is read.
    code : callable
        ``(row, k, *loads of the operands)`` → int32: the weight, or which entry of the table it is.
    entry : callable
        ``(row, entry, *loads)`` → int32: what an entry of a row's table stands for.
    entries : int
        Entries of a table; 0 where codes are weights.
    vectors : int
        Vectors of 4 rows.
    k : int
        Columns.
    """

    kind: str
    data: tuple[Any, ...]
    operands: tuple[Operand, ...]
    code: Callable[..., Expr]
    entry: Callable[..., Expr] | None = None
    entries: int = 0
    vectors: int = 1
    k: int = 32

    def __str__(self) -> str:
        return "_".join(map(str, (self.kind, *self.data)))

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
    unit: DecodedUnit, pairs: bool, views: Sequence[View], name: str = "unpack"
) -> None:
    """Decode a unit in block `name`; `views` stand for its operands and its part of a panel."""
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    *sources, target = views
    extents = unit.loops(pairs)
    kinds = "S" * (len(extents) - 1) + ("R" if unit.entries else "S")
    with b.grid(*extents) as loops, b.sblock(name):
        at = list(b.axis.remap(kinds, loops))
        entry: Any = at.pop() if unit.entries else None
        if len(at) == 3:
            at.insert(1, i32(0))
        e, c, r, i = at
        row, k = (c * 2 + r, e * 8 + i) if pairs else (c * 4 + r, e * 4 + i)
        loads = [lambda *of, v=view: v.buffer[v.at(len(of), of)] for view in sources]
        regions = [v.region(o.shape) for v, o in zip(sources, unit.operands, strict=True)]
        index = target.at(4, at)
        place = target.buffer[index]
        b.reads(*([place] if unit.entries else []), *regions)
        b.writes(place)
        value = unit.code(row, k, *loads)
        if unit.entry is not None:
            meant = unit.entry(row, entry, *loads)
            value = tirx.Select(value == entry.astype("int32"), meant, place.astype("int32"))
        b.buffer_store(target.buffer, value.astype("int8"), list(index))


def decode_pair(
    unit: DecodedUnit, pairs: bool, body: Callable[[Mapping[str, Buffer], Buffer], None]
) -> tuple[PrimFunc, PrimFunc]:
    """(desc, impl) of the decoding of a unit: its operands, then its part of the panel, int8."""

    def loops(*buffers: Buffer) -> None:
        decode_loops(unit, pairs, [View(buffer, (0,) * len(buffer.shape)) for buffer in buffers])

    def implement(*buffers: Buffer) -> None:
        *sources, out = buffers
        body({o.name: v for o, v in zip(unit.operands, sources, strict=True)}, out)

    every = (*unit.operands, Operand("b", unit.shape(pairs), "int8", 16, strided=True, compact=3))

    def declared(strided: bool) -> list[tuple[Any, ...]]:
        return [
            (o.name, o.shape, o.dtype, o.align, _strides(o) if strided and o.strided else None)
            for o in every
        ]

    reads = bool(unit.entries)
    return member(declared(False), loops, reads), member(declared(True), implement, reads)


def _strides(o: Operand) -> list[Any]:
    from tvm import tirx

    opened = len(o.shape) - o.compact
    inner = (prod(o.shape[axis + 1 :]) for axis in range(opened, len(o.shape)))
    return [*(tirx.Var(f"{o.name}{axis}", "int64") for axis in range(opened)), *inner]
