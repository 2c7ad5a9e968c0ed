"""Caches of keys and values as sessions keep them: nodes that round what attention reads.

A session in int8 stores each head of a token with one scale, one in int4 groups of its columns with
a scale and a least (`apq_tvm.ops.graph.caches.coded`), and attention rounds its queries to int8
where the device multiplies bytes (`apq_tvm.ops.graph.attention`); a session in float16 rounds keys
and values alone. A module's
outputs, the caches among them, are never rounded. A model without caches is taken for a decoder
that would have them: all its attention reads rounded keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from apq_tvm.errors import BadInput, NotApplicable
from apq_tvm.formats.caches import CODED, group_size
from apq_tvm.launches.chains import Chain, chains, shape_of
from apq_tvm.launches.shared_keys import SharedKeys, Stored, attributes
from apq_tvm.sessions import cache_type
from apq_tvm.sessions.caches import find_pairs
from apq_tvm.types import ImportedModel, Node

ROUND = "apq.RoundCache"
"""``(x) -> x`` rounded: attributes ``dtype``, numpy's or ``"int4"``, and ``axis``, along which
codes have scales."""


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
        One of `apq_tvm.formats.caches.CACHES`; ``"f32"`` changes nothing.

    Raises
    ------
    BadScheme
        There is no such type.
    BadInput
        No attention of the model would read caches, or int4 has no groups for the columns of its
        heads.
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
            check_groups(model, stored, dtype)
            rounded[stored.name] = _node(stored, stored.name, dtype)
        if dtype in CODED:
            first = attention.chain.first
            queries[first.name] = _node(attention.q, first.name, "int8")
    return replace(model, nodes=tuple(_inserted(model, rounded, queries)))


def check_groups(model: ImportedModel, stored: Stored, dtype: str) -> None:
    """Raise BadInput where int4 has no groups for the columns of keys or values."""
    shape = shape_of(model, stored.name)
    if dtype == "int4" and shape is not None:
        try:
            group_size(shape[stored.order[-1]])
        except NotApplicable as why:
            raise BadInput(f"{model.name}: '{stored.name}' has {why}") from None


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
