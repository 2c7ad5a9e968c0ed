"""A scheme for every layer, so that the whole model meets a budget of bits per weight.

Every candidate's error is measured: what it adds to the layer's output, under the calibration's H
or E[x²], and how much that hurts the model (`error_feedback.damage`). The sum over layers is what
the choice minimises, a multiple-choice knapsack. All weights that ``apq-tvm inspect`` counts are
counted; embedding tables are not chosen for, since no matrix product tells their sensitivity: they
keep the scheme they were given (``--tensor-type``), unless a language model's head shares theirs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadScheme
from apq_tvm.formats import parse_scheme
from apq_tvm.formats.families import dequantize, nbytes
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.feedback.error_feedback import damage
from apq_tvm.quantizers.registry import prepare, quantize_tensor
from apq_tvm.types import Calibration, ImportedModel, LayerStats, Scheme

F32 = NDArray[np.float32]

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128, -1)

SAMPLE_ROWS = 64
"""Rows of each weight that are quantized to measure a candidate's error."""

STATES = 4096
"""Partial choices kept while layers are added one after another; more change nothing measurable,
and models of few layers have fewer, so that their solution is exact."""


@dataclass(frozen=True)
class Item:
    """One weight and its candidates.

    Parameters
    ----------
    nodes : tuple of str
        Layers that read it.
    size : int
        Weights, counted for each layer as ``apq-tvm inspect`` does.
    bits : tuple of int
        Stored bits, scales and tables included, per candidate.
    errors : tuple of float
        `damage` per candidate.
    """

    nodes: tuple[str, ...]
    size: int
    bits: tuple[int, ...]
    errors: tuple[float, ...]


@dataclass(frozen=True)
class BudgetPlan:
    """What was chosen.

    Parameters
    ----------
    schemes : mapping of str to str
        Layer → scheme.
    errors : mapping of str to float
        Layer → `damage`.
    bits_per_weight : float
        Over all weights that count.
    """

    schemes: Mapping[str, str]
    errors: Mapping[str, float]
    bits_per_weight: float

    def tensor_types(self) -> dict[str, str]:
        """For `quantize`: a rule for every layer."""
        return {f"^{re.escape(node)}$": scheme for node, scheme in self.schemes.items()}


def default_candidates(scheme: Scheme) -> tuple[str, ...]:
    """Integers of 2 to 8 bits in groups of 32 to whole rows, with the activations of `scheme`."""
    return tuple(
        str(Scheme(bits, scheme.zero_points, scheme.act_bits, group_size=group))
        for bits, group in itertools.product(BITS, GROUPS)
    )


def choose_schemes(
    model: ImportedModel,
    layers: Mapping[str, str],
    candidates: Sequence[str],
    target: float,
    calibration: Calibration | None,
    progress: Progress | None = None,
    fixed: Mapping[str, Scheme] | None = None,
) -> BudgetPlan:
    """Choose a scheme for every layer.

    Parameters
    ----------
    model : ImportedModel
    layers : mapping of str to str
        Layer → name of its weight, for all layers to choose for.
    candidates : sequence of str
        Schemes.
    target : float
        Bits per weight, at most, over all these weights.
    calibration : Calibration or None
        Without it all inputs count the same.
    progress : Progress, optional
    fixed : mapping of str to Scheme, optional
        Names of weights that are counted, but keep their schemes.

    Returns
    -------
    BudgetPlan

    Raises
    ------
    BadScheme
        If a candidate is float, or even the smallest ones exceed the target: the message has the
        smallest possible.
    """
    schemes = [_candidate(word) for word in candidates]
    items = _measure_all(model, layers, schemes, calibration, progress or Silent())
    taken = 0
    total = sum(item.size for item in items)
    for weight, scheme in (fixed or {}).items():
        array = np.asarray(model.weights[weight], np.float32)
        total += array.size
        taken += measure(array, (), (scheme,), None, weight).bits[0]
    budget = int(target * total) - taken
    choice = solve([i.bits for i in items], [i.errors for i in items], budget)
    if choice is None:
        least = (sum(min(item.bits) for item in items) + taken) / total
        kept = f", {len(fixed)} of the weights as they were given" if fixed else ""
        raise BadScheme(
            f"{target:g} bits per weight cannot be met: the smallest candidates take {least:.3f} "
            f"with their scales{kept}; ask for more, or give smaller candidates"
        )
    return BudgetPlan(
        {n: str(schemes[c]) for i, c in zip(items, choice, strict=True) for n in i.nodes},
        {n: i.errors[c] for i, c in zip(items, choice, strict=True) for n in i.nodes},
        (sum(i.bits[c] for i, c in zip(items, choice, strict=True)) + taken) / total,
    )


