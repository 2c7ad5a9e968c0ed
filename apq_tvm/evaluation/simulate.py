"""A quantized model in torch, without compiling it: decoded weights, rounded activations.

What the kernels add of their own (int8 centroids, tables of int8) is not simulated; a compiled
module shows it. Needs the extra ``calibrate``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from apq_tvm.errors import BadInput
from apq_tvm.evaluation.caches import with_caches
from apq_tvm.formats import dequantize
from apq_tvm.types import (
    WEIGHT_INPUT,
    Array,
    ImportedModel,
    QuantizedModel,
    QuantizedTensor,
    Scheme,
)

Tensor = Any  # torch is imported inside functions


def width(tensor: QuantizedTensor, bits: int) -> int:
    """Bits a tensor is used at where the model is used at `bits`: 0 where it leaves no choice."""
    return bits if tensor.scheme.min_bits else 0


def decoded_model(quantized: QuantizedModel, bits: int = 0) -> ImportedModel:
    """The float model whose weights are the quantized ones, decoded.

    Every quantized layer reads its own weight, so that an embedding and a head of different schemes
    may share one in the original.

    Parameters
    ----------
    quantized : QuantizedModel
    bits : int
        Width of any-precision layers; 0 for the widest.
    """
    model = quantized.model
    weights: dict[str, Array] = dict(model.weights)
    for key, tensor in quantized.tensors.items():
        weights[key] = dequantize(tensor, width(tensor, bits))
    nodes = []
    for node in model.nodes:
        key = quantized.layers.get(node.name, "")
        if key:
            inputs = list(node.inputs)
            inputs[WEIGHT_INPUT[node.op]] = key
            node = replace(node, inputs=tuple(inputs))
        nodes.append(node)
    read = {name for node in nodes for name in node.inputs}
    kept = {name: array for name, array in weights.items() if name in read}
    return replace(model, nodes=tuple(nodes), weights=kept)


class Simulation:
    """A model that runs in torch with a model's quantized layers.

    Parameters
    ----------
    quantized : QuantizedModel
        One without layers is the float model.
    bits : int
        Width of any-precision layers; 0 for the widest.
    activations : bool
        Round activations where the scheme says so.
    kv : str
        What a session's caches hold: ``"f32"``, ``"f16"``, ``"i8"`` or ``"i4"``
        (`apq_tvm.evaluation.caches`).

    Raises
    ------
    BadInput
        The model has no attention that would read caches, and `kv` is not ``"f32"``.
    MissingPackage
        torch is not installed.
    UnsupportedModel
        An operator has no meaning in torch.
    """

    def __init__(
        self,
        quantized: QuantizedModel,
        bits: int = 0,
        activations: bool = True,
        kv: str = "f32",
    ) -> None:
        from apq_tvm.quantizers.torch.graph import TorchGraph

        self.graph = TorchGraph(with_caches(decoded_model(quantized, bits), kv))
        self.schemes = {
            name: quantized.tensors[key].scheme for name, key in quantized.layers.items()
        }
        self.activations = activations
        self._rounded: tuple[Any, Scheme, Tensor] | None = None

    def run(
        self, feeds: Mapping[str, Array], keep: Collection[str] | None = None
    ) -> dict[str, Array]:
        """Run one call.

        Parameters
        ----------
        feeds : mapping of str to ndarray
        keep : collection of str, optional
            Outputs to give; all by default.

        Raises
        ------
        BadInput
            torch refuses the inputs, e.g. for an id outside an embedding.
        """
        import torch

        try:
            with torch.inference_mode():
                values = self.graph.run(feeds, keep, self._product)
        except (IndexError, RuntimeError) as error:
            raise BadInput(f"the model refuses the inputs: {error}") from error
        finally:
            self._rounded = None
        return {name: value.numpy() for name, value in values.items()}

    def _product(self, node: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        import torch

        scheme = self.schemes.get(node.name)
        if scheme is not None and self.activations:
            x = self._round(x, scheme)
        return torch.nn.functional.linear(x, w, bias)

    def _round(self, x: Tensor, scheme: Scheme) -> Tensor:
        """Layers side by side (query, key, value) read one x: it is rounded once."""
        from apq_tvm.quantizers.torch.round import round_activations

        if self._rounded is None or self._rounded[0] is not x or self._rounded[1] != scheme:
            self._rounded = (x, scheme, round_activations(x, scheme))
        return self._rounded[2]
