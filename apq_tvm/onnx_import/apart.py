"""Whether the images of a batch are treated one by one: whether a run may be cut into parts.

A dimension is *apart* when result ``i`` along it depends on nothing but entry ``i`` of the inputs.
That is proved node by node: every value that follows from an input carries the dimension along one
axis, ``batch * factor``, and every operator here keeps blocks of `factor` entries to themselves.
Operators that are not listed are taken to mix them. Only nets of convolutions and of attention are
looked at: what parts gain is that activations stay in the caches, what they cost is that weights
are read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from apq_tvm.onnx_import.symbolic.dims import Dim, exact, parse, product, symbol, symbols
from apq_tvm.types import Array, ImportedModel, Node


class _Mixed(Exception):
    """Why a dimension is not apart."""


class _Value(NamedTuple):
    """A value's dimensions and, where it depends on the batch, the axis that carries it."""

    dims: tuple[Dim, ...]
    axis: int | None
    array: Array | None = None

    def factor(self, batch: Dim) -> Dim | None:
        """Entries of the axis that belong to one image."""
        return None if self.axis is None else exact(self.dims[self.axis], batch)


_POINTWISE = frozenset(
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh Cast Ceil Clip Cos Cosh Div Elu Equal Erf Exp "
    "Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less "
    "LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu "
    "Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Tan Tanh ThresholdedRelu Where Xor "
    "apq.Activation apq.FromBfloat16 apq.Gelu apq.Product apq.ToBfloat16".split()
)
_IMAGES = frozenset(
    "Conv DepthToSpace GlobalAveragePool GlobalMaxPool GroupNormalization InstanceNormalization "
    "LRN SpaceToDepth apq.Depthwise apq.Fold apq.Pool apq.PoolFirst apq.Resize apq.Windows".split()
)
_RESHAPES = frozenset("Flatten Reshape Squeeze Unsqueeze apq.Reshape".split())
_REDUCTIONS = frozenset(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSum ReduceSumSquare".split()
)


def batch_dimension(model: ImportedModel) -> tuple[str, str]:
    """Find the dimension along which runs may be cut into parts.

    Returns
    -------
    (str, str)
        Its name, ``""`` if there is none; then the other tells why not.
    """
    if not any(node.op in _IMAGES or node.op == "apq.Softmax" for node in model.nodes):
        return "", "no layer has windows or attention"
    try:
        name = _candidate(model)
        _check(model, name, symbol(name))
    except _Mixed as why:
        return "", str(why)
    except (KeyError, SyntaxError, ValueError):
        return "", "not every shape is known"
    return name, ""


def _candidate(model: ImportedModel) -> str:
    """The symbolic dimension that leads every input which names it, and every output."""
    leading = [str(s.shape[0]) for s in model.inputs if s.shape and isinstance(s.shape[0], str)]
    if not leading:
        raise _Mixed("no input has a leading dimension of unknown size")
    name = leading[0]
    if name in model.least or any(name in symbols(parse(t)) for t in model.lengths.values()):
        raise _Mixed(f"sizes of '{name}' are bounded from below")
    for spec in (*model.inputs, *model.outputs):
        dims = [parse(dim) for dim in spec.shape]
        named = [axis for axis, dim in enumerate(dims) if name in symbols(dim)]
        whole = not named if spec in model.inputs else False
        if not whole and (named != [0] or dims[0] != symbol(name)):
            raise _Mixed(f"'{spec.name}' is not led by '{name}' alone")
    return name


def _check(model: ImportedModel, name: str, batch: Dim) -> None:
    word = re.compile(rf"\b{re.escape(name)}\b")
    values = {name: _Value(array.shape, None, array) for name, array in model.weights.items()}
    for spec in model.inputs:
        dims = tuple(map(parse, spec.shape))
        values[spec.name] = _Value(dims, 0 if dims and dims[0] == batch else None)
    for node in model.nodes:
        inputs = [values[value] if value else None for value in node.inputs]
        carried = any(value is not None and value.axis is not None for value in inputs)
        sizes = [text for key in node.attrs if key != "shape" for text in _texts(node.attrs[key])]
        shapes = {out: model.value_specs[out].shape for out in node.outputs if out}
        if not carried:
            sizes += [str(dim) for shape in shapes.values() for dim in shape]
        if any(map(word.search, sizes)):
            raise _Mixed(f"{node.op} '{node.name}' computes with '{name}'")
        for output, shape in shapes.items():
            dims = tuple(map(parse, shape))
            values[output] = _Value(dims, _axis(node, dims, batch) if carried else None)
            if carried and not _keeps_apart(node, inputs, values[output], batch):
                raise _Mixed(f"{node.op} '{node.name}' is not known to treat images one by one")
    for spec in model.outputs:
        if values[spec.name].axis != 0:
            raise _Mixed(f"'{spec.name}' does not depend on the inputs")


