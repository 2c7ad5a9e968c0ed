"""Fewer, larger nodes: attention as one, whose scores then never reach memory.

On processors, and on a GPU where a decoder keeps its caches, it reads packed keys (`packed`), and
linear layers of one x are one where slices of their result cost nothing (`one_input`). On a GPU a
launch of a captured graph costs a microsecond or two, and a layer of an encoder has fifteen nodes:
attention becomes one (`attention`), linear layers of one x that only it reads become one
(`siblings`). What a kernel does to x moves into what makes x later (`apq_tvm.lower.behind`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from apq_tvm.launches.attention import join_attention
from apq_tvm.launches.one_input import join_one_input
from apq_tvm.launches.packed import pack_attention, read_in_place
from apq_tvm.launches.siblings import join_siblings
from apq_tvm.types import QuantizedModel

__all__ = ["join", "settle"]


def join(quantized: QuantizedModel, operators: Mapping[str, Callable[..., Any]]) -> QuantizedModel:
    """Join nodes where the device has an operator for all of them.

    Parameters
    ----------
    quantized : QuantizedModel
    operators : mapping of str to callable
        `apq_tvm.schedules.devices.device_operators`.

    Returns
    -------
    QuantizedModel
        With ``apq.Attention``, and linear layers side by side.
    """
    attention = operators.get("apq.Attention")
    if attention is None:
        return quantized
    model = quantized.model
    if "apq.PackKeys" in operators:
        packed = pack_attention(model, attention)
        weights = {**model.weights, **packed.weights}
        kept = replace(model, nodes=packed.nodes, weights=weights)
        return replace(quantized, model=kept, apart=packed.declined)
    joined = replace(quantized, model=replace(model, nodes=join_attention(model, attention)))
    return join_siblings(joined)


def settle(quantized: QuantizedModel) -> QuantizedModel:
    """Let attention read values where they lie, once caches of sessions have taken their places;
    layers of one x become one where nothing has to be copied for it."""
    nodes = read_in_place(quantized.model.nodes)
    settled = replace(quantized, model=replace(quantized.model, nodes=nodes))
    return join_one_input(settled)
