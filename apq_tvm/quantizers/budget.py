"""A scheme for every layer and table, so that the whole model meets a budget of bits per weight.

Every candidate's error is measured: what it adds to the layer's output, under the calibration's H
or E[x²], or to the rows of a table, and how much that hurts the model (`error_feedback.damage`).
The sum is what the choice minimises, a multiple-choice knapsack. The budget is for all that the
module stores, as `apq_tvm.quantizers.stored` counts: what is not chosen for takes its share first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.formats import embedding_scheme, parse_scheme
from apq_tvm.formats.families import dequantize, nbytes
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.exactly import exactly
from apq_tvm.quantizers.feedback.error_feedback import damage
from apq_tvm.quantizers.registry import prepare, quantize_tensor
from apq_tvm.quantizers.stored import Stored
from apq_tvm.types import F32, Calibration, ImportedModel, LayerStats, QuantizedTensor, Scheme

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
    layers, tables : tuple of str
        Linear layers and embeddings that read it.
    size : int
        Weights.
    schemes : tuple of Scheme
        Candidates. An embedding gets `embedding_scheme` of what is chosen.
    bits : tuple of int
        Stored bits, scales and tables included, per candidate.
    errors : tuple of float
        `damage` per candidate.
    """

    layers: tuple[str, ...]
    tables: tuple[str, ...]
    size: int
    schemes: tuple[Scheme, ...]
    bits: tuple[int, ...]
    errors: tuple[float, ...]


@dataclass(frozen=True)
class BudgetPlan:
    """What was chosen.

    Parameters
    ----------
    schemes : mapping of str to str
        Layer or embedding → scheme.
    errors : mapping of str to float
        Layer or embedding → `damage`.
    bits_per_weight : float
        Over all that is stored.
    """

    schemes: Mapping[str, str]
    errors: Mapping[str, float]
    bits_per_weight: float

    def tensor_types(self) -> dict[str, str]:
        """For `quantize`: a rule for every layer."""
        return {exactly(node): scheme for node, scheme in self.schemes.items()}


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
    rest: Stored | None = None,
    tables: Sequence[str] = (),
) -> BudgetPlan:
    """Choose a scheme for every layer.

    Parameters
    ----------
    model : ImportedModel
    layers : mapping of str to str
        Linear layer or embedding → name of its weight, for all to choose for.
    candidates : sequence of str
        Schemes.
    target : float
        Bits per weight, at most, over these weights and `rest`.
    calibration : Calibration or None
        Without it all inputs count the same.
    progress : Progress, optional
    rest : Stored, optional
        What the module stores besides; the bytes of a weight's other forms are in it, the weight is
        not.
    tables : sequence of str, optional
        Candidates of weights that embeddings alone read, if not the same.

    Returns
    -------
    BudgetPlan

    Raises
    ------
    BadScheme
        If a candidate is float, or even the smallest ones exceed the target: the message has the
        smallest possible.
    BadInput
        If the calibration does not tell how much a table matters.
    """
    schemes = [_candidate(word) for word in candidates]
    others = [_candidate(word) for word in tables] or schemes
    items = _measure_all(model, layers, schemes, others, calibration, progress or Silent())
    rest = rest or Stored()
    total = sum(item.size for item in items) + rest.weights
    budget = math.floor(target * total + 1e-6) - 8 * rest.nbytes
    choice = solve([i.bits for i in items], [i.errors for i in items], budget)
    if choice is None:
        # Rounded up, so that asking for it works.
        least = sum(min(item.bits) for item in items) + 8 * rest.nbytes
        possible = math.ceil(1000 * least / total) / 1000
        share = 8 * rest.nbytes / total
        fixed = f", {share:.3f} of it weights that are float or have a scheme" if share else ""
        fewer = ", or give candidates of fewer bits" if min(s.bits for s in schemes) > 2 else ""
        raise BadScheme(
            f"{target:g} bits per weight cannot be met: the smallest candidates take "
            f"{possible:.3f} in all, scales included{fixed}; ask for {possible:.3f} or more{fewer}"
        )
    chosen = list(zip(items, choice, strict=True))
    picked = {node: (item, c) for item, c in chosen for node in (*item.layers, *item.tables)}
    return BudgetPlan(
        {node: str(item.schemes[c]) for node, (item, c) in picked.items()},
        {node: item.errors[c] for node, (item, c) in picked.items()},
        (sum(item.bits[c] for item, c in chosen) + 8 * rest.nbytes) / total,
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
    others: Sequence[Scheme],
    calibration: Calibration | None,
    progress: Progress,
) -> list[Item]:
    """Every weight that `layers` read, once."""
    stats = calibration.layers if calibration else {}
    embeddings = {node.name for node in model.nodes if node.op == "apq.Embedding"}
    weights: dict[str, list[str]] = {}
    for node, weight in layers.items():
        weights.setdefault(weight, []).append(node)
    samples = {
        weight: sample_rows(np.asarray(model.weights[weight], np.float32))
        for weight, nodes in weights.items()
        if not embeddings.issuperset(nodes)
    }
    shared = {scheme: prepare(samples, scheme, calibration, progress) for scheme in schemes}
    items = []
    with progress.stage("sensitivity", len(weights)):
        for weight, nodes in weights.items():
            progress.advance(weight)
            linear = tuple(node for node in nodes if node not in embeddings)
            tables = tuple(node for node in nodes if node in embeddings)
            known = next((stats[node] for node in linear if node in stats), None)
            array = np.asarray(model.weights[weight], np.float32)
            reads = _Reads(linear, tables, known, _importance(tables, calibration))
            items.append(measure(array, reads, schemes if linear else others, weight, shared))
    return items


