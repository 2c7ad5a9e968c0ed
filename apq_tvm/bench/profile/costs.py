"""What a call has to move and to multiply, and the least time that this takes.

A run's calls are known by address, so for every tensor it is known how many bytes were touched
since it was used last. The nearest cache that holds as many is where it is read from: that bounds
the call, not memory, where all of a model lies in a cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from apq_tvm.bench.caches import Level, level_of
from apq_tvm.bench.profile.layers import LayerOf, Layers
from apq_tvm.bench.profile.recorded import CallRecord, TensorUse
from apq_tvm.bench.roofline import Limits

PAGE = 4096
"""Bytes whose last use is remembered together."""


@dataclass(frozen=True)
class Cost:
    """A call's cost.

    Parameters
    ----------
    kernel, layer : str
        ``layer`` is empty for what is no layer's.
    nbytes : tuple of int
        Bytes of its tensors by the level that they come from, the nearest first.
    products : int
        Multiply-adds.
    integer : bool
        True if they are of int8.
    tasks : int
        Threads it was cut for.
    """

    kernel: str
    layer: str
    nbytes: tuple[int, ...]
    products: int
    integer: bool
    tasks: int


def costs(
    calls: Sequence[CallRecord], layers: Layers, levels: Sequence[Level], cold: bool
) -> list[Cost]:
    """Cost of every call of a run.

    Parameters
    ----------
    calls : sequence of CallRecord
    layers : Layers
    levels : sequence of Level
    cold : bool
        Whether nothing is in a cache when a run begins; else runs follow one another.
    """
    of = [layers.of(call) for call in calls]
    read = [
        [touched(t, call, layer, layers) for t in call.tensors]
        for call, layer in zip(calls, of, strict=True)
    ]
    last: dict[int, int] = {}
    footprint: float = _walk(calls, read, last, math.inf)[1]
    if cold:
        last, footprint = {}, math.inf
    before = sum(map(sum, read))  # a run earlier
    distances, _ = _walk(calls, read, {p: at - before for p, at in last.items()}, footprint)
    made = []
    for call, layer, sizes, ago in zip(calls, of, read, distances, strict=True):
        nbytes = [0] * len(levels)
        for size, distance in zip(sizes, ago, strict=True):
            nbytes[level_of(distance, levels)] += size
        products, integer = arithmetic(call, layer)
        name = layer.name if layer else ""
        made.append(Cost(call.kernel, name, tuple(nbytes), products, integer, call.tasks))
    return made


def touched(tensor: TensorUse, call: CallRecord, layer: LayerOf | None, layers: Layers) -> int:
    """Bytes of a tensor that a call reads or writes.

    Of a table those are the rows that are looked up, of planes of bits those of the width it runs.
    """
    if layer is None or tensor.weight < 0:
        return tensor.nbytes
    if layer.bits and layers.holds_planes(tensor.weight):
        return math.ceil(tensor.nbytes * layer.share_of_planes(call.kernel))
    if not layer.looks_up:
        return tensor.nbytes
    rows = call.tensors[-1].elements / max(layer.k, 1)
    return math.ceil(tensor.nbytes * min(1.0, rows / max(layer.n, 1)))


def arithmetic(call: CallRecord, layer: LayerOf | None) -> tuple[int, bool]:
    """Multiply-adds of a call, and whether they are of int8."""
    if layer is None:
        return int(call.products), False
    if layer.looks_up or not call.tensors:
        return 0, False
    return call.tensors[-1].elements * layer.k, layer.integer


def _walk(
    calls: Sequence[CallRecord], read: Sequence[Sequence[int]], last: dict[int, int], most: float
) -> tuple[list[list[float]], int]:
    """Per tensor the bytes touched since its last use, at most `most`; and all that is touched.

    `last` maps a page to the bytes that had been touched when it was used; it is kept up to date.
    """
    now, seen = 0, 0
    distances: list[list[float]] = []
    for call, sizes in zip(calls, read, strict=True):
        mine: list[float] = []
        for tensor, size in zip(call.tensors, sizes, strict=True):
            first = tensor.address // PAGE
            pages = range(first, max(tensor.address + size - 1, tensor.address) // PAGE + 1)
            mine.append(min(most, max((now - last[p] if p in last else math.inf) for p in pages)))
            new = sum(p not in last for p in pages)
            seen += size * new // len(pages)
            last.update(dict.fromkeys(pages, now))  # its own bytes lie between two uses of it
            now += size
        distances.append(mine)
    return distances, seen


def limit(cost: Cost, limits: Limits, levels: Sequence[Level]) -> tuple[float, str]:
    """The least microseconds that a call can take, and what binds it.

    Bytes that come from a level pass through the nearer ones too; levels and arithmetic work at
    the same time.

    Parameters
    ----------
    cost : Cost
    limits : Limits
    levels : sequence of Level

    Returns
    -------
    (float, str)
        And ``"L2"``, ``"L3"``, ``"DRAM"``, ``"int8"`` or ``"fp32"``.
    """
    rate = limits.int8_gmacs if cost.integer else limits.fp32_gmacs
    bounds = [(cost.products / rate / 1e3, "int8" if cost.integer else "fp32")]
    bounds += [
        (sum(cost.nbytes[i:]) / level.gbs / 1e3, level.name) for i, level in enumerate(levels)
    ]
    return max(bounds, key=lambda bound: bound[0])
