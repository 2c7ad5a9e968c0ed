"""What a kernel call needs besides its arguments: its symbols, its checks, its estimated work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import ir, tirx
from tvm.sym import Analyzer

from apq_tvm.codegen.graph.bounds import Lookup, Reach
from apq_tvm.codegen.graph.c_expr import c_expr
from apq_tvm.codegen.graph.plain import GROWING, Condition, IdCheck, Place, Tensor
from apq_tvm.codegen.graph.work import work_of
from apq_tvm.errors import UnsupportedModel


def symbols_at(func: Any, args: Sequence[Tensor | str]) -> dict[Any, str]:
    """Give the C expressions of a function's symbols: its arguments' dimensions and integers."""
    names: dict[Any, str] = {}
    for param, arg in zip(func.params, args, strict=True):
        if isinstance(arg, str):
            names[param] = arg
            continue
        for dim, text in zip(param.shape, arg.dims, strict=False):
            if isinstance(dim, tirx.Var):
                names.setdefault(dim, text)
    return names


def id_checks(
    func: Any, kernel: str, lookups: Sequence[Lookup], args: Sequence[Tensor | str]
) -> tuple[IdCheck, ...]:
    """List the ids to check before a call.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        With attributes ``apq.id_rows`` and ``apq.ids_arg`` (an int, or equally long lists; rows may
        be expressions of the function's symbols) and ``apq.layer`` (the name in the message), its
        ids may be negative, as in ONNX, or not less than ``apq.id_lowest``. Entry i of the lists is
        about column i of ``apq.id_columns``.
    kernel : str
        Names the layer where the attributes are missing.
    lookups : sequence of Lookup
        What `apq_tvm.codegen.graph.bounds` found; used where the attributes are missing.
    args : sequence of Tensor or str
        Of the call.
    """
    attrs = func.attrs or {}
    if "apq.id_rows" not in attrs:
        return tuple(IdCheck(kernel, found.ids, "0", str(found.rows)) for found in lookups)
    layer = str(attrs["apq.layer"]) if "apq.layer" in attrs else kernel
    columns = int(attrs["apq.id_columns"]) if "apq.id_columns" in attrs else 1
    names = symbols_at(func, args)
    checks = []
    pairs = zip(_list(attrs["apq.ids_arg"]), _list(attrs["apq.id_rows"]), strict=True)
    for number, (arg, extent) in enumerate(pairs):
        rows = str(extent) if isinstance(extent, int) else c_expr(extent, names)
        lowest = str(attrs["apq.id_lowest"]) if "apq.id_lowest" in attrs else f"-({rows})"
        checks.append(IdCheck(layer, int(arg), lowest, rows, number % columns, columns))
    return tuple(checks)


def least_extents(func: Any, kernel: str, args: Sequence[Tensor | str]) -> list[Condition]:
    """List what a function asks of extents by ``apq.least``, pairs of an extent and a number."""
    attrs = func.attrs or {}
    if "apq.least" not in attrs:
        return []
    names = symbols_at(func, args)
    conditions = []
    for extent, number in attrs["apq.least"]:
        have, least = c_expr(extent, names), c_expr(number, names)
        message = f"these input shapes are too small: {kernel} wants {least} entries, not {have}"
        conditions.append(Condition(f"{have} >= {least}", message))
    return conditions


def _list(value: Any) -> list[Any]:
    return [value] if isinstance(value, int | ir.Expr) else list(value)


def shape_limits(
    kernel: str, found: Sequence[Reach], names: Mapping[Any, str]
) -> tuple[dict[str, int], list[Condition]]:
    """Turn accesses that may leave their argument into conditions on the input shapes.

    Parameters
    ----------
    kernel : str
        For the message.
    found : sequence of Reach
        Those that depend on data or on inner variables are skipped: no shape tells about them.
    names : mapping of tvm.tirx.Var to str
        `symbols_at` the call.

    Returns
    -------
    dict of str to int
        C expression of a dimension → its largest value, where the condition is as simple as that.
    list of Condition
        The others.
    """
    limits: dict[str, int] = {}
    conditions = []
    for reach in found:
        try:
            needed = c_expr(Analyzer().simplify(reach.highest + 1), names)
            extent = c_expr(reach.extent, names)
            sizes = dict.fromkeys(c_expr(size, names) for size in reach.sizes)
        except UnsupportedModel:
            continue
        if extent.isdigit():
            limits[needed] = min(limits.get(needed, int(extent)), int(extent))
        else:
            message = (
                f"these input shapes do not fit together: {kernel} would read element {needed} of "
                f"an axis of {extent}"
            )
            nothing = "".join(f"{size} < 1 || " for size in sizes)
            conditions.append(Condition(f"{nothing}{needed} <= {extent}", message))
    return limits, conditions


def call_work(
    func: Any, args: Sequence[Tensor | str], names: Mapping[Any, str], looks_up: bool
) -> str:
    """Write the C estimate of a call's work (`apq_tvm.codegen.graph.work`).

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    args : sequence of Tensor or str
    names : mapping of tvm.tirx.Var to str
        `symbols_at` the call.
    looks_up : bool
        Whether weights are tables, of which only some rows are read.
    """
    tensors = [a for a in args if isinstance(a, Tensor)]
    touched = [
        _product([str(t.itemsize), *t.dims])
        for t in tensors
        if not (looks_up and t.place is Place.WEIGHT)
    ]
    elements = _product(tensors[-1].dims) if tensors else "0"
    if func.attrs and "apq.work_along" in func.attrs:
        number, axis = (int(i) for i in func.attrs["apq.work_along"])
        along = args[number]
        assert isinstance(along, Tensor)
        elements = f"{elements} * {along.dims[axis]}"
    work = work_of(func, names, elements, " + ".join(touched) or "0")
    if func.attrs and str(func.attrs.get("apq.op", "")) in GROWING:  # what is kept costs nothing
        kept, total = (arg for arg in args if isinstance(arg, str))
        return f"({work}) * (double)({total} - {kept}) / (double)({total})"
    return work


def _product(factors: Sequence[str]) -> str:
    return " * ".join(factors) or "1"
