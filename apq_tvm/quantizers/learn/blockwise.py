"""Learning block by block: ABQ-LLM's calibration, and finetuning of every format's float arrays.

Blocks are learned in order, each fed by the blocks before it as they were quantized (ABQ-LLM, AAAI
2025, section 3.2; OmniQuant, ICLR 2024). ``abq`` learns, for integers and W2*, balance vectors
(scales per input channel, folded as `folds` can), clipping of every group, and for down_proj of the
first three and last four blocks, as in the authors' code, a compensation a·bᵀ (eq. (3)) that is
folded in before rounding (`abq_start`, where it starts, too); where it starts from error feedback
it learns codes and scales instead, behind the balance of least loss (`abq_feedback`). ``finetune``
learns the scales and offsets of any format (`torch_decode`); where it starts from error feedback it
first chooses the block's codes anew for what the blocks before it give (`block_feedback`), and so
does ``train``, which goes on to learn codes together with scales (`moving`). All learn biases.
The loss is DLC + AKL (eq. (5)) and the error of length that cosines do not see, to the float block
fed floats. To the float block fed quantized values, of which the authors' code has it too, it asks
for the errors of what is before the block: with tables of few bits W3zA8g16 brings the logits of a
Llama of two blocks from .573 to .545 without it and to .568 with it, from gptq from .436 to .370
and .383; on MiniLM-L3's first block no epoch of W2*A8 from gptq is taken with it (squared error on
other sentences .041), without it .034. With float tables it decides little: from gptq .221 both
ways, from rtn .361 without it and .351 with it.

Two kinds train all layers at once: ``distill``, for afterwards, what codes refer to
(`apq_tvm.quantizers.learn.distill`), ``qat`` the codes too (`apq_tvm.quantizers.learn.qat`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from apq_tvm.errors import BadInput
from apq_tvm.formats.families import dequantize
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.inputs.folds import Fold, find_folds
from apq_tvm.quantizers.learn.abq_feedback import fed_start
from apq_tvm.quantizers.learn.abq_start import best_start, is_compensated
from apq_tvm.quantizers.learn.block_feedback import feed_back
from apq_tvm.quantizers.learn.block_training import (
    Lesson,
    layers_of,
    train,
    with_block,
)
from apq_tvm.quantizers.learn.blocks import Block, find_blocks
from apq_tvm.quantizers.learn.code_training import train_codes
from apq_tvm.quantizers.learn.distill import distill, tuned_widths
from apq_tvm.quantizers.learn.learned import Learned
from apq_tvm.quantizers.learn.learning_run import KINDS, Fed, Run, Streams, tables_of
from apq_tvm.quantizers.learn.qat import train_whole
from apq_tvm.quantizers.learn.result_loss import mask_of
from apq_tvm.quantizers.learn.row_weights import row_weights
from apq_tvm.quantizers.torch.graph import TorchGraph, Values, as_tensor
from apq_tvm.quantizers.torch.ops import F, Tensor, torch
from apq_tvm.quantizers.torch.round import fake_activations
from apq_tvm.types import Node, QuantizedModel

WHOLE_MODELS = {"distill": distill, "qat": train_whole}
"""Kinds that train all layers at once."""


def learn(
    run: Run, checkpoint: Callable[[Run], None] | None = None, progress: Progress | None = None
) -> Learned:
    """Learn every block that is not done yet.

    Parameters
    ----------
    run : Run
        Changed in place: `done` and `learned` grow.
    checkpoint : callable, optional
        Called with `run` after every block.
    progress : Progress, optional

    Returns
    -------
    Learned

    Raises
    ------
    BadInput
        If there is no such kind, or no block has a quantized layer.
    BadScheme
        If ``abq`` is asked of another format than integers and W2*.
    UnsupportedModel
        If the model does not run in torch.
    """
    if run.kind not in KINDS:
        raise BadInput(f"--learn {run.kind!r}: one of {', '.join(KINDS)} is possible")
    if run.kind in WHOLE_MODELS:
        return WHOLE_MODELS[run.kind](run, checkpoint, progress)
    graph = TorchGraph(run.model)
    blocks = find_blocks(run.model)
    if not any(name in run.quantized.layers for block in blocks for name in block.layers):
        raise BadInput(f"{run.model.name} has no block with a quantized layer: nothing to learn")
    tables = _tables(run.quantized)
    progress = progress or Silent()
    streams = _begin(graph, run)
    if run.feeds_back and run.done < len(blocks):
        names = {name for block in blocks[run.done :] for name in block.layers}
        streams.weights = row_weights(graph, run.calls, names, progress)
    folds = find_folds(run.model)[0] if run.kind == "abq" else []
    told = ""
    with progress.stage(f"learn {run.kind}", len(blocks)):
        for at, block in enumerate(blocks):
            progress.advance(f"{block.output}{told}")
            targets = _targets(graph, block, streams, tables)
            if at >= run.done:
                compensated = is_compensated(at, len(blocks))
                lesson = partial(Lesson, streams=streams, targets=targets, tables=tables)
                found = _start(run, graph, block, lesson, folds, compensated)
                if found.layers:
                    torch.manual_seed(at)  # a run that was interrupted goes on as if it was not
                    told = _learn(run, block, found)
                    run.learned = with_block(run.learned, found)
                run.done = at + 1
                if checkpoint is not None:
                    checkpoint(run)
            _advance(graph, block, run, streams, targets, tables)
    return run.learned


def _start(
    run: Run,
    graph: TorchGraph,
    block: Block,
    lesson: Callable[..., Lesson],
    folds: Sequence[Fold],
    compensated: bool,
) -> Lesson:
    """One block where its learning starts."""
    if run.kind != "abq":
        given = lesson(graph, block, {})
        fed = Fed()
        if given.streams.weights:
            fed = feed_back(run, graph, block, given.streams, given.tables)
        return replace(given, layers=layers_of(run, block, fed))
    if run.feeds_back:
        found, alpha = fed_start(run, block, folds, lesson)
    else:
        found, alpha = best_start(run, block, folds, compensated, partial(lesson, graph, block))
    run.alphas[block.output] = alpha
    return found


def _learn(run: Run, block: Block, lesson: Lesson) -> str:
    """Learn one block; what to say of it."""
    if run.kind == "finetune":
        train(lesson, run.epochs)
        return ""
    before, after = run.losses[block.output] = train_codes(lesson, run.epochs)
    where = " on data kept apart" if run.judged_apart else ""
    alpha = f", alpha {run.alphas[block.output]:g}" if block.output in run.alphas else ""
    return f" (before it: loss{where} {before:.4f} -> {after:.4f}{alpha})"


def _tables(quantized: QuantizedModel) -> Values:
    """Embedding tables as they were quantized, by weight name."""
    tables = {}
    for node in quantized.model.nodes:
        key = quantized.layers.get(node.name)
        if node.op == "apq.Embedding" and key is not None:
            tables[node.inputs[0]] = as_tensor(dequantize(quantized.tensors[key]))
    return tables


def _begin(graph: TorchGraph, run: Run) -> Streams:
    started = [graph.begin(call) for call in run.calls]
    values = [dict(v) for v, _ in started]
    masks = [mask_of(graph.model, call) for call in run.calls]
    symbols = [sizes for _, sizes in started]
    widths = tuned_widths(tensor.scheme for tensor in run.quantized.tensors.values())
    turns = [widths[i % len(widths)] for i in range(len(values))]
    return Streams(values, [dict(v) for v in values], symbols, masks, turns)


def _targets(
    graph: TorchGraph, block: Block, streams: Streams, tables: Values
) -> list[tuple[Values, Tensor]]:
    """Per call what the float block gives: all of it fed floats, its output fed quantized values.

    Embeddings of the first block are quantized only on the quantized side.
    """
    keep = {*block.live, block.output, *block.attention}
    results = []
    with torch.no_grad():
        for full, quantized, symbols in zip(
            streams.full, streams.quantized, streams.symbols, strict=True
        ):
            plain = graph.run_nodes(block.nodes, full, symbols, keep)
            mixed = graph.run_nodes(
                block.nodes, quantized, symbols, {block.output}, weights=tables_of(block, tables)
            )
            results.append((plain, mixed[block.output]))
    return results


def _advance(
    graph: TorchGraph,
    block: Block,
    run: Run,
    streams: Streams,
    targets: Sequence[tuple[Values, Tensor]],
    tables: Values,
) -> None:
    """Move both streams behind a block."""
    known = {name: t for name, t in run.learned.tensors.items() if name in block.layers}
    decoded = {
        bits: {
            name: as_tensor(dequantize(t, bits if t.scheme.min_bits else 0))
            for name, t in known.items()
        }
        for bits in sorted(set(streams.widths))
    }
    changed = {key: as_tensor(array) for key, array in run.learned.weights.items()}
    # A copy of the nodes that read changed weights under names of their own.
    nodes, weights = [], dict(tables_of(block, tables))
    for node in block.nodes:
        inputs = list(node.inputs)
        for (name, index), array in changed.items():
            if name == node.name:
                inputs[index] = f"{name}:{index}"
                weights[inputs[index]] = array
        nodes.append(replace(node, inputs=tuple(inputs)))

    def product(bits: int, node: Node, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if node.name not in known:
            return F.linear(x, w, bias)
        x = fake_activations(x, known[node.name].scheme)
        return F.linear(x, decoded[bits][node.name], bias)

    with torch.no_grad():
        for i, (full, _) in enumerate(targets):
            at_width = partial(product, streams.widths[i])
            streams.full[i] = {name: full[name] for name in block.live if name in full}
            streams.quantized[i] = graph.run_nodes(
                nodes, streams.quantized[i], streams.symbols[i], block.live, at_width, weights
            )
