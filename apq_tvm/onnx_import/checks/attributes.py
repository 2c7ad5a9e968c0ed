"""Numbers in attributes and constant inputs, against the ranks and sizes of what they speak of.

ONNX's own inference checks some of them, where it knows the element types; the rules of this
package divide by them, count loops with them and take entries of shapes at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.onnx_import.graph import Graph, np_dtype
from apq_tvm.onnx_import.integers.codes import check_scales
from apq_tvm.onnx_import.symbolic.values import contents
from apq_tvm.types import Node

LARGEST = (1 << 31) - 1
MOST_OUTPUTS = 1 << 16  # which onnx's inference makes, read or not
# Attributes that are numbers or lists of numbers from 1 on, and from 0 on, of whatever operator.
POSITIVE = frozenset(
    "kernel_shape strides dilations group blocksize num_groups num_outputs size p pooled_shape "
    "output_height output_width hidden_size K N bits q_num_heads".split()
)
NATURAL = frozenset(
    "pads output_padding batch_dims sampling_ratio num_heads kv_num_heads "
    "rotary_embedding_dim select_last_index".split()
)
AXIS = frozenset("axis batch_axis time_axis gather_axis quantize_axis".split())
# Axes that may be one past the last of the first input's.
ONE_MORE = frozenset(("Flatten", "OneHot"))
# Where the input that axes are of is not the first.
FIRST = {"com.microsoft.QLinearConcat": 2}
# Operators whose axis means nothing where the scale is one number.
PER_AXIS = frozenset(("QuantizeLinear", "DequantizeLinear"))
# Constant inputs that are axes.
AXES_INPUT = {
    **dict.fromkeys(("Squeeze", "Unsqueeze", "CumSum"), 1),
    **dict.fromkeys(("Slice", "Pad"), 3),
    **dict.fromkeys(
        ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
         "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"), 1,
    ),
}  # fmt: skip
# Where the weight and the bias of a convolution are among its inputs.
CONVOLUTIONS = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "ConvInteger": (1, None), "QLinearConv": (3, 8),
}  # fmt: skip
NORMALIZERS = frozenset(("InstanceNormalization", "GroupNormalization"))
POOLS = frozenset(("MaxPool", "AveragePool", "LpPool"))
PER_SPATIAL = {"kernel_shape": 1, "strides": 1, "dilations": 1, "pads": 2, "output_padding": 1}


def check_attributes(graph: Graph, node: Node) -> None:
    """Refuse numbers that mean nothing.

    Raises
    ------
    ImportFailed
        Naming the node, the attribute and what it may be.
    UnsupportedModel
        A Cast to strings.
    """
    if node.op.startswith("apq."):
        return
    for key, value in node.attrs.items():
        least = 1 if key in POSITIVE else 0 if key in NATURAL else None
        if least is not None and node.op != "Pad":
            _numbers(node, key, value, least)
    if node.op == "Split" and node.attrs.get("num_outputs", 1) > MOST_OUTPUTS:
        raise _bad(node, f"num_outputs is {node.attrs['num_outputs']}, at most {MOST_OUTPUTS}")
    at = FIRST.get(node.op, 0)
    rank = graph.rank(node.inputs[at]) if len(node.inputs) > at and node.inputs[at] else None
    if rank is not None:
        _check_axes(graph, node, rank)
    if node.op in CONVOLUTIONS or node.op in POOLS:
        _check_windows(graph, node, rank)
    if node.op in CONVOLUTIONS:
        _check_convolution(graph, node)
    if node.op in NORMALIZERS:
        _check_channels(graph, node)
    if node.op == "PRelu":
        _check_slope(graph, node)
    if node.op in ("Resize", "Upsample"):
        _check_scales(graph, node)
    if node.op in PER_AXIS:
        _check_quantization(graph, node)
    if node.op == "Cast" and np_dtype(node.attrs["to"]) == "object":
        raise UnsupportedModel(f"Cast {node.name!r} to strings; only tensors of numbers work")


def _bad(node: Node, text: str) -> ImportFailed:
    return ImportFailed(f"{node.op} {node.name!r}: {text}")


def _numbers(node: Node, key: str, value: Any, least: int) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int) or not least <= number <= LARGEST:
            raise _bad(node, f"{key} is {value!r}, wanted integers from {least} to {LARGEST}")


def _check_axes(graph: Graph, node: Node, rank: int) -> None:
    scale = node.inputs[1] if len(node.inputs) > 1 else ""
    whole = node.op in PER_AXIS and graph.shape(scale) in ((), (1,))  # its axis says nothing then
    if not whole:
        for key in AXIS & node.attrs.keys():
            _one_axis(node, key, node.attrs[key], rank + (node.op in ONE_MORE))
    axes: Any = node.attrs.get("axes")
    at = AXES_INPUT.get(node.op, len(node.inputs))
    if axes is None and at < len(node.inputs) and node.inputs[at]:
        found = contents(graph, node.inputs[at])
        if found is not None and all(isinstance(v, int) for v in found.ravel()):
            axes = tuple(int(v) for v in found.ravel())
    if isinstance(axes, tuple):
        within = rank + len(axes) if node.op == "Unsqueeze" else rank
        for axis in axes:
            _one_axis(node, "axes", axis, within)
        if len({axis % within for axis in axes}) < len(axes):
            raise _bad(node, f"axes {axes} has one of them twice")
    perm = node.attrs.get("perm")
    if node.op == "Transpose" and perm is not None and sorted(perm) != list(range(rank)):
        raise _bad(node, f"perm {perm!r} is no permutation of the {rank} axes of its input")
    if node.attrs.get("batch_dims", 0) > rank:
        raise _bad(node, f"batch_dims is {node.attrs['batch_dims']}, its input has {rank} axes")


def _one_axis(node: Node, key: str, axis: Any, rank: int) -> None:
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise _bad(node, f"{key} is {axis!r}, which is none of {rank} axes")


def _check_windows(graph: Graph, node: Node, rank: int | None) -> None:
    """The window's numbers, one or two for each spatial axis."""
    if rank is None:
        return
    if rank < 3:
        raise _bad(node, f"its input has {rank} axes, wanted batch, channels and at least one more")
    for key, each in PER_SPATIAL.items():
        value = node.attrs.get(key)
        if value is not None and len(value) != each * (rank - 2):
            raise _bad(
                node, f"{key} has {len(value)} numbers for {rank - 2} axes, wanted {each} for each"
            )
    if node.op in POOLS and "kernel_shape" not in node.attrs:
        raise _bad(node, "it has no kernel_shape")


