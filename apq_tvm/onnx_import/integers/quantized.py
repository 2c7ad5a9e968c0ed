"""Integer products become layers whose codes are the file's; rounded activations become float.

What a file says of *activations* is not kept unless the import is told to (`Graph.as_written`):
this compiler rounds them itself at run time, in the scheme the user chooses. Three spellings are
met, and each leaves a note on its layer:

- ``DynamicQuantizeLinear`` + ``MatMulInteger``: uint8 with one range for the whole tensor. Our int8
  has a range per token or group, which is finer; but it is symmetric, so where all activations of a
  token have one sign it spends one bit less on them than uint8 does.
- ``QuantizeLinear`` + ``DequantizeLinear`` before a layer: the rounding is dropped, the clipping to
  the representable range stays, because quantizers remove a Relu that the range already implies.
- ``QLinearMatMul``: its input as above; the rounding of its *output* stays, others read it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.integers.codes import CODE_BITS, check_scales, of_integers
from apq_tvm.onnx_import.integers.convolutions import dynamic_convolution
from apq_tvm.onnx_import.integers.packed import store
from apq_tvm.onnx_import.integers.written import (
    as_integers,
    exact_convolution,
    exact_product,
    round_as_onnxruntime,
)
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.infer import infer
from apq_tvm.types import Node

RANGES = {
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (2, 4, 8, 16)},
    **{f"int{bits}": (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (2, 4, 8, 16)},
}
"""Least and largest value of what QuantizeLinear rounds to."""


def keep_codes(graph: Graph) -> None:
    """Write products of quantized constants as products of the floats that they mean."""
    _drop_stacks(graph)
    for node in graph.each():
        if node.op == "MatMulInteger":
            (exact_product if graph.as_written else _dynamic)(graph, node)
        elif node.op == "ConvInteger":
            if graph.as_written or not dynamic_convolution(graph, node):
                exact_convolution(graph, node)
        elif node.op in ("MatMul", "Gemm", "Conv") and not graph.as_written:
            _static(graph, node)
        elif node.op == "DequantizeLinear":
            _gathered(graph, node)
    if graph.as_written:
        round_as_onnxruntime(graph)
    graph.sweep()


def _drop_stacks(graph: Graph) -> None:
    """Of a convolution's weight only codes [Cout, everything else] are known how to read."""
    for node in graph.nodes:
        if node.op in ("Conv", "ConvTranspose"):
            codes = graph.codes.get(node.inputs[1])
            if codes is not None and len(codes.values) != graph.weights[node.inputs[1]].shape[0]:
                del graph.codes[node.inputs[1]]


def columns(
    graph: Graph, weight: str, scale: str, zero: str, source: str, node: Node
) -> str | None:
    """The float matrix [K, N] of integers with one scale and zero point per column, or for all.

    Returns
    -------
    str or None
        Its name, with codes; None if `weight` is no constant matrix or has other scales.
    """
    array, factor = graph.weights.get(weight), graph.weights.get(scale)
    offset = graph.weights.get(zero) if zero else np.zeros((), np.int32)
    codes = None if array is None else of_integers(array, source)
    if codes is None or factor is None or offset is None:
        return None
    n = codes.values.shape[1]
    if factor.size not in (1, n) or offset.size not in (1, n):
        return None
    check_scales(factor, f"{scale} of {node.op} {node.name!r}")
    size = max(factor.size, offset.size)
    kept = replace(
        codes,
        scale=np.broadcast_to(factor.reshape(1, -1), (1, size)).astype(np.float32),
        zero=np.broadcast_to(offset.reshape(1, -1), (1, size)).astype(np.int32),
        block=(codes.values.shape[0], codes.values.shape[1] if size == 1 else 1),
    )
    return store(graph, weight, f".{scale}.{zero}", kept)


