"""Small ONNX graphs, one per operator family, for the generic schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
_RNG = np.random.default_rng(0)
ROWS = ("B", "S", 48)
IMAGE = ("B", 4, 9, 20)


@dataclass(frozen=True)
class Graph:
    """Nodes, input types and symbolic shapes, output types, initializers."""

    nodes: Sequence[NodeProto]
    inputs: Mapping[str, tuple[int, Sequence[int | str]]]
    outputs: Mapping[str, int] = field(default_factory=lambda: {"y": FLOAT})
    weights: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 17

    def model(self) -> ModelProto:
        """The ONNX model."""
        graph = helper.make_graph(
            list(self.nodes),
            "g",
            [helper.make_tensor_value_info(n, t, s) for n, (t, s) in self.inputs.items()],
            [helper.make_tensor_value_info(n, t, None) for n, t in self.outputs.items()],
            [numpy_helper.from_array(np.asarray(a), n) for n, a in self.weights.items()],
        )
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)

    def feeds(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Random inputs; integers are 0 or 1."""
        out = {}
        for name, (kind, shape) in self.inputs.items():
            dims = [sizes[d] if isinstance(d, str) else d for d in shape]
            if kind == INT:
                out[name] = _RNG.integers(0, 2, dims)
            else:
                out[name] = (_RNG.standard_normal(dims) * 1.5).astype(np.float32)
        return out


def joined(graphs: Mapping[str, Graph]) -> Graph:
    """One graph of several of the same opset, each name behind its graph's."""
    nodes, inputs, outputs, weights = [], {}, {}, {}
    for name, graph in graphs.items():
        for node in map(_copy, graph.nodes):
            node.input[:] = [value and f"{name}/{value}" for value in node.input]
            node.output[:] = [value and f"{name}/{value}" for value in node.output]
            nodes.append(node)
        inputs |= {f"{name}/{key}": value for key, value in graph.inputs.items()}
        outputs |= {f"{name}/{key}": value for key, value in graph.outputs.items()}
        weights |= {f"{name}/{key}": value for key, value in graph.weights.items()}
    (opset,) = {graph.opset for graph in graphs.values()}
    return Graph(nodes, inputs, outputs, weights, opset)


def _copy(node: NodeProto) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    return copy


def _f(*shape: int) -> Any:
    return _RNG.standard_normal(shape).astype(np.float32)


def _node(op: str, inputs: str, outputs: str = "y", **attrs: Any) -> NodeProto:
    names = ["" if i == "-" else i for i in inputs.split()]
    return helper.make_node(op, names, outputs.split(), **attrs)


def _one(op: str, shape: Sequence[int | str] = ROWS, opset: int = 17, **attrs: Any) -> Graph:
    return Graph([_node(op, "x", **attrs)], {"x": (FLOAT, shape)}, opset=opset)


def _two(op: str, a: Sequence[int | str], b: Sequence[int | str], **attrs: Any) -> Graph:
    return Graph([_node(op, "x z", **attrs)], {"x": (FLOAT, a), "z": (FLOAT, b)})


def _conv(shape: Sequence[int | str], weight: Sequence[int], **attrs: Any) -> Graph:
    node = _node("Conv", "x w", **attrs)
    return Graph([node], {"x": (FLOAT, shape)}, weights={"w": _f(*weight)})


_X = {"x": (FLOAT, ROWS)}
_XZ = {"x": (FLOAT, ROWS), "z": (FLOAT, ROWS)}
_MASK = {"m": (INT, ("B", "S"))}

