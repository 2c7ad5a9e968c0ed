"""Codes chosen with error feedback (GPTQ) for integers and for every family of one code per weight.

Integers and W2* get the scale and zero point of a group from its weights as they stand when the
walk reaches it (GPTQ, section 4, "grouping"): with few levels a scale from the original weights
would clip what the columns before have fed back. With activation order, where a group's columns are
not walked together, it is from the original weights. Other families keep the scales and tables
that their own quantizer chose and get new codes: what each code would decode to, weight by weight,
is all the walk needs to know of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.formats.balance import CENTRE
from apq_tvm.formats.families import check_tensor, dequantize
from apq_tvm.formats.integer import format_of
from apq_tvm.quantizers import balance, rtn
from apq_tvm.quantizers.error_feedback import DAMPING, Columns, Feedback, feedback_of, walk
from apq_tvm.quantizers.registry import QuantContext
from apq_tvm.quantizers.weighted import quantize_weighted
from apq_tvm.types import LayerStats, QuantizedTensor, Scheme

F32 = NDArray[np.float32]

LEVELS_BYTES = 1 << 28
"""Decoded values of all codes held at a time: more rows than fit are walked in turns."""


def layer_feedback(
    stats: LayerStats,
    k: int,
    name: str,
    *,
    damping: float = DAMPING,
    act_order: bool = False,
    centred: bool = False,
) -> Feedback:
    """Factor what calibration saw of one layer.

    Parameters
    ----------
    stats : LayerStats
    k : int
        Inputs of the layer.
    name : str
    damping, act_order
        See `feedback_of`.
    centred : bool
        Use the covariance: the layer's bias makes good the mean error afterwards.

    Raises
    ------
    BadInput
        If there is no H, or it is of another size or cannot be factored.
    """
    if stats.hessian is None:
        raise BadInput(
            f"layer {name!r}: error feedback needs H, which this calibration file was made "
            "without; run apq-tvm calibrate with --hessian, or use method rtn"
        )
    if stats.hessian.shape != (k, k):
        raise BadInput(
            f"layer {name!r}: H has shape {stats.hessian.shape}, the layer takes {k} inputs; the "
            "calibration file is of another model"
        )
    h = stats.hessian
    if centred:
        mean = stats.mean.astype(np.float64)
        h = (h - np.outer(mean, mean)).astype(np.float32)
        np.fill_diagonal(h, np.maximum(h.diagonal(), 0))
    return feedback_of(h, name, damping=damping, act_order=act_order)


def feedback_integers(
    w: F32, scheme: Scheme, feedback: Feedback, name: str, search: bool = True
) -> QuantizedTensor:
    """Integers of any bits, group and zero points.

    Parameters
    ----------
    w : float32 [N, K]
    scheme : Scheme
        Of family ``"int"``.
    feedback : Feedback
    name : str
        For errors.
    search : bool
        Search each group's scale for least error.

    Returns
    -------
    QuantizedTensor
    """
    fmt = format_of(scheme)
    n, k = w.shape
    size = k if scheme.group_size == -1 else min(scheme.group_size, k)
    groups = -(-k // size)
    row = replace(scheme, group_size=-1, per_token=False)
    codes = np.empty((n, k), np.uint8)
    scales = np.empty((n, groups), np.float16)
    zeros = np.empty((n, groups), np.uint8)
    natural = bool((np.diff(feedback.order) > 0).all())

    cost = _cost(feedback)
    even = bool((cost == cost[0]).all())

    def enter(now: F32, columns: Columns) -> None:
        now = np.ascontiguousarray(now)
        if search and not even:
            part = quantize_weighted(now, row, cost[columns], name)
        else:
            part = rtn.quantize_tensor(now, row, name, search)
        scales[:, columns[0] // size] = part.scales[:, 0]
        zeros[:, columns[0] // size] = fmt.zero if part.zeros is None else part.zeros[:, 0]

    def quantize(now: F32, columns: Columns) -> F32:
        at = columns // size
        scale = scales[:, at].astype(np.float32)
        if fmt.signs_only:
            codes[:, columns] = now > 0
            return np.where(now > 0, scale, -scale)
        zero = zeros[:, at].astype(np.float32)
        code = np.divide(now, scale, out=np.zeros_like(now), where=scale != 0)
        code = np.clip(np.rint(code) + zero, 0, np.float32(fmt.max_code))
        codes[:, columns] = code
        return np.asarray(scale * (code - zero), np.float32)

    if natural:
        walk(w, feedback, quantize, group=size, enter_group=enter)
    else:
        for first in range(0, k, size):
            enter(w[:, first : first + size], np.arange(first, min(first + size, k)))
        walk(w, feedback, quantize)
    return QuantizedTensor(codes, scales, zeros if fmt.zero_points else None, scheme)


def feedback_balance(
    w: F32, scheme: Scheme, feedback: Feedback, name: str, search: bool = True
) -> QuantizedTensor:
    """W2*: five levels, the scale of a group from its weights as the walk finds them.

    Parameters are those of `feedback_integers`, the scheme of family ``"balance"``, the order of
    `feedback` the columns' own.

    Returns
    -------
    QuantizedTensor
    """
    n, k = w.shape
    size = k if scheme.group_size == -1 else min(scheme.group_size, k)
    row = replace(scheme, group_size=-1, per_token=False)
    codes = np.empty((n, k), np.uint8)
    scales = np.empty((n, -(-k // size)), np.float16)
    cost = _cost(feedback)

    def enter(now: F32, columns: Columns) -> None:
        mine = cost[columns]
        context = QuantContext(search, LayerStats(mine, mine, mine, 1))
        part = balance.quantize_tensor(np.ascontiguousarray(now), row, name, context)
        scales[:, columns[0] // size] = part.scales[:, 0]

    def quantize(now: F32, columns: Columns) -> F32:
        scale = scales[:, columns // size].astype(np.float32)
        level = np.rint(np.divide(now, scale, out=np.zeros_like(now), where=scale > 0))
        level = np.clip(level, -CENTRE, CENTRE)
        codes[:, columns] = level + CENTRE
        return np.asarray(scale * level, np.float32)

    walk(w, feedback, quantize, group=size, enter_group=enter)
    return QuantizedTensor(codes, scales, None, scheme)


def _cost(feedback: Feedback) -> F32:
    """What an error of each column costs, squared: 1 / U_ii^2, which no later column makes good."""
    cost = np.empty(len(feedback.order), np.float32)
    cost[feedback.order] = 1 / np.square(feedback.upper.diagonal())
    return cost


def feedback_codes(
    w: F32, tensor: QuantizedTensor, feedback: Feedback, name: str
) -> QuantizedTensor:
    """New codes for a tensor of any family whose weights each depend on one code.

    Parameters
    ----------
    w : float32 [N, K]
        What `tensor` stands for.
    tensor : QuantizedTensor
        Its scales and tables stay.
    feedback : Feedback
    name : str

    Returns
    -------
    QuantizedTensor

    Raises
    ------
    BadScheme
        If the family's codes are not of that kind.
    """
    n, k = w.shape
    count = _count(tensor, name)
    rows = max(1, LEVELS_BYTES // (4 * count * k))
    codes = np.empty((n, k), np.uint8)
    for first in range(0, n, rows):
        part = slice(first, min(first + rows, n))
        levels = np.empty((k, count, part.stop - first), np.float32)  # [K, C, R]
        for code in range(count):
            filled = replace(tensor, codes=np.full_like(tensor.codes, code))
            levels[:, code] = dequantize(filled)[part].T

        def quantize(now: F32, columns: Columns, part: slice = part, levels: F32 = levels) -> F32:
            choice = levels[columns[0]]  # [C, R]
            best = np.abs(choice - now[:, 0]).argmin(axis=0)
            codes[part, columns[0]] = best
            return np.take_along_axis(choice, best[None], axis=0).T

        walk(w[part], feedback, quantize)
    return replace(tensor, codes=codes)


def _count(tensor: QuantizedTensor, name: str) -> int:
    """How many codes the tensor's family accepts."""
    if tensor.scheme.min_bits:
        raise BadScheme(
            f"layer {name!r}: method gptq chooses codes of one width, {tensor.scheme} holds "
            "several; use method rtn"
        )
    count = 0
    for code in range(1 << tensor.scheme.bits):
        try:
            check_tensor(replace(tensor, codes=np.full_like(tensor.codes, code)), name)
        except BadScheme:
            break
        count = code + 1
    if count < 2:
        raise BadScheme(
            f"layer {name!r}: method gptq knows no codes of {tensor.scheme}; use method rtn"
        )
    return count
