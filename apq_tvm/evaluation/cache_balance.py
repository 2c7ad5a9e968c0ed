"""Which factors of the channels of queries and keys make an int8 cache cost least.

A token's keys of one head share one scale, that of their largest column; a column that is large in
every token takes the others' bits. Keys divided by s and queries multiplied by s have the same
products. s is a power of the columns' maxima, as in SmoothQuant (ICML 2023, eq. 4), of keys alone
or over those of queries, which attention rounds too; the power is the one of least error of the
scores, and none where none lowers it on queries that it was not chosen by.

Nothing is assumed of rotary embeddings: rows are scaled between a linear layer and attention, and
what arrives says which channels have to share a factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apq_tvm.evaluation.caches import Attention, attentions
from apq_tvm.launches.chains import makers_of
from apq_tvm.launches.shared_keys import Stored
from apq_tvm.progress import Progress
from apq_tvm.quantizers.inputs.cache_balance import PREFIX
from apq_tvm.quantizers.torch.graph import TorchGraph
from apq_tvm.quantizers.torch.ops import OPS, torch
from apq_tvm.types import Array, ImportedModel, Node

Tensor = Any

POWERS = ((0.25, 0.0), (0.5, 0.0), (0.75, 0.0), (1.0, 0.0), (0.5, 0.5), (0.75, 0.25))
"""(a, b) of s = max|k|^a / max|q|^b; ABQ's and SmoothQuant's is (0.5, 0.5)."""

PAIRINGS = ("none", "halves", "neighbours")
"""Channels that rotary embeddings mix: none, d and d + H/2, 2d and 2d + 1."""

LEAST = 1e-3
"""Of a channel's size, relative to the head's largest."""

WORTH = 0.98
"""Of the error: what gains less is left as it is."""

CLOSE = 1e-4
"""Relative, of scaled rows that arrive as scaled channels, in float32."""

QUERIES = 256
"""For each sequence, half of them to choose by."""


@dataclass(frozen=True)
class Rows:
    """The rows of a linear layer that become queries or keys.

    Parameters
    ----------
    layer : Node
    start : int
        Their first.
    between : tuple of Node
        From the layer to attention.
    """

    layer: Node
    start: int
    between: tuple[Node, ...]


def find_balance(
    model: ImportedModel, calls: Sequence[Mapping[str, Array]], progress: Progress
) -> tuple[dict[str, Array], dict[str, str]]:
    """Factors for every attention that caches would serve.

    Parameters
    ----------
    model : ImportedModel
    calls : sequence of mapping
        Inputs; a few sequences are enough. Caches among them are to be empty or zeros.
    progress : Progress

    Returns
    -------
    dict of str to ndarray
        ``caches.<layer>``, float32 [N], for a calibration file.
    dict of str to str
        Softmax → what was chosen, with the error of scores before and after, or why nothing was.
    """
    graph, found, notes = TorchGraph(model), dict[str, Array](), dict[str, str]()
    every = list(attentions(model))
    with progress.stage("caches", len(every)):
        for attention in every:
            progress.advance(attention.chain.soft.name)
            sides = [_rows(model, s.name) for s in (attention.q, attention.keys)]
            name = attention.chain.soft.name
            if isinstance(sides[0], str) or isinstance(sides[1], str):
                notes[name] = next(side for side in sides if isinstance(side, str))
                continue
            if any(f"{PREFIX}{side.layer.name}" in found for side in sides):  # type: ignore[union-attr]
                notes[name] = "its keys or queries are another attention's too"
                continue
            factors, notes[name] = _of_one(graph, attention, sides, calls)  # type: ignore[arg-type]
            found.update(factors)
    return found, notes


def _rows(model: ImportedModel, value: str) -> Rows | str:
    """The one linear layer that a value is made of, or why there is none."""
    makers, between, layers, todo = makers_of(model), set[str](), dict[str, Node](), [value]
    while todo:
        node = makers.get(todo.pop())
        if node is None or node.name in between or node.name in layers:
            continue
        if node.op == "apq.Linear":
            layers[node.name] = node
        elif node.op in OPS and _real(model, node):
            between.add(node.name)
            todo += node.inputs
    if len(layers) != 1:
        return f"{value!r} is made of {len(layers)} linear layers, not of one"
    (layer,) = layers.values()
    if layer.attrs["activation"] or (len(layer.inputs) > 3 and layer.inputs[3]):
        return f"{layer.name!r} ends in more than a bias"
    if layer.inputs[1] in model.quantized:
        return f"{layer.name!r} has codes already, which are of its rows as they are"
    readers = [n for n in model.nodes if layer.inputs[1] in n.inputs]
    if len(readers) > 1:
        return f"other layers share the weight of {layer.name!r}"
    return Rows(layer, 0, tuple(n for n in model.nodes if n.name in between))


def _real(model: ImportedModel, node: Node) -> bool:
    """Whether a node's result is of floats: what computes shapes and places is left alone."""
    spec = model.value_specs.get(node.outputs[0])
    return spec is None or spec.dtype == "float32"


