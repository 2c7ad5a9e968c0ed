"""Where ABQ-LLM's learning of a block starts: which balance vectors, and which blocks compensate.

The paper starts the balance vectors as SmoothQuant's scales (section 4.1). These move outliers of
the activations into the weights, which W8A8 needs and five levels cannot bear: on SmolLM2 they ruin
W2* before the first step. So the exponent is chosen for every block, of `ALPHAS` the one whose
codes, rounded anew for the scaled weights, have the least loss. 0 leaves the model as it is, so
that plain rounding is among the starts.

Equation (3) compensates down_proj of "the initial and final blocks". The authors' code
(bytedance/ABQ-LLM, algorithm/quantize/abq_llm.py) does so in the first three and the last four, and
so do we; of a model with seven blocks or fewer that is all of them. The paper's text is narrower.
The code starts with a = 0 and b = 1, the paper (as we do) with a = 1 and b = 0: the product is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from apq_tvm.formats.families import dequantize
from apq_tvm.quantizers.inputs.folds import Fold
from apq_tvm.quantizers.inputs.scaling import smooth_scale, smooth_size
from apq_tvm.quantizers.learn.block_training import Balance, LearnedLayer, Lesson, layers_of
from apq_tvm.quantizers.learn.blocks import Block
from apq_tvm.quantizers.learn.learning_run import Fed, Run
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.quantizers.torch.ops import torch
from apq_tvm.types import F32, Node, QuantizedTensor

ALPHAS = (0.0, 0.3, 0.6)
"""SmoothQuant's exponents that a block may start from; 0 is no scales at all."""

FIRST, LAST = 3, 4
"""Blocks at the start and at the end whose last layer is compensated."""


def is_compensated(at: int, blocks: int) -> bool:
    """Whether block `at` of so many learns a compensation."""
    return at < FIRST or at >= blocks - LAST


def best_start(
    run: Run,
    block: Block,
    folds: Sequence[Fold],
    compensated: bool,
    lesson: Callable[[Mapping[str, LearnedLayer]], Lesson],
) -> tuple[Lesson, float]:
    """A block with the balance vectors of least loss over all calls: none was learned from yet.

    Parameters
    ----------
    run : Run
    block : Block
    folds : sequence of Fold
        Of the whole model.
    compensated : bool
        See `is_compensated`.
    lesson : callable
        Layers → `Lesson`.

    Returns
    -------
    Lesson
        Without layers where nothing of the block is quantized.
    float
        The exponent; 0 where no input of the block can be scaled.
    """
    folds = inside(run, block, folds)

    def start(alpha: float) -> Lesson:
        balance, fed = _scaled(run, block, folds, alpha)
        return lesson(layers_of(run, block, fed, balance, compensated))

    return of_least_loss(run, ALPHAS if folds else ALPHAS[:1], start)


def of_least_loss(
    run: Run, alphas: Sequence[float], start: Callable[[float], Lesson]
) -> tuple[Lesson, float]:
    """What `start` makes of an exponent, and which: of least loss over all calls of a run.

    Where it makes no layers there is nothing to choose, and the exponent is 0.
    """
    tries = []
    for alpha in alphas:
        lesson = start(alpha)
        if not lesson.layers:
            return lesson, 0.0
        tries.append((lesson.judge(range(len(run.calls))), alpha, lesson))
    _, alpha, lesson = min(tries, key=lambda tried: tried[0])
    return lesson, alpha


def inside(run: Run, block: Block, folds: Sequence[Fold]) -> list[Fold]:
    """The folds that have both ends in a block, all of it quantized."""
    names = {node.name for node in block.nodes}
    quantized = run.quantized.layers
    linear = {n.name for n in run.model.nodes if n.op == "apq.Linear"}
    return [
        fold
        for fold in folds
        if fold.source in names
        and all(name in names and name in quantized for name in fold.readers)
        and (fold.source not in linear or fold.source in quantized)
    ]


def _scaled(run: Run, block: Block, folds: Sequence[Fold], alpha: float) -> tuple[Balance, Fed]:
    """Balance vectors of an exponent, and the codes of what they make of the weights."""
    nodes = {node.name: node for node in block.nodes}
    balance, tensors, biases = {}, {}, {}
    for fold in folds:
        scale = np.ones(fold.count, np.float32)
        if alpha:
            size = smooth_size(run.calibration.layers[fold.readers[0]])
            weights = [_weight(run, nodes[name]) for name in fold.readers]
            scale = smooth_scale(fold, size, weights, alpha)
            for name in fold.readers:
                node, by = nodes[name], scale[fold.channels]
                tensors[name] = _rounded(run, node, by)
                if len(node.inputs) > 2 and node.inputs[2]:
                    lost = _weight(run, node) - dequantize(tensors[name]) / by
                    shift = lost @ run.calibration.layers[name].mean  # as `correct_biases`
                    biases[name] = run.model.weights[node.inputs[2]] + shift
        balance[fold.value] = (fold, torch.from_numpy(np.log(scale)).requires_grad_())
    return balance, Fed(tensors, biases)


def _weight(run: Run, node: Node) -> F32:
    return np.asarray(run.model.weights[node.inputs[1]], np.float32)


def _rounded(run: Run, node: Node, by: F32) -> QuantizedTensor:
    """Codes of a layer whose columns are multiplied by `by` [K]."""
    stats = run.calibration.layers[node.name]
    scaled = replace(
        stats,
        mean_square=stats.mean_square / by**2,
        mean=stats.mean / by,
        absmax=stats.absmax / by,
        hessian=None,
        fisher=None,
    )
    scheme = run.quantized.tensors[run.quantized.layers[node.name]].scheme
    return quantize_tensor(_weight(run, node) * by, scheme, node.name, stats=scaled)