def _check_convolution(graph: Graph, node: Node) -> None:
    """Input, weight and bias of a convolution belong together."""
    weight_at, bias_at = CONVOLUTIONS[node.op]
    if len(node.inputs) <= weight_at:
        raise _bad(node, "it has no weight")
    x, w = graph.shape(node.inputs[0]), graph.shape(node.inputs[weight_at])
    if x is None or w is None:
        return
    if len(w) != len(x):
        raise _bad(node, f"its input has {len(x)} axes, its weight {len(w)}")
    group, kernel = node.attrs.get("group", 1), node.attrs.get("kernel_shape")
    if kernel is not None and not _may_equal(kernel, w[2:]):
        raise _bad(node, f"kernel_shape is {list(kernel)}, its weight has {_text(w)}")
    transposed = node.op == "ConvTranspose"
    inside, outside = (w[0], w[1]) if transposed else (w[1], w[0])
    wanted = inside if transposed or not isinstance(inside, int) else inside * group
    divided = inside if transposed else outside
    if not _may_equal([wanted], [x[1]]) or (isinstance(divided, int) and divided % group):
        raise _bad(node, f"in {group} groups, a weight {_text(w)} does not fit an input {_text(x)}")
    channels = outside * group if transposed and isinstance(outside, int) else outside
    if bias_at is not None and len(node.inputs) > bias_at and node.inputs[bias_at]:
        bias = graph.shape(node.inputs[bias_at])
        if bias is not None and (len(bias) != 1 or not _may_equal(bias, [channels])):
            raise _bad(node, f"its bias has {_text(bias)}, wanted {channels} numbers")


def _check_channels(graph: Graph, node: Node) -> None:
    """A scale and a bias for each channel; for each group until opset 21."""
    shape = graph.shape(node.inputs[0])
    if shape is None:
        return
    if len(shape) < 2:
        raise _bad(node, f"its input has {len(shape)} axes, wanted batch, channels and more")
    channels, groups = shape[1], node.attrs.get("num_groups", 1)
    if isinstance(channels, int) and channels % groups:
        raise _bad(node, f"num_groups is {groups}, which does not divide {channels} channels")
    grouped = node.op == "GroupNormalization" and graph.opset < 21
    wanted = groups if grouped else channels
    for what, value in zip(("scale", "bias"), node.inputs[1:3], strict=True):
        given = graph.shape(value)
        if given is not None and not _may_equal(given, [wanted]):
            raise _bad(node, f"its {what} has {_text(given)}, wanted {wanted} numbers")


def _check_slope(graph: Graph, node: Node) -> None:
    """A slope that the input's shape holds."""
    shape, slope = graph.shape(node.inputs[0]), graph.shape(node.inputs[1])
    if shape is None or slope is None:
        return
    behind = shape[len(shape) - len(slope) :] if len(slope) <= len(shape) else ()
    spread = [have if given == 1 else given for have, given in zip(behind, slope, strict=False)]
    if len(slope) > len(shape) or not _may_equal(spread, behind):
        raise _bad(node, f"its slope has {_text(slope)}, which an input {_text(shape)} cannot hold")


def _may_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are equal as far as both are numbers."""
    return len(a) == len(b) and all(
        x == y for x, y in zip(a, b, strict=True) if isinstance(x, int) and isinstance(y, int)
    )


def _text(shape: Sequence[Any]) -> str:
    return f"[{', '.join('?' if d is None else str(d) for d in shape)}]"


def _check_quantization(graph: Graph, node: Node) -> None:
    """Constant scales are finite, and none that is divided by is 0; a negative one means what it
    says (ONNX asks for no sign)."""
    scale = graph.weights.get(node.inputs[1]) if len(node.inputs) > 1 else None
    if scale is None or scale.dtype.kind not in "fV":
        return
    check_scales(scale, node.inputs[1], f" of {node.op} {node.name!r}")
    if node.op == "QuantizeLinear" and not scale.astype(np.float32).all():
        raise UnsupportedModel(
            f"{node.op} {node.name!r} divides by a scale of 0, which has no meaning; quantize the "
            "model again"
        )


def _check_scales(graph: Graph, node: Node) -> None:
    """Factors of Resize: more than 0, and no size beyond `LARGEST`."""
    for value in node.inputs[1:]:
        scales = graph.weights.get(value)
        is_region = node.op == "Resize" and value == node.inputs[1]
        if scales is None or scales.dtype.kind not in "fiu" or not scales.size or is_region:
            continue
        if not np.isfinite(scales.astype(np.float64)).all() or not (scales > 0).all():
            shown = scales.ravel()[:8].tolist()
            raise _bad(node, f"scales or sizes are {shown}, wanted more than 0")
