"""Linear layers of one x whose results one attention reads become one layer: q, k and v."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from apq_tvm.launches.together import are_plain, together
from apq_tvm.types import Node, QuantizedModel, TensorSpec


def join_siblings(quantized: QuantizedModel) -> QuantizedModel:
    """Join q, k and v of every ``apq.Attention`` whose heads are as many and as wide.

    They keep their codes, side by side. Layers of other formats than integers stay apart (their
    bits may be chosen one by one, their tables belong to a layer), and so do layers of several
    schemes, and such that something else reads too.
    """
    model = quantized.model
    makers = {name: node for node in model.nodes for name in node.outputs}
    uses = Counter(name for node in model.nodes for name in node.inputs)
    uses.update(spec.name for spec in model.outputs)
    for node in model.nodes:
        if node.op == "apq.Attention":
            found = _find(quantized, makers, uses, node)
            if found is not None:
                quantized = found.joined(quantized)
    return quantized


@dataclass(frozen=True)
class _Siblings:
    """q, k and v: layers, what gives their results heads, and who reads those."""

    layers: tuple[Node, ...]
    shapes: tuple[Node, ...]
    attention: Node
    heads: int
    width: int

    def joined(self, quantized: QuantizedModel) -> QuantizedModel:
        """The model with these as one."""
        model, first = quantized.model, self.layers[0]
        made = together(quantized, self.layers)
        name, weights = made.name, made.weights
        lead = [int(n) for n in weights[self.shapes[0].inputs[1]][:-2]]
        count = len(self.layers) * self.heads
        shape = f"shape:{'x'.join(map(str, (*lead, count, self.width)))}"
        weights[shape] = np.array([*lead, count, self.width], np.int64)
        y, by_heads = f"{name}.y", f"{name}.heads"
        linear = Node(first.op, name, made.inputs, (y,), first.attrs)
        reshape = Node("Reshape", f"{name}.heads", (y, shape), (by_heads,), self.shapes[0].attrs)
        specs = dict(model.value_specs)
        dims = specs[self.layers[0].outputs[0]].shape[:-1]
        specs[y] = TensorSpec(y, "float32", (*dims, count * self.width))
        specs[by_heads] = TensorSpec(by_heads, "float32", (*dims, count, self.width))
        attention = replace(
            self.attention,
            inputs=(by_heads, by_heads, by_heads, *self.attention.inputs[3:]),
            attrs={
                **self.attention.attrs,
                "firsts": tuple(i * self.heads for i in range(len(self.layers))),
                "heads": self.heads,
            },
        )
        gone = {node.name for node in (*self.layers[1:], *self.shapes)}
        nodes: list[Node] = []
        for node in model.nodes:
            if node.name == first.name:
                nodes += [linear, reshape]
            elif node.name == self.attention.name:
                nodes.append(attention)
            elif node.name not in gone:
                nodes.append(node)
        model = replace(model, nodes=tuple(nodes), weights=weights, value_specs=specs)
        return made.put_into(quantized, model)


def _find(
    quantized: QuantizedModel,
    makers: Mapping[str, Node],
    uses: Mapping[str, int],
    attention: Node,
) -> _Siblings | None:
    model, reads = quantized.model, attention.inputs[:3]
    shapes = [makers.get(name) for name in reads]
    layers = [makers.get(node.inputs[0]) if node else None for node in shapes]
    if len(set(reads)) != len(reads) or attention.attrs["heads"]:
        return None
    for value, shape, layer in zip(reads, shapes, layers, strict=True):
        if shape is None or layer is None or shape.op != "Reshape" or layer.op != "apq.Linear":
            return None
        if uses[value] != 1 or uses[layer.outputs[0]] != 1 or layer.inputs[3:4] not in ((), ("",)):
            return None
        if layer.name not in quantized.layers or shape.inputs[1] not in model.weights:
            return None
    nodes = [layer for layer in layers if layer is not None]
    by_heads = [shape for shape in shapes if shape is not None]
    orders = attention.attrs["orders"]
    ends = {tuple(model.weights[node.inputs[1]].tolist()) for node in by_heads}
    alike = len(ends) == 1 and len({node.inputs[0] for node in nodes}) == 1
    alike = alike and all(node.attrs == nodes[0].attrs for node in nodes)
    if not alike or not are_plain([quantized.tensors[quantized.layers[n.name]] for n in nodes]):
        return None
    (end,) = ends
    rank, heads, width = len(end), int(end[-2]), int(end[-1])
    wide = {model.weights[node.inputs[1]].shape[0] for node in nodes}
    if rank < 3 or heads <= 0 or wide != {heads * width}:
        return None
    if any(order[-3] != rank - 2 or rank - 1 not in order[-2:] for order in orders):
        return None  # heads are not the last axis but one, or are part of a product
    return _Siblings(tuple(nodes), tuple(by_heads), attention, heads, width)
