"""Sizes that only a run knows, and the operators that make or follow them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tvm import relax, sym, te, tirx

from apq_tvm.lower.dims import Dims
from apq_tvm.lower.fusion import ALONE
from apq_tvm.lower.operators.linear import known_shape
from apq_tvm.lower.operators.nodes import Shapes, call, same
from apq_tvm.lower.operators.reshape import reshape
from apq_tvm.lower.relax_import import Convert
from apq_tvm.ops.graph.numbers import RULES
from apq_tvm.ops.graph.select import non_max_suppression, non_zero, unique
from apq_tvm.ops.graph.topk import topk
from apq_tvm.types import REGION, Node


class RunSizeLowering:
    """Converters of the operators of `apq_tvm.onnx_import.run_sizes`.

    Parameters
    ----------
    dims : Dims
    """

    def __init__(self, dims: Dims) -> None:
        self._dims = dims

    def converters(self) -> dict[str, Convert]:
        """Converters by operator name."""
        return {
            "apq.NonMaxSuppression": self.non_max_suppression,
            "apq.NonZero": self.non_zero,
            "apq.Numbers": self.numbers,
            "apq.OneHot": self.one_hot,
            "apq.Sizes": self.sizes,
            "apq.Tile": self.tile,
            "apq.TopK": self.top_k,
            "apq.Unique": self.unique,
        }

    def sizes(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Sizes``: a call that `apq_tvm.codegen.graph.read_relax` reads back."""
        value = bb.emit(inputs[0])
        entries = [self._dims(dim) for dim in node.attrs["dims"]]
        kind = relax.TensorType(known_shape(value, node), "int64")
        name = f"{REGION}sizes/{node.name}"
        return bb.emit(relax.call_dps_packed(name, [value, *entries], [kind]))

    def numbers(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Numbers``."""
        attrs = node.attrs
        extents = [self._dims(dim) for dim in attrs.get("extents", ())]
        symbolic = [extent for extent in extents if not isinstance(extent, tirx.IntImm)]

        def made(*given: Any) -> Any:
            tensors, rest = given[: len(inputs)], iter(given[len(inputs) :])
            numbers = [e if isinstance(e, tirx.IntImm) else next(rest) for e in extents]
            entries = RULES[attrs["rule"]](tensors, numbers, attrs)

            def at(i: Any) -> Any:
                value = entries[-1]
                for position in reversed(range(len(entries) - 1)):
                    value = tirx.Select(i == position, entries[position], value)
                return value

            return te.compute((tirx.const(len(entries), "int64"),), at, "numbers")

        return bb.emit_te(
            made, *inputs, *symbolic, primfunc_name_hint="numbers", primfunc_attrs=ALONE
        )

    def non_zero(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.NonZero``."""
        (x,), shapes = inputs, Shapes(node)
        (count,) = shapes.dims([self._dims(node.attrs["shape"][1])])
        return call(bb, non_zero(shapes.of(x), count), [x], shapes)

    def unique(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Unique``."""
        (x,), shapes = inputs, Shapes(node)
        func = unique(shapes.of(x), str(x.ty.dtype), in_order=bool(node.attrs["sorted"]))
        return call(bb, func, [x], shapes)

    def non_max_suppression(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.NonMaxSuppression``."""
        shapes = Shapes(node)
        boxes, scores = (shapes.of(value) for value in inputs[:2])
        (rows,) = shapes.dims([self._dims(node.attrs["shapes"][0][0])])
        func = non_max_suppression(boxes, scores, rows, center=bool(node.attrs["center"]))
        return call(bb, func, list(inputs), shapes)

    def top_k(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.TopK``: TopK of a k that only a run knows."""
        (x,), attrs = inputs, node.attrs
        extents, axis = known_shape(x, node), int(attrs["axis"])
        out = self._dims.shape(attrs["shapes"][0])
        one = tirx.const(1, "int64")
        lead, rest = prod(extents[:axis], start=one), prod(extents[axis + 1 :], start=one)
        flat = bb.emit(reshape(x, [lead, extents[axis], rest]))
        func = bb.add_func(topk(str(x.ty.dtype), None, largest=bool(attrs["largest"])), "topk")
        kept = [lead, out[axis], rest]
        types = [relax.TensorType(kept, dtype) for dtype in (x.ty.dtype, "int64")]
        both = bb.emit(relax.call_tir(func, [flat], types))
        parts = [bb.emit(relax.TupleGetItem(both, i)) for i in range(2)]
        shape = relax.ShapeExpr(out)
        return relax.Tuple([bb.emit(reshape(part, shape)) for part in parts])

    def one_hot(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.OneHot``: OneHot of a depth that only a run knows."""
        shape = self._dims.shape(node.attrs["shape"])
        axis = int(node.attrs["axis"]) % len(shape)

        def made(ids: Any, pair: Any, depth: Any) -> Any:
            def element(*i: Any) -> Any:
                given = ids(*i[:axis], *i[axis + 1 :]).astype("int64")
                wrapped = tirx.Select(given < 0, given + depth, given)
                on, off = (pair(tirx.const(k, "int64")) for k in (1, 0))
                return tirx.Select(wrapped == i[axis], on, off)

            return te.compute(shape, element, "one_hot")

        return bb.emit_te(
            made, *inputs, shape[axis], primfunc_name_hint="one_hot", primfunc_attrs=ALONE
        )

    def tile(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Tile``: with an axis for how often, which no index is divided for."""
        wanted, given = self._dims.shape(node.attrs["shape"]), known_shape(inputs[0], node)
        simplify, split, places = sym.Analyzer().simplify, list[Any](), list[int]()
        for whole, own in zip(wanted, given, strict=True):
            times = simplify(tirx.floordiv(whole, own))
            if not same(times, tirx.const(1, "int64")):
                split.append(times)
            places.append(len(split))
            split.append(own)

        def made(x: Any) -> Any:
            return te.compute(split, lambda *i: x(*(i[place] for place in places)), "tile")

        tiled = bb.emit_te(made, inputs[0], primfunc_name_hint="tile", primfunc_attrs=ALONE)
        return tiled if len(split) == len(wanted) else reshape(tiled, wanted)
