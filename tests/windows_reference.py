"""The meaning in numpy of what works on windows of images, channels last."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from apq_tvm.types import Array


def _begins(attrs: Any, sizes: tuple[int, ...]) -> list[int]:
    if not attrs["auto"]:
        return list(attrs["begins"])
    found = []
    for size, k, s, d in zip(
        sizes, attrs["kernel"], attrs["strides"], attrs["dilations"], strict=True
    ):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        found.append(total // 2 if attrs["auto"] == "SAME_UPPER" else total - total // 2)
    return found


def _ends(attrs: Any, sizes: tuple[int, ...]) -> list[int]:
    return list(attrs["ends"]) if not attrs["auto"] else [0] * len(sizes)


def taps(attrs: Any, x: Array, outside: float = 0.0) -> Iterator[tuple[Array, Array]]:
    """For every tap what each output position reads [N, *out, C], and where it is an image's."""
    sizes, out = x.shape[1:-1], attrs["shape"][1:-1]
    begins = _begins(attrs, sizes)
    for tap in itertools.product(*map(range, attrs["kernel"])):
        places, inside = [], np.ones(out, bool)
        for i, t in enumerate(tap):
            at = np.arange(out[i]) * attrs["strides"][i] - begins[i] + t * attrs["dilations"][i]
            shape = [-1 if j == i else 1 for j in range(len(tap))]
            inside = inside & ((at >= 0) & (at < sizes[i])).reshape(shape)
            places.append(np.clip(at, 0, sizes[i] - 1))
        values = x[np.ix_(range(len(x)), *places, range(x.shape[-1]))]
        yield np.where(inside[None, ..., None], values, np.float32(outside)), inside


def _windows(attrs: Any, _: Any, x: Array) -> Array:
    first, count = attrs["channels"]
    parts = [value for value, _ in taps(attrs, x[..., first : first + count])]
    return np.concatenate(parts, -1)


def depthwise(attrs: Any, x: Array, w: Array, bias: Any) -> Array:
    """``apq.Depthwise`` before its activation."""
    inputs, count = attrs.get("inputs", 1), w.shape[-1]
    groups = x.shape[-1] // inputs
    # What each output reads of its group: for every one of the inputs a channel.
    reads = np.arange(groups)[:, None] * inputs + np.arange(inputs)
    of = np.repeat(reads, count // groups, axis=0).T
    rows = w.reshape(-1, inputs, count)
    seen = (value for value, _ in taps(attrs, x))
    total = sum((v[..., of] * row).sum(-2) for v, row in zip(seen, rows, strict=True))
    return np.asarray(total if bias is None else total + bias)


def _pool(attrs: Any, _: Any, x: Array) -> Array:
    if attrs["kind"] == "max":
        lowest = float(np.finfo(np.float32).min)
        return np.max([value for value, _ in taps(attrs, x, lowest)], axis=0)
    total = sum(value for value, _ in taps(attrs, x))
    if not attrs["padding"]:
        count = sum(inside.astype(np.float32) for _, inside in taps(attrs, x))
        return np.asarray(total / count[None, ..., None])
    sizes = x.shape[1:-1]
    wide = tuple(zip(_begins(attrs, sizes), _ends(attrs, sizes), strict=True))
    padded = np.pad(x, ((0, 0), *wide, (0, 0)), constant_values=1)
    moved = {**attrs, "auto": "", "begins": (0,) * len(sizes)}
    count = sum(inside.astype(np.float32) for _, inside in taps(moved, padded))
    return np.asarray(total / count[None, ..., None])


def _fold(attrs: Any, _: Any, z: Array, bias: Any = None) -> Array:
    n, *out, channels = attrs["shape"]
    total = np.zeros((n, *out, channels), np.float32)
    every = itertools.product(*map(range, attrs["kernel"]))
    for number, tap in enumerate(every):
        values = z[..., number * channels : (number + 1) * channels]
        for place in np.ndindex(*z.shape[1:-1]):
            at = tuple(
                p * s - b + t * d
                for p, s, b, t, d in zip(
                    *(place, attrs["strides"], attrs["begins"], tap, attrs["dilations"]),
                    strict=True,
                )
            )
            if all(0 <= a < size for a, size in zip(at, out, strict=True)):
                total[(slice(None), *at)] += values[(slice(None), *place)]
    return np.asarray(total if bias is None else total + bias)


def _source(attrs: Any, axis: int, size: int, out: int) -> Array:
    at, scale = np.arange(out, dtype=np.float32), np.float32(attrs["scales"][axis])
    kind = attrs["coordinates"]
    if kind == "align_corners":
        return at * np.float32(size - 1) / np.float32(max(out - 1, 1))
    if kind == "asymmetric":
        return at / scale
    if kind == "pytorch_half_pixel" and out == 1:
        return np.zeros(1, np.float32)
    return (at + np.float32(0.5)) / scale - np.float32(0.5)


def _resize(attrs: Any, _: Any, x: Array) -> Array:
    rounds = {
        "round_prefer_floor": lambda v: np.ceil(v - np.float32(0.5)),
        "round_prefer_ceil": lambda v: np.floor(v + np.float32(0.5)),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    for axis, out in enumerate(attrs["shape"][1:-1]):
        size = x.shape[1 + axis]
        at = _source(attrs, axis, size, out)
        if attrs["mode"] == "nearest":
            places = np.clip(rounds[attrs["rounding"]](at).astype(int), 0, size - 1)
            x = np.take(x, places, 1 + axis)
            continue
        low = np.floor(at)
        shape = [-1 if i == axis + 1 else 1 for i in range(x.ndim)]
        part = (at - low).reshape(shape)
        sides = [np.clip(low.astype(int) + i, 0, size - 1) for i in (0, 1)]
        x = np.take(x, sides[0], 1 + axis) * (1 - part) + np.take(x, sides[1], 1 + axis) * part
    return x


WINDOW_OPS: dict[str, Callable[..., Array]] = {
    "apq.Windows": _windows,
    "apq.Pool": _pool,
    "apq.Fold": _fold,
    "apq.Resize": _resize,
}