def _texts(attribute: Any) -> list[str]:
    """Text in an attribute, where sizes are spelled."""
    if isinstance(attribute, tuple | list):
        return [text for part in attribute for text in _texts(part)]
    return [attribute] if isinstance(attribute, str) else []


def _axis(node: Node, dims: Sequence[Dim], batch: Dim) -> int:
    """The one axis of an output that carries the batch."""
    (name,) = symbols(batch)
    named = [axis for axis, dim in enumerate(dims) if name in symbols(dim)]
    factor = exact(dims[named[0]], batch) if len(named) == 1 else None
    if factor is None or name in symbols(factor):
        raise _Mixed(f"{node.op} '{node.name}' has no result per entry of '{name}'")
    return named[0]


_Rule = Callable[[Node, Sequence[_Value | None], _Value, Dim], bool]


def _keeps_apart(node: Node, inputs: Sequence[_Value | None], out: _Value, batch: Dim) -> bool:
    """Whether images stay apart in a node one of whose outputs is `out`."""
    rule = next((rule for ops, rule in _RULES if node.op in ops), None)
    return rule is not None and rule(node, inputs, out, batch)


def _aligned(value: _Value | None, out: _Value, batch: Dim) -> bool:
    """Whether an operand broadcasts to the output image by image."""
    assert out.axis is not None
    if value is None:
        return True
    if value.axis is None:
        at = out.axis - (len(out.dims) - len(value.dims))
        return at < 0 or value.dims[at] == 1
    same = len(value.dims) - value.axis == len(out.dims) - out.axis
    return same and value.factor(batch) == out.factor(batch)


def _pointwise(node: Node, inputs: Sequence[_Value | None], out: _Value, batch: Dim) -> bool:
    return all(_aligned(value, out, batch) for value in inputs)


def _constant(values: Sequence[_Value | None]) -> bool:
    return all(value is None or value.axis is None for value in values)


def _same(x: _Value | None, out: _Value, batch: Dim) -> bool:
    """Whether input and output carry the batch along the same axis."""
    return x is not None and x.axis == out.axis and x.factor(batch) == out.factor(batch)


def _images(node: Node, inputs: Sequence[_Value | None], out: _Value, batch: Dim) -> bool:
    x, *rest = inputs
    whole = out.axis == 0 and out.dims[0] == batch
    residual = rest[2:] if node.op == "apq.Depthwise" else []
    others = rest[: len(rest) - len(residual)]
    return whole and _same(x, out, batch) and _constant(others) and _pointwise(
        node, residual, out, batch
    )  # fmt: skip


def _linear(node: Node, inputs: Sequence[_Value | None], out: _Value, batch: Dim) -> bool:
    x, weight, bias, *residual = inputs
    rows = out.axis != len(out.dims) - 1
    return rows and _same(x, out, batch) and _constant((weight, bias)) and _pointwise(
        node, residual, out, batch
    )  # fmt: skip


def _reshape(node: Node, inputs: Sequence[_Value | None], out: _Value, batch: Dim) -> bool:
    """In memory an image has its place behind as many others as before."""
    x, *rest = inputs
    if x is None or x.axis is None or out.axis is None or not _constant(rest):
        return False
    return product(x.dims[: x.axis]) == product(out.dims[: out.axis])


def _transpose(node: Node, inputs: Sequence[_Value | None], out: _Value, batch: Dim) -> bool:
    x, perm = inputs[0], node.attrs.get("perm") or tuple(reversed(range(len(out.dims))))
    return x is not None and out.axis is not None and perm[out.axis] == x.axis