def _dynamic(graph: Graph, node: Node) -> None:
    """``(DynamicQuantizeLinear(x) @ W) * x_scale * w_scale`` is ``x @ (W * w_scale)``.

    Integers from elsewhere (a table of them) are taken as they are, less their zero point, and the
    constant that the product is multiplied by is all scales in one.
    """
    a, weight, a_zero, zero = (*node.inputs, "", "")[:4]
    rounding, cast = graph.made_by(a, "DynamicQuantizeLinear"), _only_reader(graph, node)
    if cast is None or cast.op != "Cast":
        return
    if rounding is not None and rounding.outputs[2] == a_zero:
        found = _scales(graph, cast, rounding.outputs[1])
    else:
        found = _constant_scale(graph, cast) if not a_zero or a_zero in graph.weights else None
    if found is None:
        return
    last, scale = found
    source = f"MatMulInteger of {graph.dtype(weight)}"
    matrix = columns(graph, weight, scale, zero, source, node)
    if matrix is None:
        return
    if rounding is not None and rounding.outputs[2] == a_zero:
        graph.notes[node.name] = (
            "activations are rounded by the scheme, not by the file's DynamicQuantizeLinear"
        )
        graph.replace(last, Node("MatMul", node.name, (rounding.inputs[0], matrix), last.outputs))
        return
    one = graph.add_weight(f"{node.name}.one", np.ones((), np.float32))
    x = graph.fresh(f"{a}.float")
    given = (a, one, a_zero) if a_zero else (a, one)
    numbers = Node("DequantizeLinear", graph.fresh(f"{node.name}.input"), given, (x,))
    infer(graph, numbers)
    graph.replace(last, numbers, Node("MatMul", node.name, (x, matrix), last.outputs))
    _gathered(graph, numbers)


def _only_reader(graph: Graph, node: Node) -> Node | None:
    """The one node that reads the output of `node`."""
    value = node.outputs[0]
    if not graph.only_use(value):
        return None
    return next((n for n in graph.nodes if value in n.inputs), None)


def _scales(graph: Graph, cast: Node, x_scale: str) -> tuple[Node, str] | None:
    """The last Mul of ``cast * x_scale * w_scale`` in any grouping, and the name of w_scale."""
    first = _only_reader(graph, cast)
    if first is None or first.op != "Mul":
        return None
    by = _other(first, cast.outputs[0])
    both = graph.made_by(by, "Mul")
    if both is not None and x_scale in both.inputs:
        return first, _other(both, x_scale)
    second = _only_reader(graph, first)
    if second is None or second.op != "Mul":
        return None
    pair = (by, _other(second, first.outputs[0]))
    return (second, pair[1 - pair.index(x_scale)]) if x_scale in pair else None


def _constant_scale(graph: Graph, cast: Node) -> tuple[Node, str] | None:
    """The Mul of ``cast * constant``, and the name of the constant."""
    last = _only_reader(graph, cast)
    if last is None or last.op != "Mul":
        return None
    by = _other(last, cast.outputs[0])
    return (last, by) if by in graph.weights else None


def _other(node: Node, value: str) -> str:
    """The operand of a product that is not `value`."""
    return node.inputs[1] if node.inputs[0] == value else node.inputs[0]


def _static(graph: Graph, node: Node) -> None:
    """Clip the input of a layer with codes instead of rounding it to the file's grid."""
    sides = [i for i in (0, 1) if node.inputs[i] in graph.codes]
    if len(sides) != 1:
        return
    at = 1 - sides[0]
    undone = graph.made_by(node.inputs[at], "DequantizeLinear")
    done = None if undone is None else graph.made_by(undone.inputs[0], "QuantizeLinear")
    if undone is None or done is None:
        return
    scale, zero = graph.scalar(done.inputs[1]), _zero(graph, done)
    same = graph.scalar(undone.inputs[1]) == scale and _zero(graph, undone) == zero
    span = RANGES.get(str(graph.dtype(done.outputs[0])))
    if scale is None or zero is None or not same or span is None:
        return
    low, high = sorted((limit - zero) * scale for limit in span)  # a scale may be negative
    clipped = graph.fresh(f"{done.inputs[0]}.clipped")
    with np.errstate(over="ignore"):  # beyond float32 nothing is clipped
        ends = (("low", np.float32(low)), ("high", np.float32(high)))
    limits = [graph.add_weight(f"{node.name}.{which}", np.asarray(end)) for which, end in ends]
    clip = Node("Clip", graph.fresh(f"{node.name}.clip"), (done.inputs[0], *limits), (clipped,))
    infer(graph, clip)
    inputs = tuple(clipped if i == at else v for i, v in enumerate(node.inputs))
    graph.notes[node.name] = (
        f"activations are clipped to the file's range {low:g} .. {high:g} and rounded by the "
        "scheme, not by the file's QuantizeLinear"
    )
    graph.replace(node, clip, replace(node, inputs=inputs))


