"""Layers whose columns a file has in another order read their input in that order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from apq_tvm.types import WEIGHT_INPUT, Array, ImportedModel, Node, TensorSpec

Order = NDArray[np.int64]


def gather_inputs(model: ImportedModel, orders: Mapping[str, Order]) -> ImportedModel:
    """Put a Gather before every layer whose weight has its columns in another order.

    Parameters
    ----------
    model : ImportedModel
    orders : mapping of str to int64 [K]
        By weight of linear layers: which column comes where.

    Returns
    -------
    ImportedModel
        Layers that read the same in the same order share a Gather.
    """
    if not orders:
        return model
    gathers = _Gathers(model)
    nodes: list[Node] = []
    for node in model.nodes:
        number = WEIGHT_INPUT.get(node.op)
        order = None if number is None else orders.get(node.inputs[number])
        if order is not None:
            new, sorted_x = gathers.before(node, order)
            nodes += new
            node = replace(node, inputs=(sorted_x, *node.inputs[1:]))
        nodes.append(node)
    return replace(
        model, nodes=tuple(nodes), weights=gathers.weights, value_specs=gathers.value_specs
    )


class _Gathers:
    """Those made so far, and what they add to a model."""

    def __init__(self, model: ImportedModel) -> None:
        self.weights: dict[str, Array] = dict(model.weights)
        self.value_specs: dict[str, TensorSpec] = dict(model.value_specs)
        self._specs = {spec.name: spec for spec in model.inputs} | self.value_specs
        outputs = (value for node in model.nodes for value in node.outputs)
        self._taken = {*self.weights, *self._specs, *outputs, *(n.name for n in model.nodes)}
        self._made: dict[tuple[str, bytes], str] = {}
        self._constants: dict[bytes, str] = {}

    def before(self, node: Node, order: Order) -> tuple[list[Node], str]:
        """The nodes to put before a layer, and what it reads then."""
        x, content = node.inputs[0], order.tobytes()
        if (x, content) in self._made:
            return [], self._made[x, content]
        if content not in self._constants:
            self._constants[content] = name = self._fresh(f"{node.name}.order")
            self.weights[name] = order
        self._made[x, content] = result = self._fresh(f"{node.name}.sorted")
        if x in self._specs:
            self.value_specs[result] = replace(self._specs[x], name=result)
        inputs = (x, self._constants[content])
        gather = Node("Gather", self._fresh(f"{node.name}.gather"), inputs, (result,), {"axis": -1})
        return [gather], result

    def _fresh(self, base: str) -> str:
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}.{count}"
        self._taken.add(name)
        return name
