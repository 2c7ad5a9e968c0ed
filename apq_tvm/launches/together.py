"""Several linear layers of one x as one: rows of weights one below the other."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from apq_tvm.types import Array, ImportedModel, Node, QuantizedModel, QuantizedTensor


@dataclass(frozen=True)
class Together:
    """One layer that stands for several.

    Parameters
    ----------
    names : tuple of str
        Of the several.
    name : str
        Its own.
    tensor : QuantizedTensor
    weights : dict of str to ndarray
        The model's, its weight and bias among them.
    inputs : (str, str, str, str)
        Of its node: x, weight, bias or ``""``, and no residual.
    """

    names: tuple[str, ...]
    name: str
    tensor: QuantizedTensor
    weights: dict[str, Array]
    inputs: tuple[str, str, str, str]

    def put_into(self, quantized: QuantizedModel, model: ImportedModel) -> QuantizedModel:
        """`model` with its tensor instead of theirs, unless another layer has those too."""
        key = f"{self.inputs[1]}:{self.tensor.scheme}"
        layers = {n: k for n, k in quantized.layers.items() if n not in self.names}
        layers |= {self.name: key}
        used = set(layers.values())
        tensors = {k: t for k, t in quantized.tensors.items() if k in used} | {key: self.tensor}
        return replace(quantized, model=model, tensors=tensors, layers=layers)


def together(quantized: QuantizedModel, layers: Sequence[Node]) -> Together:
    """Put layers of one x whose tensors are plain (`are_plain`) together."""
    weights = dict(quantized.model.weights)
    names = tuple(layer.name for layer in layers)
    name = _joined_name(names)
    tensor = _beside([quantized.tensors[quantized.layers[n]] for n in names])
    weight = _joined_name([layer.inputs[1] for layer in layers])
    weights[weight] = np.concatenate([weights[layer.inputs[1]] for layer in layers])
    bias, of_bias = _bias_of(layers, weights), ""
    if bias is not None:
        of_bias = f"{name}.bias"
        weights[of_bias] = bias
    return Together(names, name, tensor, weights, (layers[0].inputs[0], weight, of_bias, ""))


def _joined_name(names: Sequence[str]) -> str:
    """``a/q/w``, ``a/k/w`` and ``a/v/w`` are ``a/q+k+v/w``: only parts that differ are repeated."""
    parts = [re.split(r"(?<=[/.])|(?=[/.])", name) for name in names]
    start = _alike(parts)
    end = _alike([part[start:][::-1] for part in parts])
    middles = ["".join(part[start : len(part) - end]) for part in parts]
    first = parts[0]
    return "".join(first[:start]) + "+".join(middles) + "".join(first[len(first) - end :])


def _alike(lists: Sequence[Sequence[str]]) -> int:
    """How many entries all begin with."""
    return sum(1 for _ in takewhile(lambda same: len(set(same)) == 1, zip(*lists, strict=False)))


def are_plain(tensors: Sequence[QuantizedTensor], families: Collection[str] = ("int",)) -> bool:
    """Of one scheme of these families, with nothing that belongs to a whole layer."""
    first = tensors[0]
    return all(
        tensor.scheme == first.scheme
        and tensor.scheme.family in families
        and tensor.tables.keys() == first.tables.keys()
        and all(len(table) == len(tensor.codes) for table in tensor.tables.values())
        and (tensor.zeros is None) == (first.zeros is None)
        for tensor in tensors
    )


def _beside(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Rows of several tensors, one after the other."""
    zeros = [tensor.zeros for tensor in tensors if tensor.zeros is not None]
    names = tensors[0].tables
    return replace(
        tensors[0],
        tables={key: np.concatenate([tensor.tables[key] for tensor in tensors]) for key in names},
        codes=np.concatenate([tensor.codes for tensor in tensors]),
        scales=np.concatenate([tensor.scales for tensor in tensors]),
        zeros=np.concatenate(zeros) if zeros else None,
    )


def _bias_of(layers: Sequence[Node], weights: Mapping[str, Array]) -> Array | None:
    """Biases side by side, zeros where a layer has none; None where all have none."""
    given = [layer.inputs[2] if len(layer.inputs) > 2 else "" for layer in layers]
    if not any(given):
        return None
    sizes = [weights[layer.inputs[1]].shape[0] for layer in layers]
    parts = [
        weights[name].reshape(-1) if name else np.zeros(size, np.float32)
        for name, size in zip(given, sizes, strict=True)
    ]
    return np.concatenate([np.broadcast_to(p, s) for p, s in zip(parts, sizes, strict=True)])
