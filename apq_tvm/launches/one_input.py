"""Linear layers of one x become one layer: q, k and v, or a gate and what it gates.

A kernel begins to read weights slowly, and ends when its last thread does: one of three layers'
weights does both once, and on a GPU is one launch. What each layer gave is a slice of what they
give, which costs nothing where what reads it computes element by element, so layers that others
read stay apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from apq_tvm.launches.together import are_plain, together
from apq_tvm.types import Array, ImportedModel, Node, QuantizedModel, TensorSpec

MOVES = ("Reshape", "apq.Reshape", "Transpose")
ELEMENTWISE = frozenset(("Add", "Concat", "Mul", "Neg", "Slice", "Split", "Sub", "apq.Cache"))
"""What may read a slice, behind `MOVES`: one function computes both."""


BY_ROWS = ("int", "k", "min", "nl", "super")
"""Families whose rows of weights mean the same in whatever layer they are."""


def join_one_input(quantized: QuantizedModel) -> QuantizedModel:
    """Join layers of one scheme of `BY_ROWS` whose results are read element by element."""
    model = quantized.model
    readers = _readers(model)
    groups: dict[tuple[object, ...], list[Node]] = {}
    shared = Counter(quantized.layers.values())
    for node in model.nodes:
        key = quantized.layers.get(node.name)
        if node.op != "apq.Linear" or key is None or shared[key] > 1:
            continue
        if any(node.inputs[3:]) or node.attrs.get("after") or not _read_by_element(readers, node):
            continue
        spec = model.value_specs.get(node.outputs[0])
        if spec is None or len(spec.shape) > 3:  # images: their kernels look at what is around
            continue
        moved = any(reader and reader.op in MOVES for reader in readers[node.outputs[0]])
        alike = (node.inputs[0], quantized.tensors[key].scheme, moved)
        groups.setdefault(alike, []).append(node)
    for layers in groups.values():
        tensors = [quantized.tensors[quantized.layers[node.name]] for node in layers]
        if len(layers) > 1 and are_plain(tensors, BY_ROWS):
            quantized = _joined(quantized, layers)
    return quantized if quantized.model is model else _without_parts(quantized)


def _without_parts(quantized: QuantizedModel) -> QuantizedModel:
    """Without weights that nothing reads any more."""
    model = quantized.model
    read = {name for node in model.nodes for name in node.inputs}
    read |= {spec.name for spec in model.outputs}
    weights = {name: array for name, array in model.weights.items() if name in read}
    return replace(quantized, model=replace(model, weights=weights))


def _readers(model: ImportedModel) -> dict[str, list[Node | None]]:
    """The nodes that read each value; None for the caller."""
    readers: dict[str, list[Node | None]] = {}
    for node in model.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    for spec in model.outputs:
        readers.setdefault(spec.name, []).append(None)
    return readers


def _read_by_element(readers: Mapping[str, Sequence[Node | None]], node: Node) -> bool:
    """Whether everything that reads a node's result takes a slice at no cost."""
    found = readers.get(node.outputs[0], [])
    return bool(found) and all(
        reader is not None
        and (reader.op in ELEMENTWISE or (reader.op in MOVES and _read_by_element(readers, reader)))
        for reader in found
    )


