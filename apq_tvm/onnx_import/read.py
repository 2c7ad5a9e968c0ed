"""An ONNX file becomes a `Graph`: everything the file can be wrong about is found here."""

from __future__ import annotations

import hashlib
import keyword
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.onnx_import.checks.functions import check_count, check_functions
from apq_tvm.onnx_import.checks.nodes import check_node
from apq_tvm.onnx_import.checks.sizes import LARGEST_DIM, MOST_AXES
from apq_tvm.onnx_import.control.bodies import BODIES, Body, captured_by, with_captures
from apq_tvm.onnx_import.external import read_tensor
from apq_tvm.onnx_import.graph import Graph, np_dtype, sort_nodes
from apq_tvm.onnx_import.old_opsets import OLDEST_OPSET, Aside, convert
from apq_tvm.onnx_import.other_formats import HEAD, other_format
from apq_tvm.onnx_import.symbolic.dims import is_run
from apq_tvm.types import Array, Node, TensorSpec

if TYPE_CHECKING:
    import onnx


def read_graph(path: Path) -> tuple[Graph, str]:
    """Read and check a file.

    Parameters
    ----------
    path : Path
        An ONNX model.

    Returns
    -------
    Graph
        Sorted, without Constant nodes, every name unique.
    str
        SHA-256 of the file.

    Raises
    ------
    ImportFailed
        The file is missing, not ONNX, truncated, unsafe or contradicts itself.
    UnsupportedModel
        Control flow, an old opset that cannot be converted, sparse or string weights.
    """
    model, digest = _parse(path)
    check_count(model)
    model = _inline(model)
    _check_control_flow(model.graph)
    model, opset, aside = _at_known_opset(model)
    graph = model.graph
    _without_maps(graph)
    _refuse_duplicates("input", (i.name for i in graph.input))
    _refuse_duplicates("weight", _without_twins(graph))
    if graph.sparse_initializer:
        names = ", ".join(repr(w.values.name) for w in graph.sparse_initializer)
        raise UnsupportedModel(f"sparse weights cannot be compiled: {names}; store them densely")
    folder = path.resolve().parent
    weights = {w.name: read_tensor(w, folder, w.name) for w in graph.initializer}
    nodes = _nodes(graph, folder, weights, opset, aside)
    dims = _DimNames()
    # A weight with the name of an input is its default value (ONNX IR, "Graphs"): it wins.
    inputs = [_spec(i, "input", dims) for i in graph.input if i.name not in weights]
    _refuse_duplicates(
        "value", [*(i.name for i in inputs), *(o for n in nodes for o in n.outputs if o), *weights]
    )
    nodes = sort_nodes(nodes, [*(i.name for i in inputs), *weights])
    # What a model gives twice, as torch's exporter writes it, a module gives once.
    outputs = [_spec(o, "output", dims) for o in {o.name: o for o in graph.output}.values()]
    made = {o for n in nodes for o in n.outputs} | {i.name for i in inputs} | set(weights)
    for spec in outputs:
        if spec.name not in made:
            raise ImportFailed(f"nothing makes the graph output {spec.name!r}")
    read = Graph(path.stem, opset, inputs, outputs, nodes, weights, dim_names=dims.names)
    return read, digest


def _parse(path: Path) -> tuple[onnx.ModelProto, str]:
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ImportFailed(f"{str(path)!r} is no regular file")  # a device may never end
        with path.open("rb") as file:
            head = file.read(HEAD)
            if other := other_format(head):  # before what may be large is read
                raise ImportFailed(f"{str(path)!r} is not an ONNX file but {other}")
            data = head + file.read()
    except OSError as error:
        raise ImportFailed(f"cannot read {str(path)!r}: {error.strerror}") from error
    try:
        model = onnx.ModelProto.FromString(data)
    except DecodeError as error:
        raise ImportFailed(
            f"{str(path)!r} is not an ONNX file, or it is truncated ({len(data)} bytes): {error}"
        ) from error
    if not model.ir_version or not model.opset_import or not model.graph.output:
        raise ImportFailed(
            f"{str(path)!r} is not an ONNX file, or it is truncated ({len(data)} bytes): it has no "
            "IR version, opset or graph output"
        )
    return model, hashlib.sha256(data).hexdigest()


