"""Which scheme every layer gets, and the quantized model that follows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from apq_tvm.errors import BadScheme
from apq_tvm.formats import codebook, embedding_scheme, parse_scheme
from apq_tvm.nearest import nearest
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.calibrated import Method
from apq_tvm.quantizers.codebook_file import Books, codebooks_for
from apq_tvm.quantizers.inputs.sequential import Calls
from apq_tvm.quantizers.kept_float import KeptFloat
from apq_tvm.quantizers.learn.learned import Learned
from apq_tvm.quantizers.registry import prepare, quantizer_of
from apq_tvm.types import (
    WEIGHT_INPUT,
    Array,
    Calibration,
    ImportedModel,
    Node,
    QuantizedModel,
    QuantizedTensor,
    Scheme,
)


@dataclass(frozen=True)
class _Layer:
    """A quantizable node, its weight and what was decided."""

    node: str
    weight: str
    scheme: Scheme | None
    note: str
    kept: bool = False  # the file's own codes

    @property
    def key(self) -> str:
        return f"{self.weight}:{self.scheme}"


def quantize(
    model: ImportedModel,
    scheme: Scheme | str | None,
    tensor_types: Mapping[str, str] | None = None,
    search: bool = True,
    progress: Progress | None = None,
    calibration: Calibration | None = None,
    method: str = "rtn",
    learned: Learned | None = None,
    codebooks: Books | None = None,
    calls: Calls | None = None,
    pairs: bool = False,
) -> QuantizedModel:
    """Quantize every linear layer and embedding table of a model.

    Parameters
    ----------
    model : ImportedModel
    scheme : Scheme, str or None
        For every layer that `tensor_types` does not name; ``"float"`` or None keeps them float,
        but for a file's integers of scale 1, which floats multiply exactly: they stay codes. A
        weight that came quantized keeps the file's codes (`ImportedModel.quantized`), whatever
        their bits and groups: only the activations' part counts for it then, groups included
        where the file has none. Embedding tables use
        its bits, group and zero points, or those that its family names.
    tensor_types : mapping of str to str, optional
        Regular expression → scheme string. It is searched for in the node's and in the weight's
        name; of several that match, the last one counts.
    search : bool
        False rounds plainly, from each group's maximum.
    progress : Progress, optional
    calibration : Calibration, optional
        What is known of the layers' inputs; it must be of this model. Biases are corrected by it.
    method : str
        One of `apq_tvm.quantizers.calibrated.METHODS`; all but ``"rtn"`` need a calibration.
    learned : Learned, optional
        What ``"learned"`` is to use.
    codebooks : mapping of str to ndarray, optional
        Learned on another model (`apq_tvm.quantizers.codebook_file`).
    calls : sequence of mapping, optional
        The calibration's inputs: error feedback takes statistics anew, behind quantized layers
        (`apq_tvm.quantizers.inputs.sequential`).
    pairs : bool
        The device multiplies 8-bit codes faster where neighbours fit together
        (`apq_tvm.quantizers.families.pairs`).

    Returns
    -------
    QuantizedModel
        `notes` says of every layer that stays float why, and whose codes are the file's.

    Raises
    ------
    BadScheme
        If a scheme is bad or does not fit a weight, or an expression is invalid or matches nothing.
    UnsupportedModel
        If a weight that `tensor_types` names holds NaN or infinity; others stay float.
    BadInput
        If the calibration is of another model or lacks what the method needs, or `codebooks` has
        none for a scheme.
    """
    chooser = Method(method, calibration, learned, search, pairs)
    default = parse_scheme(scheme) if isinstance(scheme, str) else scheme
    rules = tensor_types or {}
    progress = progress or Silent()
    layers = tuple(_layers(model, default, rules))
    scaled = chooser.prepare(model, _rounded(model, layers), progress)
    if scaled is not model:  # a weight may have got a copy of its own
        model, layers = scaled, tuple(_layers(scaled, default, rules))
    if calls is not None:
        chooser.walk(model, calls, _rounded(model, layers), progress)
    tensors = _tensors(model, layers, chooser, codebooks, progress)
    return chooser.finish(
        QuantizedModel(
            model,
            tensors,
            {layer.node: layer.key for layer in layers if layer.scheme is not None},
            {layer.node: layer.note for layer in layers if layer.scheme is None or layer.kept},
        )
    )


def _rounded(model: ImportedModel, layers: Iterable[_Layer]) -> dict[str, Scheme]:
    """Schemes of the linear layers whose codes are chosen here."""
    linear = {node.name for node in model.nodes if node.op == "apq.Linear"}
    return {
        layer.node: layer.scheme
        for layer in layers
        if layer.scheme is not None and not layer.kept and layer.node in linear
    }


def _tensors(
    model: ImportedModel,
    layers: Sequence[_Layer],
    chooser: Method,
    codebooks: Books | None,
    progress: Progress,
) -> dict[str, QuantizedTensor]:
    """Codes by `_Layer.key`: layers that share weight and scheme share them."""
    # Of such layers the one that keeps the file's codes comes last, and counts.
    wanted = {
        layer.key: layer
        for layer in sorted(layers, key=lambda layer: layer.kept)
        if layer.scheme is not None
    }
    readers: dict[str, list[str]] = {}
    for layer in layers:
        readers.setdefault(layer.key, []).append(layer.node)
    shared = {
        scheme: _prepare(model, wanted.values(), scheme, chooser.calibration, codebooks, progress)
        for scheme in {layer.scheme for layer in wanted.values() if layer.scheme is not None}
    }
    linear = {node.name for node in model.nodes if node.op == "apq.Linear"}
    tables = {layer.key for layer in layers if layer.node not in linear}
    tensors: dict[str, QuantizedTensor] = {}
    with progress.stage("quantize", len(wanted)):
        for key, layer in wanted.items():
            assert layer.scheme is not None
            progress.advance(layer.weight)
            if layer.kept:
                tensors[key] = _in_groups(model.quantized[layer.weight], layer.scheme)
                continue
            chooser.look(readers[key], is_table=key in tables)
            tensors[key] = chooser.tensor(
                model,
                readers[key],
                np.asarray(model.weights[layer.weight], np.float32),
                layer.scheme,
                layer.weight,
                shared[layer.scheme],
                is_table=key in tables,
            )
            chooser.decided(readers[key], tensors[key])
    return tensors


def planned_layers(
    model: ImportedModel, default: Scheme, tensor_types: Mapping[str, str]
) -> dict[str, str]:
    """Layers that would get the default scheme, and the names of their weights.

    Raises
    ------
    BadScheme
        If an expression of `tensor_types` is invalid.
    """
    rules = [_compile(pattern) for pattern in tensor_types]
    return {
        layer.node: layer.weight
        for layer in _layers(model, default, {})
        if layer.scheme is not None
        and not layer.kept
        and not any(rule.search(layer.node) or rule.search(layer.weight) for rule in rules)
    }


def ruled_layers(model: ImportedModel, tensor_types: Mapping[str, str]) -> set[str]:
    """Names of the layers that an expression of `tensor_types` is for."""
    rules = [_compile(pattern) for pattern in tensor_types]
    found = ((node.name, _weight_of(node)) for node in model.nodes)
    return {
        name
        for name, weight in found
        if weight is not None and any(r.search(name) or r.search(weight) for r in rules)
    }


def scheme_of_layers(
    model: ImportedModel, default: Scheme | None, tensor_types: Mapping[str, str]
) -> dict[str, Scheme]:
    """Scheme of every layer that `quantize` would quantize.

    Raises
    ------
    BadScheme
        See `quantize`.
    """
    layers = _layers(model, default, tensor_types)
    return {layer.node: layer.scheme for layer in layers if layer.scheme is not None}


def _prepare(
    model: ImportedModel,
    layers: Iterable[_Layer],
    scheme: Scheme,
    calibration: Calibration | None,
    codebooks: Books | None,
    progress: Progress,
) -> Any:
    """What the layers of one scheme share, such as codebooks."""
    if codebooks is not None and scheme.family == codebook.NAME:
        return codebooks_for(codebooks, scheme)
    if quantizer_of(scheme).prepare is None:
        return None
    names = dict.fromkeys(
        layer.weight for layer in layers if layer.scheme == scheme and not layer.kept
    )
    weights = {name: np.asarray(model.weights[name], np.float32) for name in names}
    return prepare(weights, scheme, calibration, progress)


def _layers(
    model: ImportedModel, default: Scheme | None, tensor_types: Mapping[str, str]
) -> Iterator[_Layer]:
    """Every quantizable node, in the model's order."""
    rules = [(pattern, _compile(pattern), parse_scheme(s)) for pattern, s in tensor_types.items()]
    unused = {pattern for pattern, _, _ in rules}
    kept_float = KeptFloat(model)
    for node in model.nodes:
        weight = _weight_of(node)
        if weight is None:
            continue
        if "keep" in node.attrs:
            yield _Layer(node.name, weight, None, node.attrs["keep"])
            continue
        chosen, note, kept = default, "the scheme is float", False
        if default is not None and (reason := kept_float.reason(node, default)):
            chosen, note = None, reason
        elif default is not None and node.op == "apq.Embedding":
            chosen = embedding_scheme(default)
        if default is None and node.op == "apq.Linear" and _holds_integers(model, weight):
            chosen, kept = replace(model.quantized[weight].scheme, act_bits=32), True
            note = "; ".join(filter(None, map(model.notes.get, (weight, node.name))))
        if default is not None and chosen is not None and weight in model.quantized:
            chosen, kept = _with_activations(node, model.quantized[weight].scheme, default), True
            note = "; ".join(filter(None, map(model.notes.get, (weight, node.name))))
        elif default is not None and chosen is not None and weight in model.notes:
            chosen, note = None, model.notes[weight]  # codes that cannot be kept, nor rounded again
        if chosen is not None and not kept and not _finite(model.weights[weight]):
            chosen, note = None, "its weight holds infinities or NaN, which no code stands for"
        for pattern, expression, scheme in rules:
            if expression.search(node.name) or expression.search(weight):
                unused.discard(pattern)
                chosen, note, kept = scheme, f"asked for by {pattern!r}", False
                if scheme is not None and node.op == "apq.Embedding":
                    chosen = embedding_scheme(scheme)
        yield _Layer(node.name, weight, chosen, note, kept)
    if unused:
        names = [node.name for node in model.nodes if _weight_of(node)]
        words = ", ".join(map(repr, sorted(unused)))
        close = ", ".join(dict.fromkeys(name for p in sorted(unused) for name in nearest(p, names)))
        raise BadScheme(
            f"tensor type {words} matches no linear layer or embedding of {model.name}; nearest "
            f"are {close or 'none'}; compile --dry-run lists all"
        )


