"""Keys without what all tokens' have in common, so that a cache of codes costs less: applied.

A constant c that is taken off every key takes the same ``q c`` off all scores of a query, which
softmax does not see (SageAttention, ICLR 2025, arXiv:2410.02367, takes off the mean of the keys at
hand). Codes of ``k - c`` have a smaller range to cover. c is a mean over calibration, so that what
a session wrote once stays as it is. ``apq_tvm.evaluation.cache_balance`` finds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from apq_tvm.errors import BadInput
from apq_tvm.types import Array, ImportedModel, Node

PREFIX = "centres."
"""Of a calibration file's arrays: ``centres.<value>``, float32, as many axes as the value has."""

NOTE = "keys centred for caches of codes"


def centred(
    model: ImportedModel, arrays: Mapping[str, Array]
) -> tuple[ImportedModel, dict[str, str]]:
    """Take constants off keys before caches take them up.

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
        Linear layer that makes the keys → what was done.

    Raises
    ------
    BadInput
        Constants are of no value that a node makes and another reads, of another shape, or no
        numbers.
    """
    centres = {
        name.removeprefix(PREFIX): array
        for name, array in arrays.items()
        if name.startswith(PREFIX)
    }
    if not centres:
        return model, {}
    makers = {name: node for node in model.nodes for name in node.outputs}
    for value, centre in centres.items():
        _check(model, makers, value, centre)
    moved = {value: f"{value}:centred" for value in centres}
    nodes = []
    for node in model.nodes:
        nodes.append(replace(node, inputs=tuple(moved.get(name, name) for name in node.inputs)))
        nodes += [
            Node("Add", moved[name], (name, f"{name}:centre"), (moved[name],), {})
            for name in node.outputs
            if name in centres
        ]
    specs = {moved[name]: model.value_specs[name] for name in centres}
    weights = {f"{name}:centre": (-c).astype(np.float32) for name, c in centres.items()}
    made = replace(
        model,
        nodes=tuple(nodes),
        weights={**model.weights, **weights},
        value_specs={**model.value_specs, **specs},
    )
    return made, dict.fromkeys(layers_of(model, arrays).values(), NOTE)


def layers_of(model: ImportedModel, arrays: Mapping[str, Array]) -> dict[str, str]:
    """Of the values that have constants: the nearest linear layer that makes each, or the value
    itself where there is none."""
    makers = {name: node for node in model.nodes for name in node.outputs}
    values = (name.removeprefix(PREFIX) for name in arrays if name.startswith(PREFIX))
    return {value: _layer(makers, value) for value in values}


def _check(model: ImportedModel, makers: Mapping[str, Node], value: str, centre: Array) -> None:
    spec = model.value_specs.get(value)
    outputs = {spec.name for spec in model.outputs}
    fits = (
        spec is not None
        and value in makers
        and value not in outputs
        and len(centre.shape) == len(spec.shape)
        and all(have in (1, want) for have, want in zip(centre.shape, spec.shape, strict=True))
    )
    if not fits:
        raise BadInput(f"{PREFIX}{value} {centre.shape} fits no value of {model.name}")
    if not np.isfinite(centre).all():
        raise BadInput(f"{PREFIX}{value} has what is no number; calibrate anew")


def _layer(makers: Mapping[str, Node], value: str) -> str:
    todo, seen = [value], {value}
    for name in todo:
        node = makers.get(name)
        if node is None:
            continue
        if node.op == "apq.Linear":
            return node.name
        todo += [n for n in node.inputs if n not in seen]
        seen.update(node.inputs)
    return value
