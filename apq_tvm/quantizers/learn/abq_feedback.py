"""Where ABQ-LLM's learning of a block starts with error feedback: its balance, and codes fed back.

ABQ-LLM rounds to nearest, and what balance and clipping do for that is less than what feedback
does: on the first block of MiniLM-L3 (W2*A8, 16 calls of 8 x 32 tokens) the squared error on other
sentences is .068 to .070 with them, .041 with feedback and no balance. Learned for nearest rounding
they do not help feedback either (.041 to .044). So from gptq every exponent of `abq_start.ALPHAS`
gets codes by feedback (`block_feedback`), the one of least loss is taken, and from there codes are
learned with their scales (`apq_tvm.quantizers.torch.moving`) by ABQ's loss. The balance is folded
in before, where that is exact; the rank-1 compensation would only move weights that move anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from apq_tvm.quantizers.inputs.folds import Fold, apply_fold
from apq_tvm.quantizers.inputs.scaling import (
    reader_weights,
    scaled_stats,
    smooth_scale,
    smooth_size,
)
from apq_tvm.quantizers.learn.abq_start import ALPHAS, inside, of_least_loss
from apq_tvm.quantizers.learn.block_feedback import feed_back
from apq_tvm.quantizers.learn.block_training import Lesson, layers_of
from apq_tvm.quantizers.learn.blocks import Block
from apq_tvm.quantizers.learn.learning_run import Run
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.quantizers.torch.graph import TorchGraph
from apq_tvm.quantizers.torch.round import even_levels
from apq_tvm.types import ImportedModel, QuantizedModel


def fed_start(
    run: Run, block: Block, folds: Sequence[Fold], lesson: Callable[..., Lesson]
) -> tuple[Lesson, float]:
    """A block with balance folded in and codes by error feedback, of least loss over all calls.

    Parameters
    ----------
    run : Run
    block : Block
    folds : sequence of Fold
        Of the whole model.
    lesson : callable
        `Lesson` but for ``graph``, ``block``, ``layers`` and ``folded``.

    Returns
    -------
    Lesson
        Without layers where nothing of the block is quantized.
    float
        The exponent; 0 where no input of the block can be scaled.

    Raises
    ------
    ApqError
        See `feed_back`; also of formats that ``abq`` does not learn.
    """
    folds = inside(run, block, folds)

    def start(alpha: float) -> Lesson:
        scaled = _scaled(run, block, folds if alpha else (), alpha)
        names = {node.name: node for node in scaled.model.nodes}
        own = replace(block, nodes=tuple(names[node.name] for node in block.nodes))
        graph = TorchGraph(scaled.model)
        empty = lesson(graph, own, {})
        if not scaled.quantized.layers:
            return empty
        fed = feed_back(scaled, graph, own, empty.streams, empty.tables)
        folded = {
            (fold.source, index): scaled.model.weights[names[fold.source].inputs[index]]
            for fold in folds
            if alpha and names[fold.source].op != "apq.Linear"
            for index in fold.divided
        }
        return replace(empty, layers=layers_of(scaled, own, fed), folded=folded)

    return of_least_loss(run, ALPHAS if folds else ALPHAS[:1], start)


def _scaled(run: Run, block: Block, folds: Sequence[Fold], alpha: float) -> Run:
    """A run of one block alone, `folds` scaled as SmoothQuant scales them."""
    model, stats = run.model, dict(run.calibration.layers)
    for fold in folds:
        size = smooth_size(run.calibration.layers[fold.readers[0]])
        scale = smooth_scale(fold, size, reader_weights(run.model, fold), alpha)
        model = apply_fold(model, fold, scale)
        scaled_stats(stats, fold, scale)
    touched = {name for fold in folds for name in (fold.source, *fold.readers)}
    part = _part(model, block)
    layers = {n.name: n for n in part.nodes if n.op == "apq.Linear"}
    layers = {name: node for name, node in layers.items() if name in run.quantized.layers}
    tensors = {}
    for name, node in layers.items():
        tensors[name] = run.quantized.tensors[run.quantized.layers[name]]
        scheme = tensors[name].scheme
        even_levels(scheme, name)
        if name in touched:
            weight = np.asarray(part.weights[node.inputs[1]], np.float32)
            tensors[name] = quantize_tensor(weight, scheme, name, stats=stats[name])
    quantized = QuantizedModel(part, tensors, {name: name for name in tensors})
    return replace(run, model=part, quantized=quantized, kind="train")


def _part(model: ImportedModel, block: Block) -> ImportedModel:
    """A block's nodes and weights alone."""
    names = {node.name for node in block.nodes}
    nodes = tuple(node for node in model.nodes if node.name in names)
    read = {value for node in nodes for value in node.inputs}
    weights = {name: weight for name, weight in model.weights.items() if name in read}
    return replace(model, nodes=nodes, weights=weights)