def _holds_integers(model: ImportedModel, weight: str) -> bool:
    """Whether the file's codes are what they mean, but for a zero point: floats multiply them
    exactly."""
    tensor = model.quantized.get(weight)
    return tensor is not None and bool((tensor.scales == 1.0).all())


def _finite(weight: Array) -> bool:
    return weight.dtype.kind != "f" or bool(np.isfinite(weight).all())


def _with_activations(node: Node, weights: Scheme, default: Scheme) -> Scheme:
    """The scheme of a file's codes with the activations of the user's scheme.

    Int8 activations share the groups of the weights. Codes with one scale per row would so get one
    scale per token where the user's scheme spells out groups: then each row's scale is repeated.
    """
    group = weights.group_size
    if weights.family != "int":
        return replace(weights, act_bits=default.act_bits)
    spelled = default.family in ("int", "anyprec") and default.integer_acts
    if node.op == "apq.Linear" and spelled and group == -1:
        group = default.act_group
    per_token = default.per_token and group != -1
    return replace(weights, act_bits=default.act_bits, per_token=per_token, group_size=group)


def _in_groups(tensor: QuantizedTensor, scheme: Scheme) -> QuantizedTensor:
    """A file's codes under a scheme whose groups are its own, or parts of its whole rows."""
    if scheme.group_size == tensor.scheme.group_size:
        return replace(tensor, scheme=scheme)
    count = -(-tensor.codes.shape[1] // scheme.group_size)
    zeros = None if tensor.zeros is None else np.repeat(tensor.zeros, count, axis=1)
    return replace(
        tensor, scales=np.repeat(tensor.scales, count, axis=1), zeros=zeros, scheme=scheme
    )


def _weight_of(node: Node) -> str | None:
    """Name of the weight that may be quantized: [N, K] of a linear layer, [V, D] of a table."""
    position = WEIGHT_INPUT.get(node.op)
    return None if position is None else node.inputs[position]


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise BadScheme(f"tensor type {pattern!r} is no regular expression: {error}") from error
