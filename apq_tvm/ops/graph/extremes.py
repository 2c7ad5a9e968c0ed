"""Largest and least elements, and where they are: right for infinities and over nothing.

TVM starts a maximum with the least finite number, so that of -inf alone it is no longer -inf, and
the place of the largest of such a row would be -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx


def neutral(dtype: str, *, largest: bool) -> Any:
    """What a maximum (or minimum) starts with, and what it is of nothing (ONNX ReduceMax)."""
    if dtype.startswith("float"):
        return -tirx.infinity(dtype) if largest else tirx.infinity(dtype)
    return tirx.min_value(dtype) if largest else tirx.max_value(dtype)


def extreme(x: Any, axes: Sequence[int], keep: bool, *, largest: bool) -> Any:
    """Maximum or minimum of a te.Tensor over `axes`; of bool too."""
    dtype = str(x.dtype)
    wide = "uint8" if dtype == "bool" else dtype
    fold = tirx.max if largest else tirx.min
    reducer = te.comm_reducer(
        lambda a, b: fold(a, b), lambda _: neutral(wide, largest=largest), name="extreme"
    )
    whole = _reduced(x, axes, keep, lambda at, over: reducer(x(*at).astype(wide), axis=over))
    if wide == dtype:
        return whole
    one = tirx.const(0, wide)
    return te.compute(whole.shape, lambda *i: whole(*i) != one, "any")


def place_of_extreme(x: Any, axis: int, *, keep: bool, largest: bool, last: bool) -> Any:
    """ArgMax or ArgMin of a te.Tensor, int64: the first of equals, or the last."""
    dtype = str(x.dtype)
    wide = "uint8" if dtype == "bool" else dtype
    if axis == len(x.shape) - 1 and dtype == "float32":
        return _place_in_rows(x, keep=keep, largest=largest, last=last)

    def pick(a: Any, b: Any) -> Any:
        beyond = a[1] > b[1] if largest else a[1] < b[1]
        sooner = a[0] > b[0] if last else a[0] < b[0]
        better = tirx.any(b[0] < 0, beyond, tirx.all(a[1] == b[1], sooner))
        mine = tirx.all(a[0] >= 0, better)
        return tirx.Select(mine, a[0], b[0]), tirx.Select(mine, a[1], b[1])

    nothing = tirx.const(-1, "int64"), neutral(wide, largest=largest)
    reducer = te.comm_reducer(pick, lambda *_: nothing, name="place")

    def entry(at: Sequence[Any], over: Sequence[Any]) -> Any:
        index = over[0].var.astype("int64")
        return reducer((index, x(*at).astype(wide)), axis=over)

    return _reduced(x, [axis], keep, entry)[0]


def _place_in_rows(x: Any, *, keep: bool, largest: bool, last: bool) -> Any:
    """Along memory in two steps, both of whole vectors: the extreme, then who is equal to it.

    The least place, from the end for the `last`. Of NaN alone it is 0: nothing is equal to NaN.
    """
    axis = len(x.shape) - 1
    top = extreme(x, [axis], True, largest=largest)
    none, end = tirx.max_value("int32"), x.shape[axis] - 1
    reducer = te.comm_reducer(lambda a, b: tirx.min(a, b), lambda _: none, name="place")

    def entry(at: Sequence[Any], over: Sequence[Any]) -> Any:
        row, i = (*at[:-1], tirx.const(0, "int64")), over[0].var
        place = (end - i if last else i).astype("int32")
        return reducer(tirx.Select(x(*at) == top(*row), place, none), axis=over)

    found = _reduced(x, [axis], keep, entry)

    def place(*i: Any) -> Any:
        least = found(*i).astype("int64")
        counted = end.astype("int64") - least if last else least
        return tirx.Select(found(*i) == none, tirx.const(0, "int64"), counted)

    return te.compute(found.shape, place, "place")


def _reduced(
    x: Any, axes: Sequence[int], keep: bool, entry: Callable[[Sequence[Any], Sequence[Any]], Any]
) -> Any:
    over = {a: te.reduce_axis((0, x.shape[a]), f"r{a}") for a in sorted(set(axes))}
    kept = [a for a in range(len(x.shape)) if a not in over]
    one = tirx.const(1, "int64")
    shape = [x.shape[a] if a in kept else one for a in range(len(x.shape)) if keep or a in kept]

    def element(*i: Any) -> Any:
        rest = iter([j for a, j in enumerate(i) if a in kept] if keep else i)
        at = [next(rest) if a in kept else over[a] for a in range(len(x.shape))]
        return entry(at, list(over.values()))

    return te.compute(shape, element, "reduced")
