"""Images in ONNX's own order, of any size and type: the sizes that come out are known by import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax, tirx

from apq_tvm.errors import UnsupportedModel
from apq_tvm.lower.dims import Dims
from apq_tvm.lower.fusion import ALONE
from apq_tvm.lower.operators.linear import known_shape
from apq_tvm.lower.operators.reshape import reshape
from apq_tvm.lower.relax_import import Convert
from apq_tvm.ops.images.conv import conv
from apq_tvm.ops.images.pad import pad
from apq_tvm.ops.images.pool import pool
from apq_tvm.ops.images.resize import gathered, is_repeat, repeated, table
from apq_tvm.types import Node, TensorSpec


class ChannelsFirstLowering:
    """Converters of convolution, pooling, padding and resizing.

    Parameters
    ----------
    dims : Dims
    specs : mapping of str to TensorSpec
        What the import knows of values.
    """

    def __init__(self, dims: Dims, specs: Mapping[str, TensorSpec]) -> None:
        self._dims = dims
        self._specs = specs

    def converters(self) -> dict[str, Convert]:
        """Converters by operator name."""
        return {
            "Conv": self.conv,
            "apq.Pad": self.pad,
            "apq.PoolFirst": self.pool,
            "apq.ResizeAxes": self.resize,
        }

    def conv(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``Conv``, whose ``auto_pad`` the ONNX import has spelled out."""
        x, weight, bias = (*inputs, None)[:3]
        known_shape(x, node)
        shape = self._out(node)
        rank = len(shape) - 2
        args = (
            tuple(node.attrs.get("strides", (1,) * rank)),
            tuple(node.attrs.get("dilations", (1,) * rank)),
            tuple(node.attrs.get("pads", (0,) * (2 * rank))),
            node.attrs.get("group", 1),
        )
        made = bb.emit_te(
            lambda a, w: conv(a, w, shape, *args), x, weight, primfunc_name_hint=f"conv{rank}d"
        )
        if bias is None:
            return made
        flat = reshape(bias, [1, shape[1], *[1] * rank])
        return relax.op.add(made, bb.emit(flat))

    def _out(self, node: Node) -> list[Any]:
        """Extents of a node's first output."""
        return self._dims.shape(self._specs[node.outputs[0]].shape)

    def pool(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.PoolFirst``."""
        known_shape(inputs[0], node)
        shape = self._dims.shape(node.attrs["shape"])
        pads = [*node.attrs["begins"], *node.attrs["ends"]]
        count = len(pads) // 2

        def whole(x: Any, *given: Any) -> Any:
            amounts = _filled(pads, given)
            return pool(x, shape, amounts[:count], amounts[count:], node.attrs)

        return self._emit(bb, whole, inputs[0], pads, "pool")

    def pad(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Pad``."""
        x, value = (*inputs, None)[:2]
        extents = known_shape(x, node)
        shape = self._dims.shape(node.attrs["shape"])
        before = list(node.attrs["before"])
        if node.attrs["mode"] != "constant" and any(
            isinstance(extent, tirx.IntImm) and int(extent) == 0 for extent in extents
        ):
            raise UnsupportedModel(f"Pad {node.name!r}: an axis of no elements has none to repeat")

        def whole(source: Any, *given: Any) -> Any:
            tensors = [g for g in given if hasattr(g, "op")]
            amounts = _filled(before, given[len(tensors) :])
            fill = tensors[0] if tensors else None
            zero = tirx.const(0, source.dtype)
            number = zero if fill is None else fill(*([0] * len(fill.shape)))
            return pad(source, shape, amounts, node.attrs["mode"], number)

        tensors = [x] if value is None else [x, value]
        return self._emit(bb, whole, tensors, before, "pad")

    def resize(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.ResizeAxes``."""
        if node.attrs["antialias"]:
            raise UnsupportedModel(
                f"Resize {node.name!r}: antialias is not done; resize before the model, or export "
                "it without"
            )
        (x, *told), attrs, wanted = inputs, node.attrs, self._dims.shape(node.attrs["shape"])
        for number, axis in enumerate(attrs["axes"]):
            shape = known_shape(x, node)
            given, shape[axis] = shape[axis], wanted[axis]
            if is_repeat(attrs, number):
                x = self._repeated(bb, x, shape, attrs, number)
            else:
                x = self._gathered(bb, (x, *told), (given, wanted[axis]), attrs, number)
        return x

    def _repeated(
        self, bb: relax.BlockBuilder, x: Any, shape: Sequence[Any], attrs: Any, number: int
    ) -> Any:
        def whole(source: Any) -> Any:
            return repeated(source, shape, attrs, number)

        return bb.emit_te(whole, x, primfunc_name_hint="repeat")

    def _gathered(
        self,
        bb: relax.BlockBuilder,
        tensors: Sequence[Any],
        extents: tuple[Any, Any],
        attrs: Any,
        number: int,
    ) -> Any:
        (x, *told), wanted = tensors, extents[1]
        symbolic = [extent for extent in extents if not isinstance(extent, tirx.IntImm)]

        def entries(which: int) -> Any:
            def made(*given: Any) -> Any:
                scale = given[0](attrs["told"][number]) if told else None
                rest = iter(given[len(told) :])
                size, count = (e if isinstance(e, tirx.IntImm) else next(rest) for e in extents)
                return table(size, count, attrs, number, scale)[which]

            return made

        # Apart: fused, they would be computed again for each element.
        named: Any = {"primfunc_name_hint": "positions", "primfunc_attrs": ALONE}
        tables = [bb.emit_te(entries(which), *told, *symbolic, **named) for which in (0, 1)]
        kinds = [relax.TensorType((t.ty.shape.values[0], wanted), t.ty.dtype) for t in tables]
        tables = [bb.match_cast(t, k) for t, k in zip(tables, kinds, strict=True)]
        axis = attrs["axes"][number]
        return bb.emit_te(
            lambda a, i, w: gathered(a, i, w, axis, attrs), x, *tables, primfunc_name_hint="resize"
        )

    def _emit(
        self, bb: relax.BlockBuilder, make: Any, tensors: Any, amounts: Sequence[Any], name: str
    ) -> Any:
        """``emit_te`` with those of `amounts` that only a run knows as arguments."""
        tensors = tensors if isinstance(tensors, list) else [tensors]
        given = [self._dims(amount) for amount in amounts if isinstance(amount, str)]
        alone = ALONE if given else None
        return bb.emit_te(make, *tensors, *given, primfunc_name_hint=name, primfunc_attrs=alone)


def _filled(amounts: Sequence[int | str], given: Sequence[Any]) -> list[Any]:
    """`amounts` with `given` in the places of texts."""
    rest = iter(given)
    return [next(rest) if isinstance(amount, str) else amount for amount in amounts]
