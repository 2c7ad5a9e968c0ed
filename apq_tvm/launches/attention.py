"""``apq.MatMul``, ``apq.Softmax``, ``apq.MatMul`` of one another become ``apq.Attention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.errors import NotApplicable
from apq_tvm.launches.chains import Chain, chains, shape_of
from apq_tvm.types import ImportedModel, Node


def join_attention(model: ImportedModel, make: Callable[..., Any]) -> tuple[Node, ...]:
    """The model's nodes with ``apq.Attention``: q, k, v and, where there is one, what is added to
    scores. Its attributes are those of `apq_tvm.ops.gpu.attention.attention`.

    Scores or probabilities that something else reads too stay as they are, and so does what `make`,
    which is that function, declines.
    """
    made: dict[str, Node] = {}
    gone: set[str] = set()
    for chain in chains(model):
        joined = _joined(model, make, chain)
        if joined is not None:
            made[chain.last.name] = joined
            gone |= {chain.first.name, chain.soft.name}
    return tuple(made.get(node.name, node) for node in model.nodes if node.name not in gone)


def _joined(model: ImportedModel, make: Callable[..., Any], chain: Chain) -> Node | None:
    first, soft, last = chain.first, chain.soft, chain.last
    straight = tuple(range(len(first.attrs["perm_out"])))
    if chain.bend:
        return None
    if tuple(first.attrs["perm_out"]) != straight or tuple(last.attrs["perm_a"]) != straight:
        return None
    mask = chain.mask
    inputs = (*first.inputs, last.inputs[1], *mask)
    shapes = [shape_of(model, name) for name in inputs]
    attrs = {
        "orders": (first.attrs["perm_a"], first.attrs["perm_b"], last.attrs["perm_b"]),
        "order_out": last.attrs["perm_out"],
        "scale": float(soft.attrs.get("scale", 1.0)),
        "zero_masked": bool(soft.attrs.get("zero_masked", False)),
        "firsts": (0, 0, 0),
        "heads": 0,
    }
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    try:
        make(known[:3], mask=known[3] if mask else None, **attrs)
    except (NotApplicable, IndexError):  # another number of axes than the permutations have
        return None
    return Node("apq.Attention", soft.name, inputs, last.outputs, attrs)
