"""Windows of images: where the largest element lies (MaxPool), and columns put back (Col2Im)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any

from tvm import te, tirx

from apq_tvm.ops.graph.shapes import Dim, Symbols


@dataclass(frozen=True)
class Windows:
    """Kernel, steps and padding per spatial axis; all of one length."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]


def max_pool_indices(
    data: Sequence[Dim], out: Sequence[Dim], windows: Windows, dtype: str, *, columns_first: bool
) -> Any:
    """The largest element of every window, and its place in the flattened input.

    Parameters
    ----------
    data : sequence of int or str
        [N, C, spatial...].
    out : sequence of int or str
        Spatial extents of the result.
    windows : Windows
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
        te.reduce_axis((0, tirx.const(k, "int64")), f"k{i}") for i, k in enumerate(windows.kernel)
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
                at, windows.strides, windows.before, taps, windows.dilations, strict=True
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
    windows: Windows,
    dtype: str,
) -> Any:
    """Columns [N, C * prod(kernel), prod(blocks)] summed where they overlap in [N, C, image...].

    Parameters
    ----------
    data : sequence of int or str
    image, blocks : sequence of int
        Spatial extents, and how many windows there are along each.
    windows : Windows
    dtype : str

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, y)``.
    """
    x = te.placeholder(Symbols().shape(data), dtype, "x")
    size = reduce(mul, windows.kernel)
    channels = x.shape[1] // size
    taps = [
        te.reduce_axis((0, tirx.const(k, "int64")), f"k{i}") for i, k in enumerate(windows.kernel)
    ]

    def element(n: Any, c: Any, *at: Any) -> Any:
        row, column, inside = c, tirx.const(0, "int64"), []
        for p, s, before, k, d, count, extent in zip(
            at, windows.strides, windows.before, taps, windows.dilations, blocks, windows.kernel,
            strict=True,
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


def tensor_scatter(
    cache: Sequence[Dim],
    update: Sequence[Dim],
    axis: int,
    dtype: str,
    *,
    circular: bool,
    starts: bool,
) -> Any:
    """A cache with `update` written along `axis` from ``starts[b]`` on (ONNX TensorScatter).

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(cache, update, [starts int64], y)``. Starts are checked by the module; here whatever does
        not lie in the cache is left out.
    """
    symbols = Symbols()
    old = te.placeholder(symbols.shape(cache), dtype, "cache")
    new = te.placeholder(symbols.shape(update), dtype, "update")
    first = te.placeholder((old.shape[0],), "int64", "starts")
    extent, length = old.shape[axis], new.shape[axis]

    def element(*i: Any) -> Any:
        at = i[axis] - first(i[0]) if starts else i[axis]
        at = tirx.floormod(at, extent) if circular else at
        fresh = new(*i[:axis], at, *i[axis + 1 :])
        return tirx.if_then_else(tirx.all(at >= 0, at < length), fresh, old(*i))

    y = te.compute(old.shape, element, "y")
    func = te.create_prim_func([old, new, first, y] if starts else [old, new, y])
    attrs: dict[str, Any] = {"apq.op": "tensor_scatter", "op_pattern": 8}
    if starts:
        rows = extent if circular else extent - length + 1
        attrs |= {"apq.ids_arg": [2], "apq.id_rows": [rows], "apq.id_lowest": 0}
    return func.with_attrs(attrs)
