"""Inputs that hold keys and values of earlier steps: before the first step they are empty."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from apq_tvm.onnx_import.control.bodies import captures, own_inputs
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.types import Node, TensorSpec

PASTS: dict[str, tuple[int, ...]] = {
    "com.microsoft.GroupQueryAttention": (3, 4),
    "com.microsoft.MultiHeadAttention": (6, 7),
    "Attention": (4, 5),
}
"""Which inputs of an operator are a past [B, N, P, H]."""


def find_caches(graph: Graph) -> dict[str, int]:
    """Inputs that are only put before something else, along an axis of symbolic length.

    Nothing else reads them than Concat, an attention operator that takes them as its past, Cast on
    the way there, and Shape; or one branch of an If alone, so that the other runs without.

    Returns
    -------
    dict of str to int
        Name of the input and the axis, which may be 0 long.
    """
    found = {}
    for spec in graph.inputs:
        axes: set[int] = set()
        results = {output.name for output in graph.outputs}
        if _only_joined(graph.nodes, results, spec, spec.name, axes) and len(axes) == 1:
            (axis,) = axes
            if axis < len(spec.shape) and isinstance(spec.shape[axis], str):
                found[spec.name] = axis
    return found


def free_caches(graph: Graph, caches: Mapping[str, int]) -> None:
    """Give caches that one branch of an If alone reads a length apart from that of other inputs.

    The other branch runs without them, whatever their length: optimum's merged decoders are given
    empty ones, or of length 1, in the first step, though they are declared as long as the encoder's
    result. The branch that reads them still needs that, and finds out by itself.
    """
    places = [_branch_of(graph, spec.name) for spec in graph.inputs]
    owners: dict[int | str, str] = {}
    for place, spec in sorted(zip(places, graph.inputs, strict=True), key=lambda p: bool(p[0])):
        for dim in spec.shape:
            owners.setdefault(dim, place)
    for at, (place, spec) in enumerate(zip(places, graph.inputs, strict=True)):
        axis = caches.get(spec.name)
        if not place or axis is None or owners[spec.shape[axis]] == place:
            continue
        name = f"{spec.shape[axis]}_{place}"
        shape = tuple(name if i == axis else dim for i, dim in enumerate(spec.shape))
        graph.inputs[at] = replace(spec, shape=shape)
        graph.dim_names.setdefault(name, name)


def _branch_of(graph: Graph, value: str) -> str:
    """``"then"`` or ``"else"`` if such branches alone read an input; ``""`` if others do."""
    found: set[str] = set()
    for node in graph.nodes:
        if value in node.inputs and (node.op != "If" or value in own_inputs(node)):
            return ""
        if value in node.inputs:
            names = {name for name, outer in captures(node).items() if outer == value}
            found |= {b for b in ("then", "else") if names & {*node.attrs[f"{b}_branch"].captured}}
    return found.pop() if len(found) == 1 else ""


def _only_joined(
    nodes: Sequence[Node], results: Collection[str], spec: TensorSpec, value: str, axes: set[int]
) -> bool:
    """Whether `value` is read as `find_caches` says; collects the axes of its joins."""
    if value in results:
        return False
    for node in nodes:
        if value not in node.inputs:
            continue
        if node.op == "If":
            if not _only_inside(node, spec, value, axes):
                return False
        elif node.op == "Concat":
            axes.add(int(node.attrs["axis"]) % max(len(spec.shape), 1))
        elif node.op in PASTS:
            if any(v == value and i not in PASTS[node.op] for i, v in enumerate(node.inputs)):
                return False
            axes.add(2)
        elif node.op == "Cast":
            if not _only_joined(nodes, results, spec, node.outputs[0], axes):
                return False
        elif node.op != "Shape":
            return False
    return True


def _only_inside(node: Node, spec: TensorSpec, value: str, axes: set[int]) -> bool:
    """Likewise of an If, whose branches read it as they call it."""
    names = [name for name, outer in captures(node).items() if outer == value]
    readers = [
        (body, name)
        for body in (node.attrs["then_branch"], node.attrs["else_branch"])
        for name in names
        if name in body.captured
    ]
    if value in own_inputs(node):
        return False
    if len(readers) == 1:
        free = [i for i, dim in enumerate(spec.shape) if i and isinstance(dim, str)]
        axes.update(free)
        return len(free) == 1
    return all(_only_joined(b.nodes, b.outputs, spec, name, axes) for b, name in readers)


def cache_lengths(graph: Graph) -> frozenset[str]:
    """Symbols that may be 0: lengths of the caches among the inputs."""
    return frozenset(dim for dim in graph.cache_dims() if isinstance(dim, str))
