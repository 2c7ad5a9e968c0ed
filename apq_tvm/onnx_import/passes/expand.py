"""Broadcast as late as possible: most often the reader broadcasts by itself."""

from __future__ import annotations

from dataclasses import replace

from apq_tvm.onnx_import.graph import Graph, Shape
from apq_tvm.onnx_import.symbolic.dims import as_attr
from apq_tvm.onnx_import.symbolic.infer import infer
from apq_tvm.onnx_import.symbolic.shape_rules import ELEMENTWISE
from apq_tvm.onnx_import.symbolic.unify import same_shape
from apq_tvm.types import Node

UNARY = frozenset(
    "Abs Cast Ceil Cos Erf Exp Floor Log Neg Not Reciprocal Relu Round Sigmoid Sign Sin Sqrt Tanh "
    "Clip".split()
)
REDUCTIONS = frozenset(
    "ReduceMax ReduceMin ReduceSum ReduceMean ReduceProd ReduceLogSumExp ReduceLogSum "
    "ReduceSumSquare ReduceL1 ReduceL2".split()
)


def expand_late(graph: Graph) -> None:
    """Move ``apq.Expand`` and ``apq.Full`` behind elementwise operators, or drop them there.

    ``f(expand(x)) = expand(f(x))``; an operator with another operand of the full shape needs no
    expansion at all; a reduction over axes that were not expanded can run before it.
    """
    for node in graph.each():
        if node.op in ELEMENTWISE:
            _operands(graph, node)
        elif node.op in UNARY and all(v in graph.weights for v in node.inputs[1:] if v):
            _before(graph, node)
        elif node.op in REDUCTIONS and _keeps_expanded_axes(graph, node):
            _before(graph, node)
    graph.sweep()


def _source(graph: Graph, value: str) -> str | None:
    """What was expanded to `value`; for ``apq.Full`` its number, as a weight."""
    node = graph.made_by(value, "apq.Expand", "apq.Full")
    if node is None:
        return None
    if node.op == "apq.Expand":
        return node.inputs[0]
    name = f"{node.name}.value"
    graph.weights.setdefault(name, node.attrs["value"])
    return name


def _operands(graph: Graph, node: Node) -> None:
    """Let an elementwise operator broadcast the expanded operands itself, or expand its result."""
    shape = graph.known_shape(node.outputs[0])
    sources = [_source(graph, v) for v in node.inputs]
    if shape is None or not any(sources):
        return
    inputs = tuple(s or v for s, v in zip(sources, node.inputs, strict=True))
    full = _broadcast([graph.shape(v) for v in inputs])
    if full is None:
        return
    if same_shape(full, shape):
        graph.replace(node, replace(node, inputs=inputs))
        return
    _compute_first(graph, node, inputs)


def _broadcast(shapes: list[Shape | None]) -> Shape | None:
    """Broadcasting that assumes nothing: None where two dimensions are not known to be equal."""
    rank = max((len(s) for s in shapes if s is not None), default=0)
    result = []
    for axis in range(-rank, 0):
        dims = []
        for shape in shapes:
            if shape is None:
                return None
            if len(shape) >= -axis and shape[axis] != 1:
                dims.append(shape[axis])
        if any(d is None or d != dims[0] for d in dims):
            return None
        result.append(dims[0] if dims else 1)
    return tuple(result)


def _before(graph: Graph, node: Node) -> None:
    source = _source(graph, node.inputs[0])
    if source is not None and source not in graph.weights:
        _compute_first(graph, node, (source, *node.inputs[1:]))


def _compute_first(graph: Graph, node: Node, inputs: tuple[str, ...]) -> None:
    """Run `node` on the small operands and expand its result."""
    shape = graph.known_shape(node.outputs[0])
    if shape is None:
        return
    small = graph.fresh(f"{node.outputs[0]}.small")
    first = replace(node, inputs=inputs, outputs=(small,))
    attrs = {"shape": tuple(as_attr(dim) for dim in shape)}
    name = graph.fresh(f"{node.name}.expand")
    then = Node("apq.Expand", name, (small,), node.outputs, attrs)
    infer(graph, first)
    graph.replace(node, first, then)


def _keeps_expanded_axes(graph: Graph, node: Node) -> bool:
    """Whether a reduction runs over none of the axes its input was expanded along."""
    maker = graph.made_by(node.inputs[0], "apq.Expand")
    if maker is None:
        return False
    before, after = graph.shape(maker.inputs[0]), graph.shape(node.inputs[0])
    axes = node.attrs.get("axes")
    if axes is None and len(node.inputs) > 1 and node.inputs[1] in graph.weights:
        axes = graph.weights[node.inputs[1]].reshape(-1).tolist()
    if before is None or after is None or len(before) != len(after) or not axes:
        return False
    return all(before[int(a)] is not None and before[int(a)] == after[int(a)] for a in axes)
