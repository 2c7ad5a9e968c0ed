"""``apq.Attention``, ``apq.PackKeys`` and ``apq.PackValues``: one kernel, or what it is made of.

Shapes as Relax knows them may say less than those that joined the nodes (`apq_tvm.launches`): a
kernel that declines only now leaves its work to plain operators, and a remark for ``explain``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tvm import relax, sym, te, tirx

from apq_tvm.errors import NotApplicable
from apq_tvm.formats.caches import CODED
from apq_tvm.lower.dims import Dims
from apq_tvm.lower.operators.linear import known_shape
from apq_tvm.lower.operators.nodes import Shapes, call, convert_matmul, convert_softmax, same
from apq_tvm.lower.operators.reshape import reshape
from apq_tvm.lower.relax_import import Convert
from apq_tvm.ops.graph.attention import PACK
from apq_tvm.ops.graph.caches.unpacked import unpacked_keys, unpacked_values
from apq_tvm.schedules.devices import cached_operators, device_operators
from apq_tvm.types import DeviceProfile, Node


class AttentionLowering:
    """Converters, and why kernels declined what they were to do.

    Parameters
    ----------
    profile : DeviceProfile
    dims : Dims
    """

    def __init__(self, profile: DeviceProfile, dims: Dims) -> None:
        self._profile, self._dims = profile, dims
        self.declined: dict[str, str] = {}
        """By the name of an ``apq.Attention`` that is no kernel: the reason."""

    def converters(self) -> dict[str, Convert]:
        """By operator name."""
        return {
            "apq.Attention": self._attention,
            "apq.PackKeys": self._pack_keys,
            "apq.PackValues": convert_pack_values,
        }

    def _attention(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """Over packed keys as processors and decoders have it, or as other models on a GPU do."""
        packed = "order_values" in node.attrs
        return (self._packed if packed else self._on_gpu)(bb, node, inputs)

    def _packed(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """Of a processor or a decoder (`apq_tvm.launches.packed`)."""
        attention = cached_operators(self._profile)["apq.Attention"]
        shapes = Shapes(node)
        args = [value for value in inputs if value is not None]
        sink, dtype = bool(node.attrs.get("sink")), _kept_type(args[1])
        of = [shapes.of(value) for value in args[: len(args) - sink]]  # a sink's follows from heads
        scales = of[3:5] if dtype in CODED else []
        given = [*of[:3], *of[3 + len(scales) :]]
        coded = {"scales": scales} if scales else {}
        try:
            func = attention(*given, **node.attrs, **coded, dtype=dtype)
        except NotApplicable as why:
            self.declined[node.name] = str(why)
            return Unpacked(bb, node, self._dims).result(args)
        return call(bb, func, args, shapes)

    def _pack_keys(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.PackKeys``; where it declines, keys with tokens first that are not packed."""
        shapes, order, (k,) = Shapes(node), node.attrs["order"], inputs
        try:
            pack_keys = cached_operators(self._profile)["apq.PackKeys"]
            func = pack_keys(shapes.of(k), order, str(k.ty.dtype))
        except NotApplicable:  # so does attention, which sees it by their axes
            return relax.op.permute_dims(k, order)
        total, batch, *heads, size = (k.ty.shape.values[p] for p in order)
        blocks = sym.Analyzer().simplify((total + PACK - 1) // PACK)
        out = relax.TensorType([blocks, batch, *(heads or [1]), size, PACK], k.ty.dtype)
        return bb.emit(relax.call_tir(bb.add_func(func, "pack_keys"), [k], out))

    def _on_gpu(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """Of a GPU (`apq_tvm.launches.attention`)."""
        make = device_operators(self._profile).get("apq.Attention")
        assert make is not None  # or there would be no such node
        shapes = Shapes(node)
        args = [value for value in inputs if value is not None]
        of = [shapes.of(value) for value in args]
        try:
            func = make(of[:3], mask=of[3] if len(of) > 3 else None, **node.attrs)
        except NotApplicable as why:
            self.declined[node.name] = str(why)
            return _apart(bb, node, args)
        return call(bb, func, args, shapes)


def convert_pack_values(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``apq.PackValues``."""
    return relax.op.permute_dims(inputs[0], node.attrs["order"])


def _kept_type(keys: Any) -> str:
    """Of keys and values, which lie in bytes where they are int4."""
    dtype = str(keys.ty.dtype)
    return next((name for name, (lies, _) in CODED.items() if lies == dtype), dtype)


class Unpacked:
    """Attention over packed keys as Relax's own operators, of caches too.

    Parameters
    ----------
    bb : relax.BlockBuilder
    node : Node
        An ``apq.Attention`` of a processor.
    dims : Dims
        Lets runs check what is not known here.
    """

    def __init__(self, bb: relax.BlockBuilder, node: Node, dims: Dims) -> None:
        self._bb, self._node, self._dims = bb, node, dims

    def _shape(self, x: Any) -> list[Any]:
        return list(known_shape(x, self._node))

    def _reshaped(self, x: Any, extents: Sequence[Any]) -> Any:
        return self._bb.emit(reshape(x, extents))

    def result(self, args: Sequence[Any]) -> Any:
        """What the kernel would give for q, keys, values, scales of codes, a mask and sinks."""
        emit, attrs = self._bb.emit, self._node.attrs
        coded = _kept_type(args[1]) in CODED
        scales, rest = (args[3:5], args[5:]) if coded else ((), args[3:])
        masks, sinks = (rest[:-1], rest[-1:]) if attrs.get("sink") else (rest, rest[:0])
        q = emit(relax.op.permute_dims(args[0], list(attrs["order"])))
        logical = self._shape(q)
        keys, values = self._floats(args[1], args[2], scales, logical[-1])
        tokens, batch, heads, columns = self._shape(values)
        rows = 1
        for extent in logical[1:-1]:
            rows = rows * extent
        rows = sym.Analyzer().simplify(rows // heads)
        keys = emit(relax.op.permute_dims(keys, [1, 2, 3, 0]))
        values = emit(relax.op.permute_dims(values, [1, 2, 0, 3]))
        together = self._reshaped(q, [batch, heads, rows, logical[-1]])
        scores = emit(relax.op.matmul(together, keys))
        scores = self._bent(self._reshaped(scores, [*logical[:-1], tokens]), masks, sinks)
        weights = self._reshaped(scores, [batch, heads, rows, tokens])
        y = self._reshaped(emit(relax.op.matmul(weights, values)), [*logical[:-1], columns])
        return relax.op.permute_dims(y, list(attrs["order_out"]))

    def _floats(self, keys: Any, values: Any, scales: Sequence[Any], size: Any) -> tuple[Any, Any]:
        """Both as float32 ``[T, B, Nkv, H]``."""
        shapes, order = Shapes(self._node), self._node.attrs["order_values"]
        dtype = _kept_type(keys)
        of_keys, of_values = shapes.of(keys), shapes.of(values)
        by = tuple(shapes.of(scale) for scale in scales) or (None, None)
        func = unpacked_values(of_values, order, dtype, by[1])
        values = self._bb.emit(call(self._bb, func, [values, *scales[1:]], shapes))
        if len(of_keys) == 5:
            func = unpacked_keys(of_keys, of_values[order[0]], int(size), dtype, by[0])
            return self._bb.emit(call(self._bb, func, [keys, *scales[:1]], shapes)), values
        _, batch, heads, _ = self._shape(values)  # packing declined
        return self._reshaped(keys, [self._shape(keys)[0], batch, heads, size]), values

    def _bent(self, scores: Any, masks: Sequence[Any], sinks: Sequence[Any]) -> Any:
        """Probabilities of scores: scale, softcap, mask, a sink beside them, softmax."""
        emit, attrs = self._bb.emit, self._node.attrs
        cap = float(attrs.get("softcap", 0.0))
        kept: dict[str, Any] = {"zero_masked": attrs.get("zero_masked", False)}
        kept["scale"] = float(attrs.get("scale", 1.0))
        if cap:
            inner = relax.op.multiply(scores, relax.const(kept["scale"] / cap, "float32"))
            bent = emit(relax.op.tanh(emit(inner)))
            scores = emit(relax.op.multiply(bent, relax.const(cap, "float32")))
            kept["scale"] = 1.0
        masks = [self._as_wide(mask, self._shape(scores)) for mask in masks]
        if sinks:
            return self._beside(scores, masks, sinks[0], kept)
        return emit(convert_softmax(self._bb, replace(self._node, attrs=kept), [scores, *masks]))

    def _beside(self, scores: Any, masks: Sequence[Any], sink: Any, kept: Mapping[str, Any]) -> Any:
        """A softmax that a score of each head takes part in, which has no value."""
        emit, shape = self._bb.emit, self._shape(scores)
        if kept["scale"] != 1.0:
            scores = emit(relax.op.multiply(scores, relax.const(kept["scale"], "float32")))
        for mask in masks:
            scores = emit(relax.op.add(scores, mask))
        column = self._reshaped(sink, [1, *shape[1:-2], 1, 1])
        column = emit(relax.op.broadcast_to(column, relax.ShapeExpr([*shape[:-1], 1])))
        wide = emit(relax.op.concat([scores, column], -1))
        node = replace(self._node, attrs={**kept, "scale": 1.0})
        weights = emit(convert_softmax(self._bb, node, [wide]))
        # Relax's slice is not sure of as many columns as only a run knows.
        return self._bb.emit_te(
            lambda x: te.compute(shape, lambda *at: x(*at), "slice"),
            weights,
            primfunc_name_hint="slice",
        )

    def _as_wide(self, mask: Any, wanted: Sequence[Any]) -> Any:
        """A mask whose extents are 1 or those of scores: runs check those that nobody knows."""
        have = self._shape(mask)
        known = [
            h if (isinstance(h, tirx.IntImm) and int(h) == 1) or same(h, w) else w
            for h, w in zip(have, wanted[len(wanted) - len(have) :], strict=True)
        ]
        if all(k is h for k, h in zip(known, have, strict=True)):
            return mask
        self._dims.require(have, known, self._node.name)
        return self._bb.match_cast(mask, relax.TensorType(known, mask.ty.dtype))


def _apart(bb: relax.BlockBuilder, node: Node, args: Sequence[Any]) -> Any:
    """The three operators that became ``apq.Attention`` (`apq_tvm.launches.attention`)."""
    orders, heads = node.attrs["orders"], node.attrs["heads"]
    q, k, v = args[:3]
    if heads:
        q, k, v = (
            bb.emit(relax.op.strided_slice(x, [order[-3]], [first], [first + heads]))
            for x, order, first in zip((q, k, v), orders, node.attrs["firsts"], strict=True)
        )
    straight = tuple(range(len(orders[0])))
    perms = {"perm_a": orders[0], "perm_b": orders[1], "perm_out": straight}
    scores = convert_matmul(bb, replace(node, attrs=perms), [q, k])
    kept = {key: node.attrs[key] for key in ("scale", "zero_masked")}
    weights = convert_softmax(bb, replace(node, attrs=kept), [bb.emit(scores), *args[3:]])
    perms = {"perm_a": straight, "perm_b": orders[2], "perm_out": node.attrs["order_out"]}
    return convert_matmul(bb, replace(node, attrs=perms), [bb.emit(weights), v])
