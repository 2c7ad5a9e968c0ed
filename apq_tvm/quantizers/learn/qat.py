"""Codes of the whole model trained end to end: quantization-aware training towards the float model.

Weights of all layers move, codes follow (`apq_tvm.quantizers.torch.moving`), together with what
``distill`` trains: scales and tables, biases, gains of norms. The float model is the teacher, as in
LLM-QAT (Liu et al., Findings of ACL 2024), by its result and, as in TinyBERT (Jiao et al., Findings
of EMNLP 2020), by the residual stream behind every block, which says of each token what is wrong
where the result says it of a sentence. What is learned is judged on calls that are kept apart; the
end of the best epoch stays, and is where an interrupted run goes on. In the last part of the steps
codes stay (`code_training`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from apq_tvm.errors import UnsupportedModel
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.learn.blocks import find_blocks
from apq_tvm.quantizers.learn.code_training import SETTLING, Kept
from apq_tvm.quantizers.learn.distill import (
    RATE,
    WHOLE,
    finish,
    outputs_of,
    result_loss,
    schedule,
)
from apq_tvm.quantizers.learn.learned import Learned
from apq_tvm.quantizers.learn.learning_run import Run, split
from apq_tvm.quantizers.learn.losses import length_loss
from apq_tvm.quantizers.learn.result_loss import mask_of, tokens_of
from apq_tvm.quantizers.learn.student import Student, student_of
from apq_tvm.quantizers.torch.graph import TorchGraph, half_products
from apq_tvm.quantizers.torch.moving import MovingCodes
from apq_tvm.quantizers.torch.ops import Tensor, torch
from apq_tvm.types import Array, ImportedModel

CROSSED = 8.0
"""Distances of two codes that a weight could cross if all steps went one way. With less hardly any
weight gets to another code, however many steps there are; with more, steps undo what error feedback
did. MiniLM-L6 on 8192 sentences, schemes of 4.5 bits (from ``gptq``: the error of sentences 8.00 %)
and 3.45 bits, by distance and steps: 7.47 and 14.99 % with 2 in 448, 7.32 with 8, 14.29 with 6,
no better than before with 32; 6.84 and 13.60 with 8 in 1344, 6.94 with 12; 15.59 with 18 in 1792;
7.53 with 2 in 3780, of 23 thousand sentences.

Weights start in the middle of what their codes stand for: beside the nearest other code, as
`code_training` has them, the first steps take away what error feedback did (MiniLM-L6, cb3, 105
steps: the loss on sentences kept apart went from .044 to .079)."""

FASTEST = 0.02
"""Of that distance in a step: with 0.036 nothing got better, with 0.018 it did."""

FOLLOWED = 8
"""Steps between two looks at which codes are the nearest, which cost as much as a step of a small
batch."""


@dataclass(frozen=True)
class _Teacher:
    """The float model and what of it is imitated."""

    graph: TorchGraph
    outputs: list[str]
    streams: list[str]  # behind blocks

    @classmethod
    def of(cls, model: ImportedModel) -> _Teacher:
        outputs = outputs_of(model)
        try:
            streams = [block.output for block in find_blocks(model)]
        except UnsupportedModel:  # loops and branches: by its result alone
            streams = []
        return cls(TorchGraph(model), outputs, [name for name in streams if name not in outputs])

    def loss(self, student: Student, call: Mapping[str, Array]) -> Tensor:
        """Of the result, and the mean over blocks of the residual stream's relative error."""
        keep = [*self.outputs, *self.streams]
        with half_products():
            with torch.no_grad():
                wanted = self.graph.run(call, keep)
            got = student.run(call, keep, 0)
        mask = mask_of(self.graph.model, call)
        total = result_loss(self.graph.model, call, {n: got[n] for n in self.outputs}, wanted)
        for name in self.streams:
            ours, theirs = (tokens_of(side[name].float(), mask) for side in (got, wanted))
            total = total + length_loss(ours, theirs) / len(self.streams)
        return total


def train_whole(
    run: Run, checkpoint: Callable[[Run], None] | None = None, progress: Progress | None = None
) -> Learned:
    """Train a quantized model's codes, scales, biases and norms.

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
        If a layer's weights do not each depend on one code, or have several widths.
    UnsupportedModel
        If the model does not run in torch.
    """
    student, teacher = student_of(run), _Teacher.of(run.model)
    progress = progress or Silent()
    learned, judged = split(len(run.calls))
    steps = len(learned) * run.epochs
    moving = student.moving()
    codes_of = [p for codes in moving for p in codes.moving()]
    rates = ((student.parameters(), run.rate or RATE), (codes_of, min(CROSSED / steps, FASTEST)))
    groups: list[dict[str, Any]] = [{"params": p, "lr": r, "rate": r} for p, r in rates]
    flat = [p for group in groups for p in group["params"]]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.95))

    def judge() -> float:
        with torch.no_grad():
            return sum(float(teacher.loss(student, run.calls[i])) for i in judged) / len(judged)

    before = best = judge()
    kept, told = Kept(flat, moving), ""
    if run.learned.tensors:  # interrupted: the end of its best epoch
        student.go_on(run.learned)
        best, kept = judge(), Kept(flat, moving)
    with progress.stage("learn qat", len(learned) * (run.epochs - run.done)):
        for epoch in range(run.done, run.epochs):
            torch.manual_seed(epoch)  # a run that was interrupted goes on in the same order
            for at, index in enumerate(torch.randperm(len(learned)).tolist()):
                progress.advance(told)
                step = epoch * len(learned) + at
                left = (1 - SETTLING) * steps - step  # in which codes move
                for group in optimizer.param_groups:
                    group["lr"] = group["rate"] * schedule(step, steps)
                optimizer.param_groups[1]["lr"] *= left > 0
                optimizer.zero_grad()
                teacher.loss(student, run.calls[learned[index]]).backward()
                torch.nn.utils.clip_grad_norm_(flat, 1.0)
                optimizer.step()
                if left > 0 and (left <= 1 or step % FOLLOWED == FOLLOWED - 1):
                    _follow(moving)
            now = judge()
            if now < best:
                best, kept, run.learned = now, Kept(flat, moving), finish(run, student)
            told, run.done = f"loss {before:.4f} -> {now:.4f}", epoch + 1
            if checkpoint is not None:
                checkpoint(run)
    kept.restore()
    run.losses[WHOLE] = before, best
    run.learned = finish(run, student)
    return run.learned


def _follow(moving: Sequence[MovingCodes]) -> None:
    """Let the codes of all layers follow, of several at a time."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(MovingCodes.follow, moving))
