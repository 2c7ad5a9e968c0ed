"""Codes that are learned with the arrays they index: weights move, codes follow.

Block-AP of EfficientQAT (Chen et al., ACL 2025, section 3.2) trains weights, scales and zero points
of a block together: forward the weights are rounded, backward the rounding is not there (Bengio et
al. 2013). What codes decode to is asked of the family (`round_to`), so every format of one code
a weight learns like this, not integers alone. Learning starts from the codes it is given, such as
those of error feedback, which rounding the weights would not give: each weight starts as near to
its float value as its code allows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apq_tvm.formats.families import dequantize, family_of
from apq_tvm.quantizers.feedback.descend import round_to
from apq_tvm.quantizers.torch.decode import Decoder
from apq_tvm.quantizers.torch.group_levels import GroupLevels
from apq_tvm.quantizers.torch.ops import Tensor, torch
from apq_tvm.types import F32, U8, QuantizedTensor

HALVINGS = 5
"""Of the way from a code's value to the float weight, until the weight rounds to the code."""


class MovingCodes:
    """A layer's weights while their codes are learned.

    Parameters
    ----------
    tensor : QuantizedTensor
        Where learning starts.
    w : Tensor [N, K]
        What it stands for.
    name : str
        Layer, for errors.
    centred : bool
        Weights start at what their codes decode to, not as near to `w` as these allow.

    Attributes
    ----------
    tensor : QuantizedTensor
        With the codes of now.

    Raises
    ------
    BadScheme
        If the family's weights do not each depend on one code, or it holds several widths.
    """

    def __init__(
        self, tensor: QuantizedTensor, w: Tensor, name: str, centred: bool = False
    ) -> None:
        self.tensor, self.name = tensor, name
        near = dequantize(tensor) if centred else _begin(tensor, w.numpy(), name)
        self.decoder = Decoder(tensor, name)
        rounding = round_to(tensor, w.numpy(), name)[1] - w.numpy()
        step = np.sqrt(12 * np.square(rounding).mean(axis=1, keepdims=True))  # even: its spacing
        self._unit = torch.from_numpy(np.maximum(step, 1e-8).astype(np.float32))
        self._start = torch.from_numpy(near)
        self.moved_by = torch.zeros(near.shape, requires_grad=True)  # in units of a step
        self.zeros: Tensor | None = None
        levels = family_of(tensor.scheme).levels(tensor.scheme)
        even = levels is not None and levels.even  # a division finds their codes
        self._levels = None if even else GroupLevels.of(tensor, name)
        if tensor.zeros is not None and levels is not None and levels.even:
            self._top = len(levels.values) - 1
            self.zeros = torch.from_numpy(tensor.zeros.astype(np.float32)).requires_grad_()

    def parameters(self) -> list[Tensor]:
        """Scales or tables, by the rate of arrays."""
        return self.decoder.parameters()

    def moving(self) -> list[Tensor]:
        """Weights and zero points, by the rate of codes: 1 is the distance of two codes."""
        return [self.moved_by] if self.zeros is None else [self.moved_by, self.zeros]

    def weight(self, bits: int = 0) -> Tensor:
        """Decoded weight [N, K], with gradients to arrays, weights and zero points."""
        value = self.decoder.weight(bits)
        moved = self.moved_by * self._unit
        value = value + (moved - moved.detach())
        if self.zeros is not None:
            size = self.tensor.scheme.group_size
            k = value.shape[1]
            scale = torch.from_numpy(self.tensor.scales.astype(np.float32))
            zero = scale * (self.zeros - self.zeros.detach())
            value = value - zero.repeat_interleave(k if size == -1 else size, 1)[:, :k]
        return value

    def follow(self) -> None:
        """Let codes and zero points follow what an optimizer moved."""
        with torch.no_grad():
            tensor = self.decoder.finish()
            if self.zeros is not None:
                self.zeros.clamp_(0, self._top)
                zeros = np.rint(self.zeros.numpy()).astype(np.uint8)
                tensor = replace(tensor, zeros=zeros)
            target = self._start + self.moved_by * self._unit
            codes, decoded = self._nearest(tensor, target)
            self.keep(replace(tensor, codes=codes))
            # A weight beyond the last code would take long to come back.
            near = decoded + (target - decoded).clamp(-self._unit, self._unit)
            self.moved_by.copy_((near - self._start) / self._unit)

    def _nearest(self, tensor: QuantizedTensor, target: Tensor) -> tuple[U8, Tensor]:
        if self._levels is not None:
            return self._levels.nearest(tensor, target)
        codes, values = round_to(tensor, target.numpy(), self.name)
        return codes, torch.from_numpy(values)

    def go_on(self, tensor: QuantizedTensor) -> None:
        """Be as `finish` gave a tensor; weights are at what its codes decode to."""
        self.keep(tensor)
        self.decoder.go_on(tensor)
        with torch.no_grad():
            self.moved_by.copy_((torch.from_numpy(dequantize(tensor)) - self._start) / self._unit)
            if self.zeros is not None and tensor.zeros is not None:
                self.zeros.copy_(torch.from_numpy(tensor.zeros.astype(np.float32)))

    def keep(self, tensor: QuantizedTensor) -> None:
        """Go on with these codes and zero points."""
        self.tensor = tensor
        self.decoder.rebase(tensor)

    def finish(self, _: Tensor | None = None) -> QuantizedTensor:
        """The tensor as learned."""
        return replace(self.decoder.finish(), codes=self.tensor.codes, zeros=self.tensor.zeros)


def _begin(tensor: QuantizedTensor, w: F32, name: str) -> F32:
    """Weights that round to the tensor's codes, as near to `w` as halving the way finds."""
    decoded = dequantize(tensor)
    near, share = w, 1.0
    for _ in range(HALVINGS):
        rounds_elsewhere = round_to(tensor, near, name)[0] != tensor.codes
        if not rounds_elsewhere.any():
            break
        share /= 2
        near = np.where(rounds_elsewhere, decoded + share * (w - decoded), near)
    rounds_elsewhere = round_to(tensor, near, name)[0] != tensor.codes
    return np.where(rounds_elsewhere, decoded, near).astype(np.float32)
