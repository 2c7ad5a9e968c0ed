"""What factors of channels of queries and keys, and what constants taken off keys, make a cache of
codes cost least.

A token's keys of one head, or groups of their columns, share one scale, that of their largest
column; a column that is large in every token takes the others' bits. Keys divided by s and queries
multiplied by s have the same products. s is a power of the columns' maxima, as in SmoothQuant (ICML
2023, eq. 4), of keys alone or over those of queries, which attention rounds too; the power is the
one of least error of the scores, and none where none lowers it on queries that it was not chosen
by.

Nothing is assumed of rotary embeddings: rows are scaled between a linear layer and attention, and
what arrives says which channels have to share a factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apq_tvm.evaluation.cache_centres import Place, nothing_changes, place_of
from apq_tvm.evaluation.caches import Attention, attentions, check_groups
from apq_tvm.launches.chains import makers_of
from apq_tvm.launches.shared_keys import Stored
from apq_tvm.progress import Progress
from apq_tvm.quantizers.inputs.cache_balance import PREFIX
from apq_tvm.quantizers.inputs.cache_centres import PREFIX as CENTRES
from apq_tvm.quantizers.torch.graph import TorchGraph
from apq_tvm.quantizers.torch.ops import OPS, torch
from apq_tvm.sessions.caches import find_pairs
from apq_tvm.types import Array, ImportedModel, Node

Tensor = Any
Run = tuple[dict[str, Tensor], dict[str, int]]

TOGETHER = 8
"""Attentions whose queries and keys are kept of one run; those of all would be large."""

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


class Scores:
    """Queries and keys of one attention, and how exact scores of their codes are.

    Parameters
    ----------
    both : sequence of (Tensor, Tensor)
        Queries [B, Nkv, G, S, H] and keys [B, Nkv, T, H] of each call.
    dtype : {"int8", "int4"}
        Of keys; queries are int8.
    size : sequence of float, optional
        Sums of squares of scores, of either half of the queries; by default of these.
    """

    def __init__(
        self,
        both: Sequence[tuple[Tensor, Tensor]],
        dtype: str,
        size: Sequence[float] | None = None,
    ) -> None:
        self.both, self.dtype = both, dtype
        self.size = size or [
            sum(_energy(_half(q, part) @ _columns(k)) for q, k in both) for part in (0, 1)
        ]

    def error(self, part: int, scale: Tensor | None = None) -> float:
        """Relative, by every second query, of keys divided by `scale` [Nkv, H]; what all scores of
        a query share is no error, as softmax does not see it."""
        error = 0.0
        for q, k in self.both:
            some, keys = _half(q, part), k
            exact = some @ _columns(k)
            if scale is not None:
                some, keys = some * scale[None, :, None, None], k / scale[None, :, None]
            wrong = _rounded(some, "int8") @ _columns(_rounded(keys, self.dtype)) - exact
            error += _energy(wrong - wrong.mean(-1, keepdim=True))
        return float((error / max(self.size[part], 1e-30)) ** 0.5)


def _half(q: Tensor, part: int) -> Tensor:
    """Every second query, no more than `QUERIES` of a sequence."""
    step = max(1, q.shape[3] // QUERIES)
    return q[..., part * step :: 2 * step, :] if q.shape[3] > 1 else q


def _columns(k: Tensor) -> Tensor:
    """Keys as the second operand of a product with queries of all their heads."""
    return k[:, :, None].transpose(-1, -2)


def _energy(x: Tensor) -> float:
    return float(x.square().sum())


def _rounded(x: Tensor, dtype: str) -> Tensor:
    result: Tensor = OPS["apq.RoundCache"]({"dtype": dtype, "axis": -1}, x)
    return result


def find_balance(
    model: ImportedModel,
    calls: Sequence[Mapping[str, Array]],
    progress: Progress,
    dtype: str = "int8",
) -> tuple[dict[str, Array], dict[str, str]]:
    """Factors and constants for every attention that caches would serve.

    Parameters
    ----------
    model : ImportedModel
    calls : sequence of mapping
        Inputs; a few sequences are enough. Caches among them are to be empty or zeros.
    progress : Progress
    dtype : {"int8", "int4"}
        Of the caches.

    Returns
    -------
    dict of str to ndarray
        ``caches.<layer>``, float32 [N], and ``centres.<value>``, for a calibration file.
    dict of str to str
        Softmax → what was chosen, with the error of scores before and after, or why nothing was.

    Raises
    ------
    BadInput
        int4 has no groups for the columns of a head.
    """
    graph, found, notes = TorchGraph(model), dict[str, Array](), dict[str, str]()
    pairs = {pair.present: pair for pair in find_pairs(model)}
    every, centres = list(attentions(model)), dict[str, Array]()
    for attention in every:
        check_groups(model, attention.keys, dtype)
    with progress.stage("caches", len(every)):
        for first in range(0, len(every), TOGETHER):
            some = [(a, _sides(model, a)) for a in every[first : first + TOGETHER]]
            runs = _runs(graph, some, calls)
            for attention, sides in some:
                name = attention.chain.soft.name
                progress.advance(name)
                place = place_of(model, attention, pairs)
                if not isinstance(sides, str) and _taken(sides, found):
                    sides = "its keys or queries are another attention's too"
                factors, centre, notes[name] = _of_one(graph, runs, attention, sides, place, dtype)
                found.update(factors)
                centres.update(centre)
    if centres and not nothing_changes(model, centres, calls[0], set(pairs)):
        text = "keys are not centred: results of the model changed by it"
        return found, {name: f"{note}; {text}" for name, note in notes.items()}
    return {**found, **centres}, notes


def _sides(model: ImportedModel, attention: Attention) -> tuple[Rows, Rows] | str:
    """The rows that make queries and keys, or why they cannot be balanced."""
    queries, keys = (_rows(model, s.name) for s in (attention.q, attention.keys))
    if isinstance(queries, str):
        return queries
    return keys if isinstance(keys, str) else (queries, keys)


def _taken(sides: tuple[Rows, Rows], found: Mapping[str, Array]) -> bool:
    return any(f"{PREFIX}{side.layer.name}" in found for side in sides)


def _runs(
    graph: TorchGraph,
    some: Sequence[tuple[Attention, tuple[Rows, Rows] | str]],
    calls: Sequence[Mapping[str, Array]],
) -> list[Run]:
    """Values that these attentions need, and sizes of dimensions, of every call."""
    seen = set[str]()
    for attention, sides in some:
        seen |= {attention.q.name, attention.keys.name}
        for side in () if isinstance(sides, str) else sides:
            seen.add(side.layer.outputs[0])
            seen.update(name for node in side.between for name in node.inputs if name)
    runs = []
    with torch.inference_mode():
        for call in calls:
            values, symbols = graph.begin(call)
            kept = graph.run_nodes(graph.model.nodes, values, symbols, seen)
            runs.append(({**values, **kept}, symbols))
    return runs


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
    runs: Sequence[Run],
    attention: Attention,
    sides: tuple[Rows, Rows] | str,
    place: Place | str,
    dtype: str,
) -> tuple[dict[str, Array], dict[str, Array], str]:
    """Factors, a constant, and what was found."""
    with torch.inference_mode():
        tried = Scores([(_queries(v, attention), _keys(v, attention.keys)) for v, _ in runs], dtype)
        centre, texts = None, list[str]()
        if isinstance(place, str):
            texts.append(place)
        else:
            centre, tried, text = _centred(tried)
            texts.append(text)
        if isinstance(sides, str):
            scale, factors = None, dict[str, Array]()
            texts.append(sides)
        else:
            scale, factors, text = _balanced(graph, runs, attention, sides, tried)
            texts.append(text)
    if centre is None or isinstance(place, str):
        return factors, {}, "; ".join(texts)
    centre = centre if scale is None else centre / scale
    return factors, {f"{CENTRES}{place.value}": place.array(centre)}, "; ".join(texts)


def _balanced(
    graph: TorchGraph,
    runs: Sequence[Run],
    attention: Attention,
    sides: tuple[Rows, Rows],
    tried: Scores,
) -> tuple[Tensor | None, dict[str, Array], str]:
    """Factors [Nkv, H] of queries or None, those of rows, and what was found."""
    q_rows, k_rows = sides
    q, k = tried.both[0]
    heads, groups, width = k.shape[1], q.shape[2], k.shape[-1]
    if q_rows.layer.name == k_rows.layer.name:  # q, k and v in one
        k_rows = Rows(k_rows.layer, heads * groups * width, k_rows.between)
    probe = torch.rand(heads, width, generator=torch.Generator().manual_seed(0)) + 0.5
    for pairing in PAIRINGS:
        if _passes(graph, runs[0], attention, (q_rows, k_rows), _shared(probe, pairing)):
            break
    else:
        text = "rows of its keys do not arrive as channels (norms, other rotary embeddings)"
        return None, {}, text
    scale, text = _choose(tried, pairing)
    if scale is None:
        return None, {}, text
    factors: dict[str, Array] = {}
    for rows, by in ((q_rows, _for_queries(scale, groups)), (k_rows, 1 / scale)):
        count = len(graph.model.weights[rows.layer.inputs[1]])
        one = factors.setdefault(f"{PREFIX}{rows.layer.name}", np.ones(count, np.float32))
        part = by.reshape(-1).numpy()
        one[rows.start : rows.start + len(part)] = part
    return scale, factors, text


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
    run: Run,
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


def _centred(tried: Scores) -> tuple[Tensor | None, Scores, str]:
    """What is taken off keys [Nkv, H] or None, scores of what is left, and what was found."""
    tokens = sum(k.shape[0] * k.shape[2] for _, k in tried.both)
    if not tokens:
        return None, tried, "keys are not centred, as there are none"
    centre = sum(k.sum((0, 2)) for _, k in tried.both) / tokens
    moved = Scores([(q, k - centre[None, :, None]) for q, k in tried.both], tried.dtype, tried.size)
    before, after = ([one.error(part) for part in (0, 1)] for one in (tried, moved))
    if all(a < WORTH * b for a, b in zip(after, before, strict=True)):
        return centre, moved, f"keys centred; error of scores {before[1]:.2g} -> {after[1]:.2g}"
    return None, tried, "keys are not centred, which gains nothing"


def _choose(tried: Scores, pairing: str) -> tuple[Tensor | None, str]:
    """Factors [Nkv, H] of queries, or None; and what was found."""
    both = tried.both
    k_top = torch.stack([k.abs().amax((0, 2)) for _, k in both]).amax(0)
    q_top = torch.stack([q.abs().amax((0, 2, 3)) for q, _ in both]).amax(0)
    k_top, q_top = (
        s.clamp_min(LEAST * float(s.max()) + 1e-30)
        for s in (_shared(k_top, pairing), _shared(q_top, pairing))
    )
    before = [tried.error(part) for part in (0, 1)]
    best, scale, powers = before[0], None, (0.0, 0.0)
    for a, b in POWERS:
        by = k_top**a / q_top**b
        by = by / by.log().mean(-1, keepdim=True).exp()
        error = tried.error(0, by)
        if error < WORTH * best:
            best, scale, powers = error, by, (a, b)
    after = before[1] if scale is None else tried.error(1, scale)
    if scale is None or not after < WORTH * before[1]:
        return None, f"no balance lowers the error of scores, {before[1]:.2g}"
    text = f"max|k|^{powers[0]:g} / max|q|^{powers[1]:g}, channels shared: {pairing}"
    return scale, f"{text}; error of scores {before[1]:.2g} -> {after:.2g}"
