"""``apq.Cache``: a decoder's keys or values, of which a session writes only what is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, sym

from apq_tvm.formats.caches import CODED
from apq_tvm.lower.dims import Dims
from apq_tvm.lower.operators.nodes import Shapes
from apq_tvm.lower.relax_import import Convert
from apq_tvm.ops.graph.attention import PACK
from apq_tvm.ops.graph.caches.coded import coded_cache, coded_shapes
from apq_tvm.ops.graph.caches.grown import KEYS
from apq_tvm.schedules.devices import cached_operators
from apq_tvm.types import KEPT, DeviceProfile, Node


def cache_converter(dims: Dims, profile: DeviceProfile) -> Convert:
    """Converter of ``apq.Cache``; its attributes are those of `apq_tvm.sessions.caches`."""
    cache = cached_operators(profile)["apq.Cache"]

    def convert(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        shapes, attrs = Shapes(node), node.attrs
        args = [value for value in inputs if value is not None]
        past, new = (shapes.of(value) for value in args[:2])
        layout, dtype, orders = attrs["layout"], attrs["dtype"], attrs["orders"]
        total, kept = dims(attrs["total"]), dims(KEPT)
        _, batch, heads, width = (shapes.extent(past[axis]) for axis in orders[0])
        blocks = sym.Analyzer().simplify((total + PACK - 1) // PACK)
        if dtype in CODED:
            func = coded_cache(past, new, orders, layout, starts=len(args) > 2, dtype=dtype)
            shapes_of = coded_shapes((blocks, total, batch, heads, width), layout, dtype)
            types = zip(shapes_of, CODED[dtype], strict=True)
            out = [relax.TensorType(shape, kind) for shape, kind in types][::-1]
        else:
            func = cache(past, new, orders, layout, dtype, starts=len(args) > 2)
            packed = [blocks, batch, heads, width, PACK]
            extents = packed if layout == KEYS else [total, batch, heads, width]
            out = relax.TensorType(extents, dtype)
        variable = bb.add_func(func, str(func.attrs["apq.op"]))
        return bb.emit(relax.call_tir(variable, [*args, kept, total], out))

    return convert
