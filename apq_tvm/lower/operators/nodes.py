"""Nodes with TensorIR of their own, apart from linear layers: one short function per operator.

The operation families name dynamic dimensions by strings; here a Relax dimension becomes its text,
so that equal expressions are equal names and equal calls share one PrimFunc.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import accumulate
from operator import mul
from typing import Any

from tvm import relax, sym, tirx, topi

from apq_tvm.codegen.layouts import weight_layout
from apq_tvm.errors import NotApplicable, UnsupportedModel
from apq_tvm.formats import details
from apq_tvm.lower.operators.arithmetic import elementwise
from apq_tvm.lower.operators.linear import known_shape
from apq_tvm.lower.operators.reshape import reshape
from apq_tvm.lower.relax_import import Convert
from apq_tvm.ops import math
from apq_tvm.ops.graph.batch_matmul import batch_matmul
from apq_tvm.ops.graph.concatenate import concatenate
from apq_tvm.ops.graph.elementwise import activation, gelu
from apq_tvm.ops.graph.embedding import embedding
from apq_tvm.ops.graph.layernorm import layernorm
from apq_tvm.ops.graph.scan import running
from apq_tvm.ops.graph.softmax import softmax
from apq_tvm.types import ImportedModel, Node, PackedModel

TOGETHER = 8
"""Tensors up to which Relax's concatenation, which finds an element by comparing its place with
where each begins, is cut into plain loops (`apq_tvm.schedules.graph.rewrites.split_guards`)."""


class Shapes:
    """Shapes of one call's operands as the operation families take them, and back again."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._expr: dict[str, Any] = {}

    def of(self, x: Any) -> tuple[int | str, ...]:
        """Integers, and texts for what is dynamic."""
        return tuple(self._dim(extent) for extent in known_shape(x, self._node))

    def dims(self, extents: Sequence[Any]) -> tuple[int | str, ...]:
        """The same of dimensions that no operand has."""
        return tuple(self._dim(extent) for extent in extents)

    def _dim(self, extent: Any) -> int | str:
        if isinstance(extent, tirx.IntImm):
            return int(extent)
        text = str(extent)
        if text in self._expr:
            return text
        for name, known in self._expr.items():
            if same(extent, known):  # past + length beside length + past
                return name
        self._expr[text] = extent
        return text

    def extent(self, dim: int | str) -> Any:
        """The Relax dimension of what `of` or `dims` gave."""
        return self._expr[dim] if isinstance(dim, str) else tirx.IntImm("int64", dim)

    def type_of(self, buffer: Any) -> relax.TensorType:
        """The Relax type of a PrimFunc's buffer whose extents are integers and such texts."""
        extents = [self._expr[e.name] if isinstance(e, tirx.Var) else int(e) for e in buffer.shape]
        return relax.TensorType(extents, buffer.dtype)


def same(a: Any, b: Any) -> bool:
    """Whether two extents are always equal, however they are written."""
    if isinstance(a, tirx.Var) and isinstance(b, tirx.Var):
        return False
    rest = sym.Analyzer().simplify(a - b)
    return isinstance(rest, tirx.IntImm) and int(rest) == 0


def call(bb: relax.BlockBuilder, func: Any, args: Sequence[Any], shapes: Shapes) -> Any:
    """``call_tir`` of `func`, named after its ``apq.op``; outputs are its last arguments."""
    variable = bb.add_func(func, str(func.attrs["apq.op"]))
    outs = [shapes.type_of(param) for param in func.params[len(args) :]]
    return bb.emit(relax.call_tir(variable, list(args), outs))