GRAPHS: dict[str, Graph] = {
    **{
        op.lower(): _one(op)
        for op in (
            "Erf", "Exp", "Tanh", "Sigmoid", "Neg", "Abs", "Relu", "Floor", "Softplus", "Elu",
            "LeakyRelu", "Sin", "Round", "HardSigmoid", "Reciprocal",
        )
    },
    **{f"softmax {axis}": _one("Softmax", axis=axis) for axis in (-1, 1)},
    "log softmax": _one("LogSoftmax", axis=-1),
    **{
        f"{op} {axes}": _one(op, opset=13, axes=axes, keepdims=keep)
        for op, axes, keep in (
            ("ReduceMean", [-1], 1), ("ReduceMean", [1], 0), ("ReduceMean", [0], 1),
            ("ReduceMean", [1, 2], 0), ("ReduceMean", [0, 2], 1), ("ReduceMean", [0, 1, 2], 0),
            ("ReduceMax", [1], 1), ("ReduceMax", [-1], 0), ("ReduceMin", [0, 1, 2], 1),
            ("ReduceL2", [-1], 1), ("ReduceProd", [2], 1), ("ReduceLogSumExp", [-1], 0),
        )
    },
    **{
        f"{op} {axis}": Graph([_node(op, "x", axis=axis)], _X, {"y": INT})
        for op, axis in (("ArgMax", -1), ("ArgMax", 1), ("ArgMin", 0))
    },
    "gelu": Graph(
        [
            _node("Div", "x root", "a"), _node("Erf", "a", "b"), _node("Add", "b one", "c"),
            _node("Mul", "x c", "d"), _node("Mul", "d half"),
        ],
        _X,
        weights={"root": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5)},
    ),
    "bias and residual": Graph(
        [_node("Add", "x b", "a"), _node("Add", "a z")], _XZ, weights={"b": _f(48)}
    ),
    "broadcast middle": _two("Add", ROWS, ("B", 1, 48)),
    "broadcast last": _two("Mul", ("B", "S", 1), ROWS),
    "attention mask": Graph(
        [
            _node("Unsqueeze", "m axes", "a"), _node("Cast", "a", "b", to=FLOAT),
            _node("Sub", "one b", "c"), _node("Mul", "c low"),
        ],
        _MASK,
        weights={"axes": np.array([1, 2]), "one": np.float32(1), "low": np.float32(-1e4)},
    ),
    "mean pooling": Graph(
        [
            _node("Unsqueeze", "m last", "a"), _node("Cast", "a", "b", to=FLOAT),
            _node("Mul", "x b", "c"), _node("ReduceSum", "c rows", "d", keepdims=0),
            _node("ReduceSum", "b rows", "e", keepdims=0), _node("Add", "e one", "f"),
            _node("Div", "d f"),
        ],
        {**_X, **_MASK},
        weights={"last": np.array([2]), "rows": np.array([1]), "one": np.float32(1)},
    ),
    "layer norm": Graph(
        [_node("LayerNormalization", "x s b", axis=-1)], _X, weights={"s": _f(48), "b": _f(48)}
    ),
    "instance norm": Graph(
        [_node("InstanceNormalization", "x s b")],
        {"x": (FLOAT, IMAGE)},
        weights={"s": _f(4), "b": _f(4)},
    ),
    "batch norm": Graph(
        [_node("BatchNormalization", "x s b m v")],
        {"x": (FLOAT, IMAGE)},
        weights={"s": _f(4), "b": _f(4), "m": _f(4), "v": abs(_f(4))},
    ),
    "transpose of what is computed": Graph(
        [
            _node("Sigmoid", "x", "g"),
            _node("Mul", "x g", "s"),
            _node("Transpose", "s", "t", perm=[0, 2, 1]),
            _node("Transpose", "z", "u", perm=[0, 2, 1]),
            _node("Add", "t u", "v"),
            _node("Mul", "v c", "y"),
        ],
        _XZ,
        weights={"c": _f(1, 1)},
    ),
    **{f"transpose {p}": _one("Transpose", perm=p) for p in ([0, 2, 1], [1, 0, 2], [2, 1, 0])},
    "split heads": Graph(
        [_node("Reshape", "x r", "a"), _node("Transpose", "a", perm=[0, 2, 1, 3])],
        _X,
        weights={"r": np.array([0, 0, 4, 12])},
    ),
    "gather rows": Graph(
        [_node("Gather", "w i")], {"i": (INT, ("B", "S"))}, weights={"w": _f(50, 48)}
    ),
    "concat last": _two("Concat", ROWS, ("B", "S", 5), axis=-1),
    "concat middle": _two("Concat", ROWS, ("B", 3, 48), axis=1),
    "slice": Graph(
        [_node("Slice", "x s e a t")],
        _X,
        weights={"s": np.array([3]), "e": np.array([40]), "a": np.array([2]), "t": np.array([2])},
    ),
    "pad": Graph(
        [_node("Pad", "x p")],
        {"x": (FLOAT, IMAGE)},
        weights={"p": np.array([0, 0, 1, 2, 0, 0, 1, 3])},
    ),
    "where": Graph([_node("Greater", "x z", "c"), _node("Where", "c x z")], _XZ),
    "cast": Graph([_node("Cast", "x", "a", to=INT), _node("Cast", "a", to=FLOAT)], _X),
    "is nan": Graph(
        [_node("IsNaN", "x", "a"), _node("Where", "a o x")], _X, weights={"o": np.float32(0)}
    ),
    "clip": Graph(
        [_node("Clip", "x lo hi")], _X, weights={"lo": np.float32(-0.5), "hi": np.float32(0.5)}
    ),
    "integer division": Graph(
        [_node("Sub", "m five", "a"), _node("Mod", "a three")],
        _MASK,
        {"y": INT},
        weights={"five": np.array(5), "three": np.array(3)},
    ),
    "max pool": _one("MaxPool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    "average pool": _one("AveragePool", IMAGE, kernel_shape=[2, 2], strides=[2, 2]),
    "global pool": _one("GlobalAveragePool", IMAGE),
    "conv": _conv(IMAGE, (6, 4, 3, 3), pads=[1, 1, 1, 1]),
    "conv bias relu": Graph(
        [_node("Conv", "x w b", "a", pads=[1, 1, 1, 1]), _node("Relu", "a")],
        {"x": (FLOAT, IMAGE)},
        weights={"w": _f(13, 4, 3, 3), "b": _f(13)},
    ),
    "conv 1x1": _conv(IMAGE, (17, 4, 1, 1)),
    "conv stride 2": _conv(("B", 4, 19, 41), (9, 4, 3, 3), strides=[2, 2]),
    "conv depthwise": _conv(IMAGE, (4, 1, 3, 3), group=4, pads=[1, 1, 1, 1]),
    "conv 1d": _conv(("B", 4, "S"), (6, 4, 3), pads=[1, 1]),
    "conv column": _conv(("B", 4, 40, 1), (10, 4, 5, 1)),
    "conv transposed": Graph(
        [_node("ConvTranspose", "x w", strides=[2, 2])],
        {"x": (FLOAT, (1, 4, 5, 6))},
        weights={"w": _f(4, 3, 3, 3)},
    ),
    "matmul": _two("MatMul", ("B", "S", 48), ("B", 48, "T")),
    "matmul flat": _two("MatMul", ("S", 48), (48, 16)),
    "einsum": _two("Einsum", (2, 5, 8), (2, 6, 8), equation="bij,bkj->bik"),
    "resize nearest": Graph(
        [_node("Resize", "x - s", mode="nearest")],
        {"x": (FLOAT, (1, 4, 9, 10))},
        weights={"s": np.array([1, 1, 2, 2], np.float32)},
    ),
    "resize linear": Graph(
        [_node("Resize", "x - s", mode="linear")],
        {"x": (FLOAT, (1, 4, 9, 10))},
        weights={"s": np.array([1, 1, 2, 2], np.float32)},
    ),
    "scatter nd": Graph(
        [_node("ScatterND", "x i u")],
        {"x": (FLOAT, (8, 6))},
        weights={"i": np.array([[1], [3]]), "u": _f(2, 6)},
    ),
    "scatter elements": Graph(
        [_node("ScatterElements", "x i u", axis=1)],
        {"x": (FLOAT, (3, 6))},
        weights={"i": np.array([[0, 5], [2, 1], [3, 4]]), "u": _f(3, 2)},
    ),
    "split": Graph(
        [_node("Split", "x", "y z", axis=-1)], _X, {"y": FLOAT, "z": FLOAT}, opset=13
    ),
    "tile": Graph(
        [_node("Tile", "x r")], {"x": (FLOAT, (2, 3, 8))}, weights={"r": np.array([1, 2, 2])}
    ),
    "one hot": Graph(
        [_node("OneHot", "i d v")],
        {"i": (INT, ("B", "S"))},
        weights={"d": np.array(10), "v": np.array([0, 1], np.float32)},
    ),
    "depth to space": _one("DepthToSpace", ("B", 4, 3, 5), blocksize=2),
}  # fmt: skip
