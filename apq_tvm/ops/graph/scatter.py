"""Elements written, or reduced into, by indices that only a run knows (ScatterElements, ScatterND).

Indices are treated as in `apq_tvm.ops.graph.gather`. Updates are applied in their order, one after
the other: the same place may be meant twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from apq_tvm.ops.graph.gather import checked, inside
from apq_tvm.ops.graph.shapes import Dim, Symbols

REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": lambda old, new: tirx.max(old, new),
    "min": lambda old, new: tirx.min(old, new),
}


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
            value = REDUCTIONS[reduction](y[tuple(where)], updates[tuple(i)])
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
            value = REDUCTIONS[reduction](old, updates[row, column])
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
