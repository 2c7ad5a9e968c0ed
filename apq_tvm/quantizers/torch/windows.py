"""Operators on windows of images in torch; ``tests/windows_reference.py`` has them in numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from apq_tvm.onnx_import.symbolic.geometry import along

Tensor = Any
Attrs = Any


def _begins(attrs: Attrs, sizes: tuple[int, ...]) -> list[int]:
    if not attrs["auto"]:
        return list(attrs["begins"])
    found = []
    for i, size in enumerate(sizes):
        reach = (attrs["kernel"][i] - 1) * attrs["dilations"][i] + 1
        begin, _, _ = along(size, reach, attrs["strides"][i], (), attrs["auto"], False)
        found.append(int(begin))  # type: ignore[arg-type]
    return found


def _taps(attrs: Attrs, x: Tensor, outside: float = 0.0) -> Iterator[tuple[Tensor, Tensor]]:
    """For every tap what each output position reads, and where that is in the image."""
    sizes, out = tuple(x.shape[1:-1]), attrs["shape"][1:-1]
    begins = _begins(attrs, sizes)
    for tap in itertools.product(*map(range, attrs["kernel"])):
        value, inside = x, torch.ones(1, dtype=torch.bool)
        for i, t in enumerate(tap):
            at = torch.arange(out[i]) * attrs["strides"][i] - begins[i] + t * attrs["dilations"][i]
            shape = [-1 if j == i else 1 for j in range(len(tap))]
            inside = inside & ((at >= 0) & (at < sizes[i])).reshape(shape)
            value = value.index_select(1 + i, at.clamp(0, sizes[i] - 1))
        inside = inside[..., None]
        yield torch.where(inside, value, outside), inside


def _windows(attrs: Attrs, x: Tensor) -> Tensor:
    first, count = attrs["channels"]
    return torch.cat([v for v, _ in _taps(attrs, x[..., first : first + count])], -1)


def depthwise(attrs: Attrs, x: Tensor, w: Tensor, bias: Tensor = None) -> Tensor:
    """``apq.Depthwise`` before its activation."""
    inputs = int(attrs.get("inputs", 0))
    if inputs:  # of each group to its outputs
        groups = x.shape[-1] // inputs
        each = w.reshape(-1, inputs, groups, w.shape[-1] // groups)
        seen = (v.unflatten(-1, (groups, inputs)) for v, _ in _taps(attrs, x))
        parts = (torch.einsum("...gi,igo->...go", v, t) for v, t in zip(seen, each, strict=True))
        total = sum(parts).flatten(-2)
    else:
        total = sum(v * row for (v, _), row in zip(_taps(attrs, x), w, strict=True))
    return total if bias is None else total + bias


def _pool(attrs: Attrs, x: Tensor) -> Tensor:
    if attrs["kind"] == "max":
        lowest = torch.finfo(torch.float32).min
        return torch.stack([v for v, _ in _taps(attrs, x, lowest)]).amax(0)
    total = sum(v for v, _ in _taps(attrs, x))
    ones, given = torch.ones_like(x[:1]), attrs
    if attrs["padding"]:
        begins = _begins(attrs, tuple(x.shape[1:-1]))
        ends = [0] * len(begins) if attrs["auto"] else attrs["ends"]
        pads = [p for pair in zip(begins, ends, strict=True) for p in pair]
        wide = [p for i in reversed(range(len(begins))) for p in pads[2 * i : 2 * i + 2]]
        ones = F.pad(ones, (0, 0, *wide), value=1.0)
        given = {**attrs, "auto": "", "begins": (0,) * len(begins)}
    return total / sum(v for v, _ in _taps(given, ones))


WINDOW_OPS: dict[str, Callable[..., Tensor]] = {
    "apq.Windows": _windows,
    "apq.Pool": _pool,
}
"""As `apq_tvm.quantizers.torch.ops.OPS`."""
