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
disturb more than rounded weights do. A table whose cells wider widths divide is trained by the
narrowest and the widest of these, more slowly (`SHARED`). What is no better on calls that are kept
apart stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from apq_tvm.formats.anyprec_cells import CELL_BITS, has_cells
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.learn.learned import Learned
from apq_tvm.quantizers.learn.learning_run import Run, split
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

WHOLE = "model"
"""Whose loss it is, among ``Run.losses``."""

Losses = dict[int, float]
"""By width."""

WARM_UP = 4
"""Steps in which the rate rises."""

WIDEST = 6
"""Widest any-precision tables that are trained, if there are narrower ones."""

SHARED = 0.6
"""Part of the rate for a table that several widths read. On SmolLM2 (``anyprec3-8``, 128 steps of 6
and 8 bits in turns), perplexity over float's and divergence of 6 and 8 bits: 1.0115 .0118 and
1.0018 .0047 before, 1.0117 .0118 and 1.0021 .0047 with 0.25, where few centroids get to their next
integer, 1.0072 .0111 and 1.0008 .0049 with 0.6; 1.0047 .0131 and 1.0003 .0072 with 1 and 64 steps
of 5 and 6 bits."""


def distill(
    run: Run, checkpoint: Callable[[Run], None] | None = None, progress: Progress | None = None
) -> Learned:
    """Tune a quantized model end to end.

    Parameters
    ----------
    run : Run
        Changed in place: `learned` grows, `done` counts epochs, `losses` has that of `WHOLE`.
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
    student, teacher = student_of(run), TorchGraph(run.model)
    outputs, widths = outputs_of(run.model), trained_widths(list(student.schemes.values()))
    rate, learned = run.rate or RATE, split(len(run.calls))[0]
    groups = _groups(student, widths, rate)
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.0, betas=(0.9, 0.95))
    parameters = [parameter for group in groups for parameter in group["params"]]
    steps = len(learned) * run.epochs

    def losses(index: int, at: Sequence[int]) -> list[Tensor]:
        call = run.calls[index]
        with half_products():
            with torch.no_grad():
                target = teacher.run(call, outputs)
            results = [student.run(call, outputs, bits) for bits in at]
        return [result_loss(run.model, call, got, target) for got in results]

    def judge() -> Losses:
        judged = split(len(run.calls))[1]
        with torch.no_grad():
            found = np.mean([losses(index, widths) for index in judged], axis=0)
        return dict(zip(widths, found.tolist(), strict=True))

    progress = progress or Silent()
    before = judge()
    student.go_on(run.learned)
    with progress.stage("distill", len(learned) * (run.epochs - run.done)):
        for epoch in range(run.done, run.epochs):
            torch.manual_seed(epoch)  # a run that was interrupted goes on in the same order
            for at, index in enumerate(torch.randperm(len(learned)).tolist()):
                progress.advance()
                step = epoch * len(learned) + at
                for group in optimizer.param_groups:
                    group["lr"] = group["rate"] * schedule(step, steps)
                optimizer.zero_grad()
                losses(learned[index], [widths[step % len(widths)]])[0].backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
            run.learned, run.done = finish(run, student), epoch + 1
            if checkpoint is not None:
                checkpoint(run)
    after = judge()
    for group in groups:
        if not sum(after[bits] - before[bits] for bits in group["widths"]) <= 0:  # nor with nan
            _undo(group["params"])
            after |= {bits: before[bits] for bits in group["widths"]}
    run.losses |= {_named(bits): (before[bits], after[bits]) for bits in widths}
    run.learned = finish(run, student)
    return run.learned


def _undo(parameters: Iterable[Tensor]) -> None:
    """Forget what was trained: it is no better where nothing was learned from."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()


def _named(bits: int) -> str:
    """`WHOLE`, at a width where there are several."""
    return f"{WHOLE} at {bits} bits" if bits else WHOLE


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate at a step: a short rise, then a cosine down to `LAST`."""
    rise = min(1.0, (step + 1) / min(WARM_UP, steps))
    return rise * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def tuned_widths(schemes: Iterable[Scheme]) -> list[int]:
    """Widths that take turns: those all any-precision layers have; ``[0]`` without such layers."""
    widths = _common(schemes)
    return [b for b in widths if b <= max(WIDEST, widths[0])] or [0]


def trained_widths(schemes: Sequence[Scheme]) -> list[int]:
    """Widths whose steps train: of those that divide the cells of one table two stand for all."""
    widths, divided = tuned_widths(schemes), [b for b in _common(schemes) if b > CELL_BITS]
    if not any(has_cells(scheme) and scheme.bits > CELL_BITS for scheme in schemes):
        return widths
    return [b for b in widths if b < CELL_BITS] + sorted({*divided[:1], *divided[-1:]}) or widths


def _common(schemes: Iterable[Scheme]) -> list[int]:
    """Widths that all any-precision layers have, if there are any."""
    found = [set(scheme.widths) for scheme in schemes if scheme.min_bits]
    return sorted(set.intersection(*found)) if found else []


def _groups(student: Student, widths: Sequence[int], rate: float) -> list[dict[str, Any]]:
    """Groups of an optimizer, each with its ``rate`` and the ``widths`` that train it."""
    groups: list[dict[str, Any]] = []
    for readers, parameters in student.read_by().items():
        trained = [bits for bits in widths if bits in readers]
        if trained:
            slower = SHARED if len(readers) > 1 else 1.0
            groups.append({"params": parameters, "rate": slower * rate, "widths": trained})
    return groups


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
