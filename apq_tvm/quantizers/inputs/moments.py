"""Mean and variance of a value's channels, and what functions make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apq_tvm.types import Array

F64 = NDArray[np.float64]

POINTS, _WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
SHARES = _WEIGHTS / _WEIGHTS.sum()
"""Where functions of normally distributed numbers are evaluated, and by what share."""


@dataclass(frozen=True)
class Moments:
    """Mean and variance of the channels of one value.

    Parameters
    ----------
    mean, variance : float64 [S, C]
        Of S inputs of the model; C is 1 where all numbers are alike.
    axis : int
        Of the channels, counted from the end.
    """

    mean: F64
    variance: F64
    axis: int = -1

    @staticmethod
    def constant(array: Array, inputs: int) -> Moments:
        """Of a constant, along its only axis of several entries, or the last."""
        wide = [i - array.ndim for i, size in enumerate(array.shape) if size > 1]
        axis = wide[0] if len(wide) == 1 else -1
        last = np.moveaxis(np.atleast_1d(array), axis, -1)
        rows = last.reshape(-1, last.shape[-1])
        mean = rows.mean(0, dtype=np.float64)
        square = np.einsum("ij,ij->j", rows, rows, dtype=np.float64) / len(rows)
        variance = np.maximum(square - np.square(mean), 0)
        return Moments(np.tile(mean, (inputs, 1)), np.tile(variance, (inputs, 1)), axis)

    @property
    def count(self) -> int:
        """Channels that are told apart."""
        return int(self.mean.shape[1])

    @property
    def alike(self) -> bool:
        """Whether there is nothing to tell channels apart by."""
        return self.count == 1

    @property
    def spread(self) -> bool:
        """Whether values vary within a channel."""
        return bool(self.variance.any())

    @property
    def finite(self) -> bool:
        """Whether all is known."""
        return bool(np.isfinite(self.mean).all() and np.isfinite(self.variance).all())

    def along(self, axis: int, size: int) -> bool:
        """Whether these are, or may be, the `size` channels of an axis."""
        return self.alike or (self.axis == axis and self.count == size)

    def goes_with(self, other: Moments) -> bool:
        """Whether the channels of both are the same."""
        return self.alike or other.alike or (self.axis, self.count) == (other.axis, other.count)

    def wide(self, size: int) -> Moments:
        """As `size` channels."""
        return self.map(lambda v: np.broadcast_to(v, (len(v), size)))

    def map(
        self, function: Callable[[F64], F64], variance: Callable[[F64], F64] | None = None
    ) -> Moments:
        """Of what functions make of the mean and of the variance."""
        return Moments(function(self.mean), (variance or function)(self.variance), self.axis)

    def through(self, function: Callable[[F64], F64]) -> Moments:
        """Of a function of normally distributed numbers."""
        values = function(self.mean + np.sqrt(self.variance) * POINTS[:, None, None])
        mean = np.tensordot(SHARES, values, 1)
        return Moments(mean, np.tensordot(SHARES, np.square(values - mean), 1), self.axis)

    def __add__(self, other: Moments) -> Moments:
        """Of the sum of independent numbers."""
        axis = other.axis if self.alike else self.axis
        return Moments(self.mean + other.mean, self.variance + other.variance, axis)

    def __mul__(self, other: Moments) -> Moments:
        """Of the product of independent numbers."""
        a, b = np.square(self.mean), np.square(other.mean)
        variance = self.variance * (other.variance + b) + other.variance * a
        return Moments(self.mean * other.mean, variance, other.axis if self.alike else self.axis)


def _sigmoid(x: F64) -> F64:
    return np.asarray(0.5 + 0.5 * np.tanh(x / 2))


def _gelu(x: F64) -> F64:
    return np.asarray(x * (0.5 + 0.5 * np.tanh(0.7978845608 * (x + 0.044715 * x**3))))


LAYER_FUNCTIONS: Mapping[str, Callable[[F64], F64]] = {
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "gelu": _gelu,
    "gelu_tanh": _gelu,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "hardsigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "hardswish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
}
"""Activations by name, as far as a mean needs."""

FUNCTIONS: Mapping[str, Callable[..., F64]] = {
    "Clip": lambda attrs, x, low=-np.inf, high=np.inf: np.clip(
        x, -np.inf if low is None else low, high
    ),
    "HardSigmoid": lambda attrs, x: np.clip(
        attrs.get("alpha", 0.2) * x + attrs.get("beta", 0.5), 0, 1
    ),
    "LeakyRelu": lambda attrs, x: np.where(x < 0, attrs.get("alpha", 0.01) * x, x),
    "PRelu": lambda attrs, x, slope: np.where(x < 0, slope * x, x),
    "Relu": lambda attrs, x: np.maximum(x, 0),
    "Sigmoid": lambda attrs, x: _sigmoid(x),
    "Tanh": lambda attrs, x: np.tanh(x),
    "apq.Activation": lambda attrs, x: LAYER_FUNCTIONS[attrs["activation"]](x),
    "apq.Gelu": lambda attrs, x: _gelu(x),
}
"""``(attrs, x, *constants) -> y`` of operators that work element by element; what is absent in the
middle is None."""
