"""Elements written by indices that only a run knows (ScatterElements, ScatterND, TensorScatter).

Indices are treated as in `apq_tvm.ops.graph.gather`. Updates are applied in their order, one after
the other: the same place may be meant twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from apq_tvm.ops.graph.gather import checked, inside
from apq_tvm.ops.graph.shapes import Dim, Symbols

REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": lambda old, new: tirx.max(old, new),
    "min": lambda old, new: tirx.min(old, new),
}

TRUTHS: dict[str, Callable[[Any, Any], Any]] = {
    "none": REDUCTIONS["none"],
    **dict.fromkeys(("add", "max"), lambda old, new: tirx.any(old, new)),
    **dict.fromkeys(("mul", "min"), lambda old, new: tirx.all(old, new)),
}
"""The same of truth values: a sum is whether any is true, as ONNX Runtime has it."""


def _combined(dtype: str, reduction: str, old: Any, new: Any) -> Any:
    return (TRUTHS if dtype == "bool" else REDUCTIONS)[reduction](old, new)


def scatter_elements(
    data: Sequence[Dim],
    ids: Sequence[Dim],
    axis: int,
    dtype: str,
    ids_dtype: str,
    reduction: str = "none",
) -> Any:
    """``y = x; y[i.. with ids[i..] at axis] (op)= updates[i..]``.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, ids, updates, y)``, unscheduled.
    """
    symbols = Symbols()
    shape, index_shape = symbols.shape(data), symbols.shape(ids)

    def scatter(b: Any, index: Any, updates: Any, y: Any) -> None:
        with b.grid(*index_shape) as loops, b.sblock("scatter"):
            i = _axes(b, "R", loops)
            where = [*i[:axis], inside(index[tuple(i)], shape[axis]), *i[axis + 1 :]]
            value = _combined(dtype, reduction, y[tuple(where)], updates[tuple(i)])
            b.buffer_store(y, value, where)

    func = _scattered((shape, index_shape, index_shape), dtype, ids_dtype, scatter)
    return checked(func, "scatter", 1, [shape[axis]])


def scatter_nd(
    data: Sequence[Dim], ids: Sequence[Dim], dtype: str, ids_dtype: str, reduction: str = "none"
) -> Any:
    """``y = x; y[*ids[i], :] (op)= updates[i, :]``.

    Parameters
    ----------
    data : sequence of int or str
        Shape of x, ``[*extents, inner]``.
    ids : sequence of int or str
        ``[rows, len(extents)]``; updates are [rows, inner].

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, ids, updates, y)``, unscheduled.
    """
    symbols = Symbols()
    shape, index_shape = symbols.shape(data), symbols.shape(ids)
    *extents, inner = shape

    def scatter(b: Any, index: Any, updates: Any, y: Any) -> None:
        with b.grid(index_shape[0], inner) as loops, b.sblock("scatter"):
            row, column = b.axis.remap("RR", loops)
            where = [inside(index[row, j], extent) for j, extent in enumerate(extents)]
            old = y[(*where, column)]
            value = _combined(dtype, reduction, old, updates[row, column])
            b.buffer_store(y, value, [*where, column])

    func = _scattered((shape, index_shape, (index_shape[0], inner)), dtype, ids_dtype, scatter)
    return checked(func, "scatter", 1, extents, len(extents))


def _scattered(
    shapes: Sequence[Sequence[Any]],
    dtype: str,
    ids_dtype: str,
    scatter: Callable[[Any, Any, Any, Any], None],
) -> Any:
    """``(x, ids, updates, y)`` of three shapes: x is copied, then `scatter` writes into y."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    shape, index_shape, update_shape = shapes
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("scatter")
        b.func_attr({"tirx.noalias": True})
        x = b.match_buffer(b.arg("x", b.handle()), shape, dtype)
        index = b.match_buffer(b.arg("ids", b.handle()), index_shape, ids_dtype)
        updates = b.match_buffer(b.arg("updates", b.handle()), update_shape, dtype)
        y = b.match_buffer(b.arg("y", b.handle()), shape, dtype)
        _copy(b, x, y)
        scatter(b, index, updates, y)
    return builder.get()


def _copy(b: Any, x: Any, y: Any) -> None:
    with b.grid(*x.shape) as loops, b.sblock("copy"):
        i = _axes(b, "S", loops)
        b.buffer_store(y, x[tuple(i)], i)


def _axes(b: Any, kind: str, loops: Any) -> list[Any]:
    """Block axes of all loops, also where there is one."""
    every = [loops] if isinstance(loops, tirx.Var) else list(loops)
    axes = b.axis.remap(kind * len(every), every)
    return [axes] if isinstance(axes, tirx.Var) else list(axes)


def tensor_scatter(
    cache: Sequence[Dim],
    update: Sequence[Dim],
    axis: int,
    dtype: str,
    *,
    circular: bool,
    starts: bool,
) -> Any:
    """A cache with `update` written along `axis` from ``starts[b]`` on (ONNX TensorScatter).

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(cache, update, [starts int64], y)``. Starts are checked by the module; here whatever does
        not lie in the cache is left out.
    """
    symbols = Symbols()
    old = te.placeholder(symbols.shape(cache), dtype, "cache")
    new = te.placeholder(symbols.shape(update), dtype, "update")
    first = te.placeholder((old.shape[0],), "int64", "starts")
    extent, length = old.shape[axis], new.shape[axis]

    def element(*i: Any) -> Any:
        at = i[axis] - first(i[0]) if starts else i[axis]
        at = tirx.floormod(at, extent) if circular else at
        fresh = new(*i[:axis], at, *i[axis + 1 :])
        return tirx.if_then_else(tirx.all(at >= 0, at < length), fresh, old(*i))

    y = te.compute(old.shape, element, "y")
    func = te.create_prim_func([old, new, first, y] if starts else [old, new, y])
    attrs: dict[str, Any] = {"apq.op": "tensor_scatter", "op_pattern": 8}
    if starts:
        rows = extent if circular else extent - length + 1
        attrs |= {"apq.ids_arg": [2], "apq.id_rows": [rows], "apq.id_lowest": 0}
    return func.with_attrs(attrs)
