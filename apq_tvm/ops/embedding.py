"""Rows of a table by id, decoded on lookup where the table is quantized (ONNX Gather, axis 0).

A quantized row lies as `apq_tvm.codegen.layouts.embedding_layout` packs it: units of 32 codes, byte
p of a field of w bits holds codes p, p + 4w, p + 8w, ... (W4: low nibbles are codes 0..15).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx

from apq_tvm.codegen.layouts import UNIT_K, embedding_layout
from apq_tvm.ops.shapes import Dim, Symbols
from apq_tvm.types import Scheme


def _int32(value: int) -> Any:
    return tirx.const(value, "int32")


def embedding(
    rows: int,
    width: int,
    ids: Sequence[Dim],
    ids_dtype: str = "int64",
    scheme: Scheme | None = None,
) -> Any:
    """y[..., :] = table[ids[...], :].

    A negative id counts from the end, as in ONNX. An id outside the table is refused by the module
    before the call; here it is clamped, so that nothing outside the table is ever read.

    Parameters
    ----------
    rows, width : int
        Shape of the table.
    ids : sequence of int or str
        Shape of the ids; strings are dynamic dimensions. May be empty (one id).
    ids_dtype : {"int64", "int32"}
    scheme : Scheme, optional
        None: a float32 table [rows, width].

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(table float32, ids, y float32)`` or ``(codes uint8, scales float16, [zeros uint8], ids,
        y)``, unscheduled, attr ``apq.op`` = "embedding"; ``apq.slice`` is the number of consecutive
        elements whose codes lie in consecutive bytes.
    """
    symbols = Symbols()
    index = te.placeholder(symbols.shape(ids), ids_dtype, "ids")
    out = (*index.shape, tirx.const(width, "int64"))

    def row(position: Sequence[Any]) -> Any:
        given = index(*position).astype("int64")
        count = tirx.const(rows, "int64")
        wrapped = tirx.Select(given < 0, given + count, given)
        return tirx.max(tirx.min(wrapped, count - 1), tirx.const(0, "int64"))

    if scheme is None:
        table = te.placeholder((rows, width), "float32", "table")
        y = te.compute(out, lambda *i: table(row(i[:-1]), i[-1]), "y")
        func = te.create_prim_func([table, index, y])
        return func.with_attrs({"apq.op": "embedding", "op_pattern": 8, "apq.slice": width})

    layout = embedding_layout(scheme)
    arrays = {
        name: te.placeholder(shape, dtype, name)
        for name, (shape, dtype) in layout.shapes(rows, width).items()
    }
    group = layout.group_width(width)

    def code(r: Any, k: Any) -> Any:
        total: Any = None
        for field in layout.fields:
            slots = 4 * field.width  # bytes of the field in a unit
            byte = arrays["codes"](r, k // UNIT_K, 4 * field.shift + k % slots).astype("int32")
            place = ((k % UNIT_K) // slots * field.width).astype("int32")
            part = (byte >> place) & _int32(field.mask)
            part = part << _int32(field.shift) if field.shift else part
            total = part if total is None else total | part
        return total

    def element(*i: Any) -> Any:
        r, k = row(i[:-1]), i[-1]
        scale = arrays["scales"](r, k // group, 0).astype("float32")
        if layout.zero_points:
            return (code(r, k) - arrays["zeros"](r, k // group, 0).astype("int32")).astype(
                "float32"
            ) * scale
        if scheme.bits == 1:
            return (code(r, k) * _int32(2) - _int32(1)).astype("float32") * scale
        return (code(r, k) - _int32(1 << (scheme.bits - 1))).astype("float32") * scale

    y = te.compute(out, element, "y")
    func = te.create_prim_func([*arrays.values(), index, y])
    # Codes of one field lie in consecutive bytes for 4w elements; groups of 16 cut them too.
    run = min(UNIT_K, group, *(4 * f.width for f in layout.fields))
    return func.with_attrs({"apq.op": "embedding", "op_pattern": 8, "apq.slice": run})
