"""Small ONNX models built in a line each, and the check every imported model must pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper
from onnx_reference import one_node_model, run_reference

from apq_tvm.onnx_import import import_onnx
from apq_tvm.types import ImportedModel, Node

# A node as (operator, inputs, outputs[, attributes]); inputs and outputs are words of one string.
NodeSpec = tuple[Any, ...]

# float32 results of another order of summation, and of GELU computed in float64.
TOLERANCE = 2e-5


def protos(nodes: Sequence[NodeSpec]) -> list[onnx.NodeProto]:
    """The nodes of `build`, for a graph inside of one too."""
    made = []
    for op, read, gives, *rest in nodes:
        domain, _, name = op.rpartition(".")
        attrs = {
            key: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
            for key, value in (rest[0] if rest else {}).items()
        }
        given = ["" if word == "_" else word for word in read.split()]
        outs = gives.split()
        made.append(
            helper.make_node(name, given, outs, name=f"n_{outs[0]}", domain=domain, **attrs)
        )
    return made


def build(
    nodes: Sequence[NodeSpec],
    inputs: Mapping[str, tuple[str, Sequence[int | str | None]]],
    outputs: str,
    weights: Mapping[str, Any] | None = None,
    opset: int = 17,
    domains: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A model.

    Parameters
    ----------
    nodes : sequence of tuple
        ``("MatMul", "x w", "y")``, with a dict of attributes as fourth entry where there are any;
        an absent optional input is ``_``. The node is named after its first output.
    inputs : mapping
        ``{"x": ("float32", ["batch", 8])}``.
    outputs : str
        Names, separated by spaces.
    weights : mapping of str to array
    opset : int
    domains : mapping of str to int
        Other operator sets and their versions.
    """
    graph = helper.make_graph(
        protos(nodes),
        "test",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape)
            )
            for name, (dtype, shape) in inputs.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in outputs.split()],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    opsets += [helper.make_opsetid(domain, version) for domain, version in (domains or {}).items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


Graph = tuple[Sequence[NodeSpec], Mapping[str, Any], str, Mapping[str, Any]]
"""Nodes, inputs, outputs and weights, as `build` takes them."""


def joined(
    graphs: Mapping[str, Graph],
) -> tuple[list[NodeSpec], dict[str, Any], list[str], dict[str, Any]]:
    """Nodes, inputs, outputs and weights of all graphs, each name behind its graph's.

    One model of all: a module's own C is compiled once instead of once a graph.
    """
    nodes, inputs, outputs, weights = [], {}, [], {}
    for name, (mine, takes, gives, constants) in graphs.items():

        def own(names: str, graph: str = name) -> str:
            words = names.split()
            return " ".join(word if word == "_" else f"{graph}.{word}" for word in words)

        nodes += [(op, own(read), own(made), *more) for op, read, made, *more in mine]
        inputs |= {own(key): value for key, value in takes.items()}
        weights |= {own(key): value for key, value in constants.items()}
        outputs += own(gives).split()
    return nodes, inputs, outputs, weights


def save(model: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    """Write `model` into `folder`."""
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return path


def rand(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def feeds_for(model: ImportedModel, sizes: Mapping[str, int], seed: int = 1) -> dict[str, Any]:
    """Random inputs for one choice of the symbolic dimensions; integers are 0 or 1."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for spec in model.inputs:
        shape = [sizes[d] if isinstance(d, str) else d for d in spec.shape]
        if spec.dtype.startswith("float"):
            feeds[spec.name] = rng.standard_normal(shape).astype(spec.dtype)
        else:
            feeds[spec.name] = rng.integers(0, 2, shape).astype(spec.dtype)
    return feeds


def session_of(model: Path | bytes) -> ort.InferenceSession:
    """ONNX Runtime, unoptimized, on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = str(model) if isinstance(model, Path) else model
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run_node(node: Node, given: list[Any], opset: int) -> list[Any]:
    """One ONNX operator by ONNX Runtime: its inputs get the types of the values at hand."""
    model = one_node_model(node, opset)
    feeds = {name: np.asarray(v) for name, v in zip(node.inputs, given, strict=True) if name}
    for info in model.graph.input:
        array = feeds[info.name]
        elem = helper.np_dtype_to_tensor_dtype(array.dtype)
        info.type.CopyFrom(helper.make_tensor_type_proto(elem, array.shape))
    results = iter(session_of(model.SerializeToString()).run(None, feeds))
    return [next(results) if name else np.empty(0) for name in node.outputs]


def run_onnx(path: Path, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs by ONNX Runtime."""
    session = session_of(path)
    names = [out.name for out in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def check(
    path: Path,
    *sizes: Mapping[str, int],
    feeds: Mapping[str, Any] | None = None,
    tolerance: float = TOLERANCE,
) -> ImportedModel:
    """Import, run by the numpy reference, compare with ONNX Runtime; returns the imported model.

    Parameters
    ----------
    path : Path
    *sizes : mapping of str to int
        Values of the symbolic dimensions; one run each, one run without symbols if there are none.
    feeds : mapping of str to array
        Inputs instead of random ones.
    tolerance : float
        Of the largest absolute difference, relative to the largest absolute value above 1.
    """
    model = import_onnx(path)
    well_formed(model)
    for size in sizes or ({},):
        given = dict(feeds) if feeds is not None else feeds_for(model, size)
        want, got = run_onnx(path, given), run_reference(model, given, run_node)
        assert list(got) == list(want) == [spec.name for spec in model.outputs]
        for spec in model.outputs:
            name = spec.name
            assert got[name].dtype == want[name].dtype == np.dtype(spec.dtype), name
            assert got[name].shape == want[name].shape, name
            assert len(spec.shape) == want[name].ndim, name
            _shapes_agree(spec.shape, want[name].shape, size)
            wide = want[name].astype(np.float64)
            scale = max(1.0, float(np.abs(wide[np.isfinite(wide)]).max(initial=0)))
            np.testing.assert_allclose(
                got[name].astype(np.float64), wide, rtol=0, atol=tolerance * scale, err_msg=name
            )
    return model


def _shapes_agree(
    spec: Sequence[int | str], shape: Sequence[int], sizes: Mapping[str, int]
) -> None:
    for dim, size in zip(spec, shape, strict=True):
        if isinstance(dim, int):
            assert dim == size
        elif dim in sizes:
            assert sizes[dim] == size


def well_formed(model: ImportedModel) -> None:
    """What every later stage relies on."""
    known = {spec.name for spec in model.inputs} | set(model.weights) | {""}
    names = [node.name for node in model.nodes]
    assert len(set(names)) == len(names), "node names are unique"
    assert all(names)
    read = set()
    for node in model.nodes:
        assert known.issuperset(node.inputs), f"{node.name} reads what is not there yet"
        assert not known.intersection(o for o in node.outputs if o)
        known.update(node.outputs)
        read.update(node.inputs)
        if node.op == "apq.Linear":
            weight, bias = model.weights[node.inputs[1]], node.inputs[2]
            assert weight.ndim == 2
            assert weight.dtype == np.float32
            assert len(node.inputs) == 4
            assert not bias or model.weights[bias].shape == (weight.shape[0],)
            if node.inputs[3]:
                residual = node.inputs[3]
                specs = {spec.name: spec for spec in model.inputs} | dict(model.value_specs)
                assert specs[residual].shape == specs[node.outputs[0]].shape
    assert known.issuperset(spec.name for spec in model.outputs)
    assert not any(spec.name in model.weights for spec in model.outputs)
    assert read.issuperset(model.weights), "every weight is read"


def ops(model: ImportedModel) -> Counter[str]:
    """How often each operator occurs."""
    return Counter(node.op for node in model.nodes)


def only(model: ImportedModel, op: str) -> Node:
    """The one node of an operator."""
    (node,) = [node for node in model.nodes if node.op == op]
    return node
