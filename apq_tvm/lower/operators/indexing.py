"""Nodes that follow indices: gathers, scatters, ReverseSequence, OneHot, TopK, decision trees.

TVM's importer counts negative indices from the end inside a kernel and follows the others wherever
they lead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from tvm import relax, te, tirx

from apq_tvm.errors import UnsupportedModel
from apq_tvm.lower.operators.linear import known_shape
from apq_tvm.lower.operators.nodes import Shapes, call
from apq_tvm.lower.operators.reshape import reshape
from apq_tvm.lower.relax_import import Convert
from apq_tvm.ops.graph.gather import gather, gather_elements, gather_nd, reverse_sequence
from apq_tvm.ops.graph.scatter import REDUCTIONS, scatter_elements, scatter_nd
from apq_tvm.ops.graph.topk import topk
from apq_tvm.ops.graph.trees import TreesSpec, trees
from apq_tvm.types import ImportedModel, Node


def dtype_of(value: Any) -> str:
    """Element type of a Relax value."""
    return str(value.ty.dtype)


def _named(func: Any, node: Node) -> Any:
    """What is told of an id out of range; functions of different names are different functions."""
    return func.with_attr("apq.layer", node.attrs.get("apq.layer", node.name))


def gather_converter(make: Callable[..., Any]) -> Convert:
    """``Gather`` or ``GatherElements``: `make` is the function of that name."""

    def convert(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        shapes, (x, ids) = Shapes(node), inputs
        data = shapes.of(x)
        axis = int(node.attrs.get("axis", 0)) % len(data)
        func = make(data, shapes.of(ids), axis, dtype_of(x), dtype_of(ids))
        return call(bb, _named(func, node), [x, ids], shapes)

    return convert


def convert_gather_nd(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``GatherND``."""
    shapes, (x, ids) = Shapes(node), inputs
    index = shapes.of(ids)
    _check_width(node, index)
    batch = int(node.attrs.get("batch_dims", 0))
    func = gather_nd(shapes.of(x), index, batch, dtype_of(x), dtype_of(ids))
    return call(bb, _named(func, node), [x, ids], shapes)


def _check_width(node: Node, index: Sequence[int | str]) -> None:
    if not isinstance(index[-1], int):
        raise UnsupportedModel(
            f"{node.op} {node.name!r}: the last dimension of its indices is {index[-1]}, but must "
            "be a number"
        )


def _reduction(node: Node) -> str:
    reduction = str(node.attrs.get("reduction", "none"))
    if reduction not in REDUCTIONS:
        raise UnsupportedModel(f"{node.op} {node.name!r}: no reduction is called {reduction!r}")
    return reduction


