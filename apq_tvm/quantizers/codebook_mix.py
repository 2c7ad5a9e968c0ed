"""A mix of 2- and 3-bit codebooks at a wanted average, as in the paper's table at 3.2 bits.

Gope et al. (section 6.5) give three bits to the layers that llama.cpp's Q2_K gives three. Here the
layers are chosen by what the third bit takes off their relative output error, measured on a sample
of rows with the codebooks of the whole model: largest gain per weight first.
"""

from __future__ import annotations

import re

import numpy as np

from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.formats import bits_per_weight, dequantize, parse_scheme
from apq_tvm.formats.codebook import NAME
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.codebook_groups import importance
from apq_tvm.quantizers.codebook_learn import learn
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.types import Array, Calibration, ImportedModel, Scheme

ROWS = 64
"""Rows of a layer that its error is measured on."""


def mix_codebooks(
    model: ImportedModel,
    bits: float = 3.2,
    low: str = "cb2",
    high: str = "cb3",
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Which linear layers get `high` so that their average is at most `bits`.

    Parameters
    ----------
    model : ImportedModel
    bits : float
        Bits per weight of all linear layers, scales included.
    low, high : str
        Codebook schemes.
    calibration : Calibration, optional
        Weighs the errors by E[x²] of the layers' inputs.
    progress : Progress, optional

    Returns
    -------
    dict of str to str
        Regular expression of a layer's name → scheme: ``tensor_types`` of `compile`.

    Raises
    ------
    BadScheme
        `low` or `high` has no codebooks, or `bits` is below what `low` takes.
    BadInput
        The model has no linear layer.
    """
    schemes = tuple(map(_scheme, (low, high)))
    nodes = {n.name: n.inputs[1] for n in model.nodes if n.op == "apq.Linear"}
    if not nodes:
        raise BadInput(f"{model.name} has no linear layer to mix codebooks in")
    progress = progress or Silent()
    weights = {w: np.asarray(model.weights[w], np.float32) for w in nodes.values()}
    books = [learn(weights, scheme, None, progress) for scheme in schemes]
    taken = 0.0
    gains: list[tuple[float, float, str]] = []
    with progress.stage("mix codebooks", len(nodes)):
        for node, name in nodes.items():
            progress.advance(node)
            weight = weights[name]
            stats = None if calibration is None else calibration.layers.get(node)
            h = importance(stats, weight.shape)
            errors, sizes = [], []
            at = np.linspace(0, len(weight) - 1, min(ROWS, len(weight))).astype(int)
            rows = np.ascontiguousarray(weight[at])
            for scheme, book in zip(schemes, books, strict=True):
                tensor = quantize_tensor(rows, scheme, name, search=False, shared=book)
                mine = h[at] if h is not None and h.ndim == 2 else h
                errors.append(_relative(rows, dequantize(tensor), mine))
                sizes.append(bits_per_weight(tensor) * weight.size)
            taken += sizes[0]
            gains.append(((errors[0] - errors[1]) / weight.size, sizes[1] - sizes[0], node))
    room = bits * sum(weights[name].size for name in nodes.values())
    if taken > room:
        least = taken / sum(weights[name].size for name in nodes.values())
        raise BadScheme(f"{bits} bits per weight: {low} alone takes {least:.4f}")
    chosen = dict.fromkeys(nodes, low)
    for _, more, node in sorted(gains, reverse=True):
        if taken + more <= room:
            taken += more
            chosen[node] = high
    return {f"^{re.escape(node)}$": scheme for node, scheme in chosen.items()}


def _scheme(text: str) -> Scheme:
    scheme = parse_scheme(text)
    if scheme is None or scheme.family != NAME:
        raise BadScheme(f"{text} is no scheme with codebooks; cb2, cb3 and cb4 are")
    return scheme


def _relative(weight: Array, decoded: Array, h: Array | None) -> float:
    """Squared error over the squared weights, both weighed by importance."""
    factor = np.float32(1) if h is None else h
    total = float((factor * weight**2).sum(dtype=np.float64))
    return float((factor * (weight - decoded) ** 2).sum(dtype=np.float64)) / (total or 1.0)