@dataclass(frozen=True)
class _Reads:
    """Who reads a weight, and what is known of that; `importance` is summed over the tables."""

    layers: tuple[str, ...]
    tables: tuple[str, ...]
    stats: LayerStats | None
    importance: float


def _importance(tables: Sequence[str], calibration: Calibration | None) -> float:
    """`Calibration.tables` of the tables; 0 where layers have no importance either."""
    if calibration is None or not any(s.importance for s in calibration.layers.values()):
        return 0.0
    unknown = [node for node in tables if node not in calibration.tables]
    if unknown:
        raise BadInput(
            f"the calibration does not tell how much embedding {unknown[0]!r} matters: an earlier "
            "apq-tvm made it; calibrate anew, or give the table a scheme with --tensor-type"
        )
    return sum(calibration.tables[node] for node in tables)


def measure(
    w: F32, reads: _Reads, schemes: Sequence[Scheme], name: str, shared: Mapping[Scheme, Any]
) -> Item:
    """Bits and error of every candidate for one weight.

    Parameters
    ----------
    w : float32 [N, K]
    reads : _Reads
    schemes : sequence of Scheme
    name : str
        Of the weight, for errors.
    shared : mapping of Scheme to object
        What the model's layers share, such as codebooks; learned on this weight where there is
        nothing.

    Returns
    -------
    Item
        Errors are of `SAMPLE_ROWS` rows.
    """
    rows, stats = sample_rows(w), reads.stats
    if stats is not None and stats.fisher is not None:
        stats = replace(stats, fisher=sample_rows(stats.fisher))
    # Importance is per output: all outputs count. Relative errors are of the whole layer already.
    share = len(w) / len(rows) if stats is not None and stats.importance else 1.0
    bits, errors = [], []
    for scheme in schemes:
        forms: dict[Scheme, QuantizedTensor] = {}
        error = 0.0
        if reads.layers:
            tensor = quantize_tensor(rows, scheme, name, stats=stats, shared=shared.get(scheme))
            forms[scheme] = tensor
            error += damage(rows - dequantize(tensor), rows, stats) * share
        if reads.tables:
            form = embedding_scheme(scheme)
            tensor = forms[form] if form in forms else quantize_tensor(rows, form, name)
            forms[form] = tensor
            error += table_damage(rows - dequantize(tensor), rows, reads.importance)
        bits.append(sum(stored_bits(form, len(w)) for form in forms.values()))
        errors.append(error)
    return Item(reads.layers, reads.tables, w.size, tuple(schemes), tuple(bits), tuple(errors))


def stored_bits(sample: QuantizedTensor, rows: int) -> int:
    """Bits of so many rows like those of `sample`."""
    return math.ceil(8 * nbytes(sample) * rows / len(sample.codes))


def table_damage(delta: F32, w: F32, importance: float) -> float:
    """`damage` of a table: all rows are looked up alike.

    Parameters
    ----------
    delta, w : float32 [N, K]
        What rows are off by, and the rows.
    importance : float
        0 if it was not measured: then the error is relative.
    """
    error = float(np.square(delta).sum(1).mean())
    return (
        error * importance if importance else error / max(float(np.square(w).sum(1).mean()), 1e-30)
    )


def sample_rows(w: F32) -> F32:
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
