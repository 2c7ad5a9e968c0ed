"""Standard operators that nothing here compiles, but ONNX defines in others: Celu, LinearAttention.

ONNX's own inliner works before types are known to anyone but itself: it fails on weights without a
declared type and on absent inputs. Here the types are at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from apq_tvm.errors import ImportFailed
from apq_tvm.onnx_import.control.bodies import BODIES, Body, captured_by, with_captures
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.ops import SUPPORTED
from apq_tvm.onnx_import.passes.widen import widen_attr
from apq_tvm.onnx_import.symbolic.onnx_inference import node_proto, type_proto
from apq_tvm.types import Array, Node

if TYPE_CHECKING:
    import onnx


def is_function(node: Node, opset: int) -> bool:
    """Whether `node` is to be replaced by what ONNX defines it as."""
    if "." in node.op or node.op in SUPPORTED:
        return False
    schema = _schema(node.op, opset)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def _schema(op: str, opset: int) -> Any:
    from onnx import defs

    return defs.get_schema(op, opset) if defs.has(op, max_inclusive_version=opset) else None


def inline_function(graph: Graph, node: Node) -> list[Node] | None:
    """The nodes ONNX defines `node` as.

    Returns
    -------
    list of Node or None
        None where ONNX has no definition for these types or this opset: the node stays, and is
        refused by name.

    Raises
    ------
    ImportFailed
        The node does not fit its own definition.
    """
    body = _definition(graph, node)
    if body is None:
        return None
    schema = _schema(node.op, graph.opset)
    attrs = {
        name: _value(attribute.default_value)
        for name, attribute in schema.attributes.items()
        if attribute.default_value.type
    } | dict(node.attrs)
    names = dict(zip(body.input, node.inputs, strict=False)) | {"": ""}
    names |= {name: "" for name in body.input[len(node.inputs) :]}
    outer = {out: name for out, name in zip(body.output, node.outputs, strict=False) if name}

    def named(value: str) -> str:
        if value not in names:
            names[value] = outer.get(value) or graph.fresh(f"{node.name}.{value}")
        return str(names[value])

    weights: dict[str, Array] = {}
    made = []
    for inner_node in _nodes(graph.opset, body.node, attrs, node, weights):
        inputs, outputs = (tuple(map(named, of)) for of in (inner_node.inputs, inner_node.outputs))
        name = graph.fresh(inner_node.name)
        made.append(replace(inner_node, name=name, inputs=inputs, outputs=outputs))
    graph.weights.update({named(value): array for value, array in weights.items()})
    for inner, output in outer.items():
        if names.get(inner) != output:  # an output that is an input
            copied = Node("Identity", graph.fresh(f"{node.name}.copy"), (named(inner),), (output,))
            made.append(copied)
        elif output in graph.weights:
            inside = graph.add_weight(f"{output}.value", graph.weights.pop(output))
            made = [_renamed(n, output, inside) for n in made]
            copied = Node("Identity", graph.fresh(f"{node.name}.copy"), (inside,), (output,))
            made.append(copied)
    return made


def _renamed(node: Node, old: str, new: str) -> Node:
    inputs = tuple(new if v == old else v for v in node.inputs)
    return Node(node.op, node.name, inputs, node.outputs, node.attrs)


def _nodes(
    opset: int,
    protos: Iterable[onnx.NodeProto],
    attrs: dict[str, Any],
    node: Node,
    weights: dict[str, Array],
) -> list[Node]:
    """Nodes of a definition, or of a graph inside of it, as it calls them; Constants go into
    `weights`."""
    made = []
    for proto in protos:
        own = _attrs(opset, proto, attrs, node)
        if proto.op_type == "Constant":
            weights[proto.output[0]] = _constant(own, node)
            continue
        domain = "" if proto.domain in ("", "ai.onnx") else f"{proto.domain}."
        inputs = list(proto.input)
        while inputs and not inputs[-1]:
            inputs.pop()
        name = f"{node.name}.{proto.op_type.lower()}"
        inner = Node(domain + proto.op_type, name, tuple(inputs), tuple(proto.output), own)
        if inner.op in BODIES:
            inner = with_captures(inner, BODIES[inner.op][0])
        made.append(_at_opset(opset, inner, weights))
    return made


def _graph(opset: int, proto: onnx.GraphProto, attrs: dict[str, Any], node: Node) -> Body:
    """A graph inside of a node of a definition."""
    from onnx import numpy_helper

    weights = {w.name: numpy_helper.to_array(w) for w in proto.initializer}
    nodes = _nodes(opset, proto.node, attrs, node, weights)
    inputs, outputs = (tuple(v.name for v in of) for of in (proto.input, proto.output))
    captured = captured_by(inputs, outputs, nodes, weights)
    return Body(inputs, outputs, tuple(nodes), weights, captured)


def _definition(graph: Graph, node: Node) -> onnx.FunctionProto | None:
    from onnx import FunctionProto, TypeProto

    schema = _schema(node.op, graph.opset)
    if any(v and graph.dtype(v) is None for v in node.inputs):
        return None
    versions = [v for v in schema.function_opset_versions if v <= graph.opset]
    if versions:
        data = schema.get_function_with_opset_version(max(versions))
        return FunctionProto.FromString(data)
    versions = [v for v in schema.context_dependent_function_opset_versions if v <= graph.opset]
    if not versions:
        return None
    types = [type_proto(graph, v) if v else TypeProto() for v in node.inputs]
    data = schema.get_context_dependent_function_with_opset_version(
        max(versions),
        node_proto(node).SerializeToString(),
        [kind.SerializeToString() for kind in types],
    )
    return FunctionProto.FromString(data) if data else None


def _attrs(opset: int, proto: onnx.NodeProto, given: dict[str, Any], node: Node) -> dict[str, Any]:
    """Attributes of a node of the definition; those that refer to the operator's own get theirs."""
    from onnx import AttributeProto

    found = {}
    for attribute in proto.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name in given:
                found[attribute.name] = given[attribute.ref_attr_name]
        elif attribute.type == AttributeProto.GRAPH:
            found[attribute.name] = _graph(opset, attribute.g, given, node)
        else:
            found[attribute.name] = _value(attribute)
    return {key: widen_attr(key, value) for key, value in found.items()}


