"""Any-precision codes with error feedback at every width at once.

One code serves all widths, so that a code which makes good the errors of the narrowest model binds
the wider ones to its children, however far their own weights are. Here all widths walk together:
each keeps weights of its own that have the errors of its own columns fed back, and a column's codes
are those of least ``Σ_b weight_b (w_b - ŵ_b)²`` over the tree of codes, found exactly. So a code
leaves a weight's own cluster only where that costs the wider models little. Then centroids of every
width are refitted to its codes, cells that are divided get the steps that suit the weights which
fell into them, and codes take turns with both as in `gptq`.

(Park et al., "Any-Precision LLM", choose codes without feedback; error feedback is GPTQ's.)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.anyprec import channels_of, levels_of, one_width
from apq_tvm.formats.anyprec_cells import CELL_BITS, HALVES
from apq_tvm.formats.families import dequantize
from apq_tvm.quantizers.families.anyprec_uniform import divided
from apq_tvm.quantizers.feedback.descend import Nearest, sweep
from apq_tvm.quantizers.feedback.error_feedback import Columns, Feedback, walk
from apq_tvm.quantizers.feedback.refit import refit
from apq_tvm.types import F32, U8, QuantizedTensor

WEIGHT = 1.7
"""How much more the error of each width counts than that of the width before. Near 1 the narrow
models, whose errors are the largest, decide alone; with 4, which makes relative errors count alike,
the narrowest gains little. Squared errors of the outputs of query, value and output layers of
SmolLM2 (3 to 8 bits), beside those of 2: 0.94 0.97 1.04 1.13 1.14 1.15."""

TURNS = 3
"""Rounds of refitting and descending after the walk: beside 1, errors are 0.96 0.97 0.97 0.96 0.78
0.65 (3 to 8 bits), as steps of cells find what feedback put into them; beside 2, 0.99 to 0.87."""

STEPS = 3
"""Of each refit of a width's centroids: products by H, of which every width needs its own, take
most of the time."""

ROWS = 4096
"""Output channels that are held for all widths at a time."""


def feed_back(w: F32, tensor: QuantizedTensor, feedback: Feedback) -> QuantizedTensor:
    """Choose codes and centroids of all widths anew.

    Parameters
    ----------
    w : float32 [N, K]
        What `tensor` stands for.
    tensor : QuantizedTensor
        Any-precision, as `quantize_anyprec` gives it. Its scales stay.
    feedback : Feedback

    Returns
    -------
    QuantizedTensor
        Every narrower model is still a prefix of it.
    """
    channels = channels_of(tensor)
    step = max(ROWS // channels, 1) * channels
    parts = []
    for first in range(0, len(w), step):
        rows = slice(first, first + step)
        blocks = slice(first // channels, (first + step) // channels)
        tables = {key: table[blocks] for key, table in tensor.tables.items()}
        part = replace(tensor, codes=tensor.codes[rows], scales=tensor.scales[rows], tables=tables)
        parts.append(_chosen(w[rows], part, feedback))
    return replace(
        tensor,
        codes=np.concatenate([part.codes for part in parts]),
        tables={key: np.concatenate([p.tables[key] for p in parts]) for key in tensor.tables},
    )


def refit_widths(w: F32, tensor: QuantizedTensor, hessian: F32) -> QuantizedTensor:
    """Centroids of all widths that suit the codes best; see `refit`.

    Widths that divide the cells of 5 bits have no centroids of their own. Where there are no others
    those of the widest move.
    """
    tables, widths = dict(tensor.tables), tensor.scheme.widths
    if HALVES in tables:
        widths = tuple(b for b in widths if b <= CELL_BITS) or widths[-1:]
    for bits in widths:
        tables.update(refit(w, one_width(tensor, bits), hessian, STEPS).tables)
    return replace(tensor, tables=tables)


def descend_widths(w: F32, tensor: QuantizedTensor, hessian: F32) -> QuantizedTensor:
    """One sweep over all columns; see `descend`."""
    decoded = np.concatenate([dequantize(tensor, bits) for bits in tensor.scheme.widths])
    delta = decoded - np.tile(w, (len(tensor.scheme.widths), 1))
    return replace(tensor, codes=sweep(delta, decoded, hessian, nearest_path(tensor)))


def nearest_path(tensor: QuantizedTensor) -> Nearest:
    """How to round one column of all widths, the targets of one below those of another.

    Returns
    -------
    callable
        ``(column, target [W * N]) -> (codes [N] of the widest, values [W * N])``.
    """
    n, widths = len(tensor.codes), tensor.scheme.widths
    blocks, at = np.arange(n) // channels_of(tensor), np.arange(n)
    levels = [
        np.ascontiguousarray((levels_of(tensor, bits)[blocks] * tensor.scales.astype(np.float32)).T)
        for bits in widths
    ]  # [2^b, N] each
    roots = [np.float32(WEIGHT ** (i / 2)) for i in range(len(widths))]
    weighed = [level * root for level, root in zip(levels, roots, strict=True)]

    def nearest(_: int, target: F32) -> tuple[U8, F32]:
        targets = target.reshape(len(widths), n)
        wanted = [row * root for row, root in zip(targets, roots, strict=True)]
        code, second = _first_code(weighed, wanted)
        values = np.empty((len(widths), n), np.float32)
        values[0] = levels[0][code, at]
        for i, level in enumerate(levels[1:], 1):
            code = 2 * code + second[i - 1][code, at]
            values[i] = level[code, at]
        return code.astype(np.uint8), values.reshape(-1)

    return nearest


def _first_code(
    levels: list[F32], targets: list[F32]
) -> tuple[NDArray[np.intp], list[NDArray[np.bool_]]]:
    """The first width's best code [N], and of every code of each width which child is better.

    Levels and targets are multiplied by the roots of what their widths count.
    """
    second: list[NDArray[np.bool_]] = []
    total = np.zeros(0, np.float32)
    for level, target in zip(reversed(levels), reversed(targets), strict=True):
        cost = level - target  # [2^b, N]
        cost *= cost
        if total.size:
            first, other = total[::2], total[1::2]
            second.insert(0, other < first)
            cost += np.minimum(first, other)
        total = cost
    return total.argmin(axis=0), second


def _chosen(w: F32, tensor: QuantizedTensor, feedback: Feedback) -> QuantizedTensor:
    nearest, codes = nearest_path(tensor), np.empty_like(tensor.codes)

    def quantize(now: F32, columns: Columns) -> F32:
        codes[:, columns[0]], values = nearest(0, now[:, 0])
        return values[:, None]

    walk(np.tile(w, (len(tensor.scheme.widths), 1)), feedback, quantize)
    tensor = replace(tensor, codes=codes)
    for _ in range(TURNS):
        tensor = _divided_again(w, refit_widths(w, tensor, feedback.hessian), feedback.hessian)
        tensor = descend_widths(w, tensor, feedback.hessian)
    return refit_widths(w, tensor, feedback.hessian)


def _divided_again(w: F32, tensor: QuantizedTensor, hessian: F32) -> QuantizedTensor:
    """Steps that suit the codes of 5 bits as they are now, if there are cells to divide."""
    if HALVES not in tensor.tables:
        return tensor
    cells = replace(tensor, codes=tensor.codes >> np.uint8(tensor.scheme.bits - CELL_BITS))
    return divided(w, cells, hessian.diagonal()[None])
