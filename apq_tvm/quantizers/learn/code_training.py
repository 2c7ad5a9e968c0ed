"""One block while its codes are learned, of ``train`` and ``abq``, judged on other data.

Every eighth call is kept apart: the loss on those decides which epoch's codes stay, the first's own
among them, so learning never makes a block worse on text that it did not see. In the last quarter
of the steps of ``train`` codes (`apq_tvm.quantizers.torch.moving`) stay where they are and the
scales settle on them: weights that lie between two codes would jump to and fro until the end (Nagel
et al., ICML 2022, "Overcoming oscillations in quantization-aware training").
"""

from __future__ import annotations

from collections.abc import Sequence

from apq_tvm.quantizers.learn.block_training import (
    Lesson,
    parameter_groups,
    restore,
)
from apq_tvm.quantizers.learn.distill import schedule
from apq_tvm.quantizers.learn.learning_run import split
from apq_tvm.quantizers.torch.moving import MovingCodes
from apq_tvm.quantizers.torch.ops import Tensor, torch

SETTLING = 0.25
"""Share of the steps in which codes stay."""


class Kept:
    """Parameters and codes as they are now."""

    def __init__(self, parameters: Sequence[Tensor], moving: Sequence[MovingCodes]) -> None:
        self._parameters, self._moving = parameters, moving
        self._values = [p.detach().clone() for p in parameters]
        self._tensors = [codes.tensor for codes in moving]

    def restore(self) -> None:
        """Make them so again."""
        restore(self._parameters, self._values)
        for codes, tensor in zip(self._moving, self._tensors, strict=True):
            codes.keep(tensor)


def train_codes(lesson: Lesson, epochs: int) -> tuple[float, float]:
    """Learn a block's codes, scales and biases.

    Parameters
    ----------
    lesson : Lesson
        The roundings of its layers are `MovingCodes`, or `LearnedRounding`.
    epochs : int

    Returns
    -------
    float, float
        Loss on the calls kept apart, before and after.
    """
    layers = lesson.layers
    moving = [r for layer in layers.values() if isinstance(r := layer.rounding, MovingCodes)]
    learned, judged = split(len(lesson.targets))
    steps = len(learned) * epochs
    groups = parameter_groups(layers, steps)
    flat = [p for group in groups for p in group["params"]]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)

    before = best = lesson.judge(judged)
    kept = Kept(flat, moving)
    step = 0
    for _ in range(epochs):
        for i in torch.randperm(len(learned)).tolist():
            moves = step < (1 - SETTLING) * steps
            for group in optimizer.param_groups:
                stays = group["moves"] and not moves
                falling = schedule(step, steps) if group["falls"] else 1.0
                group["lr"] = 0.0 if stays else group["rate"] * falling
            optimizer.zero_grad()
            lesson.loss(learned[i]).backward()
            torch.nn.utils.clip_grad_norm_(flat, 1.0)
            optimizer.step()
            for rounding in moving if moves else ():
                rounding.follow()
            step += 1
        now = lesson.judge(judged)
        if now < best:
            best, kept = now, Kept(flat, moving)
    kept.restore()
    return before, best
