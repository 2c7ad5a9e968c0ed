"""Codes of a block chosen anew, with error feedback for the inputs that the quantized blocks give.

A calibration file knows what layers read in the float model. GPTQ (Frantar et al., ICLR 2023,
section 4, "Setup") quantizes block after block and measures H = E[x xᵀ] of each on what the blocks
before it, quantized, really put out; so does this, with activations rounded as kernels round them
and rows weighed as `apq_tvm.quantizers.inputs.statistics` weighs them. Where the float block's own
inputs would correct for past errors too (GPTAQ, Li et al., ICML 2025), nothing was gained on
SmolLM2 at 2.97 bits: what is fit to the samples' errors does not hold on other text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from apq_tvm.errors import BadInput
from apq_tvm.formats.families import dequantize
from apq_tvm.quantizers.calibrated import correct_biases
from apq_tvm.quantizers.feedback.error_feedback import output_error
from apq_tvm.quantizers.feedback.gptq import fed_back, improve, layer_feedback
from apq_tvm.quantizers.inputs.row_sums import Sums
from apq_tvm.quantizers.inputs.statistics import rows_read
from apq_tvm.quantizers.learn.blocks import Block
from apq_tvm.quantizers.learn.learning_run import Fed, Run, Streams, tables_of
from apq_tvm.quantizers.registry import quantize_tensor, quantizer_of
from apq_tvm.quantizers.torch.graph import TorchGraph, Values, plain_product
from apq_tvm.quantizers.torch.ops import Tensor, torch
from apq_tvm.quantizers.torch.round import fake_activations
from apq_tvm.types import F32, Calibration, LayerStats, Node, QuantizedTensor

SENSITIVITY = "E[x^2] of what quantized blocks give, rows weighed by |dL/dy|"


def feed_back(run: Run, graph: TorchGraph, block: Block, streams: Streams, tables: Values) -> Fed:
    """Choose the codes of a block's layers anew.

    Parameters
    ----------
    run : Run
        Its tensors' scales and tables are where each layer starts.
    graph : TorchGraph
    block : Block
    streams : Streams
        What the blocks before give, and the weights of rows.
    tables : dict
        Quantized embeddings.

    Returns
    -------
    Fed
        Every tensor loses no more on these inputs than the one it replaces.

    Raises
    ------
    BadInput
        If a layer's input is 0 in every call, or H is singular beyond damping.
    BadScheme
        If a format's codes are not chosen one by one.
    """
    layers = {
        node.name: node
        for node in block.nodes
        if node.op == "apq.Linear" and node.name in run.quantized.layers
    }
    if not layers:
        return Fed()
    stats = _stats(run, graph, block, layers, streams, tables)
    keys = {name: run.quantized.layers[name] for name in layers}
    tensors = {}
    for name, node in layers.items():
        weight = np.asarray(run.model.weights[node.inputs[1]], np.float32)
        biased = len(node.inputs) > 2 and bool(node.inputs[2])
        tensors[name] = codes_anew(
            weight, run.quantized.tensors[keys[name]], stats[name], name, biased
        )
    fed = replace(
        run.quantized, model=run.model, tensors={keys[name]: t for name, t in tensors.items()}
    )
    calibration = Calibration(stats, run.model.sha256, SENSITIVITY)
    model = correct_biases(fed, calibration).model
    nodes = {node.name: node for node in model.nodes}
    biases = {
        name: model.weights[nodes[name].inputs[2]]
        for name, node in layers.items()
        if len(node.inputs) > 2 and node.inputs[2]
    }
    return Fed(tensors, biases)


def codes_anew(
    w: F32, tensor: QuantizedTensor, stats: LayerStats, name: str, biased: bool = False
) -> QuantizedTensor:
    """Codes of one layer for other statistics than those it was quantized with.

    Parameters
    ----------
    w : float32 [N, K]
    tensor : QuantizedTensor
        What it was quantized to; its codebooks and tables stay.
    stats : LayerStats
    name : str
        For errors.
    biased : bool
        The layer's bias makes good the mean error afterwards.

    Returns
    -------
    QuantizedTensor
        `tensor` itself if that loses less.
    """
    k = w.shape[1]
    centred = biased and not tensor.scheme.min_bits
    quantizer = quantizer_of(tensor.scheme)
    if quantizer.feeds_back:
        feedback = layer_feedback(stats, k, name)
        start = quantize_tensor(w, tensor.scheme, name, stats=stats)
        found = improve(w, start, feedback.hessian, name)
    else:
        feedback = layer_feedback(stats, k, name, act_order=True, centred=centred)
        found = fed_back(w, tensor, feedback, name)
        if quantizer.feedback is not None:
            return found
    before, after = (
        output_error(dequantize(t) - w, feedback.hessian, stats.mean_square)
        for t in (tensor, found)
    )
    return found if after < before else tensor


def _stats(
    run: Run,
    graph: TorchGraph,
    block: Block,
    layers: Mapping[str, Node],
    streams: Streams,
    tables: Values,
) -> dict[str, LayerStats]:
    """Statistics of what the layers read where all blocks before are quantized, this one is not."""
    sums: dict[str, Sums] = {}
    for values, symbols, mask, weights in zip(
        streams.quantized, streams.symbols, streams.masks, streams.weights, strict=True
    ):
        rounded: dict[tuple[str, str], Tensor] = {}

        def product(
            node: Node,
            x: Tensor,
            w: Tensor,
            bias: Tensor | None,
            mask: Tensor | None = mask,
            weights: Mapping[str, Tensor] = weights,
            rounded: dict[tuple[str, str], Tensor] = rounded,
        ) -> Tensor:
            if node.name in layers:
                scheme = run.quantized.tensors[run.quantized.layers[node.name]].scheme
                key = (node.inputs[0], str(scheme))
                if key not in rounded:
                    rounded[key] = fake_activations(rows_read(x, mask, node.name), scheme)
                total = sums.setdefault(node.name, Sums.zero(x.shape[-1], True))
                total.add(rounded[key], weights[node.name])
            return plain_product(node, x, w, bias)

        with torch.no_grad():
            graph.run_nodes(
                block.nodes, values, symbols, {block.output}, product, tables_of(block, tables)
            )
    unseen = sorted(set(layers) - set(sums))
    if unseen:
        raise BadInput(f"layer {unseen[0]!r} was not run by any of the inputs; use other inputs")
    return {name: total.stats() for name, total in sums.items()}
