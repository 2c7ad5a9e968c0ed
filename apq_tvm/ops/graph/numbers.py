"""Sizes worked out of tensors: what Reshape, Expand, Slice, Pad and Range are told at a run.

Every rule gives the entries of an int64 tensor; -1 says that what was asked for means nothing,
which the emitted C refuses (``apq.Sizes``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import mul
from typing import Any

from tvm import tirx

from apq_tvm.ops.graph.arithmetic import to_integer

Entries = list[Any]


def _int(value: int) -> Any:
    return tirx.const(value, "int64")


def _at(tensor: Any, position: int) -> Any:
    return tensor(*([_int(position)] * len(tensor.shape)))


def _clip(value: Any, low: Any, high: Any) -> Any:
    return tirx.max(tirx.min(value, high), low)


def _reshape(tensors: Sequence[Any], extents: Sequence[Any], attrs: Mapping[str, Any]) -> Entries:
    """A target of Reshape with 0 and -1 replaced."""
    count = int(attrs["shape"][0])
    asked = [_at(tensors[0], i) for i in range(count)]
    if not attrs["keep_zeros"]:
        copied = [extents[i] if i < len(extents) else _int(-1) for i in range(count)]
        asked = [tirx.Select(a == 0, c, a) for a, c in zip(asked, copied, strict=True)]
    whole = reduce(mul, extents, _int(1))
    given = reduce(mul, [tirx.Select(a == -1, _int(1), a) for a in asked], _int(1))
    rest = tirx.Select(given > 0, tirx.floordiv(whole, tirx.max(given, _int(1))), _int(0))
    return [tirx.Select(a == -1, rest, a) for a in asked]


def _expand(tensors: Sequence[Any], extents: Sequence[Any], attrs: Mapping[str, Any]) -> Entries:
    """A target of Expand: an axis of 1 becomes what is asked, others stay."""
    made = []
    for i, extent in enumerate(extents):
        asked = _at(tensors[0], i)
        fits = tirx.any(asked == 1, asked == extent)
        kept = tirx.Select(fits, extent, _int(-1))
        made.append(tirx.Select(extent == 1, asked, kept))
    return made


def _slice(tensors: Sequence[Any], extents: Sequence[Any], attrs: Mapping[str, Any]) -> Entries:
    """First element and number of elements of each slice (ONNX Slice, as numpy counts)."""
    made = []
    for at, step, extent in zip(attrs["positions"], attrs["strides"], extents, strict=True):
        start, end = (_at(tensor, at) for tensor in tensors)
        start, end = (tirx.Select(v < 0, v + extent, v) for v in (start, end))
        if step > 0:
            start, end = (_clip(v, _int(0), extent) for v in (start, end))
            count = tirx.floordiv(end - start + (step - 1), _int(step))
        else:
            # An end that is as far before the front as an extent stays before the front.
            asked = _at(tensors[1], at)
            start = _clip(start, _int(-1), extent - 1)
            end = _clip(tirx.Select(asked < -extent, _int(-1), end), _int(-1), extent - 1)
            count = tirx.floordiv(start - end + (-step - 1), _int(-step))
        count = tirx.max(count, _int(0))
        made += [tirx.Select(count == 0, _int(0), start), count]
    return made


def _pad(tensors: Sequence[Any], extents: Sequence[Any], attrs: Mapping[str, Any]) -> Entries:
    """Elements put before an axis, elements cut off there, and what it has afterwards."""
    made = []
    for at, extent in zip(attrs["positions"], extents, strict=True):
        before, after = _at(tensors[0], at), _at(tensors[0], at + int(attrs["count"]))
        made += [tirx.max(before, _int(0)), tirx.max(-before, _int(0)), extent + before + after]
    return made


def _range(tensors: Sequence[Any], extents: Sequence[Any], attrs: Mapping[str, Any]) -> Entries:
    """How many numbers from start to limit there are."""
    start, limit, delta = (_at(tensor, 0) for tensor in tensors)
    if str(tensors[0].dtype).startswith("float"):
        wide = (limit - start).astype("float64") / delta.astype("float64")
        count = tirx.max(to_integer(tirx.ceil(wide), "int64"), _int(0))
        return [tirx.Select(delta == tirx.const(0, str(tensors[2].dtype)), _int(-1), count)]
    first, last, by = (v.astype("int64") for v in (start, limit, delta))
    wide, up = last - first, by > 0
    ahead = tirx.Select(up, last > first, last < first)
    wrapped = tirx.Select(up, wide <= 0, wide >= 0)  # the distance is beyond 64 bits
    step = tirx.Select(by == 0, _int(1), by)
    count = tirx.floordiv(wide + tirx.Select(up, _int(-1), _int(1)), step) + 1
    count = tirx.Select(ahead, tirx.Select(wrapped, _int(-1), count), _int(0))
    return [tirx.Select(by == 0, _int(-1), count)]


def _choose(tensors: Sequence[Any], extents: Sequence[Any], attrs: Mapping[str, Any]) -> Entries:
    """The first half of the extents where a flag is set, else the second."""
    flag, count = _at(tensors[0], 0), len(extents) // 2
    pairs = zip(extents[:count], extents[count:], strict=True)
    return [tirx.Select(flag, first, second) for first, second in pairs]


def _scaled(tensors: Sequence[Any], extents: Sequence[Any], attrs: Mapping[str, Any]) -> Entries:
    """Sizes that scales make, rounded down, each times its extent in float32 (as ONNX Runtime)."""
    made = []
    for at, extent in zip(attrs["positions"], extents, strict=True):
        scale = _at(tensors[0], at)
        size = to_integer(tirx.floor(extent.astype("float32") * scale), "int64")
        made.append(tirx.Select(scale > tirx.const(0, "float32"), size, _int(-1)))
    return made


RULES: dict[str, Callable[[Sequence[Any], Sequence[Any], Mapping[str, Any]], Entries]] = {
    "choose": _choose,
    "expand": _expand,
    "pad": _pad,
    "range": _range,
    "reshape": _reshape,
    "scaled": _scaled,
    "slice": _slice,
}
"""By ``rule`` of ``apq.Numbers``: tensors, extents, attributes → int64 entries."""
