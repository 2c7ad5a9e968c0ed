"""How many nodes a file has, and its functions, before the inliner follows their calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from apq_tvm.errors import ImportFailed, UnsupportedModel

if TYPE_CHECKING:
    import onnx

DEEPEST = 100
"""Calls inside of calls; the inliner recurses."""

# Nodes that inlining may make: so many, or so many for each node of the file.
FREE_NODES, FOR_EACH = 1 << 14, 16

MOST_NODES = 40_000
"""Of a file: some seconds of import. The largest of exporters have a few thousand."""

_Key = tuple[str, str, str]


def check_count(model: onnx.ModelProto) -> None:
    """Refuse files of very many nodes.

    Raises
    ------
    UnsupportedModel
        There are more than `MOST_NODES`.
    """
    plain = len(model.graph.node) + sum(len(f.node) for f in model.functions)
    graphs = (model.graph.node, *(f.node for f in model.functions))
    nodes = plain if plain > MOST_NODES else sum(1 for g in graphs for _ in _operators(g))
    if nodes > MOST_NODES:
        raise UnsupportedModel(
            f"the file has {nodes} nodes, up to {MOST_NODES} can be compiled; export loops as Loop "
            "or Scan instead of writing out their rounds"
        )


def check_functions(model: onnx.ModelProto) -> None:
    """Refuse functions that call themselves, or make far more nodes than the file has.

    Raises
    ------
    ImportFailed
        Naming the function.
    """
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    if len(functions) < len(model.functions):
        raise ImportFailed("function names must be unique")
    calls = {key: list(_operators(f.node)) for key, f in functions.items()}
    sizes: dict[_Key, tuple[int, int]] = {}
    for key in functions:
        _measure(key, calls, sizes)
    called = list(_operators(model.graph.node))
    nodes = sum(sizes.get(key, (1, 0))[0] for key in called)
    there = len(called) + sum(map(len, calls.values()))
    if nodes > FREE_NODES + FOR_EACH * there:
        name = max(called, key=lambda key: sizes.get(key, (1, 0))[0])[1]
        raise ImportFailed(
            f"the functions of this file are {nodes} nodes where they are called, {name!r} above "
            f"all, and the file has {there}"
        )


def _operators(nodes: Iterable[onnx.NodeProto]) -> Iterator[_Key]:
    """What nodes and those inside of them call."""
    for node in nodes:
        yield node.domain, node.op_type, node.overload
        for attribute in node.attribute:
            yield from _operators(attribute.g.node)
            for graph in attribute.graphs:
                yield from _operators(graph.node)


def _measure(
    start: _Key, calls: dict[_Key, list[_Key]], sizes: dict[_Key, tuple[int, int]]
) -> None:
    """Nodes and depth of a function and of all it calls."""
    path = [start]
    while path:
        key = path[-1]
        open_calls = [k for k in calls[key] if k in calls and k not in sizes]
        if not open_calls:
            inner = [sizes[k] for k in calls[key] if k in sizes]
            plain = len(calls[key]) - len(inner)
            depth = 1 + max((d for _, d in inner), default=0)
            sizes[key] = plain + sum(count for count, _ in inner), depth
            path.pop()
            continue
        if open_calls[0] in path:
            raise ImportFailed(f"the function {key[1]!r} calls itself, if only through others")
        path.append(open_calls[0])
        if len(path) > DEEPEST:
            raise ImportFailed(
                f"the function {start[1]!r} calls others {DEEPEST} deep, the most that is followed"
            )