def _inline(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace calls of the model's own functions by their bodies."""
    if not model.functions:
        return model
    from onnx import inliner

    check_functions(model)
    try:
        return inliner.inline_local_functions(model)
    except Exception as error:  # the inliner's C++ code raises many, which have no base
        raise ImportFailed(f"the functions of this file cannot be inlined: {error}") from error


def _without_maps(graph: onnx.GraphProto) -> None:
    """Outputs that ``ZipMap`` makes, a map of classes for each row, are the tensor it reads: a
    column for each class, in the order of its labels."""
    makers = {output: node for node in graph.node for output in node.output}
    for output in graph.output:
        maker = makers.get(output.name)
        if maker is not None and maker.op_type == "ZipMap" and maker.domain == "ai.onnx.ml":
            maker.op_type, maker.domain = "Identity", ""
            del maker.attribute[:]
            output.ClearField("type")


def _check_control_flow(graph: onnx.GraphProto) -> None:
    from onnx import AttributeProto

    found = []
    for node in graph.node:
        inner = [a for a in node.attribute if a.type == AttributeProto.GRAPH]
        lists = any(a.type == AttributeProto.GRAPHS for a in node.attribute)
        if lists or (inner and node.op_type not in BODIES) or node.op_type == "SequenceMap":
            found.append(f"{node.op_type} {node.name or ''.join(node.output[:1])!r}")
        for attribute in inner:
            _check_control_flow(attribute.g)
    if found:
        raise UnsupportedModel(
            f"control flow cannot be compiled: {', '.join(found)}; export the model without it "
            "(torch.export, or a fixed branch)"
        )


def _at_known_opset(model: onnx.ModelProto) -> tuple[onnx.ModelProto, int, Aside]:
    """The model at opset 11 or later, converted if need be, and what it was too large for."""
    from onnx import defs

    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    newest = defs.onnx_opset_version()
    if opset is None:
        opset = newest  # nothing of the default domain is used
    if opset < 1:
        raise ImportFailed(f"the model has opset {opset}; the first is 1")
    if opset > newest:
        raise UnsupportedModel(
            f"the model has opset {opset}; the installed onnx package knows up to {newest}: "
            "upgrade it"
        )
    if opset >= OLDEST_OPSET:
        return model, opset, {}
    converted, aside = convert(model, opset)
    return converted, OLDEST_OPSET, aside


def _without_twins(graph: onnx.GraphProto) -> Iterator[str]:
    """Names of weights; of one that is there again, to the bit, as ONNX Runtime's tools leave some,
    once."""
    kept: dict[str, onnx.TensorProto] = {}
    for weight in graph.initializer:
        first = kept.setdefault(weight.name, weight)
        if first is weight or first != weight:
            yield weight.name


def _refuse_duplicates(what: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ImportFailed(f"{what} names must be unique: {', '.join(map(repr, twice))}")


def _nodes(
    graph: onnx.GraphProto,
    folder: Path,
    weights: dict[str, Array],
    opset: int,
    aside: Aside | None = None,
) -> list[Node]:
    """Nodes with unique names; Constants become weights."""
    taken = {node.name for node in graph.node}
    seen: set[str] = set()
    counts: defaultdict[str, int] = defaultdict(lambda: 1)
    nodes = []
    for i, proto in enumerate(graph.node):
        domain = "" if proto.domain in ("", "ai.onnx") else f"{proto.domain}."
        name = proto.name
        if not name or name in seen:
            base = name or f"{proto.op_type}_{i}"
            name = base
            while name in taken:
                counts[base] += 1
                name = f"{base}_{counts[base]}"
            taken.add(name)
        seen.add(name)
        check_node(proto, domain + proto.op_type, name, opset)
        of = _table if proto.op_type.startswith("TreeEnsemble") and domain else _attribute
        kept = (aside or {}).get(tuple(proto.output), ())
        attrs = {a.name: of(a, folder, name, opset) for a in (*proto.attribute, *kept)}
        if domain + proto.op_type == "Constant":
            if proto.output[0] in weights:
                raise ImportFailed(f"value names must be unique: {proto.output[0]!r}")
            weights[proto.output[0]] = _constant(attrs, name)
        else:
            inputs, outputs = _strip(proto.input), _strip(proto.output)
            node = Node(domain + proto.op_type, name, inputs, outputs, attrs)
            if node.op in BODIES:
                before, names = BODIES[node.op]
                if not all(isinstance(attrs.get(name), Body) for name in names.split()):
                    raise ImportFailed(f"{node.op} {name!r}: {names} must be there, and graphs")
                node = with_captures(node, before)
            nodes.append(node)
    return nodes


def _body(graph: onnx.GraphProto, folder: Path, node: str, opset: int) -> Body:
    """A graph inside of a node."""
    if graph.sparse_initializer:
        raise UnsupportedModel(f"node {node!r}: sparse weights cannot be compiled")
    weights = {w.name: read_tensor(w, folder, w.name) for w in graph.initializer}
    nodes = _nodes(graph, folder, weights, opset)
    inputs = tuple(i.name for i in graph.input)
    outputs = tuple(o.name for o in graph.output)
    made = [*inputs, *(o for n in nodes for o in n.outputs if o)]
    _refuse_duplicates("value", [*made, *(name for name in weights if name not in inputs)])
    captured = captured_by(inputs, outputs, nodes, weights)
    nodes = sort_nodes(nodes, [*inputs, *weights, *captured])
    listed = bool(graph.input) and len(graph.input[0].type.tensor_type.shape.dim) == 1
    return Body(inputs, outputs, tuple(nodes), weights, captured, listed)


def _strip(values: Iterable[str]) -> tuple[str, ...]:
    """Without absent optionals at the end, which mean the same."""
    kept = list(values)
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept)


def _attribute(proto: onnx.AttributeProto, folder: Path, node: str, opset: int) -> Any:
    from onnx import AttributeProto, helper

    if proto.ref_attr_name:
        raise ImportFailed(f"node {node!r}: attribute {proto.name!r} refers to no function's")
    value = helper.get_attribute_value(proto)
    if proto.type == AttributeProto.GRAPH:
        return _body(value, folder, node, opset)
    if proto.type == AttributeProto.TENSOR:
        return read_tensor(value, folder, f"{node}.{proto.name}")
    if isinstance(value, (int, float)):
        return value
    try:
        if isinstance(value, bytes):
            return value.decode()
        if proto.type in (AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS):
            return tuple(v.decode() if isinstance(v, bytes) else v for v in value)
    except UnicodeDecodeError as error:
        raise ImportFailed(f"node {node!r}: attribute {proto.name!r}: {error}") from error
    kind = AttributeProto.AttributeType.Name(proto.type)
    raise UnsupportedModel(f"node {node!r}: attribute {proto.name!r} of kind {kind}")


def _table(proto: onnx.AttributeProto, folder: Path, node: str, opset: int) -> Any:
    """An attribute of an operator that keeps millions of numbers in its lists: arrays."""
    from onnx import AttributeProto

    for kind, field, dtype in (
        (AttributeProto.INTS, proto.ints, np.int64),
        (AttributeProto.FLOATS, proto.floats, np.float32),
    ):
        if proto.type == kind and not proto.name.startswith("classlabels"):
            return np.fromiter(field, dtype, len(field))
    if proto.type == AttributeProto.STRINGS:  # a few words, millions of times
        words = {word: word.decode(errors="replace") for word in set(proto.strings)}
        return tuple(words[word] for word in proto.strings)
    return _attribute(proto, folder, node, opset)


def _constant(attrs: dict[str, Any], name: str) -> Array:
    """The value of a Constant node."""
    for key, dtype in (("value_float", np.float32), ("value_int", np.int64)):
        for suffix in ("", "s"):
            if key + suffix in attrs:
                return np.asarray(attrs[key + suffix], dtype)
    if "value" in attrs:
        return np.asarray(attrs["value"])
    raise UnsupportedModel(f"Constant {name!r} holds {sorted(attrs) or 'nothing'}, not numbers")


class _DimNames:
    """Names of symbolic dimensions as identifiers, so that expressions over them can be written."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        if name not in self.names:
            base = re.sub(r"\W", "_", name, flags=re.ASCII)
            base = f"dim_{base}" if not base or base[0].isdigit() else base
            # Words that `dims.evaluate` or Python's grammar would read as something else.
            if base in ("min", "max") or keyword.iskeyword(base) or is_run(base):
                base += "_"
            count, unique = 1, base
            while unique in self.names.values():
                count += 1
                unique = f"{base}_{count}"
            self.names[name] = unique
        return self.names[name]


def _spec(info: onnx.ValueInfoProto, what: str, names: _DimNames) -> TensorSpec:
    """Type of a graph input or output.

    Raises
    ------
    UnsupportedModel
        It is no tensor of numbers, or an input without rank.
    """
    from onnx import TensorProto

    kind = info.type.WhichOneof("value")
    tensor = info.type.tensor_type
    if kind not in ("tensor_type", None) or tensor.elem_type == TensorProto.STRING:
        held = "strings" if kind == "tensor_type" else str(kind).removesuffix("_type")
        remedy = (
            "encode them before the model, and cut it behind what does"
            if what == "input"
            else "remove it from the model (labels that are strings: train on numbers)"
        )
        raise UnsupportedModel(
            f"{what} {info.name!r} holds {held}; only tensors of numbers work: {remedy}"
        )
    if what == "input" and (kind is None or not tensor.HasField("shape")):
        raise UnsupportedModel(
            f"input {info.name!r} has no shape; give it one with onnx.tools.update_model_dims"
        )
    shape: list[int | str] = []
    for axis, dim in enumerate(tensor.shape.dim):
        if dim.WhichOneof("value") == "dim_value" and dim.dim_value > LARGEST_DIM:
            raise UnsupportedModel(
                f"{what} {info.name!r} has {dim.dim_value} elements along axis {axis}; the most is "
                f"{LARGEST_DIM}"
            )
        if dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0:
            shape.append(int(dim.dim_value))
        else:
            # "?" and "*" are how some exporters write an unknown dimension: each is its own.
            named = any(c.isalnum() for c in dim.dim_param)
            shape.append(names(dim.dim_param if named else f"{info.name}_dim_{axis}"))
    known = tensor.elem_type in TensorProto.DataType.values()
    if not known or (what == "input" and not tensor.elem_type):
        raise ImportFailed(f"{what} {info.name!r} has the element type {tensor.elem_type}")
    if len(shape) > MOST_AXES:
        raise UnsupportedModel(f"{what} {info.name!r} has {len(shape)} axes, at most {MOST_AXES}")
    dtype = np_dtype(tensor.elem_type) if tensor.elem_type else ""
    return TensorSpec(info.name, dtype, tuple(shape))
