"""Where a scale per input channel of linear layers can be folded into what makes that input.

Dividing x by s and multiplying the layer's weights by s changes nothing. The division costs nothing
where x comes from a normalisation's weights, or from another linear layer by way that only moves
numbers, mixes tokens (attention) or multiplies by something else (a gate). That holds only if
nobody else reads x: after a BERT layer's normalisation the residual does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.onnx_import.symbolic.dims import evaluate
from apq_tvm.types import F32, Array, ImportedModel, Node

NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
MOVES = ("Reshape", "apq.Reshape", "Transpose", "Squeeze", "Unsqueeze", "apq.Expand", "Identity")


@dataclass(frozen=True)
class Fold:
    """One value that linear layers read and whose channels can be scaled.

    Parameters
    ----------
    value : str
        x, [..., K].
    readers : tuple of str
        Names of the ``apq.Linear`` nodes that read it.
    source : str
        Name of the node whose weights are divided.
    divided : tuple of int
        Which inputs of `source` are: a norm's weights, or a linear layer's rows and bias.
    channels : int [K]
        Channel of the source that channel k of x comes from: several where key-value heads are
        repeated. They share a scale.
    """

    value: str
    readers: tuple[str, ...]
    source: str
    divided: tuple[int, ...]
    channels: NDArray[np.intp]

    @property
    def count(self) -> int:
        """Channels of the source."""
        return int(self.channels.max()) + 1


def find_folds(model: ImportedModel) -> tuple[list[Fold], dict[str, str]]:
    """Every value that can be scaled, and why the others cannot.

    Returns
    -------
    list of Fold
        In the model's order.
    dict of str to str
        Name of a linear layer → why its input cannot be scaled.
    """
    search = _Search(model)
    folds, reasons = [], {}
    for value, readers in search.layers.items():
        found = search.fold(value, readers)
        if isinstance(found, Fold):
            folds.append(found)
        else:
            reasons.update({name: found for name in readers})
    return folds, reasons


def apply_fold(model: ImportedModel, fold: Fold, scale: F32) -> ImportedModel:
    """Divide the source's channels by `scale` and multiply the readers' columns by it.

    Parameters
    ----------
    model : ImportedModel
    fold : Fold
    scale : float32 [fold.count]
        Positive.

    Returns
    -------
    ImportedModel
        Computes the same. A weight that other nodes read too is stored a second time.
    """
    nodes = {node.name: node for node in model.nodes}
    source = nodes[fold.source]
    changes: dict[tuple[str, int], Array] = {}
    for index in fold.divided:
        weight = model.weights[source.inputs[index]]
        by = scale if weight.ndim == 1 else scale[:, None]  # a linear layer's rows
        if source.op != "apq.Linear":
            by = scale
        changes[(source.name, index)] = (weight / by).astype(np.float32)
    columns = scale[fold.channels]
    for name in fold.readers:
        weight = model.weights[nodes[name].inputs[1]]
        changes[(name, 1)] = (weight * columns).astype(np.float32)
    return replace_weights(model, changes)


def replace_weights(
    model: ImportedModel, changes: Mapping[tuple[str, int], Array], label: str = "scaled"
) -> ImportedModel:
    """Give nodes other weights.

    Parameters
    ----------
    model : ImportedModel
    changes : mapping of (node name, input index) to ndarray
        The new weight. An input that was absent may be given one.
    label : str
        For the name of a copy.

    Returns
    -------
    ImportedModel
        Weights keep their names, unless other nodes or inputs read the old one too.
    """
    uses = Counter(v for node in model.nodes for v in node.inputs if v in model.weights)
    weights, nodes = dict(model.weights), list(model.nodes)
    taken = set(weights) | {v for node in nodes for v in (*node.inputs, *node.outputs)}
    for i, node in enumerate(nodes):
        inputs = list(node.inputs)
        for (name, index), array in changes.items():
            if name != node.name:
                continue
            inputs += [""] * (index + 1 - len(inputs))
            old = inputs[index]
            if not old or uses[old] > 1:
                uses[old] -= 1
                inputs[index] = _fresh(f"{old or node.name}.{label}", taken)
            weights[inputs[index]] = array
        if tuple(inputs) != node.inputs:
            nodes[i] = replace(node, inputs=tuple(inputs))
    return replace(model, nodes=tuple(nodes), weights=weights)


def _fresh(base: str, taken: set[str]) -> str:
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name


class _Search:
    """Facts about one graph that every fold needs."""

    def __init__(self, model: ImportedModel) -> None:
        self.model = model
        self.maker = {out: node for node in model.nodes for out in node.outputs if out}
        self.uses = Counter(v for node in model.nodes for v in node.inputs)
        self.uses.update(spec.name for spec in model.outputs)
        self.layers: dict[str, tuple[str, ...]] = {}
        self.weight_of: dict[str, str] = {}
        for node in model.nodes:
            if node.op == "apq.Linear":
                self.weight_of[node.name] = node.inputs[1]
                value = node.inputs[0]
                self.layers[value] = (*self.layers.get(value, ()), node.name)
        # Any sizes do: they only have to tell axes apart.
        names = sorted({d for s in model.inputs for d in s.shape if isinstance(d, str)})
        self.symbols = {name: 2 + i for i, name in enumerate(names)}

    def fold(self, value: str, readers: tuple[str, ...]) -> Fold | str:
        """The fold of one value, or why there is none."""
        if self.uses[value] != len(readers):
            return "its input is read elsewhere too (a residual, an output)"
        if shared := [name for name in readers if self.uses[self.weight_of[name]] > 1]:
            return f"other layers share the weight of {shared[0]!r}, which scales would store twice"
        path: list[tuple[Node, str]] = []
        source = self._source(value, path)
        if isinstance(source, str):
            return source
        node, divided, count = source
        if node.op == "apq.Linear" and self.uses[node.inputs[1]] > 1:
            return f"other layers share the weight of {node.name!r}, which scales would store twice"
        channels = self._channels(node, path, count)
        if channels is None:
            return f"channels of its input cannot be followed back to {node.name!r}"
        return Fold(value, readers, node.name, divided, channels)

    def _source(
        self, value: str, path: list[tuple[Node, str]]
    ) -> tuple[Node, tuple[int, ...], int] | str:
        """The node whose weights scale `value`, the inputs to divide, its channels."""
        node = self.maker.get(value)
        if node is None:
            return "its input is the model's"
        if path and self.uses[value] != 1:
            return "what makes its input is read elsewhere too"
        weights = self.model.weights
        if node.op in NORMS:
            gamma = weights.get(node.inputs[1])
            if gamma is None or gamma.ndim != 1 or any(node.outputs[1:]):
                return f"the weights of {node.name!r} are no vector"
            divided = tuple(i for i, name in enumerate(node.inputs) if i and name)
            return node, divided, len(gamma)
        if node.op == "apq.Linear":
            residual = len(node.inputs) > 3 and node.inputs[3]
            if node.attrs["activation"] not in ("", "relu") or residual:
                what = "a residual" if residual else node.attrs["activation"]
                return f"{node.name!r} ends in {what}, which scales do not pass"
            bias = (2,) if len(node.inputs) > 2 and node.inputs[2] else ()
            return node, (1, *bias), len(weights[node.inputs[1]])
        if node.op == "Mul":
            return self._product(node, path)
        if node.op in MOVES:
            path.append((node, node.inputs[0]))
            return self._source(node.inputs[0], path)
        if node.op == "apq.MatMul":
            shares = self.maker.get(node.inputs[0])
            if shares is not None and shares.op in ("apq.Softmax", "Softmax"):
                path.append((node, node.inputs[1]))
                return self._source(node.inputs[1], path)
        return f"its input comes from {node.op} {node.name!r}, which scales do not pass"

    def _product(
        self, node: Node, path: list[tuple[Node, str]]
    ) -> tuple[Node, tuple[int, ...], int] | str:
        """A Mul: by a vector of weights, or of a gate and a linear layer's output."""
        reason = f"no factor of {node.name!r} can be scaled"
        for index in (1, 0):
            weight = self.model.weights.get(node.inputs[index])
            width = self._shape(node.outputs[0])
            if weight is not None:
                if weight.ndim == 1 and width and len(weight) == width[-1]:
                    return node, (index,), len(weight)
                return f"the weights of {node.name!r} are no vector over channels"
        for index in (1, 0):
            if self._shape(node.inputs[index]) != self._shape(node.outputs[0]):
                continue
            tried = [*path, (node, node.inputs[index])]
            found = self._source(node.inputs[index], tried)
            if not isinstance(found, str):
                path[:] = tried
                return found
        return reason

    def _shape(self, value: str) -> tuple[int, ...] | None:
        """A shape with numbers for symbols."""
        spec = self.model.value_specs.get(value)
        try:
            return None if spec is None else tuple(evaluate(d, self.symbols) for d in spec.shape)
        except (ValueError, SyntaxError):
            return None

    def _channels(
        self, source: Node, path: list[tuple[Node, str]], count: int
    ) -> NDArray[np.intp] | None:
        """Push every source channel's number along the path, and see where it arrives."""
        shape = self._shape(source.outputs[0])
        if shape is None or shape[-1] != count:
            return None
        x = np.broadcast_to(np.arange(count), shape)
        for node, _ in reversed(path):
            moved = self._move(node, x)
            if moved is None:
                return None
            x = moved
        flat = x.reshape(-1, x.shape[-1])
        return np.array(flat[0], np.intp) if bool((flat == flat[0]).all()) else None

    def _move(self, node: Node, x: NDArray[Any]) -> NDArray[Any] | None:
        if node.op == "Mul":
            return x
        if node.op == "apq.MatMul":  # shares of tokens that are all alike: any token is the result
            scores = self._shape(node.inputs[0])
            if scores is None:
                return None
            rows = np.empty(scores).transpose(node.attrs["perm_a"]).shape[:-1]
            values = x.transpose(node.attrs["perm_b"])[..., :1, :]
            return np.broadcast_to(values, (*rows, values.shape[-1])).transpose(
                node.attrs["perm_out"]
            )
        if node.op == "Transpose":
            return x.transpose(node.attrs.get("perm", tuple(range(x.ndim))[::-1]))
        shape = self._shape(node.outputs[0])
        if shape is None:
            return None
        return np.broadcast_to(x, shape) if node.op == "apq.Expand" else x.reshape(shape)
