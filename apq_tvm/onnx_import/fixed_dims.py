"""Symbolic dimensions that the user gives a size or bounds."""

from __future__ import annotations

from collections.abc import Mapping

from apq_tvm.errors import BadInput
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.dims import LONGEST
from apq_tvm.types import DimSizes


def read_dims(graph: Graph, dims: DimSizes) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    """Split what was asked of dimensions into sizes and bounds, by the names `graph` has.

    Parameters
    ----------
    graph : Graph
        As it was read: every symbolic dimension of the file is there.
    dims : mapping of str to int or (int, int)
        By the dimension's ONNX name, or by the name messages have for it.

    Returns
    -------
    dict of str to str
        Dimension → its size as text, for `normalise`.
    dict of str to (int, int)
        Dimension → least and greatest size.

    Raises
    ------
    BadInput
        No input has such a dimension; a size that is less than 0, or bounds the wrong way round.
    """
    known = {d for spec in graph.inputs for d in spec.shape if isinstance(d, str)}
    names = {onnx: name for onnx, name in graph.dim_names.items() if name in known}
    fixed: dict[str, str] = {}
    bounds: dict[str, tuple[int, int]] = {}
    for asked, size in dims.items():
        name = names.get(asked, asked if asked in known else None)
        if name is None:
            there = ", ".join(repr(n) for n in sorted(names)) or "none: every size is fixed"
            raise BadInput(f"no input has a dimension {asked!r}; there are {there}")
        low, high = (size, size) if isinstance(size, int) else size
        if not 0 <= low <= high <= LONGEST:
            raise BadInput(
                f"dimension {asked!r}: {low if low == high else f'{low}:{high}'} is no size from 0 "
                f"to {LONGEST}, or no such range"
            )
        if low == high:
            fixed[name] = str(low)
        else:
            bounds[name] = (low, high)
    return fixed, bounds


def apply_bounds(
    graph: Graph, bounds: Mapping[str, tuple[int, int]], equal: Mapping[str, str]
) -> None:
    """Record bounds under the dimension that another was found to be equal to.

    Raises
    ------
    BadInput
        The model fixes the dimension, outside its bounds.
    """
    for name, (low, high) in bounds.items():
        kept = equal.get(name, name)
        if kept.isdigit():
            if not low <= int(kept) <= high:
                raise BadInput(f"dimension {name!r} is {kept} in this model, not {low} to {high}")
            continue
        graph.limits[kept] = min(high, graph.limits.get(kept, high))
        graph.least[kept] = max(low, graph.least.get(kept, low))