def _of_one(
    graph: TorchGraph,
    attention: Attention,
    sides: tuple[Rows, Rows],
    calls: Sequence[Mapping[str, Array]],
) -> tuple[dict[str, Array], str]:
    model, (q_rows, k_rows) = graph.model, sides
    seen = {attention.q.name, attention.keys.name}
    for side in sides:
        seen.add(side.layer.outputs[0])
        seen.update(name for node in side.between for name in node.inputs if name)
    runs = []
    with torch.inference_mode():
        for call in calls:
            values, symbols = graph.begin(call)
            kept = graph.run_nodes(model.nodes, values, symbols, seen)
            runs.append(({**values, **kept}, symbols))
        both = [(_queries(v, attention), _keys(v, attention.keys)) for v, _ in runs]
        (q, k), heads = both[0], both[0][1].shape[1]
        groups, width = q.shape[2], k.shape[-1]
        if q_rows.layer.name == k_rows.layer.name:  # q, k and v in one
            k_rows = Rows(k_rows.layer, heads * groups * width, k_rows.between)
        probe = torch.rand(heads, width, generator=torch.Generator().manual_seed(0)) + 0.5
        for pairing in PAIRINGS:
            if _passes(graph, runs[0], attention, (q_rows, k_rows), _shared(probe, pairing)):
                break
        else:
            return {}, "rows of its keys do not arrive as channels (norms, other rotary embeddings)"
        scale, text = _choose(both, pairing)
    if scale is None:
        return {}, text
    factors: dict[str, Array] = {}
    for rows, by in ((q_rows, _for_queries(scale, groups)), (k_rows, 1 / scale)):
        count = len(model.weights[rows.layer.inputs[1]])
        one = factors.setdefault(f"{PREFIX}{rows.layer.name}", np.ones(count, np.float32))
        part = by.reshape(-1).numpy()
        one[rows.start : rows.start + len(part)] = part
    return factors, text


def _queries(values: Mapping[str, Tensor], attention: Attention) -> Tensor:
    """[B, Nkv, G, S, H]."""
    q, keys = values[attention.q.name].permute(attention.q.order), attention.keys
    heads = _keys(values, keys).shape[1]
    batch = values[keys.name].shape[keys.order[1]]
    return q.reshape(batch, heads, -1, *q.shape[-2:])


def _keys(values: Mapping[str, Tensor], stored: Stored) -> Tensor:
    """[B, Nkv, T, H]."""
    k = values[stored.name].permute(stored.order)
    k = k if k.ndim == 4 else k.unsqueeze(2)
    return k.permute(1, 2, 0, 3)


