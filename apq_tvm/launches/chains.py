"""Attention in a graph: ``apq.MatMul``, ``apq.Softmax``, ``apq.MatMul`` of one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from apq_tvm.types import ImportedModel, Node

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Chain:
    """Scores, their softmax, and what those weigh; nothing else reads the first two's results."""

    first: Node
    soft: Node
    last: Node
    bend: tuple[Node, ...] = ()
    """Between the first two: factors and Tanh of a softcap."""

    @property
    def mask(self) -> tuple[str, ...]:
        """What is added to the scores, if anything is."""
        return tuple(name for name in self.soft.inputs[1:] if name)


def chains(model: ImportedModel) -> Iterator[Chain]:
    """Every such chain of a model."""
    makers = makers_of(model)
    uses = Counter(name for node in model.nodes for name in node.inputs)
    uses.update(spec.name for spec in model.outputs)
    for last in model.nodes:
        soft = makers.get(last.inputs[0]) if last.op == "apq.MatMul" else None
        if soft is None or soft.op != "apq.Softmax":
            continue
        first, bend = makers.get(soft.inputs[0]), []
        while first is not None and first.op in ("Tanh", "Mul", "Div"):
            bend.append(first)
            first = makers.get(next((x for x in first.inputs if x not in model.weights), ""))
        if first is None or first.op != "apq.MatMul":
            continue
        if all(uses[node.outputs[0]] == 1 for node in (soft, first, *bend)):
            yield Chain(first, soft, last, tuple(bend))


def apart(model: ImportedModel) -> tuple[str, ...]:
    """Names of softmaxes that weigh something in a product but are of no such chain."""
    found = {chain.soft.name for chain in chains(model)}
    weighing = {node.inputs[0] for node in model.nodes if node.op == "apq.MatMul"}
    soft = (n for n in model.nodes if n.op in ("Softmax", "apq.Softmax"))
    return tuple(n.name for n in soft if n.outputs[0] in weighing and n.name not in found)


def makers_of(model: ImportedModel) -> dict[str, Node]:
    """The node that makes each value."""
    return {name: node for node in model.nodes for name in node.outputs}


def shape_of(model: ImportedModel, name: str) -> Shape | None:
    """Of a value, where it is known."""
    if name in model.weights:
        return tuple(model.weights[name].shape)
    inputs = {spec.name: spec for spec in model.inputs}
    spec = model.value_specs.get(name) or inputs.get(name)
    return spec.shape if spec else None
