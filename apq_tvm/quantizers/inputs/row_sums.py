"""Running sums over what linear layers read, kept so that a run can stop and go on later."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from apq_tvm.quantizers.torch.ops import Tensor, torch
from apq_tvm.types import LayerStats

PULLS = 256
"""Samples whose gradients are told apart."""


@dataclass
class Sums:
    """Running weighted sums over a layer's input rows, float64 except for the large `hessian`.

    Parameters
    ----------
    square, total : float64 [K]
    absmax : float32 [K]
    rows : int
    weight : float
        Sum of the rows' weights.
    hessian : float32 [K, K] or None
        Sum of x xᵀ.
    """

    square: NDArray[np.float64]
    total: NDArray[np.float64]
    absmax: NDArray[np.float32]
    rows: int = 0
    weight: float = 0.0
    hessian: NDArray[np.float32] | None = None

    @staticmethod
    def zero(k: int, hessian: bool) -> Sums:
        """Nothing seen yet."""
        h = np.zeros((k, k), np.float32) if hessian else None
        return Sums(np.zeros(k), np.zeros(k), np.zeros(k, np.float32), hessian=h)

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Count rows x float32 [rows, K], each with its weight float32 [rows] or 1."""
        if not len(x):
            return
        weighed = x if weights is None else x * weights[:, None]
        self.square += (weighed * x).sum(0, dtype=torch.float64).numpy()
        self.total += weighed.sum(0, dtype=torch.float64).numpy()
        np.maximum(self.absmax, x.abs().amax(0).numpy(), out=self.absmax)
        self.rows += len(x)
        self.weight += float(len(x) if weights is None else weights.double().sum())
        if self.hessian is not None:
            torch.from_numpy(self.hessian).addmm_(weighed.T, x)

    def stats(self) -> LayerStats:
        """The weighted means."""
        weight = self.weight or 1.0  # a layer on which the result does not depend
        return LayerStats(
            mean_square=(self.square / weight).astype(np.float32),
            mean=(self.total / weight).astype(np.float32),
            absmax=self.absmax,
            samples=self.rows,
            hessian=None if self.hessian is None else self.hessian / np.float32(weight),
        )


@dataclass
class State:
    """How far a calibration is.

    Parameters
    ----------
    calls : int
        Calls counted.
    sums : dict of str to Sums
        By the node's name, or, without weights, by the value that layers read.
    fisher : dict of str to float32 [N, K]
        Sum over sequences of (dL/dw)^2, by node.
    pulls : dict of str to float32 [`PULLS`, K]
        By node: the rows of a sample's dL/dw added with random signs; those of later samples are
        added to those of earlier ones, where there are more than rows.
    tables : dict of str to float
        Sum of |dL/dy|^2 over the rows y that were looked up, by the embedding's node.
    """

    calls: int = 0
    sums: dict[str, Sums] = field(default_factory=dict)
    fisher: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    pulls: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    tables: dict[str, float] = field(default_factory=dict)
