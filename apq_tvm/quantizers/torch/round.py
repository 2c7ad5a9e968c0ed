"""Roundings with gradients: straight through (Bengio et al. 2013), clipping ranges learnable.

ABQ-LLM learns, per group of weights, how far the largest and the smallest weight are clipped
(AAAI 2025, eq. (1): W_max = a max(W), W_min = b min(W)); steps and zero points follow from them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.formats.families import family_of
from apq_tvm.formats.integer import MAX_SCALE
from apq_tvm.formats.levels import Levels
from apq_tvm.quantizers.torch.ops import F, Tensor, torch
from apq_tvm.types import QuantizedTensor, Scheme

LEAST_STEP = 2.0**-24
"""Smallest float16: groups of zeros get it."""

TINY = 2.0**-100
"""Largest magnitudes below this count as zero, as in `apq_tvm.ops.activations.quantize`."""

ASYMMETRIC = 126.5
"""Steps from the middle of a row's range to its ends, as there."""


def through(value: Tensor, rounded: Tensor) -> Tensor:
    """`rounded` forward, the gradient of `value` backward."""
    return value + (rounded - value).detach()


def round_activations(x: Tensor, scheme: Scheme) -> Tensor:
    """Activations [..., K] as integer kernels see them: rounded per token or group.

    Parameters
    ----------
    x : Tensor
    scheme : Scheme
        Float activations are given back as they are.

    Returns
    -------
    Tensor
        ``scale * code``, code in -(2^(p-1) - 1) .. 2^(p-1) - 1, scale = absmax / (2^(p-1) - 1); or
        ``scale * (code - zero)`` where activations are asymmetric, scale = (top - low) / 253.

    Raises
    ------
    BadInput
        Activations of 1 bit, which have no zero.
    """
    if not scheme.integer_acts:
        return x
    if scheme.act_bits < 2:
        raise BadInput(f"scheme {scheme}: activations of 1 bit are not simulated; compile it")
    limit = float(2 ** (scheme.act_bits - 1) - 1)
    k = x.shape[-1]
    size = k if scheme.act_group == -1 else min(scheme.act_group, k)
    if scheme.asymmetric_acts:
        return _asymmetric(x)
    padded = F.pad(x, (0, -k % size)) if k % size else x
    groups = padded.reshape(*x.shape[:-1], -1, size)
    top = groups.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(top < TINY, 0.0, limit / top)
    rounded = (groups * inverse).round_().clamp_(-limit, limit).mul_(top / limit)
    return rounded.reshape(*x.shape[:-1], -1)[..., :k]


def _asymmetric(x: Tensor) -> Tensor:
    """As `apq_tvm.ops.activations.quantize` with zero points: 0 is a code of every row."""
    top = x.amax(dim=-1, keepdim=True).clamp_(min=0)
    low = x.amin(dim=-1, keepdim=True).clamp_(max=0)
    half = top / 2 - low / 2
    inverse = torch.where(half < TINY, 0.0, ASYMMETRIC / half)
    middle = ((top / 2 + low / 2) * inverse).round_()
    codes = (x * inverse - middle).round_().clamp_(-127, 127)
    return codes.add_(middle).mul_(half / ASYMMETRIC)


def fake_activations(x: Tensor, scheme: Scheme) -> Tensor:
    """`round_activations` with the gradient of x."""
    if not scheme.integer_acts:
        return x
    x = x.float()
    return through(x, round_activations(x.detach(), scheme))


def even_levels(scheme: Scheme, name: str) -> Levels:
    """The levels of a scheme that ``abq`` learns.

    Parameters
    ----------
    scheme : Scheme
    name : str
        Layer, for errors.

    Raises
    ------
    BadScheme
        If the family's codes are not on an even grid.
    """
    levels = family_of(scheme).levels(scheme)
    whole = levels is not None and (levels.even or levels.signs)
    if levels is None or not whole or not (levels.values[0] < 0 or scheme.zero_points):
        raise BadScheme(
            f"layer {name!r}: --learn abq learns codes on an even grid (integers, W2*), not "
            f"{scheme}; use --learn finetune"
        )
    return levels