def convert_scatter_elements(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``ScatterElements``, and ``Scatter`` of opset 9."""
    shapes, (x, ids, updates) = Shapes(node), inputs
    data = shapes.of(x)
    axis = int(node.attrs.get("axis", 0)) % len(data)
    func = scatter_elements(
        data, shapes.of(ids), axis, dtype_of(x), dtype_of(ids), _reduction(node)
    )
    return call(bb, _named(func, node), [x, ids, updates], shapes)


def convert_scatter_nd(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``ScatterND``, as rows of indices and of updates."""
    shapes, (x, ids, updates) = Shapes(node), inputs
    index = shapes.of(ids)
    _check_width(node, index)
    extents, lead = known_shape(x, node), known_shape(ids, node)[:-1]
    count = int(index[-1])
    rows, inner = prod(lead, start=_int(1)), prod(extents[count:], start=_int(1))

    def shaped(value: Any, *dims: Any) -> Any:
        return bb.emit(reshape(value, dims))

    args = [
        shaped(x, *extents[:count], inner),
        shaped(ids, rows, _int(count)),
        shaped(updates, rows, inner),
    ]
    func = scatter_nd(
        shapes.of(args[0]), shapes.of(args[1]), dtype_of(x), dtype_of(ids), _reduction(node)
    )
    y = call(bb, _named(func, node), args, shapes)
    return reshape(y, extents)


def _int(value: int) -> Any:
    return tirx.const(value, "int64")


def convert_reverse_sequence(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``ReverseSequence``."""
    shapes, (x, lengths) = Shapes(node), inputs
    time, batch = (int(node.attrs.get(key, i)) for i, key in enumerate(("time_axis", "batch_axis")))
    if "batch_axis" not in node.attrs:
        batch = 1
    func = reverse_sequence(shapes.of(x), time, batch, dtype_of(x), dtype_of(lengths))
    return call(bb, _named(func, node), [x, lengths], shapes)


def one_hot_converter(model: ImportedModel) -> Convert:
    """``OneHot`` of a constant depth; an index outside of it gives a row that is off throughout."""

    def convert(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        depth = int(model.weights[node.inputs[1]].reshape(()))
        index, values = inputs[0], inputs[2]
        rank = len(known_shape(index, node))
        axis = int(node.attrs.get("axis", -1)) % (rank + 1)

        def one_hot(ids: Any, pair: Any) -> Any:
            shape = (*ids.shape[:axis], _int(depth), *ids.shape[axis:])

            def element(*i: Any) -> Any:
                given = ids(*i[:axis], *i[axis + 1 :]).astype("int64")
                wrapped = tirx.Select(given < 0, given + depth, given)
                return tirx.Select(wrapped == i[axis], pair(_int(1)), pair(_int(0)))

            return te.compute(shape, element, "one_hot")

        return bb.emit_te(one_hot, index, values, primfunc_name_hint="one_hot")

    return convert


def topk_converter(model: ImportedModel) -> Convert:
    """``TopK`` of a constant k, as [outer, n, inner]."""

    def convert(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        x, extents = inputs[0], known_shape(inputs[0], node)
        k = int(model.weights[node.inputs[1]].reshape(()))
        axis = int(node.attrs.get("axis", -1)) % len(extents)
        if isinstance(extents[axis], tirx.IntImm) and k > int(extents[axis]):
            raise UnsupportedModel(
                f"TopK {node.name!r}: k is {k}, but its axis has {extents[axis]} elements"
            )
        lead, rest = prod(extents[:axis], start=_int(1)), prod(extents[axis + 1 :], start=_int(1))
        flat = bb.emit(reshape(x, [lead, extents[axis], rest]))
        largest = bool(node.attrs.get("largest", 1))
        func = bb.add_func(topk(dtype_of(x), k, largest=largest), "topk")
        kept = [lead, _int(k), rest]
        types = [relax.TensorType(kept, dtype) for dtype in (dtype_of(x), "int64")]
        both = bb.emit(relax.call_tir(func, [flat], types))
        out = relax.ShapeExpr([*extents[:axis], _int(k), *extents[axis + 1 :]])
        parts = [bb.emit(relax.TupleGetItem(both, i)) for i in range(2)]
        return relax.Tuple([bb.emit(reshape(part, out)) for part in parts])

    return convert


def convert_trees(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``apq.Trees``."""
    attrs, dtype = node.attrs, dtype_of(inputs[0])
    told = ("targets", "how", "modes", "missing", "least", "side")
    spec = TreesSpec(dtype, **{name: attrs[name] for name in told})
    func = bb.add_func(trees(spec), "trees")
    out = [known_shape(inputs[0], node)[0], _int(spec.targets)]
    return bb.emit(relax.call_tir(func, list(inputs), relax.TensorType(out, dtype)))


def indexing_converters(model: ImportedModel) -> dict[str, Convert]:
    """Converters by operator name."""
    return {
        "Gather": gather_converter(gather),
        "GatherElements": gather_converter(gather_elements),
        "GatherND": convert_gather_nd,
        "OneHot": one_hot_converter(model),
        "ReverseSequence": convert_reverse_sequence,
        "Scatter": convert_scatter_elements,
        "ScatterElements": convert_scatter_elements,
        "ScatterND": convert_scatter_nd,
        "TopK": topk_converter(model),
        "apq.Trees": convert_trees,
    }
