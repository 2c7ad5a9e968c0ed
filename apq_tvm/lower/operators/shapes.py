"""Nodes whose attributes hold symbolic dimensions: ``apq.Reshape``, ``apq.Range`` and so on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax, te, tirx, topi

from apq_tvm.lower.dims import Dims
from apq_tvm.lower.fusion import ALONE
from apq_tvm.lower.operators.linear import known_shape
from apq_tvm.lower.operators.reshape import reshape
from apq_tvm.lower.relax_import import Convert
from apq_tvm.ops.graph.caches.append import append_cache
from apq_tvm.types import Node


class ShapeLowering:
    """Converters that read dimensions from attributes.

    Parameters
    ----------
    dims : Dims
    """

    def __init__(self, dims: Dims) -> None:
        self._dim = dims

    def converters(self) -> dict[str, Convert]:
        """Converters by operator name."""
        return {
            "apq.AppendCache": self.append_cache,
            "apq.Assume": self.assume,
            "apq.AssumeHere": self.assume_here,
            "apq.Dims": self.dims,
            "apq.Expand": self.expand,
            "apq.Full": self.full,
            "apq.Range": self.range,
            "apq.Reshape": self.reshape,
            "apq.Slice": self.slice,
        }

    def extents(self, node: Node) -> list[Any]:
        """The dimensions of a node's attribute ``shape``."""
        return [self._dim(d) for d in node.attrs["shape"]]

    def reshape(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Reshape``."""
        return reshape(inputs[0], self.extents(node))

    def assume(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Assume``: the emitted C compares the dimensions before anything runs."""
        shape = self.extents(node)
        have = known_shape(inputs[0], node)
        self._dim.require(have, shape, node.name)
        return bb.emit_te(
            lambda x: te.compute(shape, lambda *at: x(*at), "fitted"),
            inputs[0],
            primfunc_name_hint="fitted",
            primfunc_attrs=_alone(have, shape),
        )

    def assume_here(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.AssumeHere``: the emitted code checks it where the value is read."""
        kind = relax.TensorType(self.extents(node), inputs[0].ty.dtype)
        return bb.match_cast(bb.emit(inputs[0]), kind, node.name)

    def expand(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Expand``."""
        return relax.op.broadcast_to(inputs[0], relax.ShapeExpr(self.extents(node)))

    def slice(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Slice``: starts are in range, so the output's shape is exact."""
        shape, axes = self.extents(node), list(node.attrs["axes"])
        begins, steps = node.attrs["starts"], [self._dim(d) for d in node.attrs["steps"]]
        # As arguments: the symbols of `emit_te`'s PrimFunc are others than these.
        symbolic = [self._dim(d) for d in begins if isinstance(d, str)]
        alone = ALONE if symbolic else _alone(known_shape(inputs[0], node), shape)

        def element(x: Any, *given: Any) -> Any:
            rest = iter(given)
            starts = [next(rest) if isinstance(d, str) else self._dim(d) for d in begins]

            def at(*index: Any) -> Any:
                where = list(index)
                for axis, start, step in zip(axes, starts, steps, strict=True):
                    where[axis] = start + where[axis] * step
                return x(*where)

            return te.compute(shape, at, "slice")

        return bb.emit_te(
            element, inputs[0], *symbolic, primfunc_name_hint="slice", primfunc_attrs=alone
        )

    def append_cache(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.AppendCache``."""
        given = [value for value in inputs if value is not None]
        shape = self.extents(node)
        return bb.emit_te(append_cache, *given, shape, primfunc_name_hint="append_cache")

    def full(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Full``."""
        dtype, extents = node.attrs["dtype"], self.extents(node)
        number = np.asarray(node.attrs["value"], dtype)
        if number.dtype.kind == "f" and not np.isfinite(number):  # Relax fails to legalize these
            return bb.emit_te(topi.full, extents, dtype, float(number))
        return relax.op.full(relax.ShapeExpr(extents), relax.const(number, dtype), dtype)

    def range(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Range``."""
        dtype = node.attrs["dtype"]
        given = {key: node.attrs[key] for key in ("start", "delta")}
        # As arguments, and alone, for the reasons that `dims` gives.
        symbolic = [key for key, value in given.items() if isinstance(value, str)]
        alone = ALONE if symbolic else {}

        def values(*arguments: Any) -> Any:
            numbers = {key: self._number(value, dtype) for key, value in given.items()}
            numbers |= {k: a.astype(dtype) for k, a in zip(symbolic, arguments, strict=True)}
            start, delta = numbers["start"], numbers["delta"]
            shape = self.extents(node)
            return te.compute(shape, lambda i: start + i.astype(dtype) * delta, "range")

        arguments = [self._dim(given[key]) for key in symbolic]
        return bb.emit_te(
            values, *arguments, primfunc_name_hint="range", primfunc_attrs=alone or None
        )

    def _number(self, value: Any, dtype: str) -> Any:
        if isinstance(value, str):
            return self._dim(value).astype(dtype)
        return tirx.const(np.asarray(value).item(), dtype)

    def dims(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Dims``: dimensions used as numbers."""
        dtype = node.attrs["dtype"]
        shape = [tirx.const(d, "int64") for d in node.attrs["shape"]]

        # As arguments: no buffer of this PrimFunc has a shape that would bind the symbols.
        def values(*numbers: Any) -> Any:
            def at(*index: Any) -> Any:
                value = numbers[-1]
                for i in reversed(range(len(numbers) - 1)):
                    value = tirx.Select(index[0] == i, numbers[i], value)
                return value.astype(dtype)

            return te.compute(shape, at, "dims")

        numbers = [self._dim(d) for d in node.attrs["dims"]]
        # FuseTIR fails on a number beside a symbol that only an inner buffer binds.
        alone = ALONE
        return bb.emit_te(values, *numbers, primfunc_name_hint="dims", primfunc_attrs=alone)


def _alone(have: Sequence[Any], shape: Sequence[Any]) -> dict[str, int] | None:
    """Attributes that keep a PrimFunc apart where its output has symbols that its input has not:
    FuseTIR fails where only the output binds one, or where one inside is an expression outside."""
    return None if _variables(shape) <= _variables(have) else ALONE


def _variables(extents: Sequence[Any]) -> set[str]:
    return {var.name for extent in extents for var in tirx.analysis.undefined_vars(extent, [])}
