"""What ONNX Runtime's optimizer saves of a product and what stood around it.

``FusedMatMul`` has transposes and a factor, ``FusedConv`` and ``FusedGemm`` an activation, the
former a residual too (onnxruntime docs/ContribOperators.md). Written apart again, they become
layers as in the file that was optimized.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Node

PLAIN = ("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh")
"""Activations without numbers."""

NUMBERS = {
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Selu": ("alpha", "gamma"),
    "ThresholdedRelu": ("alpha",),
}
"""Attributes of the others, in the order of ``activation_params``."""


def fused_matmul(graph: Graph, node: Node) -> list[Node]:
    """``FusedMatMul``: ``alpha * A B``, either of both transposed.

    ``transBatch`` says that the rows are the first axis and the batch lies behind them.
    """
    steps, sides = Steps(graph, node), list[str]()
    for value, side in zip(node.inputs, "AB", strict=True):
        rank = len(steps.shape(value))
        perm = list(range(rank))
        if node.attrs.get(f"transBatch{side}", 0) and rank > 2:
            perm = [*perm[1:-1], 0, perm[-1]]
        if node.attrs.get(f"trans{side}", 0) and rank > 1:
            perm[-2:] = perm[:-3:-1]
        sides.append(value if perm == sorted(perm) else steps.transpose(value, *perm))
    y = graph.fresh(f"{node.name}.product")
    steps.add(Node("MatMul", node.name, tuple(sides), (y,)))
    alpha = float(node.attrs.get("alpha", 1.0))
    if alpha != 1.0:
        y = steps("Mul", y, steps.number(alpha, str(graph.dtype(y))))
    return steps.done(y)


def fused_conv(graph: Graph, node: Node) -> list[Node]:
    """``FusedConv``: a convolution, what is added to it, an activation.

    Raises
    ------
    UnsupportedModel
        The activation is none of those that ONNX Runtime's own kernels have.
    """
    steps = Steps(graph, node)
    x, weight, bias, residual = (*node.inputs, "", "")[:4]
    extra = ("activation", "activation_params")
    attrs = {key: value for key, value in node.attrs.items() if key not in extra}
    y = graph.fresh(f"{node.name}.convolution")
    inputs = (x, weight, bias) if bias else (x, weight)
    steps.add(Node("Conv", node.name, inputs, (y,), attrs))
    if residual:
        y = steps("Add", y, residual)
    given = [float(value) for value in node.attrs.get("activation_params", ())]
    return steps.done(_activated(steps, y, str(node.attrs.get("activation", "")), given))


def fused_gemm(graph: Graph, node: Node) -> list[Node]:
    """``FusedGemm``: Gemm and an activation.

    Raises
    ------
    UnsupportedModel
        As of `fused_conv`.
    """
    steps = Steps(graph, node)
    attrs = {key: v for key, v in node.attrs.items() if not key.startswith("activation")}
    y = graph.fresh(f"{node.name}.product")
    steps.add(Node("Gemm", node.name, node.inputs, (y,), attrs))
    kind = str(node.attrs.get("activation", ""))
    names = [f"activation_{name}" for name in NUMBERS.get(kind, ())]
    given = [float(node.attrs[name]) for name in names if name in node.attrs]
    return steps.done(_activated(steps, y, kind, given))


def _activated(steps: Steps, y: str, kind: str, given: list[float]) -> str:
    """`y` behind an activation with these numbers."""
    if not kind:
        return y
    if kind in PLAIN:
        return steps(kind, y)
    if kind == "Clip" and len(given) == 2:
        dtype = str(steps.graph.dtype(y))
        above = steps("Max", y, steps.number(given[0], dtype))
        return steps("Min", above, steps.number(given[1], dtype))
    if kind not in NUMBERS or len(given) > len(NUMBERS[kind]):
        raise steps.refuse(f"its activation {kind!r} with the numbers {given} is not known")
    attrs: dict[str, Any] = dict(zip(NUMBERS[kind], given, strict=False))
    return steps(kind, y, **attrs)
