"""Attention in a graph: ``apq.MatMul``, ``apq.Softmax``, ``apq.MatMul`` of one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from apq_tvm.types import ImportedModel, Node

Shape = tuple[int | str, ...]

EXPANDS = ("apq.Expand", "Expand")
SLICES = ("apq.Slice", "Slice")


@dataclass(frozen=True)
class Chain:
    """Scores, their softmax, and what those weigh; nothing else reads the first two's results."""

    first: Node
    soft: Node
    last: Node
    bend: tuple[Node, ...] = ()
    """Between the first two, the last of them first: factors and Tanh of a softcap."""
    sink: str = ""
    """A constant: the score of each head that has no value, a column behind the others."""
    beside: tuple[Node, ...] = ()
    """What puts that column behind the scores, and takes its weight away."""
    added: str = ""
    """The mask of a chain with a sink."""

    @property
    def mask(self) -> tuple[str, ...]:
        """What is added to the scores, if anything is."""
        return tuple(name for name in (*self.soft.inputs[1:], self.added) if name)


def chains(model: ImportedModel, sinks: bool = False) -> Iterator[Chain]:
    """Every such chain of a model; those with `sinks` where they are asked for."""
    makers = makers_of(model)
    uses = Counter(name for node in model.nodes for name in node.inputs)
    uses.update(spec.name for spec in model.outputs)
    for last in model.nodes:
        soft = makers.get(last.inputs[0]) if last.op == "apq.MatMul" else None
        if soft is None:
            continue
        if soft.op in SLICES and sinks:
            chain = _with_sink(model, makers, last, soft)
        elif soft.op == "apq.Softmax":
            first, bend = _scores(model, makers, soft.inputs[0])
            chain = Chain(first, soft, last, bend) if first is not None else None
        else:
            continue
        if chain is None:
            continue
        mine = (chain.soft, chain.first, *chain.bend, *chain.beside)
        inside = Counter(name for node in (*mine, last) for name in node.inputs)
        if all(uses[node.outputs[0]] == inside[node.outputs[0]] for node in mine):
            yield chain


def _scores(
    model: ImportedModel, makers: Mapping[str, Node], name: str
) -> tuple[Node | None, tuple[Node, ...]]:
    """The product behind factors and a softcap, and those."""
    first, bend = makers.get(name), list[Node]()
    while first is not None and first.op in ("Tanh", "Mul", "Div"):
        bend.append(first)
        first = makers.get(next((x for x in first.inputs if x not in model.weights), ""))
    return (first if first is not None and first.op == "apq.MatMul" else None), tuple(bend)


def _without_top(makers: Mapping[str, Node], name: str) -> tuple[str, tuple[Node, ...]]:
    """What scores were before their largest was taken off, which softmax does by itself; and the
    nodes that did it."""
    less = makers.get(name)
    top = makers.get(less.inputs[1]) if less is not None and less.op == "Sub" else None
    if less is None or top is None or top.op != "ReduceMax" or top.inputs[0] != less.inputs[0]:
        return name, ()
    return less.inputs[0], (less, top)


def _with_sink(
    model: ImportedModel, makers: Mapping[str, Node], last: Node, cut: Node
) -> Chain | None:
    """A chain whose scores have a column of a constant behind them (arXiv:2309.17453)."""
    soft = makers.get(cut.inputs[0])
    if soft is None or soft.op != "apq.Softmax":
        return None
    joined, less = _without_top(makers, soft.inputs[0])
    join = makers.get(joined)
    if join is None or join.op != "Concat" or len(join.inputs) != 2:
        return None
    scores, column = (shape_of(model, name) for name in (join.inputs[0], join.outputs[0]))
    if scores is None or column is None or shape_of(model, cut.outputs[0]) != scores:
        return None
    end = len(column) - 1
    if (
        _taken(model, cut) != (end, 0, 1)
        or int(join.attrs["axis"]) % len(column) != end
        or any(soft.inputs[1:])
    ):
        return None
    spread = makers.get(join.inputs[1])
    sink = spread.inputs[0] if spread is not None and spread.op in EXPANDS else join.inputs[1]
    if sink not in model.weights or float(soft.attrs.get("scale", 1.0)) != 1.0:
        return None
    add = makers.get(join.inputs[0])
    if add is None or add.op != "Add":
        first, bend = _scores(model, makers, join.inputs[0])
        return (
            Chain(first, soft, last, bend, sink, (cut, join, *less)) if first is not None else None
        )
    for inner, mask in (add.inputs, add.inputs[::-1]):
        first, bend = _scores(model, makers, inner)
        if first is not None and shape_of(model, inner) == scores:
            return Chain(first, soft, last, bend, sink, (cut, join, add, *less), mask)
    return None


def _taken(model: ImportedModel, cut: Node) -> tuple[int, ...]:
    """Axis, start and step of a slice of one axis that says them in numbers, else nothing.

    Where all sizes are numbers it is ONNX's own, whose end the shapes tell.
    """
    if cut.op == "apq.Slice":
        found: list[Any] = [cut.attrs[key] for key in ("axes", "starts", "steps")]
    else:
        names = (*cut.inputs, "", "")
        found = [model.weights.get(names[3]), model.weights.get(names[1])]
        found.append(model.weights.get(names[4]) if names[4] else (1,))
    if any(part is None or len(part) != 1 or isinstance(part[0], str) for part in found):
        return ()
    axis, first, step = (int(part[0]) for part in found)
    return (axis % len(shape_of(model, cut.outputs[0]) or (0,)), first, step)


def apart(model: ImportedModel) -> tuple[str, ...]:
    """Names of softmaxes that weigh something in a product but are of no such chain."""
    makers, found = makers_of(model), {chain.soft.name for chain in chains(model, sinks=True)}
    weighing = {node.inputs[0] for node in model.nodes if node.op == "apq.MatMul"}
    cuts = [makers[name] for name in weighing if name in makers and makers[name].op == "apq.Slice"]
    weighing |= {cut.inputs[0] for cut in cuts}
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
