"""Error feedback: what rounding one column breaks, the columns after it make good.

The method of GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", ICLR 2023, section 3, after Hassibi and Stork's Optimal Brain Surgeon):
with H = E[x xᵀ] of a layer's input, the change of the columns F that are still float which least
raises E|x (W - Ŵ)ᵀ|² after column i became ŵ_i is ``-(w_i - ŵ_i) / [H⁻¹]_ii * [H⁻¹]_iF``. H⁻¹ over
the columns that remain, for every i at once, is the upper factor U of H⁻¹ = UᵀU.

The walk here knows no format: a callback rounds the columns it is shown, one or several at a time,
so that integers, codebooks, binary codes and mixed widths share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadInput
from apq_tvm.types import F32, LayerStats

Columns = NDArray[np.intp]
QuantizeColumns = Callable[[F32, Columns], F32]
"""``(w [N, C], columns [C]) -> ŵ [N, C]``: the decoded values of what the columns become. `w` is
the columns' present value, error of earlier ones included; `columns` is where they stand in K."""

EnterGroup = Callable[[F32, Columns], None]
"""``(w [N, G], columns [G])``: the present value of a group before its first column is rounded."""

DAMPING = 0.01
"""Added to H's diagonal, relative to its mean (GPTQ, section 3.3)."""

MAX_DAMPING = 1.0
"""Where damping stops to grow: H + this is as much identity as it is H."""

LAZY = 128
"""Columns whose changes reach the columns after them in one matrix product (GPTQ, section 3.3)."""


@dataclass(frozen=True)
class Feedback:
    """How error spreads over the columns of one layer.

    Parameters
    ----------
    upper : float32 [K, K]
        U of H⁻¹ = UᵀU, columns in the order of `order`.
    order : int [K]
        Columns in the order they are rounded.
    damping : float
        What was added to H's diagonal, relative to its mean.
    dead : int
        Input channels that were 0 in every sample.
    hessian : float32 [K, K]
        H as it was factored, damped, columns in their own order.
    """

    upper: F32
    order: Columns
    damping: float
    dead: int
    hessian: F32

    def note(self) -> str:
        """What a report should say, or ``""`` if all went as asked."""
        parts = []
        if self.damping > DAMPING:
            parts.append(f"H was singular: damped by {self.damping:g} of its mean diagonal")
        if self.dead:
            parts.append(f"{self.dead} input channels are 0 in every sample")
        return "; ".join(parts)


def feedback_of(
    hessian: F32, name: str, *, damping: float = DAMPING, act_order: bool = False
) -> Feedback:
    """Factor a layer's H for `walk`.

    Parameters
    ----------
    hessian : float32 [K, K]
        E[x xᵀ], or the covariance where the mean is corrected elsewhere.
    name : str
        Layer, for errors.
    damping : float
        Relative to the mean of the diagonal; ten times as much is tried while H cannot be factored.
    act_order : bool
        Round columns of large diagonal first, while all others can still make good their error.

    Returns
    -------
    Feedback

    Raises
    ------
    BadInput
        If H is not square and finite, has a negative diagonal, or stays singular with
        `MAX_DAMPING`.
    """
    h = _check(hessian, name).astype(np.float64)
    k = len(h)
    diagonal = h.diagonal().copy()
    dead = diagonal <= 0
    if dead.all():
        raise BadInput(
            f"layer {name!r}: its input is 0 in every calibration sample, so H is zero; calibrate "
            "with inputs like those the model will see, or use method rtn"
        )
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(k)
    mean = float(diagonal[~dead].mean())
    h[dead, dead] = mean
    natural, h = h, h[np.ix_(order, order)]
    while damping <= MAX_DAMPING:
        try:
            # H = V Vᵀ with V upper, by the Cholesky factor of H read backwards; then U = V⁻¹.
            lower = np.linalg.cholesky((h + np.eye(k) * damping * mean)[::-1, ::-1])
            upper = np.triu(np.linalg.inv(lower[::-1, ::-1]))
        except np.linalg.LinAlgError:
            damping = max(damping, DAMPING / 10) * 10
            continue
        if np.isfinite(upper).all():
            whole = (natural + np.eye(k) * damping * mean).astype(np.float32)
            return Feedback(upper.astype(np.float32), order, damping, int(dead.sum()), whole)
        damping = max(damping, DAMPING / 10) * 10
    raise BadInput(
        f"layer {name!r}: H [{k}, {k}] is singular even with {MAX_DAMPING:g} of its mean diagonal "
        "added; calibrate with more samples, or use method rtn"
    )


