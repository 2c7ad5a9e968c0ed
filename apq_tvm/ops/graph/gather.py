"""Elements by indices that only a run knows: ONNX Gather and its kin, ReverseSequence.

A negative index counts from the end. One outside its axis is refused by the module before the call,
by the attributes that `checked` gives; here it is clamped besides, so that nothing outside the
tensor is ever read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx

from apq_tvm.ops.graph.shapes import Dim, Symbols


def inside(index: Any, extent: Any) -> Any:
    """`index` as int64, counted from the front and clamped to ``0 .. extent - 1``."""
    given, zero = index.astype("int64"), tirx.const(0, "int64")
    wrapped = tirx.Select(given < zero, given + extent, given)
    return tirx.max(tirx.min(wrapped, extent - 1), zero)


def checked(
    func: Any, op: str, ids: int, rows: Sequence[Any], columns: int = 1, lowest: int | None = None
) -> Any:
    """`func` with what makes the module check its indices before a call.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    op : str
        ``apq.op``.
    ids : int
        Number of the argument that holds indices.
    rows : sequence of PrimExpr
        Extent of the axis that column 0, 1, ... of the indices goes along.
    columns : int
        Indices that belong together, side by side: entry i is of column i % columns.
    lowest : int, optional
        The least index; by default they may count from the end.
    """
    attrs: dict[str, Any] = {
        "apq.op": op,
        "op_pattern": 8,
        "apq.ids_arg": [ids] * len(rows),
        "apq.id_rows": list(rows),
        "apq.id_columns": columns,
    }
    if lowest is not None:
        attrs["apq.id_lowest"] = lowest
    return func.with_attrs(attrs)


def _inputs(data: Sequence[Dim], ids: Sequence[Dim], dtype: str, ids_dtype: str) -> tuple[Any, Any]:
    symbols = Symbols()
    x = te.placeholder(symbols.shape(data), dtype, "x")
    return x, te.placeholder(symbols.shape(ids), ids_dtype, "ids")


def gather(data: Sequence[Dim], ids: Sequence[Dim], axis: int, dtype: str, ids_dtype: str) -> Any:
    """``y[a.., i.., b..] = x[a.., ids[i..], b..]``.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, ids, y)``, unscheduled.
    """
    x, index = _inputs(data, ids, dtype, ids_dtype)
    rank = len(ids)

    def element(*i: Any) -> Any:
        at = inside(index(*i[axis : axis + rank]), x.shape[axis])
        return x(*i[:axis], at, *i[axis + rank :])

    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    func = te.create_prim_func([x, index, te.compute(shape, element, "y")])
    return checked(func, "gather", 1, [x.shape[axis]])


def gather_elements(
    data: Sequence[Dim], ids: Sequence[Dim], axis: int, dtype: str, ids_dtype: str
) -> Any:
    """``y[i..] = x[i.. with ids[i..] at axis]``.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, ids, y)``, unscheduled.
    """
    x, index = _inputs(data, ids, dtype, ids_dtype)

    def element(*i: Any) -> Any:
        return x(*i[:axis], inside(index(*i), x.shape[axis]), *i[axis + 1 :])

    func = te.create_prim_func([x, index, te.compute(index.shape, element, "y")])
    return checked(func, "gather", 1, [x.shape[axis]])


def gather_nd(
    data: Sequence[Dim], ids: Sequence[Dim], batch_dims: int, dtype: str, ids_dtype: str
) -> Any:
    """``y[b.., i.., c..] = x[b.., *ids[b.., i..], c..]``; the last axis of `ids` is a number.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, ids, y)``, unscheduled.
    """
    x, index = _inputs(data, ids, dtype, ids_dtype)
    lead, count = len(ids) - 1, int(ids[-1])
    extents = x.shape[batch_dims : batch_dims + count]

    def element(*i: Any) -> Any:
        where = [
            inside(index(*i[:lead], tirx.const(j, "int64")), extent)
            for j, extent in enumerate(extents)
        ]
        return x(*i[:batch_dims], *where, *i[lead:])

    shape = (*index.shape[:-1], *x.shape[batch_dims + count :])
    func = te.create_prim_func([x, index, te.compute(shape, element, "y")])
    return checked(func, "gather", 1, list(extents), count)


def reverse_sequence(
    data: Sequence[Dim], time_axis: int, batch_axis: int, dtype: str, lengths_dtype: str
) -> Any:
    """The first ``lengths[b]`` entries along time in reverse, the others as they are.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, lengths, y)``, unscheduled.
    """
    x = te.placeholder(Symbols().shape(data), dtype, "x")
    lengths = te.placeholder((x.shape[batch_axis],), lengths_dtype, "lengths")
    steps = x.shape[time_axis]

    def element(*i: Any) -> Any:
        length = lengths(i[batch_axis]).astype("int64")
        length = tirx.max(tirx.min(length, steps), tirx.const(0, "int64"))
        t = i[time_axis]
        where = list(i)
        where[time_axis] = tirx.Select(t < length, length - 1 - t, t)
        return x(*where)

    func = te.create_prim_func([x, lengths, te.compute(x.shape, element, "y")])
    return checked(func, "reverse_sequence", 1, [steps + 1], lowest=0)
