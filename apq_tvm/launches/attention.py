"""``apq.MatMul``, ``apq.Softmax``, ``apq.MatMul`` of one another become ``apq.Attention``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from apq_tvm.errors import NotApplicable
from apq_tvm.types import ImportedModel, Node


def join_attention(model: ImportedModel, make: Callable[..., Any]) -> tuple[Node, ...]:
    """The model's nodes with ``apq.Attention``: q, k, v and, where there is one, what is added to
    scores. Its attributes are those of `apq_tvm.ops.gpu.attention.attention`.

    Scores or probabilities that something else reads too stay as they are, and so does what `make`,
    which is that function, declines.
    """
    makers = {name: node for node in model.nodes for name in node.outputs}
    uses = Counter(name for node in model.nodes for name in node.inputs)
    uses.update(spec.name for spec in model.outputs)
    made: dict[str, Node] = {}
    gone: set[str] = set()
    for last in model.nodes:
        soft = makers.get(last.inputs[0]) if last.op == "apq.MatMul" else None
        first = makers.get(soft.inputs[0]) if soft and soft.op == "apq.Softmax" else None
        if soft is None or first is None or first.op != "apq.MatMul":
            continue
        if any(uses[node.outputs[0]] != 1 for node in (soft, first)):
            continue
        joined = _joined(model, make, first, soft, last)
        if joined is not None:
            made[last.name] = joined
            gone |= {first.name, soft.name}
    return tuple(made.get(node.name, node) for node in model.nodes if node.name not in gone)


def _joined(
    model: ImportedModel, make: Callable[..., Any], first: Node, soft: Node, last: Node
) -> Node | None:
    straight = tuple(range(len(first.attrs["perm_out"])))
    if tuple(first.attrs["perm_out"]) != straight or tuple(last.attrs["perm_a"]) != straight:
        return None
    mask = [name for name in soft.inputs[1:] if name]
    inputs = (*first.inputs, last.inputs[1], *mask)
    shapes = [_shape(model, name) for name in inputs]
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


def _shape(model: ImportedModel, name: str) -> tuple[int | str, ...] | None:
    """Of a value, where it is known."""
    if name in model.weights:
        return tuple(model.weights[name].shape)
    inputs = {spec.name: spec for spec in model.inputs}
    spec = model.value_specs.get(name) or inputs.get(name)
    return spec.shape if spec else None
