"""Float images whose channels come last: windows as rows of a layer, pooling, resizing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tvm import relax

from apq_tvm.lower.operators.nodes import Shapes, call
from apq_tvm.lower.operators.reshape import reshape
from apq_tvm.lower.relax_import import Convert
from apq_tvm.ops.images.resample import Resampling, fold, resize
from apq_tvm.ops.images.window_reduce import convolution, depthwise, pool
from apq_tvm.ops.images.windows import Geometry, windows
from apq_tvm.schedules.graph.convolution import pays
from apq_tvm.types import DeviceProfile, Node

if TYPE_CHECKING:
    from apq_tvm.schedules.linear.kernel import Preparation


@dataclass(frozen=True)
class _Source:
    """What the rows of a matrix are windows of."""

    node: Node
    x: Any
    geometry: Geometry
    channels: tuple[int, int]


def _operands(tail: Sequence[str]) -> list[str]:
    return [name for name in ("bias", "residual") if name in tail]


class ChannelsLastLowering:
    """Converters of one model; remembers which values are windows.

    Parameters
    ----------
    extents : callable
        Node → the dimensions of its attribute ``shape``.
    """

    def __init__(self, extents: Callable[[Node], list[Any]]) -> None:
        self._extents = extents
        self._sources: dict[Any, _Source] = {}

    def converters(self) -> dict[str, Convert]:
        """Converters by operator name."""
        return {
            "apq.Windows": self.windows,
            "apq.Depthwise": self.depthwise,
            "apq.Pool": self.pool,
            "apq.Fold": self.fold,
            "apq.Resize": self.resize,
        }

    def windows(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Windows``: rows in float, which nobody reads where they are gathered into codes."""
        (x,), shapes = inputs, Shapes(node)
        geometry, (first, count) = Geometry.of(node.attrs), node.attrs["channels"]
        out = shapes.dims(self._extents(node))
        rows = call(bb, windows(shapes.of(x), out, geometry, first, count), [x], shapes)
        self._sources[rows] = _Source(node, x, geometry, (first, count))
        return rows

    def depthwise(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Depthwise``."""
        args, shapes = [v for v in inputs if v is not None], Shapes(node)
        name, bias = str(node.attrs["activation"]), len(args) > 2
        out = shapes.dims(self._extents(node))
        group = int(node.attrs.get("inputs", 0))
        func = depthwise(shapes.of(args[0]), out, Geometry.of(node.attrs), bias, name, group)
        return call(bb, func, args, shapes)

    def pool(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Pool``."""
        (x,), shapes = inputs, Shapes(node)
        out = shapes.dims(self._extents(node))
        kind, padding = str(node.attrs["kind"]), bool(node.attrs["padding"])
        func = pool(shapes.of(x), out, Geometry.of(node.attrs), kind, padding)
        return call(bb, func, [x], shapes)

    def fold(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Fold``; what follows is fused with it."""
        args, out = [v for v in inputs if v is not None], self._extents(node)
        geometry = Geometry.of(node.attrs)

        def folded(z: Any, *bias: Any) -> Any:
            return fold(z, bias[0] if bias else None, out, geometry)

        return bb.emit_te(folded, *args, primfunc_name_hint="fold")

    def resize(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """``apq.Resize``; what follows is fused with it."""
        mode, coordinates, rounding = (
            str(node.attrs[name]) for name in ("mode", "coordinates", "rounding")
        )
        how = Resampling(mode, coordinates, rounding, tuple(node.attrs["scales"]))
        out = self._extents(node)
        return bb.emit_te(lambda x: resize(x, out, how), inputs[0], primfunc_name_hint="resize")

    def convolved(
        self, bb: relax.BlockBuilder, rows: Any, weight: Any, channels: int, tail: Sequence[str],
        more: Sequence[Any], profile: DeviceProfile,
    ) -> Any:  # fmt: skip
        """The product of windows and float weights [blocks, K, lanes] without making the windows.

        None where `rows` are no windows, or a product of matrices is faster
        (`apq_tvm.schedules.graph.convolution.pays`). `more` are the bias and the residual of
        `tail`.
        """
        source = self._sources.get(rows)
        if source is None:
            return None
        shapes, lanes = Shapes(source.node), int(weight.ty.shape[2])
        out = (*shapes.dims(self._extents(source.node))[:-1], channels)
        if not pays([int(e) for e in weight.ty.shape.values], out[-2], profile):
            return None
        func = convolution(shapes.of(source.x), out, source.geometry, *source.channels, lanes, tail)
        extents = [shapes.extent(dim) for dim in out]
        images = [
            bb.emit(reshape(value, extents)) if name == "residual" else value
            for name, value in zip(_operands(tail), more, strict=True)
        ]
        return call(bb, func, [source.x, weight, *images], shapes)

    def gathered(
        self, rows: Any, preparation: Preparation, profile: DeviceProfile
    ) -> tuple[Any, Preparation] | None:
        """The image and a preparation of its windows in the place of one of `rows`.

        None where `rows` are no windows, or there is no such preparation.
        """
        source = self._sources.get(rows)
        if source is None or preparation.gather is None:
            return None
        given = Shapes(source.node).of(source.x)
        shape = [dim if isinstance(dim, int) else f"d{i}" for i, dim in enumerate(given)]
        make = preparation.gather(shape, source.geometry, source.channels)
        size = "x".join(map(str, shape))
        parts = (preparation.key, size, source.geometry.name, *map(str, source.channels))
        key = "_".join(["windows", *parts])
        mine = replace(preparation, key=key, make=make, gather=None)
        return source.x, replace(mine, geometry=source.geometry, image=given)
