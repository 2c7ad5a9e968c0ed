"""End-to-end tuning of scales: the whole quantized model towards the float model's own result.

Codes stay as error feedback or block-wise learning chose them; scales, offsets and centroids of
every layer, its bias, and the gains of the norms before it are trained together. That is the
second phase of EfficientQAT (Chen et al., ACL 2025, section 3.3: step sizes only, end to end),
with the norms of Norm Tweaking (Li et al., AAAI 2024): a gain scales the input channels of the
layers behind it, so that it is a balance vector for which no code must change. The loss is not
that of the text but the Kullback-Leibler divergence from the float model's next-token distribution
(knowledge distillation, as in LLM-QAT, Liu et al. 2023), so few texts do and none is learned by
heart. Models without logits come close to the float outputs instead.

Widths of an any-precision model take turns, step by step, each with a table of its own. Gains stay
there, since all widths share them; widths above `WIDEST` stay too, which rounded activations
disturb more than rounded weights do, and so do those that divide the cells of one table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from apq_tvm.formats.anyprec_cells import CELL_BITS, has_cells
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.learn.learned import Learned
from apq_tvm.quantizers.learn.learning_run import Run
from apq_tvm.quantizers.learn.losses import kl_loss, length_loss
from apq_tvm.quantizers.learn.result_loss import (
    is_language_model,
    language_model,
    mask_of,
    tokens_of,
)
from apq_tvm.quantizers.learn.student import Student, student_of
from apq_tvm.quantizers.torch.graph import TorchGraph, Values, half_products
from apq_tvm.quantizers.torch.ops import Tensor, torch
from apq_tvm.types import Array, ImportedModel, Scheme

RATE = 1e-3
"""Learning rate at the start, relative to the mean size of an array; it falls to `LAST` of it. At
3 bits and fewer twice as much suits."""

LAST = 0.1

WARM_UP = 4
"""Steps in which the rate rises."""

WIDEST = 6
"""Widest any-precision tables that are trained, if there are narrower ones."""


def distill(
    run: Run, checkpoint: Callable[[Run], None] | None = None, progress: Progress | None = None
) -> Learned:
    """Tune a quantized model end to end.

    Parameters
    ----------
    run : Run
        Changed in place: `learned` grows, `done` counts epochs.
    checkpoint : callable, optional
        Called with `run` after every epoch.
    progress : Progress, optional

    Returns
    -------
    Learned
        Every quantized linear layer, and each float weight that differs from the float model's.

    Raises
    ------
    BadInput
        If no linear layer is quantized.
    BadScheme
        If a format's float arrays cannot be learned.
    UnsupportedModel
        If the model does not run in torch.
    """
    student = student_of(run)
    teacher = TorchGraph(run.model)
    outputs = outputs_of(run.model)
    schemes = list(student.schemes.values())
    widths = own_tables(schemes, tuned_widths(schemes))
    parameters = student.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0, betas=(0.9, 0.95))
    torch.manual_seed(run.done)
    steps, rate = len(run.calls) * run.epochs, run.rate or RATE
    progress = progress or Silent()
    with progress.stage("distill", len(run.calls) * (run.epochs - run.done)):
        for epoch in range(run.done, run.epochs):
            for at, index in enumerate(torch.randperm(len(run.calls)).tolist()):
                progress.advance()
                step, call = epoch * len(run.calls) + at, run.calls[index]
                for group in optimizer.param_groups:
                    group["lr"] = rate * schedule(step, steps)
                with half_products():
                    with torch.no_grad():
                        target = teacher.run(call, outputs)
                    got = student.run(call, outputs, widths[step % len(widths)])
                loss = result_loss(run.model, call, got, target)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
            run.learned, run.done = finish(run, student), epoch + 1
            if checkpoint is not None:
                checkpoint(run)
    return run.learned


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate at a step: a short rise, then a cosine down to `LAST`."""
    rise = min(1.0, (step + 1) / min(WARM_UP, steps))
    return rise * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def tuned_widths(schemes: Iterable[Scheme]) -> list[int]:
    """Widths that take turns: those all any-precision layers have; ``[0]`` without such layers."""
    found = [set(scheme.widths) for scheme in schemes if scheme.min_bits]
    widths = sorted(set.intersection(*found)) if found else []
    return [b for b in widths if b <= max(WIDEST, widths[0])] or [0]


def own_tables(schemes: Sequence[Scheme], widths: Sequence[int]) -> list[int]:
    """Of widths those whose table no other width reads; all of them if there are none such."""
    shared = any(has_cells(scheme) and scheme.bits > CELL_BITS for scheme in schemes)
    return [b for b in widths if not shared or b < CELL_BITS] or list(widths)


def outputs_of(model: ImportedModel) -> list[str]:
    """Values that are compared."""
    if is_language_model(model):
        return [language_model(model)[1]]
    return [spec.name for spec in model.outputs if spec.dtype.startswith("float")]


def result_loss(
    model: ImportedModel, call: Mapping[str, Array], got: Values, target: Values
) -> Tensor:
    """How far a result is from the float model's: divergence of logits, error of others."""
    mask = mask_of(model, call)
    total = torch.zeros(())
    for name, value in got.items():
        value, wanted = (tokens_of(side.float(), mask) for side in (value, target[name]))
        loss = kl_loss if is_language_model(model) else length_loss
        total = total + loss(value, wanted)
    return total


def finish(run: Run, student: Student) -> Learned:
    """What has been learned so far."""
    tensors = student.finish()
    with torch.no_grad():
        trained = {name: value.numpy().copy() for name, value in student.weights().items()}
    weights = changed_weights(run.model, student.graph.model, trained, tensors)
    return replace(run.learned, tensors=tensors, weights=weights)


def changed_weights(
    old: ImportedModel,
    new: ImportedModel,
    trained: Mapping[str, Array],
    layers: Mapping[str, object],
) -> dict[tuple[str, int], Array]:
    """Float weights that a model has otherwise than another with the same nodes.

    Parameters
    ----------
    old, new : ImportedModel
    trained : mapping of str to ndarray
        By the name of the weight in `new`, in its place.
    layers : mapping of str
        Quantized layers: their own weights do not count.
    """
    found: dict[tuple[str, int], Array] = {}
    before = {node.name: node for node in old.nodes}
    for node in new.nodes:
        past = before[node.name].inputs
        for index, name in enumerate(node.inputs):
            if node.op == "apq.Linear" and index == 1 and node.name in layers:
                continue
            if name in trained:
                found[(node.name, index)] = trained[name]
            elif name in new.weights:
                was = old.weights.get(past[index]) if index < len(past) else None
                if was is None or not np.array_equal(was, new.weights[name]):
                    found[(node.name, index)] = new.weights[name]
    return found
