"""Pairs of meaning and instructions for kernels on bitplanes: operands and plain loops.

`implement` of a member gets the buffers and emits instructions; without it the member is the
meaning (`apq_tvm.tensorize.meaning.planes`).

Units with groups of activations take one more operand before the sums, which are float32: the
scales of activations, float32 [.., k / 4].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.meaning.planes import (
    QUAD,
    ROWS,
    PlanesUnit,
    centroid_if,
    column_of,
    dot_axes,
    dot_body,
    plane_code,
    rows_body,
    scaled,
    table_axes,
)

PrimFunc = Any  # tvm is untyped
Buffer = Any
Implement = Callable[..., None]


def dot_pair(unit: PlanesUnit, implement: Implement) -> tuple[PrimFunc, PrimFunc]:
    """Product of a unit with one row of activations.

    Operands: planes uint8 [bits, 1, k], tables int8 [tables, 2^bits], x int8 [k], sums int32
    [8, vector / 4].
    """
    return _dot_member(unit, None), _dot_member(unit, implement)


def lookup_pair(unit: PlanesUnit, implement: Implement) -> tuple[PrimFunc, PrimFunc]:
    """Lookup of a unit: planes, tables, out uint8 [8, k], to which centroids are added."""
    return _lookup_member(unit, None), _lookup_member(unit, implement)


def codes_pair(unit: PlanesUnit, implement: Implement) -> tuple[PrimFunc, PrimFunc]:
    """Codes of a unit: planes, out uint8 [8, k]."""
    return _codes_member(unit, None), _codes_member(unit, implement)


def table_pair(unit: PlanesUnit, rows: int, implement: Implement) -> tuple[PrimFunc, PrimFunc]:
    """Lookups of rows that share a table, times one row of activations.

    Operands: codes uint8 [rows, k], table int8 [2^bits], x int8 [k], sums int32 [rows, vector / 4];
    there is no axis of one row.
    """
    return _table_member(unit, rows, None), _table_member(unit, rows, implement)


def rows_pair(
    unit: PlanesUnit, m: int, rows: int, implement: Implement
) -> tuple[PrimFunc, PrimFunc]:
    """Rows of looked up bytes times rows of activations.

    Operands: w uint8 [rows, k] (signed bytes where there is no offset), x int8 [m, k], sums int32
    [m, rows, vector / 4].
    """
    return _rows_member(unit, m, rows, None), _rows_member(unit, m, rows, implement)


def _operand(name: str, shape: tuple[int, ...], dtype: str, strided: bool, align: int) -> Buffer:
    """A buffer argument; a strided one leaves all strides but the last open."""
    strides: list[Any] | None = None
    extents: list[Any] = list(shape)
    if strided:
        extents = [tirx.const(extent, "int64") for extent in shape]  # of the strides' type
        strides = [tirx.Var(f"{name}{d}", "int64") for d in range(len(shape) - 1)]
        strides.append(tirx.const(1, "int64"))
    return b.match_buffer(
        b.arg(name, b.handle()), extents, dtype, strides=strides, align=align, offset_factor=1
    )


def _whole(buffer: Buffer, shape: tuple[int, ...]) -> Any:
    return buffer[tuple(slice(0, extent) for extent in shape)]


def _scales(unit: PlanesUnit, lead: tuple[int, ...], strided: bool = False) -> list[Buffer]:
    """The operand of scales, if there is one."""
    if not unit.group:
        return []
    return [_operand("scales", (*lead, unit.k // QUAD), "float32", strided, 4)]


def _dot_member(unit: PlanesUnit, implement: Implement | None) -> PrimFunc:
    shapes = (unit.bits, 1, unit.k), (unit.tables, unit.entries), (unit.k,), (ROWS, unit.lanes)
    strided = implement is not None
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("planes_dot")
        planes = _operand("planes", shapes[0], "uint8", strided, 32)
        table = _operand("table", shapes[1], "int8", strided, min(unit.entries, 64))
        x = _operand("x", shapes[2], "int8", False, 4)
        scales = _scales(unit, ())
        acc = _operand("acc", shapes[3], unit.sums, False, 64)
        with b.sblock("root"):
            read = map(_whole, (acc, planes, table, x), (shapes[3], *shapes[:3]))
            b.reads(*read, *(_whole(s, (unit.k // QUAD,)) for s in scales))
            b.writes(_whole(acc, shapes[3]))
            (implement or partial(_dot_meaning, unit))(planes, table, x, *scales, acc)
    return builder.get()


def _dot_meaning(unit: PlanesUnit, planes: Buffer, table: Buffer, x: Buffer, *more: Buffer) -> None:
    kinds, extents = dot_axes(unit)
    *scales, acc = more
    with b.grid(*extents) as loops, b.sblock("dot"):
        axes = tuple(b.axis.remap(kinds, loops))
        at = axes[0], axes[1]
        whole = ((unit.bits, 1, unit.k), (unit.tables, unit.entries), (unit.k,))
        read = map(_whole, (planes, table, x), whole)
        b.reads(acc[at], *read, *(_whole(s, (unit.k // QUAD,)) for s in scales))
        b.writes(acc[at])
        dot_body(
            unit,
            acc,
            at,
            lambda p, column: planes[p, 0, column],
            lambda t, entry: table[t, entry],
            lambda column: x[column],
            lambda column: scales[0][column // QUAD] if scales else None,
            axes,
        )


def _lookup_member(unit: PlanesUnit, implement: Implement | None) -> PrimFunc:
    shapes = (unit.bits, 1, unit.k), (unit.tables, unit.entries), (ROWS, unit.k)
    strided = implement is not None
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("planes_lookup")
        planes = _operand("planes", shapes[0], "uint8", strided, 32)
        table = _operand("table", shapes[1], "int8", strided, min(unit.entries, 64))
        out = _operand("out", shapes[2], "uint8", strided, 32)
        with b.sblock("root"):
            b.reads(*map(_whole, (out, planes, table), (shapes[2], *shapes[:2])))
            b.writes(_whole(out, shapes[2]))
            if implement is not None:
                implement(planes, table, out)
            else:
                with b.grid(ROWS, unit.k, unit.entries) as loops, b.sblock("lookup"):
                    r, column, entry = b.axis.remap("SSR", loops)
                    reads = map(_whole, (planes, table), shapes[:2])
                    b.reads(out[r, column], *reads)
                    b.writes(out[r, column])
                    code = plane_code(lambda p: planes[p, 0, column], r, unit.bits)
                    centroid = table[unit.table_of(r), entry]
                    value = centroid_if(code, entry, centroid, unit.offset).astype("uint8")
                    b.buffer_store(out, out[r, column] + value, [r, column])
    return builder.get()


def _codes_member(unit: PlanesUnit, implement: Implement | None) -> PrimFunc:
    shapes = (unit.bits, 1, unit.k), (ROWS, unit.k)
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("planes_codes")
        planes = _operand("planes", shapes[0], "uint8", implement is not None, 32)
        out = _operand("out", shapes[1], "uint8", implement is not None, 32)
        with b.sblock("root"):
            b.reads(_whole(planes, shapes[0]))
            b.writes(_whole(out, shapes[1]))
            if implement is not None:
                implement(planes, out)
            else:
                with b.grid(*shapes[1]) as loops, b.sblock("codes"):
                    r, column = b.axis.remap("SS", loops)
                    b.reads(_whole(planes, shapes[0]))
                    b.writes(out[r, column])
                    code = plane_code(lambda p: planes[p, 0, column], r, unit.bits)
                    b.buffer_store(out, code.astype("uint8"), [r, column])
    return builder.get()


def _table_member(unit: PlanesUnit, rows: int, implement: Implement | None) -> PrimFunc:
    lead = (rows,) if rows > 1 else ()
    shapes = (*lead, unit.k), (unit.entries,), (unit.k,), (*lead, unit.lanes)
    strided = implement is not None and rows > 1
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("table_dot")
        codes = _operand("codes", shapes[0], "uint8", strided, 32)
        table = _operand("table", shapes[1], "int8", False, min(unit.entries, 64))
        x = _operand("x", shapes[2], "int8", False, 4)
        scales = _scales(unit, ())
        acc = _operand("acc", shapes[3], unit.sums, False, 16)
        with b.sblock("root"):
            read = map(_whole, (acc, codes, table, x), (shapes[3], *shapes[:3]))
            b.reads(*read, *(_whole(s, (unit.k // QUAD,)) for s in scales))
            b.writes(_whole(acc, shapes[3]))
            (implement or partial(_table_meaning, unit, rows))(codes, table, x, *scales, acc)
    return builder.get()


def _table_meaning(
    unit: PlanesUnit, rows: int, codes: Buffer, table: Buffer, x: Buffer, *more: Buffer
) -> None:
    """Plain loops of `table_pair`."""
    kinds, extents = table_axes(unit, rows)
    *scales, acc = more
    with b.grid(*extents) as loops, b.sblock("dot"):
        *row, lane, register, byte, entry = b.axis.remap(kinds, loops)
        at, column = (*row, lane), register * unit.vector + lane * 4 + byte
        mine = (slice(0, rows),) if row else ()
        read = codes[(*mine, slice(0, unit.k))], table[0 : unit.entries], x[0 : unit.k]
        b.reads(acc[at], *read, *(_whole(s, (unit.k // QUAD,)) for s in scales))
        b.writes(acc[at])
        code = codes[(*row, column)].astype("int32")
        term = centroid_if(code, entry, table[entry], unit.offset) * x[column].astype("int32")
        term = scaled(term, scales[0][column // QUAD] if scales else None)
        b.buffer_store(acc, acc[at] + term, list(at))


def _rows_member(unit: PlanesUnit, m: int, rows: int, implement: Implement | None) -> PrimFunc:
    shapes = (rows, unit.k), (m, unit.k), (m, rows, unit.lanes)
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("rows_dot")
        strided = implement is not None
        w = _operand("w", shapes[0], "uint8", strided, 32)
        x = _operand("x", shapes[1], "int8", strided, 4)
        scales = _scales(unit, (m,), strided)
        acc = _operand("acc", shapes[2], unit.sums, False, 64)
        with b.sblock("root"):
            read = map(_whole, (acc, w, x), (shapes[2], *shapes[:2]))
            b.reads(*read, *(_whole(s, (m, unit.k // QUAD)) for s in scales))
            b.writes(_whole(acc, shapes[2]))
            (implement or partial(_rows_meaning, unit, m, rows))(w, x, *scales, acc)
    return builder.get()


def _rows_meaning(unit: PlanesUnit, m: int, rows: int, w: Buffer, x: Buffer, *more: Buffer) -> None:
    """Plain loops of `rows_dot_intrinsic`."""
    *scales, acc = more
    registers = (unit.registers,) if unit.registers > 1 else ()
    extents = (m, rows, unit.lanes, *registers, 4)
    kinds = "SSS" + "R" * (len(registers) + 1)
    with b.grid(*extents) as loops, b.sblock("rows_dot"):
        i, r, lane, *inner = b.axis.remap(kinds, loops)
        column = column_of(unit, lane, tuple(inner))
        read = _whole(w, (rows, unit.k)), _whole(x, (m, unit.k))
        b.reads(acc[i, r, lane], *read, *(_whole(s, (m, unit.k // QUAD)) for s in scales))
        b.writes(acc[i, r, lane])
        scale = scales[0][i, column // QUAD] if scales else None
        rows_body(unit, acc, (i, r, lane), w[r, column], x[i, column], scale, column)
