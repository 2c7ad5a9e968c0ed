"""Windows of images: where the largest element lies (MaxPool), and columns put back (Col2Im)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import mul
from typing import Any

from tvm import te, tirx

from apq_tvm.ops.graph.shapes import Dim, Symbols
from apq_tvm.ops.images.windows import Geometry


def max_pool_indices(
    data: Sequence[Dim], out: Sequence[Dim], geometry: Geometry, dtype: str, *, columns_first: bool
) -> Any:
    """The largest element of every window, and its place in the flattened input.

    Parameters
    ----------
    data : sequence of int or str
        [N, C, spatial...].
    out : sequence of int or str
        Spatial extents of the result.
    geometry : Geometry
    dtype : str
    columns_first : bool
        Places count along columns first (ONNX ``storage_order`` 1).

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, y, places int64)``; of equal elements the first counts.
    """
    symbols = Symbols()
    x = te.placeholder(symbols.shape(data), dtype, "x")
    spatial = x.shape[2:]
    taps = [
        te.reduce_axis((0, tirx.const(k, "int64")), f"k{i}") for i, k in enumerate(geometry.kernel)
    ]
    least = tirx.const(-1, "int64"), tirx.min_value(dtype)

    def better(a: Any, b: Any) -> Any:
        keep = tirx.any(a[1] > b[1], tirx.all(a[1] == b[1], a[0] >= 0))
        return tirx.Select(keep, a[0], b[0]), tirx.Select(keep, a[1], b[1])

    largest = te.comm_reducer(better, lambda *_: least, name="largest")

    def element(n: Any, c: Any, *at: Any) -> Any:
        where = [
            p * s - before + k * d
            for p, s, before, k, d in zip(
                at, geometry.strides, geometry.begins, taps, geometry.dilations, strict=True
            )
        ]
        inside = tirx.all(
            *(t >= 0 for t in where), *(t < e for t, e in zip(where, spatial, strict=True))
        )
        pairs = list(zip(where, spatial, strict=True))
        place: Any = tirx.const(0, "int64")
        for t, extent in reversed(pairs) if columns_first else pairs:
            place = place * extent + t
        place = place + (n * x.shape[1] + c) * reduce(mul, spatial)
        index = tirx.if_then_else(inside, place, least[0])
        value = tirx.if_then_else(inside, x(n, c, *where), least[1])
        return largest((index, value), axis=taps)

    places, y = te.compute((*x.shape[:2], *symbols.shape(out)), element, "pool")
    func = te.create_prim_func([x, y, places])
    return func.with_attrs({"apq.op": "max_pool", "op_pattern": 8})


def col2im(
    data: Sequence[Dim],
    image: Sequence[int],
    blocks: Sequence[int],
    geometry: Geometry,
    dtype: str,
) -> Any:
    """Columns [N, C * prod(kernel), prod(blocks)] summed where they overlap in [N, C, image...].

    Parameters
    ----------
    data : sequence of int or str
    image, blocks : sequence of int
        Spatial extents, and how many windows there are along each.
    geometry : Geometry
    dtype : str

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, y)``.
    """
    x = te.placeholder(Symbols().shape(data), dtype, "x")
    size = reduce(mul, geometry.kernel)
    channels = x.shape[1] // size
    taps = [
        te.reduce_axis((0, tirx.const(k, "int64")), f"k{i}") for i, k in enumerate(geometry.kernel)
    ]

    def element(n: Any, c: Any, *at: Any) -> Any:
        row, column, inside = c, tirx.const(0, "int64"), []
        for p, s, before, k, d, count, extent in zip(
            at, geometry.strides, geometry.begins, taps, geometry.dilations, blocks,
            geometry.kernel, strict=True,
        ):  # fmt: skip
            distance = p + before - k * d
            step = tirx.floordiv(distance, s)
            inside += [distance >= 0, tirx.floormod(distance, s) == 0, step < count]
            row, column = row * extent + k, column * count + step
        value = tirx.if_then_else(tirx.all(*inside), x(n, row, column), tirx.const(0, dtype))
        return te.sum(value, axis=taps)

    shape = (x.shape[0], channels, *(tirx.const(d, "int64") for d in image))
    func = te.create_prim_func([x, te.compute(shape, element, "y")])
    return func.with_attrs({"apq.op": "col2im", "op_pattern": 8})
