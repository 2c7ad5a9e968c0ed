"""``apq.MatMul``, ``apq.Softmax``, ``apq.MatMul`` become ``apq.Attention`` over packed keys.

For processors, and for decoders on GPUs. Keys and values get nodes of their own, so that a cache
which is kept packed can take their place: ``apq.PackKeys(k)`` and ``apq.PackValues(v)`` with the
attribute ``order``, as ONNX Transpose to tokens first (`apq_tvm.ops.graph.caches.pack_keys`).
`read_in_place` then takes away every ``apq.PackValues`` that the kernel needs not, which reads
values by strides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from apq_tvm.errors import NotApplicable
from apq_tvm.launches.chains import EXPANDS, Chain, apart, chains
from apq_tvm.launches.shared_keys import RESHAPES, SharedKeys, Stored, attributes
from apq_tvm.types import Array, ImportedModel, Node

MOVES = (*RESHAPES, *EXPANDS, "Transpose")


@dataclass
class Packed:
    """The nodes of a model with ``apq.Attention``.

    Parameters
    ----------
    nodes : tuple of Node
    declined : dict of str to str
        By the name of a softmax that stays: why.
    weights : dict of str to ndarray
        Sinks, float32 [heads of q], beside the model's weights.
    """

    nodes: tuple[Node, ...]
    declined: dict[str, str] = field(default_factory=dict)
    weights: dict[str, Array] = field(default_factory=dict)


def pack_attention(model: ImportedModel, make: Callable[..., Any]) -> Packed:
    """Join what `make`, which is `apq_tvm.ops.graph.attention.attention`, takes.

    The node reads q, packed keys, values and, where there are, the mask and the sinks; its
    attributes are those of the function.
    """
    shared, known = SharedKeys(model), {value for node in model.nodes for value in node.outputs}
    made: dict[str, tuple[Node, ...]] = {}
    gone: set[str] = set()
    declined = dict.fromkeys(apart(model), "something else reads its scores or changes its weights")
    packs: dict[tuple[str, Stored], str] = {}
    sinks: dict[str, Array] = {}
    for chain in chains(model, sinks=True):
        try:
            sink = _sink(model, shared, chain)
            joined = _joined(shared, make, chain, packs, known, tuple(sink))
            sinks |= sink
        except NotApplicable as reason:
            declined[chain.soft.name] = str(reason)
            continue
        made[chain.last.name] = joined
        gone |= {node.name for node in (chain.first, chain.soft, *chain.bend, *chain.beside)}
    nodes: list[Node] = []
    for node in model.nodes:
        if node.name not in gone:
            nodes += made.get(node.name, (node,))
    return Packed(_used(model, nodes), declined, sinks)


def _sink(model: ImportedModel, shared: SharedKeys, chain: Chain) -> dict[str, Array]:
    """The sinks of a chain by their own name, float32 [heads of q]; nothing where it has none."""
    if not chain.sink:
        return {}
    array, heads = model.weights[chain.sink], shared.shape(chain.first.outputs[0])[1:-2]
    array = array.reshape((1,) * max(0, len(heads) + 3 - array.ndim) + array.shape)
    column = array[:1, ..., :1, :1]  # of one sequence and query; an Expand may have been computed
    same = array.dtype == "float32" and bool((array == column).all())
    if not same or not all(isinstance(n, int) for n in heads):
        raise NotApplicable(f"the sink {chain.sink!r} {array.shape} is no number for each head")
    numbers = np.broadcast_to(column[0, ..., 0, 0], [int(n) for n in heads])
    return {f"{chain.sink}:sink": np.ascontiguousarray(numbers).reshape(-1)}


def _used(model: ImportedModel, nodes: list[Node]) -> tuple[Node, ...]:
    """Without moves that nothing reads any more: the copies of keys for each head."""
    used, kept = {spec.name for spec in model.outputs}, list[Node]()
    for node in reversed(nodes):
        if used.isdisjoint(node.outputs) and node.op in MOVES:
            continue
        used.update(node.inputs)
        kept.append(node)
    return tuple(reversed(kept))


def _joined(
    shared: SharedKeys,
    make: Callable[..., Any],
    chain: Chain,
    packs: dict[tuple[str, Stored], str],
    known: set[str],
    sink: tuple[str, ...],
) -> tuple[Node, ...]:
    first, last = attributes(chain.first), attributes(chain.last)
    straight = tuple(range(len(first["perm_out"])))
    if first["perm_out"] != straight or last["perm_a"] != straight:
        raise NotApplicable("scores are transposed")
    q, k, v = chain.first.inputs[0], chain.first.inputs[1], chain.last.inputs[1]
    for name, perm in ((q, first["perm_a"]), (k, first["perm_b"]), (v, last["perm_b"])):
        if len(shared.shape(name)) != len(perm):
            raise NotApplicable(f"{name!r} has axes that the product does without")
    keys = shared.find(k, first["perm_b"], -1, -2)
    values = shared.find(v, last["perm_b"], -2, -1)
    attrs = {
        "order": first["perm_a"],
        "order_out": last["perm_out"],
        **_scores(shared, chain),
        "zero_masked": bool(chain.soft.attrs.get("zero_masked", False)),
        **({"sink": True} if sink else {}),
    }
    token, batch, *heads, size = (shared.shape(keys.name)[p] for p in keys.order)
    if token != shared.shape(values.name)[values.order[0]]:
        raise NotApplicable(f"{keys.name!r} and {values.name!r} are of different lengths")
    packed = ("keys", batch, *(heads or [1]), size, 16)
    spread = [shared.shape(values.name)[p] for p in values.order]
    ordered = {"order_values": tuple(range(len(spread)))}
    mask = [shared.shape(name) for name in chain.mask]
    make(shared.shape(q), packed, spread, *mask, **attrs, **ordered)
    name, nodes, inputs = chain.soft.name, [], [q]
    for op, stored in (("apq.PackKeys", keys), ("apq.PackValues", values)):
        if (op, stored) not in packs:
            value = f"{stored.name}.{op.removeprefix('apq.')}"
            while value in known:
                value += "_"
            known.add(value)
            packs[op, stored] = value
            nodes.append(Node(op, value, (stored.name,), (value,), {"order": stored.order}))
        inputs.append(packs[op, stored])
    inputs += (*chain.mask, *sink)
    joined = Node("apq.Attention", name, tuple(inputs), chain.last.outputs, {**attrs, **ordered})
    return (*nodes, joined)


def _scores(shared: SharedKeys, chain: Chain) -> dict[str, float]:
    """What is done to products: a factor, or a softcap ``c * tanh(product * factor / c)``."""
    scale, bend = float(chain.soft.attrs.get("scale", 1.0)), list(chain.bend)
    while bend and bend[0].op != "Tanh":
        scale *= shared.factor(bend.pop(0))
    if not bend:
        return {"scale": scale}
    if any(node.op == "Tanh" for node in bend[1:]):
        raise NotApplicable("its scores are changed by more than a factor and a softcap")
    inner = scale
    for node in bend[1:]:
        inner = inner * shared.factor(node)
    return {"scale": inner, "softcap": scale}


def read_in_place(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Let ``apq.Attention`` read values as they are stored, where a token's columns are neighbours.

    ``apq.PackValues`` that nothing reads any more are gone.
    """
    packs = {
        node.outputs[0]: node
        for node in nodes
        if node.op == "apq.PackValues" and node.attrs["order"][-1] == len(node.attrs["order"]) - 1
    }
    out: list[Node] = []
    for node in nodes:
        pack = packs.get(node.inputs[2]) if node.op == "apq.Attention" else None
        if pack is not None:
            inputs = (*node.inputs[:2], pack.inputs[0], *node.inputs[3:])
            attrs = {**node.attrs, "order_values": tuple(pack.attrs["order"])}
            node = replace(node, inputs=inputs, attrs=attrs)
        out.append(node)
    used = {name for node in out for name in node.inputs}
    return tuple(n for n in out if n.op != "apq.PackValues" or n.outputs[0] in used)
