"""The passes in their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from apq_tvm.onnx_import.apart import batch_dimension
from apq_tvm.onnx_import.control.chosen import next_inside
from apq_tvm.onnx_import.control.regions import check_regions, tidy_regions
from apq_tvm.onnx_import.conv.affine import fold_affine
from apq_tvm.onnx_import.conv.channels_last import channels_last
from apq_tvm.onnx_import.conv.pools import separate_pools
from apq_tvm.onnx_import.conv.taps import drop_padded_taps
from apq_tvm.onnx_import.fixed_dims import apply_bounds, read_dims
from apq_tvm.onnx_import.graph import Graph, Inner
from apq_tvm.onnx_import.integers.codes import to_tensor
from apq_tvm.onnx_import.integers.quantized import keep_codes
from apq_tvm.onnx_import.operators.expansions import EXPANSIONS
from apq_tvm.onnx_import.ops import check_supported, decompose
from apq_tvm.onnx_import.passes.activations import (
    fuse_activations,
    fuse_gelu,
    fuse_hard,
    fuse_last_activations,
    fuse_residuals,
)
from apq_tvm.onnx_import.passes.attention import fuse_attention
from apq_tvm.onnx_import.passes.caches import cache_lengths, find_caches, free_caches
from apq_tvm.onnx_import.passes.cleanup import (
    drop_squeezes,
    merge_equal_nodes,
    merge_equal_weights,
    rename_outputs,
)
from apq_tvm.onnx_import.passes.expand import expand_late
from apq_tvm.onnx_import.passes.fold import fold
from apq_tvm.onnx_import.passes.linear import make_layers
from apq_tvm.onnx_import.passes.moves import merge_moves
from apq_tvm.onnx_import.passes.norm import fuse_layer_norm
from apq_tvm.onnx_import.passes.stacked import split_stacks
from apq_tvm.onnx_import.passes.widen import widen
from apq_tvm.onnx_import.read import read_graph
from apq_tvm.onnx_import.symbolic import floors
from apq_tvm.onnx_import.symbolic.assume import assume_equal
from apq_tvm.onnx_import.symbolic.dims import Call, as_attr, may_be_zero, needs_one, parse, symbols
from apq_tvm.onnx_import.symbolic.positions import decide_comparisons
from apq_tvm.onnx_import.symbolic.shapes import check_shape_inputs, materialize
from apq_tvm.onnx_import.symbolic.windows import rewrite_windows
from apq_tvm.types import WEIGHT_INPUT, DimSizes, ImportedModel, QuantizedTensor, TensorSpec


def import_model(path: Path, dims: DimSizes, as_written: bool = False) -> ImportedModel:
    """Read and normalise one file; see `apq_tvm.onnx_import.import_onnx`."""
    raw, digest = read_graph(path)
    raw.as_written = as_written
    raw.sweep()
    check_supported(raw, EXPANSIONS, "ai.onnx.ml.")  # before large trees become tables
    widen(raw)
    decompose(raw)
    check_supported(raw, EXPANSIONS, "com.microsoft.")  # before anything asks for their shapes
    drop_squeezes(raw)
    caches = find_caches(raw)
    free_caches(raw, caches)
    equal, bounds = read_dims(raw, dims)
    asked = frozenset(name for name, (low, _) in bounds.items() if low == 0)
    lengths: dict[str, str] = {}
    inside: dict[Inner, str] = {}
    sizes: frozenset[Call] = frozenset()
    while True:
        graph = _with_dims(raw, equal)
        graph.lengths, graph.caches, graph.equal_inside = dict(lengths), caches, inside
        graph.floors = sizes
        zeros, needed = cache_lengths(graph) | _kept(asked, equal), set[str]()
        with may_be_zero(zeros), needs_one(needed):
            fold(graph)
        if more := floors.found(graph):
            sizes |= more
            raw.run_sizes = {}
        elif proved := graph.settled or graph.same:
            # Dimensions proved to be one: start over with one of each two replaced everywhere.
            equal, inside = _joined(equal, proved), {}
        elif found := next_inside(graph):
            inside = {key: dim for key, dim in found.items() if key[0]}
            equal |= {name: dim for (place, name), dim in found.items() if not place}
        elif graph.sums:
            name, other = next(iter(graph.sums.items()))
            lengths[name] = other
        else:
            break
    with may_be_zero(zeros), needs_one(needed):
        _rewrite(graph)
    graph.least |= dict.fromkeys(sorted(needed), 1)
    apply_bounds(graph, bounds, equal)
    return _finish(graph, digest)


def _joined(equal: dict[str, str], same: dict[str, str]) -> dict[str, str]:
    """`equal` with what was found; what hangs on a symbol that this replaces is found again."""
    known, gone = dict(equal), set[str]()
    for name, found in same.items():
        other = known.get(found, found)
        if name in known or name == other or symbols(parse(other)) & gone:
            continue
        known = {old: other if new == name else new for old, new in known.items()}
        known[name] = other
        gone.add(name)
    return known


def _kept(names: frozenset[str], equal: Mapping[str, str]) -> frozenset[str]:
    """Dimensions as they are called once those that are equal have one name."""
    return frozenset().union(*(symbols(parse(equal.get(name, name))) for name in names))


def _rewrite(graph: Graph) -> None:
    """Everything after the shapes are known."""
    tidy_regions(graph)
    merge_equal_nodes(graph)
    materialize(graph)
    assume_equal(graph)
    keep_codes(graph)
    fold_affine(graph)
    separate_pools(graph)
    drop_padded_taps(graph)
    channels_last(graph)
    rewrite_windows(graph)
    split_stacks(graph)
    make_layers(graph)
    merge_moves(graph)
    decide_comparisons(graph)
    expand_late(graph)
    fold(graph)  # what is left of a decided comparison or of a tensor of one number
    fuse_layer_norm(graph)
    fuse_gelu(graph)
    fuse_hard(graph)
    fuse_activations(graph)
    fuse_residuals(graph)
    fuse_last_activations(graph)
    fuse_attention(graph)
    tidy_regions(graph)
    merge_equal_nodes(graph)
    rename_outputs(graph)
    merge_equal_weights(graph)
    graph.sweep()
    check_supported(graph)
    check_regions(graph)
    check_shape_inputs(graph)


def _with_dims(raw: Graph, equal: dict[str, str]) -> Graph:
    """A fresh copy of `raw` with symbolic dimensions replaced."""

    def spec(old: TensorSpec) -> TensorSpec:
        shape = tuple(equal.get(d, d) if isinstance(d, str) else d for d in old.shape)
        return replace(old, shape=tuple(int(d) if str(d).isdigit() else d for d in shape))

    inputs, outputs = [spec(s) for s in raw.inputs], [spec(s) for s in raw.outputs]
    graph = Graph(raw.name, raw.opset, inputs, outputs, list(raw.nodes), dict(raw.weights))
    graph.run_sizes, graph.equal, graph.inferred = raw.run_sizes, equal, raw.inferred
    graph.as_written = raw.as_written
    return graph


def _finish(graph: Graph, digest: str) -> ImportedModel:
    specs = {}
    for node in graph.nodes:
        for value in node.outputs:
            shape = graph.shape(value)
            if value and shape is not None and graph.dtype(value):
                dims = tuple(
                    f"{value}_dim_{i}" if d is None else as_attr(d) for i, d in enumerate(shape)
                )
                specs[value] = TensorSpec(value, str(graph.dtype(value)), dims)
    outputs = tuple(
        specs.get(spec.name, replace(spec, dtype=spec.dtype or str(graph.dtype(spec.name))))
        for spec in graph.outputs
    )
    quantized, notes = _quantized(graph)
    model = ImportedModel(
        name=graph.name,
        opset=graph.opset,
        inputs=tuple(graph.inputs),
        outputs=outputs,
        nodes=tuple(graph.nodes),
        weights=graph.weights,
        value_specs=specs,
        sha256=digest,
        limits=graph.limits,
        least=graph.least,
        lengths={name: str(graph.input_dim(name)) for name in graph.lengths},
        quantized=quantized,
        notes=notes,
    )
    batch, mixed = batch_dimension(model)
    return replace(model, batch=batch, mixed=mixed)


def _quantized(graph: Graph) -> tuple[dict[str, QuantizedTensor], dict[str, str]]:
    """Tensors of the file's codes by weight; notes by weight and layer."""
    tensors, notes = {}, {n.name: graph.notes[n.name] for n in graph.nodes if n.name in graph.notes}
    for node in graph.nodes:
        weight = node.inputs[WEIGHT_INPUT[node.op]] if node.op in WEIGHT_INPUT else ""
        if weight in graph.codes and weight not in notes:
            tensor, notes[weight] = to_tensor(graph.codes[weight])
            if tensor is not None:
                tensors[weight] = tensor
    return tensors, notes


__all__ = ["import_model"]
