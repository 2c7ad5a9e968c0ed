"""Caches of keys and values as sessions keep them: nodes that round what attention reads.

A session in int8 stores each head of a token with one scale (`apq_tvm.ops.graph.caches.coded`), and
attention rounds its queries in the same way where the device multiplies int8
(`apq_tvm.ops.graph.attention`); a session in float16 rounds keys and values alone. A module's
outputs, the caches among them, are never rounded. A model without caches is taken for a decoder
that would have them: all its attention reads rounded keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from apq_tvm.errors import BadInput, NotApplicable
from apq_tvm.launches.chains import Chain, chains
from apq_tvm.launches.shared_keys import SharedKeys, Stored, attributes
from apq_tvm.sessions import cache_type
from apq_tvm.sessions.caches import find_pairs
from apq_tvm.types import ImportedModel, Node

ROUND = "apq.RoundCache"
"""``(x) -> x`` rounded: attributes ``dtype``, of numpy, and ``axis``, along which int8 has one
scale."""


@dataclass(frozen=True)
class Attention:
    """What one attention reads.

    Parameters
    ----------
    chain : Chain
    q : Stored
        As the product reads it: ``order`` ends with the axis of columns.
    keys, values : Stored
        Where caches would hold them.
    """

    chain: Chain
    q: Stored
    keys: Stored
    values: Stored


def attentions(model: ImportedModel) -> Iterator[Attention]:
    """Every attention of a model that reads its caches, or would if it had them."""
    shared = SharedKeys(model)
    presents = {pair.present for pair in find_pairs(model)}
    for chain in chains(model, sinks=True):
        first, last = attributes(chain.first), attributes(chain.last)
        try:
            keys = shared.find(chain.first.inputs[1], first["perm_b"], -1, -2)
            values = shared.find(chain.last.inputs[1], last["perm_b"], -2, -1)
        except NotApplicable:
            continue
        if not presents or {keys.name, values.name} <= presents:
            yield Attention(chain, Stored(chain.first.inputs[0], first["perm_a"]), keys, values)


def with_caches(model: ImportedModel, kv: str) -> ImportedModel:
    """Let attention read what caches of a type hold.

    Parameters
    ----------
    model : ImportedModel
    kv : str
        ``"f32"``, which changes nothing, ``"f16"`` or ``"i8"``.

    Raises
    ------
    BadScheme
        There is no such type.
    BadInput
        No attention of the model would read caches.
    """
    dtype = cache_type(kv)
    if dtype == "float32":
        return model
    found = list(attentions(model))
    if not found:
        raise BadInput(f"{model.name}: no attention reads caches, so that kv={kv!r} means nothing")
    rounded: dict[str, Node] = {}
    queries: dict[str, Node] = {}
    for attention in found:
        for stored in (attention.keys, attention.values):
            rounded[stored.name] = _node(stored, stored.name, dtype)
        if dtype == "int8":
            first = attention.chain.first
            queries[first.name] = _node(attention.q, first.name, dtype)
    return replace(model, nodes=tuple(_inserted(model, rounded, queries)))


def _node(stored: Stored, owner: str, dtype: str) -> Node:
    name = f"{owner}:{dtype}"
    return Node(ROUND, name, (stored.name,), (name,), {"axis": stored.order[-1], "dtype": dtype})


def _inserted(
    model: ImportedModel, rounded: dict[str, Node], queries: dict[str, Node]
) -> Iterator[Node]:
    """The nodes, what is rounded behind what makes it; products read rounded queries."""
    made = {name for node in model.nodes for name in node.outputs}
    yield from (node for name, node in rounded.items() if name not in made)
    for node in model.nodes:
        inputs = tuple(rounded[n].outputs[0] if n in rounded else n for n in node.inputs)
        if query := queries.get(node.name):
            yield replace(query, inputs=(inputs[0],))
            inputs = (query.outputs[0], *inputs[1:])
        yield replace(node, inputs=inputs)
        yield from (rounded[name] for name in node.outputs if name in rounded)
