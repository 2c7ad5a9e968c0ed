"""ReduceMax, ReduceMean, ReduceMin, ArgMax, ArgMin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

from tvm import relax, tirx, topi

from apq_tvm.errors import UnsupportedModel
from apq_tvm.lower.operators.linear import known_shape
from apq_tvm.lower.relax_import import Convert
from apq_tvm.ops.graph.extremes import extreme, place_of_extreme
from apq_tvm.types import ImportedModel, Node

Reduce = Callable[[Any, Sequence[int], bool], Any]
"""``x, axes, keep -> y`` of te.Tensors."""


def reduction_converter(model: ImportedModel, name: str, reduce: Reduce) -> Convert:
    """A reduction; axes are an attribute or, from opset 18 on, a constant."""

    def convert(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        x, attrs = inputs[0], node.attrs
        rank = len(known_shape(x, node))
        given = node.inputs[1] if len(node.inputs) > 1 else ""
        if given and given not in model.weights:
            raise UnsupportedModel(f"{node.op} {node.name!r}: its axes are not a constant")
        axes = [int(a) for a in model.weights[given].reshape(-1)] if given else attrs.get("axes")
        if not axes and attrs.get("noop_with_empty_axes", 0):
            return x
        over = [a % rank for a in axes or range(rank)]
        keep = bool(attrs.get("keepdims", 1))
        if not over:
            return x
        return bb.emit_te(lambda t: reduce(t, over, keep), x, primfunc_name_hint=name)

    return convert


def _mean(x: Any, axes: Sequence[int], keep: bool) -> Any:
    """The mean; 0 of nothing, as ONNX Runtime has it, where TVM's would be NaN."""
    count = prod((x.shape[axis] for axis in axes), start=tirx.const(1, "int64"))
    return topi.divide(topi.sum(x, list(axes), keep), tirx.max(count, 1))


def place_converter(*, largest: bool) -> Convert:
    """``ArgMax`` or ``ArgMin``."""

    def convert(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        x, attrs = inputs[0], node.attrs
        rank = len(known_shape(x, node))
        if not rank:
            raise UnsupportedModel(f"{node.op} {node.name!r}: its input is a scalar")
        axis, last = int(attrs.get("axis", 0)) % rank, bool(attrs.get("select_last_index", 0))
        keep = bool(attrs.get("keepdims", 1))
        return bb.emit_te(
            lambda t: place_of_extreme(t, axis, keep=keep, largest=largest, last=last),
            x,
            primfunc_name_hint="argmax" if largest else "argmin",
        )

    return convert


def reduction_converters(model: ImportedModel) -> dict[str, Convert]:
    """Converters by operator name."""
    return {
        "ArgMax": place_converter(largest=True),
        "ArgMin": place_converter(largest=False),
        "ReduceMax": reduction_converter(model, "max", partial(extreme, largest=True)),
        "ReduceMean": reduction_converter(model, "mean", _mean),
        "ReduceMin": reduction_converter(model, "min", partial(extreme, largest=False)),
    }