def _shared(size: Tensor, pairing: str) -> Tensor:
    """Sizes [Nkv, H] where channels that are mixed share the larger."""
    width = size.shape[-1]
    if pairing == "none" or width % 2:
        return size
    shape = (2, width // 2) if pairing == "halves" else (width // 2, 2)
    parts = size.unflatten(-1, shape)
    axis = -2 if pairing == "halves" else -1
    return parts.amax(axis, keepdim=True).expand_as(parts).flatten(-2)


def _for_queries(scale: Tensor, groups: int) -> Tensor:
    """Of [Nkv, H]: [Nkv, G, H], each head of keys for all heads of queries that read it."""
    return scale[:, None].expand(-1, groups, -1)


def _passes(
    graph: TorchGraph,
    run: tuple[dict[str, Tensor], dict[str, int]],
    attention: Attention,
    sides: tuple[Rows, Rows],
    scale: Tensor,
) -> bool:
    """Whether scaled rows of both layers arrive as scaled channels."""
    values, symbols = run
    groups = _queries(values, attention).shape[2]
    q_by, k_by = _for_queries(scale, groups), 1 / scale
    for rows, by, name in (
        (sides[0], q_by, attention.q.name),
        (sides[1], k_by, attention.keys.name),
    ):
        out = rows.layer.outputs[0]
        factors = torch.ones(values[out].shape[-1])
        if rows.start + by.numel() > len(factors):
            return False
        factors[rows.start : rows.start + by.numel()] = by.reshape(-1)
        given = {key: value for key, value in values.items() if key != out}
        for node in rows.between:
            for key in node.outputs:
                given.pop(key, None)
        given[out] = values[out] * factors
        arrived = graph.run_nodes(rows.between, given, symbols, (name,))
        made = {**values, **arrived}
        if name == attention.q.name:
            found, wanted = (_queries(v, attention) for v in (made, values))
            wanted = wanted * q_by[None, :, :, None]
        else:
            found, wanted = (_keys(v, attention.keys) for v in (made, values))
            wanted = wanted * k_by[None, :, None]
        if float((found - wanted).abs().max()) > CLOSE * float(wanted.abs().max()):
            return False
    return True


def _choose(both: Sequence[tuple[Tensor, Tensor]], pairing: str) -> tuple[Tensor | None, str]:
    """Factors [Nkv, H] of queries, or None; and what was found."""
    k_top = torch.stack([k.abs().amax((0, 2)) for _, k in both]).amax(0)
    q_top = torch.stack([q.abs().amax((0, 2, 3)) for q, _ in both]).amax(0)
    k_top, q_top = (
        s.clamp_min(LEAST * float(s.max()) + 1e-30)
        for s in (_shared(k_top, pairing), _shared(q_top, pairing))
    )
    ones = torch.ones_like(k_top)
    before = [_error(both, ones, part) for part in (0, 1)]
    best, scale, powers = before[0], None, (0.0, 0.0)
    for a, b in POWERS:
        tried = k_top**a / q_top**b
        tried = tried / tried.log().mean(-1, keepdim=True).exp()
        error = _error(both, tried, 0)
        if error < WORTH * best:
            best, scale, powers = error, tried, (a, b)
    after = before[1] if scale is None else _error(both, scale, 1)
    if scale is None or not after < WORTH * before[1]:
        return None, f"no balance lowers the error of scores, {before[1]:.2g}"
    text = f"max|k|^{powers[0]:g} / max|q|^{powers[1]:g}, channels shared: {pairing}"
    return scale, f"{text}; error of scores {before[1]:.2g} -> {after:.2g}"


def _error(both: Sequence[tuple[Tensor, Tensor]], scale: Tensor, part: int) -> float:
    """Relative error of scores, of int8 keys and queries, by every second query."""
    error = whole = 0.0
    for q, k in both:
        step = max(1, q.shape[3] // QUERIES)
        some = q[..., part * step :: 2 * step, :] if q.shape[3] > 1 else q
        keys = k[:, :, None].transpose(-1, -2)
        exact = some @ keys
        codes = _rounded(k / scale[None, :, None])[:, :, None].transpose(-1, -2)
        found = _rounded(some * scale[None, :, None, None]) @ codes
        error += float((found - exact).square().sum())
        whole += float(exact.square().sum())
    return float((error / max(whole, 1e-30)) ** 0.5)


def _rounded(x: Tensor) -> Tensor:
    result: Tensor = OPS["apq.RoundCache"]({"dtype": "int8", "axis": -1}, x)
    return result