def _reduction(node: Node, inputs: Sequence[_Value | None], out: _Value, batch: Dim) -> bool:
    x, axes = inputs[0], _numbers(node, inputs, "axes", 1)
    if x is None or x.axis is None or axes is None:
        return False
    over = {axis % len(x.dims) for axis in axes}
    gone = 0 if node.attrs.get("keepdims", 1) else sum(axis < x.axis for axis in over)
    return x.axis not in over and out.axis == x.axis - gone


def _numbers(
    node: Node, inputs: Sequence[_Value | None], key: str, at: int
) -> Sequence[int] | None:
    """An attribute, or the constant input that it is in later opsets."""
    if key in node.attrs:
        return tuple(node.attrs[key])
    value = inputs[at] if at < len(inputs) else None
    return None if value is None or value.array is None else value.array.ravel().tolist()


def _behind(node: Node, inputs: Sequence[_Value | None], out: _Value, batch: Dim) -> bool:
    """Over the axes from ``axis`` on; other operands broadcast."""
    x, *rest = inputs
    if out.axis is None or ("axis" not in node.attrs and node.op in ("Softmax", "LogSoftmax")):
        return False  # what is meant depends on the opset
    before = out.axis < node.attrs.get("axis", -1) % len(out.dims)
    return before and _same(x, out, batch) and _pointwise(node, rest, out, batch)


def _along(node: Node, inputs: Sequence[_Value | None], out: _Value, batch: Dim) -> bool:
    """Along one other axis."""
    parts = inputs if node.op == "Concat" else inputs[:1]
    apart = node.attrs.get("axis", 0) % len(out.dims) != out.axis
    return apart and all(_same(x, out, batch) for x in parts) and _constant(inputs[len(parts) :])


def _elsewhere(node: Node, inputs: Sequence[_Value | None], out: _Value, batch: Dim) -> bool:
    """Slices and padding of other axes: one of this axis could turn or shift it."""
    x, *rest = inputs
    if node.op == "apq.Pad":
        axes: Sequence[int] | None = [i for i, n in enumerate(node.attrs["before"]) if n != 0]
    elif node.op in ("Slice", "apq.Slice"):
        axes = _numbers(node, inputs, "axes", 3)
    else:
        axes = ()
    if axes is None or not _same(x, out, batch) or not _constant(rest):
        return False
    return out.axis not in {axis % len(out.dims) for axis in axes}


def _embedding(node: Node, inputs: Sequence[_Value | None], out: _Value, batch: Dim) -> bool:
    """A row of a table for each id."""
    table, ids = inputs
    return _constant((table,)) and _same(ids, out, batch)


def _matmul(node: Node, inputs: Sequence[_Value | None], out: _Value, batch: Dim) -> bool:
    """Products of matrices that belong to one image each."""
    a, b = (
        None if x is None else _permuted(x, node.attrs[key])
        for x, key in zip(inputs, ("perm_a", "perm_b"), strict=True)
    )
    back = tuple(node.attrs["perm_out"])
    product = _permuted(out, [back.index(axis) for axis in range(len(back))])
    if a is None or b is None or product.axis is None or product.axis >= len(back) - 2:
        return False
    return _aligned(a, product, batch) and _aligned(b, product, batch)


def _permuted(value: _Value, perm: Sequence[int]) -> _Value:
    axis = None if value.axis is None else tuple(perm).index(value.axis)
    return _Value(tuple(value.dims[i] for i in perm), axis)


_RULES: tuple[tuple[frozenset[str], _Rule], ...] = (
    (_POINTWISE, _pointwise),
    (_IMAGES, _images),
    (frozenset({"apq.Linear"}), _linear),
    (_RESHAPES, _reshape),
    (frozenset({"Transpose"}), _transpose),
    (_REDUCTIONS, _reduction),
    (
        frozenset("LayerNormalization RMSNormalization Softmax LogSoftmax apq.Softmax".split()),
        _behind,
    ),
    (frozenset({"Concat", "Split"}), _along),
    (
        frozenset("DequantizeLinear QuantizeLinear Slice apq.Assume apq.Pad apq.Slice".split()),
        _elsewhere,
    ),
    (frozenset({"apq.MatMul"}), _matmul),
    (frozenset({"apq.Embedding"}), _embedding),
)
