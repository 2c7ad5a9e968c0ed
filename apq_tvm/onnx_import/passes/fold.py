"""One sweep in graph order: constants computed, copies dropped, shapes resolved, types inferred."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from apq_tvm.errors import ImportFailed
from apq_tvm.onnx_import.checks.sizes import Budget, computed_entries
from apq_tvm.onnx_import.control.regions import without_constants
from apq_tvm.onnx_import.control.sequences import refuse_sequences
from apq_tvm.onnx_import.graph import FLOATS, SIZES, Graph, np_dtype
from apq_tvm.onnx_import.integers.codes import CODE_BITS, follow
from apq_tvm.onnx_import.operators.expansions import EXPANSIONS, expand
from apq_tvm.onnx_import.operators.functions import inline_function, is_function
from apq_tvm.onnx_import.symbolic.infer import infer, infer_inputs
from apq_tvm.onnx_import.symbolic.onnx_inference import node_proto
from apq_tvm.onnx_import.symbolic.regions import MARKERS
from apq_tvm.onnx_import.symbolic.shapes import rewrite
from apq_tvm.onnx_import.symbolic.unify import same_shape
from apq_tvm.onnx_import.symbolic.values import evaluate
from apq_tvm.onnx_import.symbolic.windows import infer_windows
from apq_tvm.types import Array, Node

# Attributes say how long RoiAlign takes: samples a bin, which are no entries of anything.
UNFOLDED = frozenset(("RoiAlign",))

# Folding may make constants this much larger than what they come from, or this many entries.
GROWTH, FREE_ENTRIES = 2, 1 << 16


def fold(graph: Graph) -> None:
    """Fold constants and shapes; afterwards every value that can be has a type and a shape.

    Raises
    ------
    ImportFailed
        A node does not fit its inputs, or its constant cannot be computed; the message names it.
    """
    infer_inputs(graph)
    outputs = {spec.name for spec in graph.outputs}
    alias = {spec.name: _empty(graph, spec.name) for spec in graph.inputs if 0 in spec.shape}
    alias = {name: value for name, value in alias.items() if value}
    pending, graph.nodes, graph.inside = deque(graph.nodes), [], []
    budget = Budget(graph.weights.values())
    while pending:
        original = pending.popleft()
        node = replace(original, inputs=tuple(alias.get(v, v) for v in original.inputs))
        if _inlined(graph, node, pending):
            continue
        refuse_sequences(graph, node)
        if node.op in MARKERS:
            node, known = without_constants(graph, node)
            alias |= known
        if _fold_constant(graph, node, outputs, budget):
            continue
        infer(graph, node)
        source = copied(graph, node)
        if source is None and _fold_values(graph, node, outputs):
            continue
        nothing = None if source else _of_nothing(graph, node, outputs)
        new = source or (rewrite(graph, node) if nothing is None else nothing)
        if isinstance(new, str):
            value = node.outputs[0]
            if value not in outputs:
                alias[value] = new
                continue
            new = [Node("Identity", node.name, (new,), (value,))]
        for made in [node] if new is None else new:
            if made is not node:
                infer(graph, made)
            infer_windows(graph, made)
            graph.maker.update((out, made) for out in made.outputs if out)
            graph.nodes.append(made)
            _follow(graph, made)
    graph.index()
    graph.sweep()


def _follow(graph: Graph, node: Node) -> None:
    """Keep account of the branches that are open behind a node."""
    if node.op in ("apq.Else", "apq.EndIf"):
        graph.inside.pop()
    if node.op in ("apq.Then", "apq.Else"):
        graph.inside.append(node.outputs[0])


def _empty(graph: Graph, value: str) -> str:
    """A constant without elements of the type of `value`; empty where it may have some."""
    shape, dtype = graph.known_shape(value), graph.dtype(value)
    sizes = [dim for dim in shape or () if isinstance(dim, int)]
    if shape is None or dtype is None or 0 not in sizes or len(sizes) < len(shape):
        return ""
    return graph.add_weight(f"{value}.empty", np.empty(sizes, np.dtype(dtype)))


def _of_nothing(graph: Graph, node: Node, outputs: set[str]) -> list[Node] | None:
    """What stands for a node whose results have no elements: constants, if it stays at all."""
    made = [value for value in node.outputs if value]
    if node.op in (*MARKERS, SIZES) or not made:
        return None
    if any(0 not in (graph.shape(value) or ()) for value in made):
        return None
    names = {value: _empty(graph, value) for value in made}
    if not all(names.values()):
        return None
    kept = []
    for value, name in names.items():
        if value in outputs:
            kept.append(Node("Identity", graph.fresh(f"{value}.nothing"), (name,), (value,)))
        else:
            graph.weights[value] = graph.weights.pop(name)
    return kept


def _inlined(graph: Graph, node: Node, pending: deque[Node]) -> bool:
    """Put what `node` is written as in front of the pending nodes; whether it is written so."""
    inner = None
    if node.op in EXPANSIONS:
        inner = expand(graph, node)
    elif is_function(node, graph.opset) and copied(graph, node) is None:
        inner = inline_function(graph, node)
    if inner is not None:
        pending.extendleft(reversed(inner))
    return inner is not None


def copied(graph: Graph, node: Node) -> str | None:
    """The value `node` only copies: Identity, Dropout at inference, Cast to the type it has."""
    if node.op == "Identity":
        return node.inputs[0]
    if node.op == "Dropout" and not any(node.outputs[1:]):
        # Also where an exporter left the training mode on: what is compiled here infers.
        return node.inputs[0]
    if node.op == "Cast" and np_dtype(node.attrs["to"]) == graph.dtype(node.inputs[0]):
        return node.inputs[0]
    if node.op == "CastLike" and graph.dtype(node.inputs[0]) == graph.dtype(node.inputs[1]):
        return node.inputs[0] if graph.dtype(node.inputs[0]) else None
    if _neutral(graph, node):
        return node.inputs[0] if node.inputs[1] in graph.weights else node.inputs[1]
    if node.op in ("Sum", "Max", "Min", "Mean", "Concat") and len(node.inputs) == 1:
        return node.inputs[0]
    return None


# Numbers that change nothing, on either side unless the operator is in _RIGHT.
_NEUTRAL: dict[str, float] = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1, "And": 1, "Or": 0, "Pow": 1}
_RIGHT = ("Sub", "Div", "Pow")


def _neutral(graph: Graph, node: Node) -> bool:
    """Whether `node` adds 0, multiplies by 1 or the like, and does not broadcast."""
    if node.op not in _NEUTRAL or len(node.inputs) != 2:
        return False
    pairs = [node.inputs] if node.op in _RIGHT else [node.inputs, node.inputs[::-1]]
    return any(
        x not in graph.weights
        and graph.scalar(c) == _NEUTRAL[node.op]
        and same_shape(graph.shape(x), graph.shape(node.outputs[0]))
        for x, c in pairs
    )


def _fold_values(graph: Graph, node: Node, outputs: set[str]) -> bool:
    """Record symbolic contents; whether the node is a constant after all."""
    arrays = evaluate(graph, node)
    if arrays is None:
        return False
    plain = True
    for value, array in zip(node.outputs, arrays, strict=False):
        graph.values[value] = array
        graph.shapes[value] = array.shape
        plain = plain and all(isinstance(v, (bool, int)) for v in array.ravel())
    if not plain or outputs.intersection(node.outputs):
        return False
    for value, array in zip(node.outputs, arrays, strict=False):
        graph.weights[value] = array.astype(np.dtype(str(graph.dtypes[value])))
    return True


def _fold_constant(graph: Graph, node: Node, outputs: set[str], budget: Budget) -> bool:
    """Compute a node whose inputs are all constants; whether it is gone."""
    constants = graph.weights
    read = [v for v in node.inputs if v]
    if not read or any(v not in constants for v in read):
        return False
    if outputs.intersection(node.outputs):
        nothing = any(constants[v].size == 0 for v in read)
        return nothing and _fold_output(graph, node, budget)
    if "." in node.op or node.op in UNFOLDED or (node.op == "Dropout" and len(node.inputs) > 2):
        return False
    infer(graph, node)
    if copied(graph, node) is not None:
        return False  # an alias, which keeps the weight's name
    operands = {v: constants[v] for v in read}
    given = [operands[v] for v in read]
    most = max(FREE_ENTRIES, GROWTH * sum(array.size for array in given))
    after = computed_entries(graph, node, operands)
    if after is None or after > most or not budget.takes(node, given, after):
        return False
    try:
        with np.errstate(all="ignore"):  # a division by 0 is what the model says
            arrays = _compute(node, operands, graph.opset)
    except (IndexError, ValueError) as error:
        read_text = ", ".join(map(graph.describe, read))
        raise ImportFailed(
            f"{node.op} {node.name!r} cannot be computed from {read_text}: {error}"
        ) from error
    if arrays is None:
        return False
    for value, array in zip(node.outputs, arrays, strict=False):
        if value:
            constants[value] = array
    codes = follow(node, constants, graph.codes)
    if codes is not None and constants[node.outputs[0]].dtype.name in FLOATS:
        graph.codes[node.outputs[0]] = codes
    return True


def _fold_output(graph: Graph, node: Node, budget: Budget) -> bool:
    """Compute a node that makes graph outputs of nothing: no kernel runs over no elements."""
    names = {out: graph.fresh(f"{out}.folded") for out in node.outputs if out}
    inner = replace(node, outputs=tuple(names.get(out, "") for out in node.outputs))
    if not _fold_constant(graph, inner, set(), budget):
        return False
    for out, name in names.items():
        copy = Node("Identity", graph.fresh(f"{out}.copy"), (name,), (out,))
        infer(graph, copy)
        graph.maker[out] = copy
        graph.nodes.append(copy)
    return True


def _compute(node: Node, arrays: Mapping[str, Array], opset: int) -> list[Array] | None:
    """Outputs of `node`; views where numpy can give them, so that mapped weights stay mapped."""
    x = arrays[next(v for v in node.inputs if v)]
    if node.op == "Transpose":
        return [x.transpose(node.attrs.get("perm", tuple(reversed(range(x.ndim)))))]
    if node.op == "Cast" and x.dtype.kind in "fiub":
        to = np.dtype(np_dtype(node.attrs["to"]))
        if to.kind in "fiub":
            return [x.astype(to)]
    if node.op == "DequantizeLinear":
        return [dequantize(x, *(arrays[v] for v in node.inputs[1:]), attrs=node.attrs)]
    if node.op == "GatherElements":  # the reference has none of more than 64 along the axis
        return [_gather_elements(x, arrays[node.inputs[1]], node.attrs.get("axis", 0))]
    if node.op in ("CumSum", "CumProd"):  # ONNX Runtime takes an axis [1], the reference does not
        arrays = {**arrays, node.inputs[1]: arrays[node.inputs[1]].reshape(())}
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    inputs = [
        helper.make_tensor_value_info(v, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for v, a in arrays.items()
    ]
    outs = [helper.make_empty_tensor_value_info(v) for v in node.outputs if v]
    graph = helper.make_graph([node_proto(node)], "constant", inputs, outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    try:
        evaluator = ReferenceEvaluator(model)
    except (NotImplementedError, RuntimeError):
        return None  # onnx cannot run this version; the node stays, and is reported if TVM cannot
    try:
        results: list[Any] = evaluator.run(None, dict(arrays))
    except (NotImplementedError, TypeError):
        return None  # a gap of the reference: OneHot of bools
    except Exception as error:
        raise ImportFailed(f"{node.op} {node.name!r} cannot be computed: {error}") from error
    given = iter(results)
    return [np.asarray(next(given)) if v else np.empty(0) for v in node.outputs]


def _gather_elements(x: Array, index: Array, axis: int) -> Array:
    """Raises IndexError where an index is outside."""
    axis %= x.ndim
    part = x[tuple(slice(None if i == axis else size) for i, size in enumerate(index.shape))]
    return np.take_along_axis(part, index, axis)


def dequantize(
    x: Array, scale: Array, zero: Array | None = None, *, attrs: Mapping[str, Any]
) -> Array:
    """DequantizeLinear per tensor, per axis or in blocks (ONNX operator specification, opset 21).

    Parameters
    ----------
    x : int8, uint8 or int32 [...]
        4-bit types are accepted too.
    scale, zero : [] or [D] or the shape of `x` with one axis divided by ``block_size``
    attrs : mapping
        ``axis`` and ``block_size``.

    Returns
    -------
    ndarray
        ``(x - zero) * scale`` in the type of `scale`.
    """
    axis, block = attrs.get("axis", 1), attrs.get("block_size", 0)

    def spread(array: Array) -> Array:
        if block:
            wide = np.repeat(array, min(block, x.shape[axis]), axis)
            return wide[tuple(slice(d) for d in x.shape)]
        if array.size == 1:
            return array.reshape(())
        return array.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])

    wide = np.int32 if x.dtype.kind in "iu" or x.dtype.name in CODE_BITS else np.float32
    offset = x.astype(wide) - (0 if zero is None else spread(zero).astype(wide))
    return np.asarray(offset * spread(scale), scale.dtype)
