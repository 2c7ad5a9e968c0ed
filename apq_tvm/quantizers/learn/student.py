"""The quantized model while all of it is trained, for `apq_tvm.quantizers.learn.distill`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from apq_tvm.errors import BadInput
from apq_tvm.formats.families import dequantize
from apq_tvm.quantizers.inputs.folds import NORMS, find_folds
from apq_tvm.quantizers.learn.learned import Learned
from apq_tvm.quantizers.learn.learning_run import Run
from apq_tvm.quantizers.torch.decode import Decoder
from apq_tvm.quantizers.torch.graph import TorchGraph, Values, as_tensor
from apq_tvm.quantizers.torch.moving import MovingCodes
from apq_tvm.quantizers.torch.ops import F, Tensor, torch
from apq_tvm.quantizers.torch.round import fake_activations
from apq_tvm.types import Array, ImportedModel, Node, QuantizedTensor, Scheme


@dataclass
class Student:
    """The quantized model while it is trained."""

    graph: TorchGraph
    decoders: dict[str, Decoder | MovingCodes]
    schemes: dict[str, Scheme]
    tables: Values  # of embeddings, which stay
    heads: dict[str, str]  # by the name of a table, the layer that has it as its weight
    steps: dict[str, Tensor]  # of float weights, by name, in `units`
    units: Values

    def parameters(self) -> list[Tensor]:
        """What is trained besides codes."""
        decoded = (p for decoder in self.decoders.values() for p in decoder.parameters())
        return [*decoded, *self.steps.values()]

    def read_by(self) -> dict[tuple[int, ...], list[Tensor]]:
        """`parameters` of fixed codes, by the widths that read them; ``(0,)`` without a choice."""
        found: dict[tuple[int, ...], list[Tensor]] = {}
        if self.steps:
            found[(0,)] = list(self.steps.values())
        for decoder in self.decoders.values():
            if isinstance(decoder, Decoder):
                for readers, parameter in decoder.read_by():
                    found.setdefault(readers, []).append(parameter)
        return found

    def moving(self) -> list[MovingCodes]:
        """Layers whose codes are trained."""
        return [d for d in self.decoders.values() if isinstance(d, MovingCodes)]

    def finish(self) -> dict[str, QuantizedTensor]:
        """Layers as trained."""
        return {name: decoder.finish() for name, decoder in self.decoders.items()}

    def weights(self) -> Values:
        """Float weights as trained, by name."""
        weights = self.graph.weights
        return {name: weights[name] + self.units[name] * s for name, s in self.steps.items()}

    def go_on(self, learned: Learned) -> None:
        """Be as an interrupted run left it, if it did; where it started stays known."""
        for name, tensor in learned.tensors.items():
            self.decoders[name].go_on(tensor)
        inputs = {node.name: node.inputs for node in self.graph.model.nodes}
        with torch.no_grad():
            for (node, index), weight in learned.weights.items():
                name = inputs[node][index]
                if name in self.steps:
                    unit = self.units[name]
                    step = (as_tensor(weight) - self.graph.weights[name]) / unit
                    self.steps[name].copy_(torch.where(unit == 0, 0.0, step))  # of a gain of 0

    def run(self, call: Mapping[str, Array], keep: Sequence[str], bits: int) -> Values:
        """The model's outputs at a width."""
        rounded: list[Any] = [None, None, None]

        def product(node: Node, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
            decoder = self.decoders.get(node.name)
            if decoder is None:
                return F.linear(x, w, bias)
            scheme = self.schemes[node.name]
            if rounded[0] is not x or rounded[1] != scheme:  # layers side by side share one x
                rounded[:] = x, scheme, fake_activations(x, scheme)
            return F.linear(rounded[2], decoder.weight(bits), bias)

        values, symbols = self.graph.begin(call)
        heads = {table: self.decoders[name].weight(bits) for table, name in self.heads.items()}
        weights = {**self.tables, **heads, **self.weights()}
        return self.graph.run_nodes(self.graph.model.nodes, values, symbols, keep, product, weights)


def student_of(run: Run) -> Student:
    """The model where tuning starts: as it was quantized.

    Raises
    ------
    BadInput
        If no linear layer is quantized.
    """
    model = run.quantized.model
    decoders: dict[str, Decoder | MovingCodes] = {}
    schemes: dict[str, Scheme] = {}
    tables: Values = {}
    heads: dict[str, str] = {}
    layers = run.quantized.layers
    linear = {name: layers[name] for name in _named(model, "apq.Linear") if name in layers}
    for node in model.nodes:
        key = layers.get(node.name)
        if key is None:
            continue
        tensor = run.quantized.tensors[key]
        if node.op == "apq.Embedding":
            sharing = [name for name, other in linear.items() if other == key]
            if len(sharing) == 1:  # of several each gets a weight of its own (`Learned.apply`)
                heads[_own(node.inputs[0])] = sharing[0]
            else:
                tables[_own(node.inputs[0])] = as_tensor(dequantize(tensor))
            continue
        weight = as_tensor(model.weights[node.inputs[1]])
        moves = run.kind == "qat"
        decoders[node.name] = (
            MovingCodes(tensor, weight, node.name, centred=True)
            if moves
            else Decoder(tensor, node.name)
        )
        schemes[node.name] = tensor.scheme
    if not decoders:
        raise BadInput(f"{run.model.name} has no quantized layer: nothing to learn")
    alone = not any(scheme.min_bits for scheme in schemes.values())
    units = _units(model, decoders) if alone else {}
    steps = {name: torch.zeros(model.weights[name].shape, requires_grad=True) for name in units}
    graph = TorchGraph(_with_own_tables(model, {*tables, *heads}))
    return Student(graph, decoders, schemes, tables, heads, steps, units)


def _named(model: ImportedModel, op: str) -> list[str]:
    return [node.name for node in model.nodes if node.op == op]


def _own(table: str) -> str:
    """What only embeddings read: a float head may share the table."""
    return f"{table}:quantized"


def _with_own_tables(model: ImportedModel, tables: Collection[str]) -> ImportedModel:
    """Quantized tables under names of their own."""
    nodes = [
        replace(node, inputs=(_own(node.inputs[0]), *node.inputs[1:]))
        if node.op == "apq.Embedding" and _own(node.inputs[0]) in tables
        else node
        for node in model.nodes
    ]
    return replace(model, nodes=tuple(nodes))


def _units(model: ImportedModel, layers: Mapping[str, object]) -> Values:
    """Float weights that are trained, by name, and what a step of 1 adds to them: gains (and
    offsets) of norms that only quantized layers read, and those layers' biases."""
    nodes = {node.name: node for node in model.nodes}
    found = [
        nodes[fold.source].inputs[index]
        for fold in find_folds(model)[0]
        if nodes[fold.source].op in NORMS and all(name in layers for name in fold.readers)
        for index in fold.divided
    ]
    units = {name: as_tensor(np.abs(model.weights[name])) for name in found}
    biases = [node.inputs[2] for node in model.nodes if node.name in layers and _biased(node)]
    return units | {name: as_tensor(np.abs(model.weights[name])).mean() for name in biases}


def _biased(node: Node) -> bool:
    return len(node.inputs) > 2 and bool(node.inputs[2])