def walk(
    w: F32,
    feedback: Feedback,
    quantize_columns: QuantizeColumns,
    *,
    step: int = 1,
    group: int = 0,
    enter_group: EnterGroup | None = None,
) -> F32:
    """Round columns one after another, each time moving the error to those that are left.

    Parameters
    ----------
    w : float32 [N, K]
        Not changed.
    feedback : Feedback
    quantize_columns : callable
    step : int
        Columns rounded at a time: blocks that share a code or a table. They do not make good each
        other's error.
    group : int
        `enter_group` is called at every multiple of it, with the columns up to the next; 0 calls it
        once, with all. It needs the natural order, since a group is no longer together in another.
    enter_group : callable, optional
        Chooses the group's parameters.

    Returns
    -------
    float32 [N, K]
        The decoded weights, as `quantize_columns` returned them.
    """
    n, k = w.shape
    order, upper = feedback.order, feedback.upper
    now = np.ascontiguousarray(w[:, order].T)  # [K, N]: a column of w is contiguous
    result = np.empty((n, k), np.float32)
    lazy = _lazy(step, group)
    if enter_group is not None and not group:
        enter_group(w, order)
    for first in range(0, k, lazy):
        last = min(first + lazy, k)
        errors = np.empty((last - first, n), np.float32)
        for at in range(first, last, step):
            stop = min(at + step, last)
            if group and enter_group is not None and at % group == 0:
                end = min(at + group, k)
                enter_group(np.ascontiguousarray(now[at:end].T), order[at:end])
            here = slice(at, stop)
            rounded = quantize_columns(np.ascontiguousarray(now[here].T), order[here])
            result[:, order[here]] = rounded
            # E U_BB = W_B - Ŵ_B; for one column a division by U_ii.
            left = now[here] - rounded.T
            if stop - at == 1:
                error = left / upper[at, at]
            else:
                error = np.linalg.solve(upper[here, here].T, left).astype(np.float32)
            errors[at - first : stop - first] = error
            now[stop:last] -= upper[here, stop:last].T @ error
        now[last:] -= upper[first:last, last:].T @ errors
    return result


def output_error(delta: F32, hessian: F32 | None, mean_square: F32) -> float:
    """E|x Δᵀ|² of weights that are off by Δ.

    Parameters
    ----------
    delta : float32 [N, K]
    hessian : float32 [K, K] or None
        E[x xᵀ]; without it channels count as uncorrelated, by `mean_square`.
    mean_square : float32 [K]

    Returns
    -------
    float
        Summed over the N outputs.
    """
    if hessian is None:
        return float(np.einsum("nk,nk,k->", delta, delta, mean_square, dtype=np.float64))
    return float(np.einsum("nk,nk->", delta @ hessian, delta, dtype=np.float64))


def damage(delta: F32, w: F32, stats: LayerStats | None) -> float:
    """How much a layer's error matters, in units that compare between layers.

    Parameters
    ----------
    delta : float32 [N, K]
        What the weights are off by.
    w : float32 [N, K]
    stats : LayerStats or None
        Where it has importance the result is that times E|x delta^T|^2, rows weighed as calibration
        did: about how much the loss grows to second order (as Fisher information has it).
        Without, the error relative to the layer's output, E|x delta^T|^2 / E|x w^T|^2; without
        stats all inputs count the same.

    Returns
    -------
    float
        Not negative.
    """
    square = np.ones(w.shape[1], np.float32) if stats is None else stats.mean_square
    hessian = None if stats is None else stats.hessian
    error = max(output_error(delta, hessian, square), 0.0)
    if stats is not None and stats.importance:
        return error * stats.importance
    return error / max(output_error(w, hessian, square), 1e-30)


def _lazy(step: int, group: int) -> int:
    """The lazy width: whole steps and whole groups, since a group is seen before it is walked."""
    unit = step if not group else int(np.lcm(step, group))
    return max(1, LAZY // unit) * unit


def _check(hessian: F32, name: str) -> F32:
    if hessian.ndim != 2 or hessian.shape[0] != hessian.shape[1]:
        raise BadInput(f"layer {name!r}: H has shape {hessian.shape}; [K, K] is needed")
    if not np.isfinite(hessian).all():
        raise BadInput(
            f"layer {name!r}: H holds NaN or infinity; calibrate anew with finite inputs"
        )
    if (hessian.diagonal() < 0).any():
        raise BadInput(
            f"layer {name!r}: H has a negative diagonal, so it is no E[x xᵀ]; calibrate anew"
        )
    return hessian
