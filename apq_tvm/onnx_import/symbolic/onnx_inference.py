"""ONNX's own shape inference, node by node, with expressions of `dims` as names of dimensions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from apq_tvm.errors import ImportFailed
from apq_tvm.onnx_import.graph import Graph, Shape, np_dtype
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr, parse
from apq_tvm.types import Array, Node

if TYPE_CHECKING:
    import onnx

# Larger constants are not needed to infer a shape.
SMALL = 1024

_TERM = r"[A-Za-z ]*(?:\.\.\.[A-Za-z ]*)?"
EQUATION = re.compile(rf"{_TERM}(?:,{_TERM})*(?:->{_TERM})?")
"""Of an ``Einsum``, as ONNX has it. Its own inference never comes back from other characters."""


def infer_by_onnx(graph: Graph, node: Node) -> None:
    """Record what ONNX knows of the outputs of `node`; of equal nodes it is asked once.

    Raises
    ------
    ImportFailed
        The node does not fit its inputs; the message names it.
    """
    from onnx import defs, numpy_helper

    if not defs.has(node.op, max_inclusive_version=graph.opset):
        return  # reported with all other unsupported operators
    read = [v for v in node.inputs if v]
    if any(graph.dtype(value) is None for value in read):
        return
    equation = str(node.attrs.get("equation", ""))
    if node.op == "Einsum" and not EQUATION.fullmatch(equation):
        raise ImportFailed(
            f"Einsum {node.name!r}: {equation!r} is no equation, such as 'ij,jk->ik'"
        )
    data = {
        value: np.asarray(graph.weights[value], order="C")
        for value in read
        if value in graph.weights and graph.weights[value].size <= SMALL
    }
    key = _memo_key(graph, node, data)
    found = graph.inferred.get(key) if key is not None else None
    if found is None:
        constants = {v: numpy_helper.from_array(a) for v, a in data.items()}
        kinds = _onnx_types(graph, node, read, constants)
        found = [_dtype_and_shape(kinds.get(value)) for value in node.outputs]
        if key is not None:
            graph.inferred[key] = found
    for value, kind in zip(node.outputs, found, strict=True):
        if value and kind is not None:
            graph.dtypes[value] = kind[0]
            if kind[1] is not None:
                graph.shapes[value] = kind[1]


def _memo_key(graph: Graph, node: Node, data: Mapping[str, Array]) -> Any:
    """What ONNX's inference of a node depends on; None if that is nothing to look up by."""
    plain = (int, float, str, tuple)
    if not all(isinstance(value, plain) for value in node.attrs.values()):
        return None
    inputs = tuple(
        (graph.dtype(v), graph.shape(v), data[v].tobytes() if v in data else None) if v else None
        for v in node.inputs
    )
    # A value read twice must not be taken for two values that are alike.
    places = tuple(node.inputs.index(v) for v in node.inputs)
    made = tuple(bool(v) for v in node.outputs)
    return node.op, tuple(sorted(node.attrs.items())), inputs, places, made


LEAST = dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), 21)
"""Opsets that gave operators more types alone: ONNX Runtime's quantizer writes, and ONNX Runtime
takes, codes of 4 bits in files that say an earlier one."""


def _dtype_and_shape(kind: onnx.TypeProto | None) -> tuple[str, Shape | None] | None:
    """What a type says, if it is that of a tensor."""
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.elem_type:
        return None
    tensor = kind.tensor_type
    shape = tuple(_dim(d) for d in tensor.shape.dim) if tensor.HasField("shape") else None
    return np_dtype(tensor.elem_type), shape


def _onnx_types(
    graph: Graph, node: Node, read: Sequence[str], data: dict[str, onnx.TensorProto]
) -> Mapping[str, onnx.TypeProto]:
    """The types of a node's outputs by name.

    Raises
    ------
    ImportFailed
        The inputs do not fit the operator.
    """
    from onnx import checker, defs, helper, shape_inference

    opset = max(graph.opset, LEAST.get(node.op, 1))
    schema = defs.get_schema(node.op, opset)
    types = {value: type_proto(graph, value) for value in read}
    opsets = [helper.make_opsetid("", opset)]
    try:
        proto = node_proto(node)
        # Outputs that nothing reads may be missing at the end; the inference counts them.
        proto.output.extend(f"unused:{i}" for i in range(len(proto.output), schema.min_output))
        kinds: Mapping[str, onnx.TypeProto] = shape_inference.infer_node_outputs(
            schema, proto, types, data, opset_imports=opsets
        )
        return kinds
    except (
        *(checker.ValidationError, shape_inference.InferenceError),
        *(RuntimeError, TypeError, ValueError),
    ) as error:
        shapes = ", ".join(graph.describe(value) for value in read)
        raise ImportFailed(
            f"{node.op} {node.name!r} does not fit its inputs {shapes}: {str(error).strip()}"
        ) from error


def _dim(proto: onnx.TensorShapeProto.Dimension) -> Dim | None:
    if proto.HasField("dim_value"):
        return int(proto.dim_value)
    return parse(proto.dim_param) if proto.dim_param else None


def type_proto(graph: Graph, value: str) -> onnx.TypeProto:
    """The type of a value whose element type is known."""
    from onnx import helper

    elem = helper.np_dtype_to_tensor_dtype(np.dtype(str(graph.dtype(value))))
    shape = graph.shape(value)
    dims = None if shape is None else [None if d is None else as_attr(d) for d in shape]
    return helper.make_tensor_type_proto(elem, dims)


def node_proto(node: Node) -> onnx.NodeProto:
    """A node of the default domain as protobuf, without attributes of ours."""
    from onnx import helper, numpy_helper

    attrs = {
        key: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
        for key, value in node.attrs.items()
        # An empty list has no type; it means the default.
        if not key.startswith("apq.") and (not isinstance(value, tuple) or value)
    }
    return helper.make_node(node.op, node.inputs, node.outputs, name=node.name, **attrs)
