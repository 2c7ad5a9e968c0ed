"""What a module stores: how many weights in how many bytes. The one place that counts them.

Everything a node reads and no node makes is a weight: quantized layers and tables, linear layers
and tables that stay float, filters of convolutions, gains of norms, biases. A weight counts once
however many layers read it; its bytes count once for every form it is stored in, so that a table
whose head has another scheme takes the bits of both. Integers that steer the graph (shapes, axes)
do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from apq_tvm.formats import nbytes_at
from apq_tvm.types import WEIGHT_INPUT, ImportedModel, QuantizedModel


@dataclass(frozen=True)
class Stored:
    """Some weights and what they take.

    Parameters
    ----------
    weights : int
    nbytes : int
        Codes, scales, zero points and tables, without a layout's padding.
    """

    weights: int = 0
    nbytes: int = 0

    @property
    def bits(self) -> float:
        """Bits per weight; 0 where there are none."""
        return 8 * self.nbytes / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class Storage:
    """What a model stores.

    Parameters
    ----------
    all : Stored
        Everything.
    quantized, linear, embedding : Stored
        The part that is quantized, and its linear layers and tables. What a table shares with a
        linear layer is in all three.
    """

    all: Stored
    quantized: Stored
    linear: Stored
    embedding: Stored


def storage(quantized: QuantizedModel, bits: int = 0) -> Storage:
    """Count what a quantized model stores.

    Parameters
    ----------
    quantized : QuantizedModel
    bits : int
        Width of any-precision layers: only the planes and the table that it reads count. 0 is all.
    """
    model = quantized.model
    keys: dict[str, dict[str, str]] = {op: {} for op in WEIGHT_INPUT}
    for node in model.nodes:
        key = quantized.layers.get(node.name)
        if key is not None:
            keys[node.op][key] = node.inputs[WEIGHT_INPUT[node.op]]

    def count(form: Mapping[str, str], floats: Collection[str] = ()) -> Stored:
        """`form` is quantized tensors and the names of their weights."""
        tensors = [quantized.tensors[key] for key in form]
        coded = sum(nbytes_at(t, bits if t.scheme.min_bits else 0) for t in tensors)
        return Stored(
            sum(model.weights[name].size for name in {*form.values(), *floats}),
            coded + sum(model.weights[name].nbytes for name in floats),
        )

    linear, embedding = keys["apq.Linear"], keys["apq.Embedding"]
    both = {**linear, **embedding}
    floats = float_weights(model, quantized.layers)
    return Storage(count(both, floats), count(both), count(linear), count(embedding))


def float_weights(model: ImportedModel, quantized: Collection[str]) -> set[str]:
    """Names of the weights that are stored as floats where the layers named are quantized."""
    return {
        name
        for node in model.nodes
        for at, name in enumerate(node.inputs)
        if name in model.weights
        and model.weights[name].dtype.kind == "f"
        and not (node.name in quantized and at == WEIGHT_INPUT[node.op])
    }
