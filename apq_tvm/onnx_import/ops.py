"""Which operators can be compiled, and what the others are written as."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container
from dataclasses import replace

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import.control.bodies import Body, each_body
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.types import Node

# What is left after folding must be one of these, or an ``apq.`` operator.
SUPPORTED = frozenset(
    "Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool "
    "BatchNormalization BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast "
    "CastLike Ceil Clip Col2Im Concat ConstantOfShape Conv ConvTranspose Cos Cosh CumProd "
    "CumSum DepthToSpace DequantizeLinear Div DynamicQuantizeLinear Einsum Elu Equal Erf Exp "
    "Expand EyeLike Flatten Floor Gather GatherElements GatherND Gelu Gemm GlobalAveragePool "
    "GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization "
    "HardSigmoid HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN LRN "
    "LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax LpPool MatMul MatMulInteger "
    "Max MaxPool MaxRoiPool MaxUnpool Mean MeanVarianceNormalization Min Mish Mod Mul Neg Not "
    "OneHot Or PRelu Pad Pow QuantizeLinear RMSNormalization Range Reciprocal ReduceL1 "
    "ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign Round Scatter "
    "ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax "
    "Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh TensorScatter "
    "ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Where Xor".split()
)

# Those TVM's importer knows and this compiler still refuses, with the reason.
_SIZE = "the size of its output depends on data"
_OPTIONAL = "optionals are no tensors"
_CONTRIB = "it is no standard operator; onnxruntime's are read from its own domain, com.microsoft"
REFUSED = {
    "AllClassNMS": _SIZE,
    **dict.fromkeys(("Optional", "OptionalGetElement", "OptionalHasElement"), _OPTIONAL),
    **dict.fromkeys(("BiasGelu", "FastGelu", "SkipLayerNormalization"), _CONTRIB),
    **dict.fromkeys(("EmbedLayerNormalization", "MatMulInteger16"), _CONTRIB),
    **dict.fromkeys(
        ("ai.onnx.ml.CastMap", "ai.onnx.ml.CategoryMapper", "ai.onnx.ml.DictVectorizer"),
        "maps and strings are no tensors of numbers; encode them before the model",
    ),
    "ai.onnx.ml.ZipMap": "only outputs may be maps; export with options={'zipmap': False}",
    "Constant": "it is a weight",
    "Dropout": "it is dropped, as it does nothing at inference, but here its mask is used",
    "Upsample": "it is older than opset 11",
}


BLOCKED = "com.microsoft.nchwc."
"""What ONNX Runtime makes of convolutions at its last level, which is its default."""


def check_supported(graph: Graph, known: Container[str] = SUPPORTED, domain: str = "") -> None:
    """Refuse operators nothing can compile.

    Parameters
    ----------
    graph : Graph
    known : container of str
        Operators that can be compiled, beside those of our own.
    domain : str
        What names of operators that are looked at begin with.

    Raises
    ------
    UnsupportedModel
        Listing every such operator with the names of its nodes, or saying how to save the file.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for node in graph.nodes:
        ours = node.op.startswith("apq.") or not node.op.startswith(domain)
        if not ours and node.op not in known:
            found[node.op].append(repr(node.name))
    if any(op.startswith(BLOCKED) for op in found):
        raise UnsupportedModel(
            "ONNX Runtime saved this file for one processor (operators of com.microsoft.nchwc, in "
            "blocks of channels that only it knows): compile the model it was made of, or save it "
            "with graph_optimization_level = ORT_ENABLE_EXTENDED"
        )
    if found:
        listed = "; ".join(
            f"{op}{f' ({REFUSED[op]})' if op in REFUSED else ''}: {', '.join(names)}"
            for op, names in sorted(found.items())
        )
        raise UnsupportedModel(
            f"operators that cannot be compiled: {listed}; replace them in the model"
        )


def decompose(graph: Graph) -> None:
    """Write what ONNX Runtime's optimizer makes of its own domain in standard operators."""
    nodes = []
    for node in graph.nodes:
        rule = CONTRIB.get(node.op)
        node = each_body(node, lambda body: _decomposed(graph, body))
        nodes += rule(graph, node) if rule else [node]
    graph.nodes = nodes
    graph.index()


def _decomposed(graph: Graph, body: Body) -> Body:
    """A body whose operators are written likewise; weights that this takes become its own."""
    inner = replace(graph, nodes=list(body.nodes), weights=dict(body.weights))
    decompose(inner)
    return replace(body, nodes=tuple(inner.nodes), weights=inner.weights)


def _gelu(graph: Graph, node: Node) -> list[Node]:
    """Gelu, FastGelu and BiasGelu, with a bias or not (onnxruntime docs/ContribOperators.md)."""
    x, nodes = node.inputs[0], []
    if len(node.inputs) > 1:
        x = graph.fresh(f"{node.name}.biased")
        nodes.append(Node("Add", graph.fresh(f"{node.name}.add"), node.inputs, (x,)))
    kind = "tanh" if node.op.endswith("FastGelu") else "none"
    return [*nodes, Node("apq.Gelu", node.name, (x,), node.outputs, {"approximate": kind})]


def _skip_layer_norm(graph: Graph, node: Node) -> list[Node]:
    """LayerNormalization of ``input + skip + bias``; the fourth output is that sum."""
    x, skip, gamma, beta, bias = (*node.inputs, "", "", "")[:5]
    outputs = (*node.outputs, "", "", "")[:4]
    nodes = []
    if bias:
        biased = graph.fresh(f"{node.name}.biased")
        nodes.append(Node("Add", graph.fresh(f"{node.name}.bias"), (x, bias), (biased,)))
        x = biased
    total = outputs[3] or graph.fresh(f"{node.name}.sum")
    nodes.append(Node("Add", graph.fresh(f"{node.name}.add"), (x, skip), (total,)))
    attrs = {"axis": -1, "epsilon": node.attrs.get("epsilon", 1e-12)}
    inputs = (total, gamma, beta) if beta else (total, gamma)
    kept = outputs[:3] if any(outputs[1:3]) else outputs[:1]
    return [*nodes, Node("LayerNormalization", node.name, inputs, kept, attrs)]


CONTRIB: dict[str, Callable[[Graph, Node], list[Node]]] = {
    "com.microsoft.Gelu": _gelu,
    "com.microsoft.FastGelu": _gelu,
    "com.microsoft.BiasGelu": _gelu,
    "com.microsoft.SkipLayerNormalization": _skip_layer_norm,
}
