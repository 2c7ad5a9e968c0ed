"""Decoders whose caches a module keeps: which inputs and outputs they are, and nodes that append.

An exported decoder takes the keys and values of earlier tokens as inputs and gives those of all
tokens as outputs: each token copies every cache. Behind `keep` attention reads an ``apq.Cache``,
which a run fills whole and a session fills where it is new (`apq_tvm.ops.graph.caches.grown`); the
outputs are computed by the nodes that they always had, which sessions leave out.
"""

from __future__ import annotations

from dataclasses import replace

from apq_tvm.errors import BadScheme, NotApplicable
from apq_tvm.formats.caches import CACHES
from apq_tvm.sessions.caches import find_pairs, in_place
from apq_tvm.sessions.feeds import find_feeds
from apq_tvm.sessions.logits import only_asked
from apq_tvm.types import QuantizedModel, State

__all__ = ["cache_type", "keep"]


ON_GPU = ("f32", "f16")
"""Those that attention on a GPU reads."""


def cache_type(kv: str, on_gpu: bool = False) -> str:
    """numpy's name of a type of caches.

    Raises
    ------
    BadScheme
        There is no such type, or attention on a GPU does not read it.
    """
    if on_gpu and kv in CACHES and kv not in ON_GPU:
        raise BadScheme(f"kv={kv!r} is not for GPUs, whose attention reads {' and '.join(ON_GPU)}")
    if kv not in CACHES:
        raise BadScheme(f"kv={kv!r} is no type of caches: wanted one of {', '.join(CACHES)}")
    return CACHES[kv]


def keep(quantized: QuantizedModel, cache: str = "float32") -> QuantizedModel:
    """Let a decoder's attention read caches that grow in place.

    Parameters
    ----------
    quantized : QuantizedModel
        With ``apq.Attention``, ``apq.PackKeys`` and ``apq.PackValues`` (`apq_tvm.launches`).
    cache : str
        Type of the caches, one of those of `apq_tvm.formats.caches.CACHES`.

    Returns
    -------
    QuantizedModel
        Its model has a `State`; or it is as it was, and ``stateless`` says what stands against it
        where it has caches.
    """
    model = quantized.model
    pairs = find_pairs(model)
    if not pairs:
        return quantized
    try:
        feeds, past, length = find_feeds(model, pairs)
        nodes = in_place(model, pairs, cache)
        logits, nodes, specs = only_asked(model, pairs, nodes, length)
    except NotApplicable as why:
        return replace(quantized, model=replace(model, stateless=str(why)))
    state = State(
        tuple(pair.past for pair in pairs),
        tuple(pair.present for pair in pairs),
        feeds,
        logits,
        past,
        length,
        cache,
    )
    kept = replace(model, nodes=tuple(nodes), value_specs=specs, state=state)
    return replace(quantized, model=kept)