def _zero(graph: Graph, node: Node) -> float | None:
    """The zero point of a QuantizeLinear or DequantizeLinear, if it is one number."""
    return graph.scalar(node.inputs[2]) if len(node.inputs) > 2 else 0.0


def _gathered(graph: Graph, node: Node) -> None:
    """Rows of a table of integers, dequantized by one scale, are rows of a dequantized table."""
    gather = graph.made_by(node.inputs[0], "Gather")
    if gather is None or gather.attrs.get("axis", 0) not in (0, -2):
        return
    zero = node.inputs[2] if len(node.inputs) > 2 else ""
    if graph.scalar(node.inputs[1]) is None or gather.inputs[1] in graph.weights:
        return
    source = f"DequantizeLinear of {graph.dtype(gather.inputs[0])}"
    table = columns(graph, gather.inputs[0], node.inputs[1], zero, source, node)
    if table is not None:
        inputs = (table, gather.inputs[1])
        graph.replace(node, Node("Gather", gather.name, inputs, node.outputs, {"axis": 0}))


# Operators that `fold` writes in others as soon as it meets them


def standard(graph: Graph, node: Node) -> list[Node]:
    """An operator that onnxruntime's own domain only repeats, under its standard name."""
    return [replace(node, op=node.op.removeprefix("com.microsoft."))]


def dynamic_quantize_matmul(graph: Graph, node: Node) -> list[Node]:
    """``DynamicQuantizeMatMul`` and ``MatMulIntegerToFloat``: what ORT's optimizer saves.

    Raises
    ------
    UnsupportedModel
        Weights that are no constant matrix with one scale per column.
    """
    dynamic = node.op.endswith("DynamicQuantizeMatMul")
    if dynamic:
        a, weight, scale, zero, bias = (*node.inputs, "", "")[:5]
        a_scale = a_zero = ""
    else:
        a, weight, a_scale, scale, a_zero, zero, bias = (*node.inputs, "", "", "")[:7]
    if graph.as_written:
        matrix_of(graph, node, weight, scale, zero)  # refuses what it would
        steps = Steps(graph, node)
        return steps.done(as_integers(steps, (a, a_scale, a_zero), (weight, scale, zero), bias))
    x, nodes = a, list[Node]()
    if dynamic:
        graph.notes[node.name] = (
            "activations are rounded by the scheme, not by the file's DynamicQuantizeMatMul"
        )
    else:
        x, nodes = unrounded(graph, node, a, a_scale, a_zero)
    matrix = matrix_of(graph, node, weight, scale, zero)
    y = graph.fresh(f"{node.name}.product") if bias else node.outputs[0]
    nodes.append(Node("MatMul", node.name, (x, matrix), (y,)))
    if bias:
        nodes.append(Node("Add", graph.fresh(f"{node.name}.bias"), (y, bias), node.outputs))
    return nodes


def unrounded(graph: Graph, node: Node, a: str, scale: str, zero: str) -> tuple[str, list[Node]]:
    """What an input of 8 bits was before the file's ``DynamicQuantizeLinear``, with a note on
    `node`; of another the floats that it means, and the node that makes them."""
    rounding = None if graph.as_written else graph.made_by(a, "DynamicQuantizeLinear")
    if rounding is not None and rounding.outputs[1:] == (scale, zero):
        graph.notes[node.name] = (
            "activations are rounded by the scheme, not by the file's DynamicQuantizeLinear"
        )
        return rounding.inputs[0], []
    x, given = graph.fresh(f"{node.name}.a"), (a, scale, zero) if zero else (a, scale)
    return x, [Node("DequantizeLinear", graph.fresh(f"{node.name}.input"), given, (x,))]


def matrix_of(graph: Graph, node: Node, weight: str, scale: str, zero: str) -> str:
    """The float matrix of `columns`, which one of onnxruntime's operators reads.

    Raises
    ------
    UnsupportedModel
        It is no constant matrix with one scale per column.
    """
    op = node.op.removeprefix("com.microsoft.")
    matrix = columns(graph, weight, scale, zero, f"{op} of {graph.dtype(weight)}", node)
    if matrix is None:
        raise UnsupportedModel(
            f"{op} {node.name!r}: its weight {graph.describe(weight)} must be a constant matrix of "
            f"{', '.join(CODE_BITS)} with one constant scale per column or for all"
        )
    return matrix


__all__ = ["dynamic_quantize_matmul", "keep_codes", "matrix_of", "standard", "unrounded"]