def _value(attribute: onnx.AttributeProto) -> Any:
    from onnx import AttributeProto, helper, numpy_helper

    value = helper.get_attribute_value(attribute)
    if attribute.type == AttributeProto.TENSOR:
        return numpy_helper.to_array(value)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, int | float | str):
        return value
    return tuple(v.decode() if isinstance(v, bytes) else v for v in value)


def _constant(attrs: dict[str, Any], node: Node) -> Any:
    for key, dtype in (("value_float", np.float32), ("value_int", np.int64)):
        for suffix in ("", "s"):
            if key + suffix in attrs:
                return np.asarray(attrs[key + suffix], dtype)
    if "value" not in attrs:
        raise ImportFailed(f"{node.op} {node.name!r} lacks an attribute that it must have")
    return np.asarray(attrs["value"])


def _at_opset(opset: int, node: Node, weights: dict[str, Array]) -> Node:
    """A node of a definition that was written for an older opset: axes became inputs."""
    since = 13 if node.op in ("ReduceSum", "Squeeze", "Unsqueeze") else 18
    moved = node.op.startswith("Reduce") or node.op in ("Squeeze", "Unsqueeze")
    if not moved or opset < since or "axes" not in node.attrs:
        return node
    axes = f"{node.outputs[0]}.axes"
    weights[axes] = np.asarray(node.attrs["axes"], np.int64)
    attrs = {key: value for key, value in node.attrs.items() if key != "axes"}
    return Node(node.op, node.name, (node.inputs[0], axes), node.outputs, attrs)
