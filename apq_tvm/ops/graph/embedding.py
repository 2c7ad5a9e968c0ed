"""Rows of a table by id, decoded on lookup where the table is quantized (ONNX Gather, axis 0).

A quantized row lies as `apq_tvm.codegen.layouts.embedding_layout` packs it: units of 32 codes, byte
p of a field of w bits holds codes p, p + 4w, p + 8w, ... (W4: low nibbles are codes 0..15). A table
that is a language model's head too is stored once, in the head's layout, and read there: a row
costs more cache lines, which is nothing beside the rest of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import te, tirx

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout, WeightLayout, embedding_layout
from apq_tvm.ops.graph.shapes import Dim, Symbols
from apq_tvm.tensorize.exprs import i32
from apq_tvm.types import Scheme


def embedding(
    rows: int,
    width: int,
    ids: Sequence[Dim],
    ids_dtype: str = "int64",
    scheme: Scheme | None = None,
    layout: WeightLayout | None = None,
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
    layout : WeightLayout, optional
        Of a linear layer that shares the table; `embedding_layout` by default.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(table float32, ids, y float32)`` or ``(*arrays of the layout, ids, y)``, such as ``codes
        uint8, scales float16, [zeros uint8]``; unscheduled, attr ``apq.op`` = "embedding";
        ``apq.slice`` is the number of consecutive elements whose codes lie in consecutive bytes.
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

    own = embedding_layout(scheme)
    found = own if layout is None else layout
    arrays = {
        name: te.placeholder(shape, dtype, name)
        for name, (shape, dtype) in found.shapes(rows, width).items()
    }
    if isinstance(own, InterleavedLayout) and own.rows == 1 and found == own:
        weight, run = _decoded(own, scheme, arrays, width)
    else:
        weight, run = _shared(found, arrays)
    y = te.compute(out, lambda *i: weight(row(i[:-1]), i[-1]), "y")
    func = te.create_prim_func([*arrays.values(), index, y])
    return func.with_attrs({"apq.op": "embedding", "op_pattern": 8, "apq.slice": run})


Weight = Callable[[Any, Any], Any]
"""``(row, k)`` to the TensorIR float32 expression of a weight."""


def _shared(layout: WeightLayout, arrays: Mapping[str, Any]) -> tuple[Weight, int]:
    """Weights of a linear layer's layout, and how many lie side by side."""

    def weight(r: Any, k: Any) -> Any:
        lanes = tirx.const(layout.rows, "int64")
        return layout.weight(arrays, r // lanes, r % lanes, k)

    return weight, 4 if isinstance(layout, InterleavedLayout) else 1


def _decoded(
    layout: InterleavedLayout, scheme: Scheme, arrays: Mapping[str, Any], width: int
) -> tuple[Weight, int]:
    """Weights of `embedding_layout`, and how many codes lie in consecutive bytes."""
    group = layout.group_width(width)

    def code(r: Any, k: Any) -> Any:
        total: Any = None
        for field in layout.fields:
            slots = 4 * field.width  # bytes of the field in a unit
            byte = arrays["codes"](r, k // UNIT_K, 4 * field.shift + k % slots).astype("int32")
            place = ((k % UNIT_K) // slots * field.width).astype("int32")
            part = (byte >> place) & i32(field.mask)
            part = part << i32(field.shift) if field.shift else part
            total = part if total is None else total | part
        return total

    def weight(r: Any, k: Any) -> Any:
        scale = arrays["scales"](r, k // group, 0).astype("float32")
        if layout.zero_points:
            return (code(r, k) - arrays["zeros"](r, k // group, 0).astype("int32")).astype(
                "float32"
            ) * scale
        if scheme.bits == 1:
            return (code(r, k) * i32(2) - i32(1)).astype("float32") * scale
        return (code(r, k) - i32(1 << (scheme.bits - 1))).astype("float32") * scale

    # Codes of one field lie in consecutive bytes for 4w elements; groups of 16 cut them too.
    return weight, min(UNIT_K, group, *(4 * f.width for f in layout.fields))
