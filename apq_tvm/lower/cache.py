"""``apq.Cache``: a decoder's keys or values, of which a session writes only what is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, sym

from apq_tvm.lower.dims import Dims
from apq_tvm.lower.nodes import Shapes
from apq_tvm.lower.relax_import import Convert
from apq_tvm.ops.graph.attention import PACK
from apq_tvm.ops.graph.cache import KEYS
from apq_tvm.schedules.devices import cached_operators
from apq_tvm.types import DeviceProfile, Node


def cache_converter(dims: Dims, profile: DeviceProfile) -> Convert:
    """Converter of ``apq.Cache``; its attributes are those of `apq_tvm.sessions.caches`."""
    cache = cached_operators(profile)["apq.Cache"]

    def convert(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        shapes, attrs = Shapes(node), node.attrs
        args = [value for value in inputs if value is not None]
        past, new = (shapes.of(value) for value in args[:2])
        layout, dtype = attrs["layout"], attrs["dtype"]
        func = cache(past, new, attrs["orders"], layout, dtype, starts=len(args) > 2)
        variable = bb.add_func(func, "cache")
        total, kept = dims(attrs["total"]), dims(attrs["kept"])
        _, batch, heads, width = (shapes.extent(past[axis]) for axis in attrs["orders"][0])
        extents = [total, batch, heads, width]
        if layout == KEYS:
            blocks = sym.Analyzer().simplify((total + PACK - 1) // PACK)
            extents = [blocks, batch, heads, width, PACK]
        out = relax.TensorType(extents, dtype)
        return bb.emit(relax.call_tir(variable, [*args, kept, total], out))

    return convert
