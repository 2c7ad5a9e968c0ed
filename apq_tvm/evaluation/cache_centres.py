"""Where keys can be centred for caches of codes (`apq_tvm.quantizers.inputs.cache_centres`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from apq_tvm.evaluation.caches import Attention
from apq_tvm.launches.chains import makers_of
from apq_tvm.quantizers.inputs.cache_centres import centred
from apq_tvm.quantizers.torch.graph import TorchGraph
from apq_tvm.quantizers.torch.ops import torch
from apq_tvm.sessions.caches import Pair
from apq_tvm.types import Array, ImportedModel

Tensor = Any

CLOSE = 1e-3
"""Of a result's largest element: how far centred keys may move it in float32."""


@dataclass(frozen=True)
class Place:
    """A value that constants can be taken off.

    Parameters
    ----------
    value : str
        New keys, before a cache takes them up.
    order : tuple of int
        From its axes to ``[T, B, Nkv, H]`` or ``[T, B, H]``.
    rank : int
    """

    value: str
    order: tuple[int, ...]
    rank: int

    def array(self, centre: Tensor) -> Array:
        """A constant [Nkv, H], shaped to go with the value."""
        *head, column = self.order[2:]
        shape = [1] * self.rank
        shape[column] = centre.shape[-1]
        if head:
            shape[head[0]] = centre.shape[0]
            centre = centre if head[0] < column else centre.T
        return np.ascontiguousarray(centre.numpy().reshape(shape).astype(np.float32))


def place_of(model: ImportedModel, attention: Attention, pairs: Mapping[str, Pair]) -> Place | str:
    """Where an attention's keys are new, or why nothing may be taken off them.

    `pairs` are those of the model by their present.
    """
    chain, stored = attention.chain, attention.keys
    if chain.sink or any(node.op == "Tanh" for node in chain.bend):
        return "its scores are bent or have a sink beside them"
    pair = pairs.get(stored.name)
    value, order = stored.name, stored.order
    if pair is not None:
        value = pair.node.inputs[1]
        if pair.node.op == "apq.AppendCache":  # [B, S, N, H] behind [B, N, P, H]
            order = tuple((0, 2, 1, 3)[axis] for axis in order)
    uses = Counter(name for node in model.nodes for name in node.inputs)
    uses.update(spec.name for spec in model.outputs)
    spec = model.value_specs.get(value)
    if spec is None or value not in makers_of(model) or uses[value] != 1:
        return f"others read its keys {value!r} as they are"
    if pair is not None and uses[stored.name] > 2:  # an output, and attention
        return f"others read its keys {stored.name!r} as they are"
    return Place(value, order, len(spec.shape))


def nothing_changes(
    model: ImportedModel, centres: Mapping[str, Array], call: Mapping[str, Array], caches: set[str]
) -> bool:
    """Whether results but the `caches` stay what they are for one call, from empty caches."""
    made, _ = centred(model, centres)
    results = [spec.name for spec in model.outputs if spec.name not in caches]
    with torch.inference_mode():
        before, after = (TorchGraph(one).run(call, keep=results) for one in (model, made))
    for name in results:
        if not before[name].is_floating_point():
            continue
        largest = float(before[name].abs().max())
        if float((after[name] - before[name]).abs().max()) > CLOSE * largest:
            return False
    return True