class LearnedRounding:
    """Rounds one layer's weight with learnable clipping.

    Parameters
    ----------
    start : QuantizedTensor
        Of codes on an even grid: its scales are where learning starts.
    w : Tensor [N, K]
        What `start` stands for.
    name : str
        Layer, for errors.

    Attributes
    ----------
    upper, lower : Tensor [N, G]
        Of the clipping. With zero points they are the ends of the range, for W2*, whose zero stays
        in the middle, their distance is the step; elsewhere only `upper` counts.

    Raises
    ------
    BadScheme
        If the family's codes are not on an even grid.
    """

    def __init__(self, start: QuantizedTensor, w: Tensor, name: str) -> None:
        scheme = start.scheme
        levels = even_levels(scheme, name)
        self.scheme, self.name, self.k = scheme, name, w.shape[1]
        self.size = self.k if scheme.group_size == -1 else min(scheme.group_size, self.k)
        self.signs, self.zeros = levels.signs, scheme.zero_points
        self.low, self.high = levels.values[0], levels.values[-1]
        # Of even levels (W2*) both ends count, as in the authors' quantizer.
        self.balanced = not self.signs and not self.zeros and self.low == -self.high
        step = torch.from_numpy(start.scales.astype(np.float32))
        self.sign = torch.where(step < 0, -1.0, 1.0)
        parts = self._parts(w)
        if self.zeros and start.zeros is not None:
            zero = torch.from_numpy(start.zeros.astype(np.float32))
            top, bottom = parts.amax(-1).clamp_min(0), parts.amin(-1).clamp_max(0)
            self.upper = _ratio(step * (self.high - zero), top)
            self.lower = _ratio(-step * zero, bottom)
        elif self.balanced:
            span = parts.amax(-1).clamp_min(0) - parts.amin(-1).clamp_max(0)
            self.upper = _ratio(step * (self.high - self.low), span)
            self.lower = self.upper.clone()
        else:
            self.upper = _ratio(step.abs() * self._reach(), self._size(parts))
            self.lower = torch.ones_like(self.upper)
        for parameter in (self.upper, self.lower):
            parameter.requires_grad_()

    def parameters(self) -> list[Tensor]:
        """What can be learned."""
        return [self.upper, self.lower] if self.zeros or self.balanced else [self.upper]

    def weight(self, w: Tensor) -> Tensor:
        """Decoded weight [N, K] of float weight `w`, with gradients to `w` and the parameters."""
        return self._round(w)[0]

    def finish(self, w: Tensor) -> QuantizedTensor:
        """Codes and float16 scales of `w` as learned.

        Raises
        ------
        BadScheme
            If a scale exceeds float16.
        """
        with torch.no_grad():
            _, code, step, zero = self._round(w)
            if float(step.abs().max()) > MAX_SCALE:
                raise BadScheme(f"layer {self.name!r}: a learned scale exceeds {MAX_SCALE:.0f}")
            return QuantizedTensor(
                _numpy(code.flatten(1)[:, : self.k], np.uint8),
                _numpy(step, np.float16),
                _numpy(zero, np.uint8) if self.zeros else None,
                self.scheme,
            )

    def _reach(self) -> float:
        """Steps from 0 to the end of the range."""
        return 1.0 if self.signs else float(-self.low)

    def _size(self, parts: Tensor) -> Tensor:
        return parts.abs().mean(-1) if self.signs else parts.abs().amax(-1)

    def _parts(self, w: Tensor) -> Tensor:
        """[N, K] -> [N, G, size]; the last group is filled with zeros."""
        return F.pad(w, (0, -self.k % self.size)).unflatten(1, (-1, self.size))

    def _round(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decoded weight, codes [N, G, size], steps and zero points [N, G]."""
        parts = self._parts(w)
        if self.zeros or self.balanced:
            top = self.upper * parts.amax(-1).clamp_min(0)
            bottom = self.lower * parts.amin(-1).clamp_max(0)
            step = _half((top - bottom) / (self.high - self.low))
            exact = -bottom / step
            zero = through(exact, torch.round(exact)).clamp(self.low, self.high)
            zero = zero if self.zeros else torch.zeros_like(step)
        else:
            step = _half(self.upper.abs() * self._size(parts) / self._reach()) * self.sign
            zero = torch.zeros_like(step)
        u, s, z = parts, step[..., None], zero[..., None]
        if self.signs:
            level = through(torch.tanh(u / s), torch.where(u > 0, 1.0, -1.0))
            code = (level > 0).to(u.dtype)
        else:
            exact = u / s + z
            code = through(exact, torch.round(exact)).clamp(self.low, self.high)
            level = code - z
            code = code - (0 if self.zeros else self.low)
        return (level * s).flatten(1)[:, : self.k], code, step, zero


def _half(step: Tensor) -> Tensor:
    """A step as float16 holds it, never 0."""
    step = step.clamp_min(LEAST_STEP)
    return through(step, step.half().float())


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b where b is not 0, else 1."""
    return torch.where(b.abs() > 1e-12, a / torch.where(b == 0, 1.0, b), 1.0).detach().clone()


def _numpy(tensor: Tensor, dtype: type) -> NDArray[Any]:
    values = tensor.detach().numpy()
    return np.ascontiguousarray(np.rint(values) if dtype is np.uint8 else values).astype(dtype)
