"""Inputs that hold keys and values of earlier steps: before the first step they are empty."""

from __future__ import annotations

from apq_tvm.onnx_import.graph import Graph

PASTS: dict[str, tuple[int, ...]] = {
    "com.microsoft.GroupQueryAttention": (3, 4),
    "com.microsoft.MultiHeadAttention": (6, 7),
    "Attention": (4, 5),
}
"""Which inputs of an operator are a past [B, N, P, H]."""


def find_caches(graph: Graph) -> dict[str, int]:
    """Inputs that are only put before something else, along an axis of symbolic length.

    Nothing else reads them than Concat, an attention operator that takes them as its past, Cast on
    the way there, and Shape.

    Returns
    -------
    dict of str to int
        Name of the input and the axis, which may be 0 long.
    """
    found = {}
    for spec in graph.inputs:
        axes: set[int] = set()
        if _only_joined(graph, spec.name, len(spec.shape), axes) and len(axes) == 1:
            (axis,) = axes
            if axis < len(spec.shape) and isinstance(spec.shape[axis], str):
                found[spec.name] = axis
    return found


def _only_joined(graph: Graph, value: str, rank: int, axes: set[int]) -> bool:
    """Whether `value` is read as `find_caches` says; collects the axes of its joins."""
    if any(spec.name == value for spec in graph.outputs):
        return False
    for node in graph.nodes:
        if value not in node.inputs:
            continue
        if node.op == "Concat":
            axes.add(int(node.attrs["axis"]) % max(rank, 1))
        elif node.op in PASTS:
            if any(v == value and i not in PASTS[node.op] for i, v in enumerate(node.inputs)):
                return False
            axes.add(2)
        elif node.op == "Cast":
            if not _only_joined(graph, node.outputs[0], rank, axes):
                return False
        elif node.op != "Shape":
            return False
    return True


def cache_lengths(graph: Graph) -> frozenset[str]:
    """Symbols that may be 0: lengths of the caches among the inputs."""
    axes = ((spec, graph.may_be_empty.get(spec.name)) for spec in graph.inputs)
    dims = (spec.shape[axis] for spec, axis in axes if axis is not None)
    return frozenset(dim for dim in dims if isinstance(dim, str))