def _candidate(word: str) -> Scheme:
    scheme = parse_scheme(word)
    if scheme is None:
        raise BadScheme("float is no candidate for a budget: it has no bits to count")
    return scheme


def _measure_all(
    model: ImportedModel,
    layers: Mapping[str, str],
    schemes: Sequence[Scheme],
    calibration: Calibration | None,
    progress: Progress,
) -> list[Item]:
    """Every weight that `layers` read, once."""
    stats = calibration.layers if calibration else {}
    weights: dict[str, list[str]] = {}
    for node, weight in layers.items():
        weights.setdefault(weight, []).append(node)
    samples = {weight: _sample(np.asarray(model.weights[weight], np.float32)) for weight in weights}
    shared = {scheme: prepare(samples, scheme, calibration, progress) for scheme in schemes}
    items = []
    with progress.stage("sensitivity", len(weights)):
        for weight, nodes in weights.items():
            progress.advance(weight)
            known = next((stats[node] for node in nodes if node in stats), None)
            array = np.asarray(model.weights[weight], np.float32)
            items.append(measure(array, tuple(nodes), schemes, known, weight, shared))
    return items


def measure(
    w: F32,
    nodes: tuple[str, ...],
    schemes: Sequence[Scheme],
    stats: LayerStats | None,
    name: str,
    shared: Mapping[Scheme, Any] | None = None,
) -> Item:
    """Bits and error of every candidate for one weight.

    Parameters
    ----------
    w : float32 [N, K]
    nodes : tuple of str
    schemes : sequence of Scheme
    stats : LayerStats or None
    name : str
        Of the weight, for errors.
    shared : mapping of Scheme to object, optional
        What the model's layers share, such as codebooks; by default learned on this weight.

    Returns
    -------
    Item
        Errors are of `SAMPLE_ROWS` rows.
    """
    rows = _sample(w)
    if stats is not None and stats.fisher is not None:
        stats = replace(stats, fisher=_sample(stats.fisher))
    # Importance is per output: all outputs count. Relative errors are of the whole layer already.
    share = len(w) / len(rows) if stats is not None and stats.importance else 1.0
    bits, errors = [], []
    for scheme in schemes:
        known = None if shared is None else shared[scheme]
        tensor = quantize_tensor(rows, scheme, name, stats=stats, shared=known)
        bits.append(round(8 * nbytes(tensor) * len(w) / len(rows)))
        errors.append(damage(rows - dequantize(tensor), rows, stats) * share)
    # As ``apq-tvm inspect`` counts: a weight that layers share counts for each of them.
    copies = max(len(nodes), 1)
    return Item(nodes, w.size * copies, tuple(b * copies for b in bits), tuple(errors))


def _sample(w: F32) -> F32:
    """`SAMPLE_ROWS` rows, evenly spread."""
    at = np.linspace(0, len(w) - 1, SAMPLE_ROWS).astype(int)
    return np.ascontiguousarray(w[np.unique(at)])


def solve(
    bits: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], budget: int
) -> list[int] | None:
    """Pick one candidate per item, of least total error within a budget of total bits.

    Items are added one after another; of the partial choices only those stay that no other beats in
    both bits and error, and of more than `STATES` the best in each of so many ranges of bits.

    Parameters
    ----------
    bits, errors : sequences of equal shape
        Per item and candidate.
    budget : int

    Returns
    -------
    list of int or None
        Candidates; None if the budget cannot be met.
    """
    least = [min(b) for b in bits]
    rest = sum(least)
    if rest > budget:
        return None
    costs, sums = np.zeros(1, np.int64), np.zeros(1)
    history: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for item_bits, item_errors, smallest in zip(bits, errors, least, strict=True):
        rest -= smallest
        cost = (costs[:, None] + np.asarray(item_bits, np.int64)).ravel()
        total = (sums[:, None] + np.asarray(item_errors)).ravel()
        index = np.flatnonzero(cost + rest <= budget)
        index = index[np.lexsort((total[index], cost[index]))]
        best = np.minimum.accumulate(total[index])
        index = index[np.r_[True, total[index][1:] < best[:-1]]]
        if len(index) > STATES:
            span = max(int(cost[index[-1]] - cost[index[0]]), 1)
            place = (cost[index] - cost[index[0]]) * (STATES - 1) // span
            # Errors fall along `index`: the last of a range is its best.
            index = index[np.r_[place[1:] != place[:-1], True]]
        history.append((index // len(item_bits), index % len(item_bits)))
        costs, sums = cost[index], total[index]
    at = int(sums.argmin())
    choice = []
    for parents, candidates in reversed(history):
        choice.append(int(candidates[at]))
        at = int(parents[at])
    return choice[::-1]
