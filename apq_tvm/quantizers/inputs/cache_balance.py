"""Factors of the rows that make queries and keys, so that a cache of codes costs less: applied.

``apq_tvm.evaluation.cache_balance`` finds them (ABQ-LLM, arXiv:2408.08554, balances Q and K in the
same way): a row of keys is divided by what the row of queries that meets it is multiplied by, so
that scores stay as they are and the columns of a cached token become equally large.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from apq_tvm.errors import BadInput
from apq_tvm.formats.caches import is_coded
from apq_tvm.quantizers.inputs.cache_centres import centred, layers_of
from apq_tvm.quantizers.inputs.folds import replace_weights
from apq_tvm.types import Array, ImportedModel

PREFIX = "caches."
"""Of a calibration file's arrays: ``caches.<layer>``, float32 [N]."""

NOTE = "rows balanced for caches of codes"
PASSED_OVER = (
    "neither balanced nor centred for caches of codes: codes of --codes are of rows as they were"
)


def balanced(
    model: ImportedModel, arrays: Mapping[str, Array]
) -> tuple[ImportedModel, dict[str, str]]:
    """Multiply rows of linear layers, and their biases.

    Parameters
    ----------
    model : ImportedModel
    arrays : mapping of str to ndarray
        Of a calibration file; others than `PREFIX` are left alone.

    Returns
    -------
    ImportedModel
        Computes the same from empty caches; its caches of keys hold other numbers.
    dict of str to str
        Layer → what was done.

    Raises
    ------
    BadInput
        Factors are of no linear layer, of another length, or not positive.
    """
    nodes = {node.name: node for node in model.nodes if node.op == "apq.Linear"}
    changes: dict[tuple[str, int], Array] = {}
    notes = {}
    for name, factors in arrays.items():
        if not name.startswith(PREFIX):
            continue
        layer = name.removeprefix(PREFIX)
        node = nodes.get(layer)
        weight = None if node is None else model.weights[node.inputs[1]]
        if node is None or weight is None or factors.shape != (len(weight),):
            raise BadInput(f"{name} {factors.shape} fits no linear layer of {model.name}")
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise BadInput(f"{name} has factors that are not positive numbers; calibrate anew")
        changes[layer, 1] = (weight * factors[:, None]).astype(np.float32)
        if len(node.inputs) > 2 and node.inputs[2]:
            changes[layer, 2] = (model.weights[node.inputs[2]] * factors).astype(np.float32)
        notes[layer] = NOTE
    return (replace_weights(model, changes, "balanced") if changes else model), notes


def for_caches(
    model: ImportedModel, arrays: Mapping[str, Array], kv: str, learned: bool
) -> tuple[ImportedModel, dict[str, str]]:
    """A model as caches of type `kv` want it, by a calibration file's arrays.

    Rows are balanced for caches of codes and wherever codes were `learned`, as these are of such
    rows; keys are centred for caches of codes. See `balanced` and
    `apq_tvm.quantizers.inputs.cache_centres.centred`.
    """
    coded, notes = is_coded(kv), dict[str, str]()
    if coded or learned:
        model, notes = balanced(model, arrays)
    if coded:
        model, more = centred(model, arrays)
        notes = joined(notes, more)
    return model, notes


def passed_over(model: ImportedModel, arrays: Mapping[str, Array]) -> dict[str, str]:
    """Layer that has factors, or makes keys that have a constant → why these are not applied."""
    layers = {key.removeprefix(PREFIX) for key in arrays if key.startswith(PREFIX)}
    return dict.fromkeys(layers | {*layers_of(model, arrays).values()}, PASSED_OVER)


def joined(notes: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Notes by layer, `more` behind those that there are."""
    found = dict(notes)
    for layer, note in more.items():
        found[layer] = "; ".join(filter(None, (found.get(layer, ""), note)))
    return found
