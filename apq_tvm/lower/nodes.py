"""Nodes with TensorIR of their own, apart from linear layers: one short function per operator.

The operation families name dynamic dimensions by strings; here a Relax dimension becomes its text,
so that equal expressions are equal names and equal calls share one PrimFunc.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax, tirx

from apq_tvm.lower.linear import known_shape
from apq_tvm.ops.batch_matmul import batch_matmul
from apq_tvm.ops.elementwise import gelu
from apq_tvm.ops.embedding import embedding
from apq_tvm.ops.layernorm import layernorm
from apq_tvm.ops.softmax import softmax
from apq_tvm.types import Node, PackedModel

Names = dict[str, Any]


def dims(x: Any, node: Node, names: Names) -> tuple[int | str, ...]:
    """The shape of `x` as the operation families take it; `names` remembers each text's expression."""
    out: list[int | str] = []
    for extent in known_shape(x, node):
        if isinstance(extent, tirx.IntImm):
            out.append(int(extent))
        else:
            names[str(extent)] = extent
            out.append(str(extent))
    return tuple(out)


def call(
    bb: relax.BlockBuilder, func: Any, args: Sequence[Any], outs: Sequence[Any]
) -> Any:
    """``call_tir`` of `func`, named after its ``apq.op``."""
    op = str(func.attrs["apq.op"])
    return bb.emit(relax.call_tir(bb.add_func(func, op), list(args), list(outs)))


def convert_softmax(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``apq.Softmax``."""
    names: Names = {}
    x, mask = (*inputs, None)[:2]
    shape = dims(x, node, names)
    mask_shape = None if mask is None else dims(mask, node, names)
    func = softmax(shape, mask_shape, node.attrs.get("scale", 1.0))
    args = [x] if mask is None else [x, mask]
    return call(bb, func, args, [relax.TensorType(x.ty.shape, "float32")])


def convert_layernorm(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``LayerNormalization``, with ONNX's optional mean and inverse standard deviation."""
    names: Names = {}
    x, scale, bias = (*inputs, None)[:3]
    extents = known_shape(x, node)
    axis = node.attrs.get("axis", -1) % len(extents)
    statistics = len(node.outputs) > 1
    func = layernorm(
        dims(x, node, names),
        axis,
        node.attrs.get("epsilon", 1e-5),
        bias=bias is not None,
        statistics=statistics,
    )
    args = [x, scale] if bias is None else [x, scale, bias]
    outs = [relax.TensorType(extents, "float32")]
    if statistics:
        reduced = [*extents[:axis], *[1] * (len(extents) - axis)]
        outs += [relax.TensorType(reduced, "float32")] * 2
    return call(bb, func, args, outs)


def convert_matmul(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``apq.MatMul``: transposes are folded into the loops."""
    names: Names = {}
    a, b = inputs
    shapes = dims(a, node, names), dims(b, node, names)
    perms = [node.attrs[key] for key in ("perm_a", "perm_b", "perm_out")]
    func, out = batch_matmul(*shapes, *perms)
    extents = [d if isinstance(d, int) else names[d] for d in out]
    return call(bb, func, [a, b], [relax.TensorType(extents, "float32")])


def convert_gelu(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``apq.Gelu`` that no linear layer took in."""
    (x,) = inputs
    func = gelu(dims(x, node, {}), node.attrs.get("approximate", "none"))
    return call(bb, func, [x], [relax.TensorType(x.ty.shape, "float32")])


class EmbeddingLowering:
    """``apq.Embedding``: rows decoded on lookup.

    Parameters
    ----------
    packed : PackedModel
    param_vars : callable
        ``layer name -> {array name: relax.Var}``.
    """

    def __init__(
        self, packed: PackedModel, param_vars: Callable[[str], Mapping[str, Any]]
    ) -> None:
        self._packed = packed
        self._param_vars = param_vars

    def convert(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """Lower one node; ids out of range are refused at run time under the node's name."""
        quantized = self._packed.plan.quantized
        weight, ids = inputs
        rows, width = quantized.model.weights[node.inputs[0]].shape
        tensor = quantized.tensors.get(quantized.layers.get(node.name, ""))
        scheme = tensor.scheme if tensor else None
        names: Names = {}
        func = embedding(rows, width, dims(ids, node, names), ids.ty.dtype, scheme)
        func = func.with_attrs({"apq.layer": node.name})
        table = self._param_vars(node.name).values() if tensor else [weight]
        out = relax.TensorType([*known_shape(ids, node), width], "float32")
        return call(bb, func, [*table, ids], [out])


def node_converters(
    packed: PackedModel, param_vars: Callable[[str], Mapping[str, Any]]
) -> dict[str, Callable[[relax.BlockBuilder, Node, Sequence[Any]], Any]]:
    """Converters by operator name."""
    return {
        "apq.Embedding": EmbeddingLowering(packed, param_vars).convert,
        "apq.Gelu": convert_gelu,
        "apq.MatMul": convert_matmul,
        "apq.Softmax": convert_softmax,
        "LayerNormalization": convert_layernorm,
    }
