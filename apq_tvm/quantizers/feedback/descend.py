"""Codes that lower the output error one at a time, all others fixed.

Rounding with error feedback never looks back. Here column after column is rounded once more, to
what is best given all other columns, those after it included: for column i of Δ = Ŵ - W the least
of ``Δ H Δᵀ`` lies at ``ŵ_i - (Δ H)_i / H_ii``, and of the values that codes can have the nearest is
the best, since the function is quadratic. No step makes the error larger. (Coordinate descent, as
in Nair and Suggala, "CDQuant", 2024.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from apq_tvm.errors import BadScheme
from apq_tvm.formats.families import dequantize, family_of
from apq_tvm.formats.levels import Levels
from apq_tvm.types import F32, U8, QuantizedTensor

Nearest = Callable[[Any, F32], tuple[U8, F32]]
"""``(column, target [R]) -> (codes [R], values [R])``: the codes that decode nearest to the target,
for some rows of a tensor; of even levels ``(columns [C], targets [C, R])`` too."""

LEVELS_BYTES = 1 << 28
"""Decoded values of all codes held at a time: more rows than fit are handled in turns."""

LAZY = 64
"""Columns whose changes reach the others in one matrix product."""


def descend(w: F32, tensor: QuantizedTensor, hessian: F32, name: str) -> QuantizedTensor:
    """One sweep over all columns.

    Parameters
    ----------
    w : float32 [N, K]
        What `tensor` stands for.
    tensor : QuantizedTensor
        Of any family whose weights each depend on one code.
    hessian : float32 [K, K]
        With a positive diagonal.
    name : str
        For errors.

    Returns
    -------
    QuantizedTensor
        With other codes; no row's ``(w - ŵ) H (w - ŵ)ᵀ`` is larger, but for float32's rounding.

    Raises
    ------
    BadScheme
        If the family's codes are not of that kind.
    """
    codes = tensor.codes.copy()
    decoded = dequantize(tensor)
    for rows, nearest in nearest_codes(tensor, name):
        codes[rows] = sweep(decoded[rows] - w[rows], decoded[rows], hessian, nearest)
    return replace(tensor, codes=codes)


def sweep(delta: F32, decoded: F32, hessian: F32, nearest: Nearest) -> U8:
    """Choose the codes of every column anew, one after another.

    Parameters
    ----------
    delta : float32 [R, K]
        What the weights are off by.
    decoded : float32 [R, K]
    hessian : float32 [K, K]
    nearest : callable

    Returns
    -------
    uint8 [N, K]
        As `nearest` gave them.
    """
    values = np.ascontiguousarray(decoded.T)  # [K, R]
    k, rows = values.shape
    slope = hessian @ delta.T
    codes = []
    for first in range(0, k, LAZY):
        last = min(first + LAZY, k)
        moved = np.empty((last - first, rows), np.float32)
        for i in range(first, last):
            code, value = nearest(i, values[i] - slope[i] / hessian[i, i])
            codes.append(code)
            moved[i - first] = value - values[i]
            slope[i + 1 : last] += hessian[i + 1 : last, i, None] * moved[i - first]
        slope[last:] += hessian[last:, first:last] @ moved
    return np.stack(codes, axis=1)


def nearest_codes(tensor: QuantizedTensor, name: str) -> list[tuple[slice, Nearest]]:
    """How to round to what a tensor's scales and tables offer, for parts of its rows.

    Raises
    ------
    BadScheme
        If its weights do not each depend on one code.
    """
    scheme = tensor.scheme
    n, k = tensor.codes.shape
    levels = family_of(scheme).levels(scheme)
    if levels is not None and levels.even:
        return [(slice(0, n), _uniform(tensor, levels))]
    count = code_count(tensor, name)
    rows = max(1, LEVELS_BYTES // (4 * count * k))
    return [
        (part, _table(tensor, part, count))
        for part in (slice(first, min(first + rows, n)) for first in range(0, n, rows))
    ]


def round_to(tensor: QuantizedTensor, w: F32, name: str) -> tuple[U8, F32]:
    """The nearest codes that a tensor's scales and tables offer, and what they decode to.

    Parameters
    ----------
    tensor : QuantizedTensor
    w : float32 [N, K]
    name : str
        Layer, for errors.

    Returns
    -------
    uint8 [N, K], float32 [N, K]

    Raises
    ------
    BadScheme
        If its weights do not each depend on one code.
    """
    levels = family_of(tensor.scheme).levels(tensor.scheme)
    if levels is not None and levels.even:
        codes, values = _uniform(tensor, levels)(np.arange(w.shape[1]), w.T)
        return np.ascontiguousarray(codes.T), np.ascontiguousarray(values.T)
    count = code_count(tensor, name)
    codes, values = np.zeros(w.shape, np.uint8), dequantize(with_code(tensor, 0))
    least = np.abs(values - w)
    for code in range(1, count):
        value = dequantize(with_code(tensor, code))
        error = np.abs(value - w)
        better = error < least
        for kept, new in ((codes, code), (values, value), (least, error)):
            np.copyto(kept, new, where=better)
    return codes, values


def _uniform(tensor: QuantizedTensor, levels: Levels) -> Nearest:
    """Of integers: a division."""
    k, size = tensor.codes.shape[1], tensor.scheme.group_size
    size = k if size == -1 else min(size, k)
    centre, top = np.float32(-levels.values[0]), np.float32(len(levels.values) - 1)
    scales = np.ascontiguousarray(tensor.scales.astype(np.float32).T)  # [G, N]
    zeros = None if tensor.zeros is None else np.ascontiguousarray(tensor.zeros.T)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)

    def nearest(column: Any, target: F32) -> tuple[U8, F32]:
        group = column // size
        zero = centre if zeros is None else zeros[group].astype(np.float32)
        code = np.clip(np.rint(target * inverse[group]) + zero, 0, top)
        return code.astype(np.uint8), np.asarray(scales[group] * (code - zero), np.float32)

    return nearest


def _table(tensor: QuantizedTensor, part: slice, count: int) -> Nearest:
    """Of anything else: what every code decodes to, weight by weight."""
    k = tensor.codes.shape[1]
    levels = np.empty((k, count, part.stop - part.start), np.float32)  # [K, C, R]
    for code in range(count):
        levels[:, code] = dequantize(with_code(tensor, code))[part].T

    def nearest(column: int, target: F32) -> tuple[U8, F32]:
        choice = levels[column]  # [C, R]
        best = np.abs(choice - target).argmin(axis=0)
        return best.astype(np.uint8), np.take_along_axis(choice, best[None], axis=0)[0]

    return nearest


def code_count(tensor: QuantizedTensor, name: str) -> int:
    """How many codes the tensor's family accepts.

    Raises
    ------
    BadScheme
        If it holds several widths, or its weights have no codes of their own.
    """
    if len(tensor.scheme.widths) > 1:
        raise BadScheme(
            f"layer {name!r}: codes of one width are chosen here, {tensor.scheme} holds several"
        )
    count = 1 + int(np.max(family_of(tensor.scheme).top_codes(tensor)))
    if count < 2:
        raise BadScheme(
            f"layer {name!r}: weights of {tensor.scheme} have no codes that method gptq could "
            "choose one by one; use method rtn"
        )
    return count


def with_code(tensor: QuantizedTensor, code: int) -> QuantizedTensor:
    """The tensor with one code everywhere; in columns of fewer codes the largest of theirs."""
    top = np.asarray(family_of(tensor.scheme).top_codes(tensor), np.uint8)
    return replace(tensor, codes=np.full_like(tensor.codes, np.minimum(top, np.uint8(code))))
