"""What the GPU can do: bytes of its memory a second, products of each kind of ``mma`` a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .driver import Gpu, Kernels, Memory
from .layer import image_for
from .timing import MOST_TURNS, Candidate, measure

COPY_BYTES = 1 << 30
"""Copied and read at once, where so much is free."""

THREADS = 256
ROUNDS = 4096
"""Of the loop of an ``mma`` kernel."""

BLOCKS = 4
"""Of a multiprocessor."""

REPEATS = 4
"""Launches of a graph."""

SECONDS = 1.0
"""Spent on each."""


def rates(gpu: Gpu, folder: Path, described: Mapping[str, Any], small: bool) -> dict[str, Any]:
    """Measure them.

    Parameters
    ----------
    gpu : Gpu
    folder : Path
        The bundle.
    described : mapping
        ``rates`` of ``bundle.json``.
    small : bool
        Only whether it works.

    Returns
    -------
    dict
        ``copy_gbs``: bytes read and written by copies, ``read_gbs``: by reading, both in 10^9 bytes
        a second; ``mma_tmacs``: by kind, 10^12 multiply-adds a second.
    """
    kernels = gpu.load((folder / image_for(described["images"], gpu.sm)).read_bytes())
    with Memory(gpu) as memory:
        size = (1 << 16) if small else min(COPY_BYTES, gpu.free_bytes() // 4)
        size -= size % (1 << 12)
        source, to, out = memory.take(size), memory.take(size), memory.take(4096)
        gpu.fill(source, size)
        work: dict[str, Callable[[], None]] = {
            "copy": lambda: gpu.copy(to, source, size),
            "read": lambda: _read(gpu, kernels, source, size, out, small),
        }
        for kind in described["mma"]:
            if gpu.sm in kind["sms"]:
                work[kind["name"]] = partial(_multiply, gpu, kernels, kind, out, small)
        seconds = {name: _seconds(gpu, one, small) for name, one in work.items()}
    kernels.unload()
    warps = _blocks(gpu, small) * _threads(small) // 32
    return {
        "copy_gbs": 2 * size / seconds["copy"] / 1e9,
        "read_gbs": size / seconds["read"] / 1e9,
        "mma_tmacs": {
            kind["name"]: kind["macs"] * kind["chains"] * _rounds(small) * warps
            / seconds[kind["name"]] / 1e12
            for kind in described["mma"]
            if kind["name"] in seconds
        },
    }  # fmt: skip


def _seconds(gpu: Gpu, work: Callable[[], None], small: bool) -> float:
    def repeated() -> None:
        for _ in range(REPEATS):
            work()

    work()  # the driver loads a kernel when it is first launched, which no capture should hold
    gpu.synchronize()
    graph = gpu.capture(repeated)
    timed = measure({"it": Candidate(graph.run, REPEATS)}, SECONDS, 1 if small else MOST_TURNS)
    graph.destroy()
    return timed["it"].us / 1e6


def _rounds(small: bool) -> int:
    return 2 if small else ROUNDS


def _threads(small: bool) -> int:
    return 32 if small else THREADS


def _blocks(gpu: Gpu, small: bool) -> int:
    return 1 if small else BLOCKS * gpu.multiprocessors


def _read(gpu: Gpu, kernels: Kernels, source: int, size: int, out: int, small: bool) -> None:
    blocks = 1 if small else 8 * gpu.multiprocessors
    arguments = [("pointer", source), ("int64", size // 16), ("pointer", out)]
    kernels.launch("apq_rate_read", (blocks, 1, 1, _threads(small), 1, 1, 0), arguments)


def _multiply(gpu: Gpu, kernels: Kernels, kind: Mapping[str, Any], out: int, small: bool) -> None:
    extents = (_blocks(gpu, small), 1, 1, _threads(small), 1, 1, 0)
    kernels.launch(kind["kernel"], extents, [("int32", _rounds(small)), ("pointer", out)])