def _joined(quantized: QuantizedModel, layers: Sequence[Node]) -> QuantizedModel:
    """The model with these as one layer, and slices of it."""
    model, first = quantized.model, layers[0]
    made = together(quantized, layers)
    names, name, weights = made.names, made.name, made.weights
    sizes = [int(weights[layer.inputs[1]].shape[0]) for layer in layers]
    specs, y = dict(model.value_specs), f"{name}.y"
    lead = specs[first.outputs[0]].shape[:-1]
    specs[y] = TensorSpec(y, "float32", (*lead, sum(sizes)))
    joined = [Node(first.op, name, made.inputs, (y,), {**first.attrs, "activation": ""})]
    heads = _heads(model, layers)
    if heads:
        joined += _by_heads(name, layers, heads, weights, specs)
    else:
        for layer, start, size in zip(layers, _starts(sizes), sizes, strict=True):
            joined += _slice(layer, y, start, size, specs)
    gone = {*names, *(node.name for node in heads)}
    nodes: list[Node] = []
    for node in model.nodes:
        if node.name == first.name:
            nodes += joined
        elif node.name not in gone:
            nodes.append(node)
    kept = replace(model, nodes=tuple(nodes), weights=weights, value_specs=specs)
    notes = {n: note for n, note in quantized.notes.items() if n not in names}
    said = dict.fromkeys(quantized.notes[n] for n in names if quantized.notes.get(n))
    notes |= {name: "; ".join(said)} if said else {}
    return replace(made.put_into(quantized, kept), notes=notes)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _heads(model: ImportedModel, layers: Sequence[Node]) -> list[Node]:
    """The nodes that give each layer's result heads of one width, if they alone read them.

    Behind one such node for all layers heads are slices of an axis of their own, which transposing
    and what follows reads in place.
    """
    readers, specs, found, widths = _readers(model), model.value_specs, list[Node](), set()
    for layer in layers:
        (out,) = layer.outputs
        (reader, *others) = readers[out]
        if others or reader is None or reader.op != "Reshape" or layer.attrs["activation"]:
            return []
        shape = specs[reader.outputs[0]].shape if reader.outputs[0] in specs else ()
        if reader.inputs[1] not in model.weights or out not in specs or len(shape) < 2:
            return []
        columns = specs[out].shape[-1]
        if shape[:-2] != specs[out].shape[:-1] or not all(isinstance(d, int) for d in shape[-2:]):
            return []
        if int(shape[-2]) * int(shape[-1]) != columns:
            return []
        widths.add(shape[-1])
        found.append(reader)
    return found if len(widths) == 1 else []


def _by_heads(
    name: str,
    layers: Sequence[Node],
    heads: Sequence[Node],
    weights: dict[str, Array],
    specs: dict[str, TensorSpec],
) -> Iterator[Node]:
    """Heads of all layers, then those of each."""
    first, shapes = heads[0], [specs[node.outputs[0]].shape for node in heads]
    counts, width = [int(shape[-2]) for shape in shapes], int(shapes[0][-1])
    before = [int(n) for n in weights[first.inputs[1]].reshape(-1)[:-2]]
    wanted = (*before, sum(counts), width)
    constant, value = f"shape:{'x'.join(map(str, wanted))}", f"{name}.heads"
    weights[constant] = np.array(wanted, np.int64)
    specs[value] = TensorSpec(value, "float32", (*shapes[0][:-2], sum(counts), width))
    yield Node("Reshape", value, (f"{name}.y", constant), (value,), first.attrs)
    axis = len(shapes[0]) - 2
    for layer, node, start, shape in zip(layers, heads, _starts(counts), shapes, strict=True):
        attrs = {"axes": (axis,), "starts": (start,), "steps": (1,), "shape": shape}
        yield Node("apq.Slice", f"{layer.name}.slice", (value,), node.outputs, attrs)


def _slice(
    layer: Node, y: str, start: int, size: int, specs: dict[str, TensorSpec]
) -> Iterator[Node]:
    """What a layer gave, of what all of them give."""
    activation, (out,) = str(layer.attrs["activation"]), layer.outputs
    value = f"{out}.linear" if activation else out
    shape = (*specs[y].shape[:-1], size)
    axis = len(shape) - 1
    attrs = {"axes": (axis,), "starts": (start,), "steps": (1,), "shape": shape}
    specs[value] = TensorSpec(value, "float32", shape)
    yield Node("apq.Slice", f"{layer.name}.slice", (y,), (value,), attrs)
    if activation:
        bent = {"activation": activation, "fused": True}
        yield Node("apq.Activation", f"{layer.name}.{activation}", (value,), (out,), bent)
