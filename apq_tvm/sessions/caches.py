"""Pairs of a past and a present, and attention's caches as nodes that grow in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from apq_tvm.errors import NotApplicable
from apq_tvm.formats.caches import CODED, check_heads
from apq_tvm.types import ImportedModel, Node

PACKS = {"apq.PackKeys": "keys", "apq.PackValues": "rows"}
"""Nodes that lay out what attention reads → the layout (`apq_tvm.ops.graph.caches.grown`)."""


@dataclass(frozen=True)
class Pair:
    """An input that holds earlier tokens, and the output that holds those of this run too.

    `node` makes the output of the input; `axis` of the input counts tokens.
    """

    past: str
    present: str
    node: Node
    axis: int


def find_pairs(model: ImportedModel) -> list[Pair]:
    """Every input that one node joins with what is new, to an output."""
    inputs = {spec.name: spec for spec in model.inputs}
    outputs = {spec.name for spec in model.outputs}
    pairs = []
    for node in model.nodes:
        past = node.inputs[0] if node.inputs else ""
        if past not in inputs or node.outputs[0] not in outputs:
            continue
        rank = len(inputs[past].shape)
        if node.op == "apq.AppendCache":
            pairs.append(Pair(past, node.outputs[0], node, 2))
        elif node.op == "Concat" and len(node.inputs) == 2:
            axis = int(node.attrs["axis"]) % rank
            if isinstance(inputs[past].shape[axis], str):
                pairs.append(Pair(past, node.outputs[0], node, axis))
    return pairs


MOVES = frozenset("Expand Reshape Squeeze Transpose Unsqueeze apq.Expand apq.Reshape".split())
"""What repeats keys for groups of heads, until attention reads each of them once."""


def _read(model: ImportedModel) -> list[Node]:
    """The model's nodes without those of `MOVES` that nothing reads."""
    wanted = {spec.name for spec in model.outputs}
    nodes = []
    for node in reversed(model.nodes):
        if node.op not in MOVES or wanted & {*node.outputs}:
            nodes.append(node)
            wanted |= {*node.inputs}
    return nodes[::-1]


def in_place(model: ImportedModel, pairs: Sequence[Pair], cache: str) -> list[Node]:
    """The model's nodes with an ``apq.Cache`` for what lays a present as attention reads it.

    ``apq.Cache`` has the inputs of what joins past and new. Its attributes are ``orders``, of both
    to ``[T, B, N, H]``; ``layout``, ``dtype`` and ``total``, the dimension T. Of int8 and int4
    it has two outputs, scales and codes (`apq_tvm.ops.graph.caches.coded`), and ``apq.Attention``
    reads the scales of keys and of values behind both.

    Raises
    ------
    NotApplicable
        Something else reads a past or a present, attention reads a cache and what is none, or codes
        are not made of such heads.
    """
    by_present = {pair.present: pair for pair in pairs}
    owners = {pair.past: pair.node.name for pair in pairs}
    makers = {name: node for node in model.nodes for name in node.outputs}
    nodes = []
    for node in _read(model):
        if node.op in PACKS and node.inputs[0] in by_present:
            nodes.append(_cache(model, by_present[node.inputs[0]], node, makers, cache))
            continue
        for name in node.inputs:
            if name in by_present or owners.get(name, node.name) != node.name:
                raise NotApplicable(
                    f"{node.op} '{node.name}' reads the cache '{name}', which attention alone may "
                    "read in a session"
                )
        nodes.append(node)
    return _read_as_kept(nodes, cache)


def _read_as_kept(nodes: list[Node], cache: str) -> list[Node]:
    """Let attention read what ``apq.Cache`` gives: of codes the scales too."""
    caches = {node.outputs[-1]: node for node in nodes if node.op == "apq.Cache"}
    out = []
    for node in nodes:
        kept = [caches.get(name) for name in node.inputs[1:3]]
        if node.op == "apq.Attention" and any(kept):
            keys, values = kept
            if keys is None or values is None:
                raise NotApplicable(f"'{node.name}' has a cache of keys or of values alone")
            if cache in CODED:
                scales = (keys.outputs[0], values.outputs[0])
                node = replace(node, inputs=(*node.inputs[:3], *scales, *node.inputs[3:]))
        out.append(node)
    return out


def _cache(
    model: ImportedModel, pair: Pair, pack: Node, makers: dict[str, Node], dtype: str
) -> Node:
    order: tuple[int, ...] = tuple(pack.attrs["order"])
    if len(order) != 4 or order[0] != pair.axis:
        raise NotApplicable(f"the cache '{pair.past}' grows along axis {pair.axis}")
    if dtype in CODED:
        shape = model.value_specs[pair.present].shape
        check_heads(shape[order[2]], shape[order[3]], dtype)
    past, new, *start = pair.node.inputs
    new_order: tuple[int, ...] = order
    if pair.node.op == "apq.AppendCache":  # [B, S, N, H] behind [B, N, P, H]
        new_order = tuple((0, 2, 1, 3)[axis] for axis in order)
    moved = makers.get(new)
    if moved is not None and moved.op == "Transpose":  # read where it lies
        perm = moved.attrs["perm"]
        new, new_order = moved.inputs[0], tuple(int(perm[axis]) for axis in new_order)
    attrs = {
        "orders": (order, new_order),
        "layout": PACKS[pack.op],
        "dtype": dtype,
        "total": model.value_specs[pair.present].shape[pair.axis],
    }
    outputs = (f"{pack.outputs[0]}.scales",) * (dtype in CODED) + tuple(pack.outputs)
    return Node("apq.Cache", pack.name, (past, new, *start), outputs, attrs)