def convert_softmax(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``apq.Softmax``."""
    shapes = Shapes(node)
    args = [value for value in inputs if value is not None]
    mask = shapes.of(args[1]) if len(args) > 1 else None
    scale, zero_masked = node.attrs.get("scale", 1.0), bool(node.attrs.get("zero_masked", False))
    func = softmax(shapes.of(args[0]), mask, scale, zero_masked)
    return call(bb, func, args, shapes)


def convert_layernorm(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``LayerNormalization``, with ONNX's optional mean and inverse standard deviation."""
    shapes = Shapes(node)
    args = [value for value in inputs if value is not None]
    func = layernorm(
        shapes.of(args[0]),
        node.attrs.get("axis", -1),
        node.attrs.get("epsilon", 1e-5),
        bias=len(args) > 2,
        statistics=len(node.outputs) > 1,
    )
    return call(bb, func, args, shapes)


def convert_rms_norm(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``RMSNormalization`` (ONNX opset 23)."""
    shapes = Shapes(node)
    axis, epsilon = node.attrs.get("axis", -1), node.attrs.get("epsilon", 1e-5)
    func = layernorm(shapes.of(inputs[0]), axis, epsilon, bias=False, rms=True)
    return call(bb, func, list(inputs), shapes)


def convert_matmul(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``apq.MatMul``: transposes are folded into the loops, except where shapes forbid it."""
    shapes = Shapes(node)
    a, b = inputs
    perms = [node.attrs[key] for key in ("perm_a", "perm_b", "perm_out")]
    try:
        func = batch_matmul(shapes.of(a), shapes.of(b), *perms)
    except NotApplicable:
        # Vectors, and axes whose equality only run time knows; `inspect` shows the generic rules.
        a, b = (bb.emit(relax.op.permute_dims(v, p)) for v, p in zip(inputs, perms, strict=False))
        return relax.op.permute_dims(bb.emit(relax.op.matmul(a, b)), perms[2])
    return call(bb, func, [a, b], shapes)


def convert_concat(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``Concat``; FuseTIR takes the ``3 + n`` of Relax's own for another extent than ``n + 3``."""
    if len(inputs) == 1:
        return inputs[0]
    if len(inputs) <= TOGETHER:
        return bb.emit_te(
            topi.concatenate, list(inputs), node.attrs["axis"], primfunc_name_hint="concatenate"
        )
    shapes, dtype = Shapes(node), str(inputs[0].ty.dtype)
    known = [list(known_shape(x, node)) for x in inputs]
    axis = int(node.attrs["axis"]) % len(known[0])
    variable = bb.add_func(concatenate([shapes.of(x) for x in inputs], axis, dtype), "concatenate")
    ends = [sym.Analyzer().simplify(end) for end in accumulate(shape[axis] for shape in known)]
    begins = [] if all(isinstance(end, tirx.IntImm) for end in ends) else ends[:-1]
    out = relax.TensorType([*known[0][:axis], ends[-1], *known[0][axis + 1 :]], dtype)
    return bb.emit(relax.call_tir(variable, [*inputs, *begins], out))


def convert_gelu(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``apq.Gelu`` that no linear layer took in."""
    shapes = Shapes(node)
    (x,) = inputs
    return call(bb, gelu(shapes.of(x), node.attrs.get("approximate", "none")), [x], shapes)


def convert_activation(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``apq.Activation`` that no layer took in; ``fused`` with what reads it."""
    (x,), name, shapes = inputs, str(node.attrs["activation"]), Shapes(node)
    if node.attrs.get("fused"):
        return elementwise(bb, partial(math.activation, name), x)
    return call(bb, activation(shapes.of(x), name), [x], shapes)


def embedding_converter(
    packed: PackedModel, param_vars: Callable[[str], Mapping[str, Any]]
) -> Convert:
    """``apq.Embedding``: rows decoded on lookup; bad ids are refused under the node's name."""
    quantized = packed.plan.quantized

    def convert(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        shapes = Shapes(node)
        weight, ids = inputs
        rows, width = quantized.model.weights[node.inputs[0]].shape
        key = quantized.layers.get(node.name)
        scheme, layout, table = None, None, [weight]
        if key is not None:
            tensor = quantized.tensors[key]
            name = packed.plan.choices[node.name][0].layout
            scheme, layout = tensor.scheme, weight_layout(name, tensor.scheme, details(tensor))
            table = list(param_vars(node.name).values())
        func = embedding(rows, width, shapes.of(ids), str(ids.ty.dtype), scheme, layout)
        func = func.with_attrs(
            {"apq.layer": node.name, "apq.ids_arg": len(func.params) - 2, "apq.id_rows": rows}
        )
        return call(bb, func, [*table, ids], shapes)

    return convert


def cumsum_converter(model: ImportedModel) -> Convert:
    """``CumSum`` and ``CumProd`` along a constant axis, as [outer, n, inner]."""

    def convert(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        x, extents = inputs[0], known_shape(inputs[0], node)
        if node.inputs[1] not in model.weights:
            raise UnsupportedModel(f"{node.op} {node.name!r}: its axis is not a constant")
        axis = int(model.weights[node.inputs[1]].reshape(())) % len(extents)
        shape = [reduce(mul, extents[:axis], 1), extents[axis], reduce(mul, extents[axis + 1 :], 1)]
        flags = {key: bool(node.attrs.get(key, 0)) for key in ("exclusive", "reverse")}
        flags["product"] = node.op == "CumProd"
        func = bb.add_func(running(str(x.ty.dtype), **flags), "cumsum")
        x3d = bb.emit(reshape(x, shape))
        y = bb.emit(relax.call_tir(func, [x3d], relax.TensorType(shape, x.ty.dtype)))
        return reshape(y, extents)

    return convert


def node_converters(
    packed: PackedModel, param_vars: Callable[[str], Mapping[str, Any]]
) -> dict[str, Convert]:
    """Converters by operator name."""
    return {
        "apq.Activation": convert_activation,
        "apq.Embedding": embedding_converter(packed, param_vars),
        "apq.Gelu": convert_gelu,
        "apq.MatMul": convert_matmul,
        "apq.Softmax": convert_softmax,
        "Concat": convert_concat,
        "CumProd": cumsum_converter(packed.plan.quantized.model),
        "CumSum": cumsum_converter(packed.plan.quantized.model),
        "LayerNormalization": convert_layernorm,
        "RMSNormalization": convert_rms_norm,
    }
