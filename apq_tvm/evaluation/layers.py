"""Every quantized layer on its own: how far its weights and its outputs are from the float ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from apq_tvm.errors import BadInput
from apq_tvm.evaluation.agreement import relative
from apq_tvm.evaluation.simulate import Simulation, width
from apq_tvm.formats import dequantize, nbytes_at
from apq_tvm.types import WEIGHT_INPUT, Array, Node, QuantizedModel

MAX_ROWS = 1024
"""Rows of activations that outputs are compared on: more change the third digit."""


def layer_errors(
    quantized: QuantizedModel,
    calls: Sequence[Mapping[str, Array]] = (),
    bits: int = 0,
    activations: bool = True,
) -> list[dict[str, Any]]:
    """Errors of every quantized layer.

    Parameters
    ----------
    quantized : QuantizedModel
    calls : sequence of mapping
        Inputs of the model; layers get the float model's activations. Empty leaves ``output_error``
        None.
    bits : int
        Width of any-precision layers; 0 for the widest.
    activations : bool
        Round activations where the scheme says so.

    Returns
    -------
    list of dict
        In the model's order: ``name``, ``op``, ``scheme``, ``shape``, ``bits_per_weight``,
        ``weight_error`` (‖W - Ŵ‖ / ‖W‖, Frobenius) and ``output_error`` (the same of x Wᵀ without
        the bias; None for embeddings).
    """
    model = quantized.model
    outputs = _output_errors(quantized, calls, bits, activations) if calls else {}
    rows, decoded_errors = [], {}
    for node in model.nodes:
        key = quantized.layers.get(node.name)
        if key is None:
            continue
        tensor = quantized.tensors[key]
        weight = node.inputs[WEIGHT_INPUT[node.op]]
        if (key, weight) not in decoded_errors:
            original = np.asarray(model.weights[weight], np.float32)
            rest = original - dequantize(tensor, width(tensor, bits))
            decoded_errors[key, weight] = relative(norm2(rest), norm2(original))
        rows.append(
            {
                "name": node.name,
                "op": node.op,
                "scheme": str(tensor.scheme),
                "shape": list(tensor.codes.shape),
                "bits_per_weight": 8 * nbytes_at(tensor, width(tensor, bits)) / tensor.codes.size,
                "weight_error": decoded_errors[key, weight],
                "output_error": outputs.get(node.name),
            }
        )
    return rows


def norm2(array: Array) -> float:
    """Sum of squares, in float64 by parts that are short enough for float32."""
    return float(np.einsum("nk,nk->n", array, array).sum(dtype=np.float64))


def _output_errors(
    quantized: QuantizedModel, calls: Sequence[Mapping[str, Array]], bits: int, activations: bool
) -> dict[str, float]:
    """Relative error of x Wᵀ by layer, each fed with the float model's x."""
    import torch

    from apq_tvm.quantizers.torch.round import round_activations

    decoded: dict[str, Any] = {}
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    rows = 0

    def product(node: Node, x: Any, w: Any, bias: Any) -> Any:
        y = torch.nn.functional.linear(x, w)
        key = quantized.layers.get(node.name)
        if key is not None:
            tensor = quantized.tensors[key]
            if key not in decoded:
                decoded[key] = torch.from_numpy(dequantize(tensor, width(tensor, bits)))
            given = round_activations(x, tensor.scheme) if activations else x
            rest = torch.nn.functional.linear(given, decoded[key]) - y
            sums[node.name][0] += float(rest.square().sum(dtype=torch.float64))
            sums[node.name][1] += float(y.square().sum(dtype=torch.float64))
        return y if bias is None else y + bias

    simulation = Simulation(QuantizedModel(quantized.model, {}, {}))
    for call in calls:
        if rows >= MAX_ROWS:
            break
        with torch.inference_mode():
            try:
                simulation.graph.run(call, product=product)
            except (IndexError, RuntimeError) as error:
                raise BadInput(f"the model refuses the inputs: {error}") from error
        first = next(iter(call.values()))
        rows += int(np.prod(first.shape[:2]))
    return {name: relative(*pair) for name, pair in sums.items()}
