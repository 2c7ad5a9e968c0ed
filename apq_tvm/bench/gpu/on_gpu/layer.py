"""A layer of the bundle on the GPU: its weights in several copies, its launches, its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .driver import Gpu, Graph, Kernels, Memory, Unfit
from .timing import Candidate, rounds_of, seconds_of

SEED = 1

MOST_COPIES = 512
"""Of a layer's weights."""


def image_for(images: Mapping[str, str], sm: int) -> str:
    """The image for a compute capability: its own, or an earlier one of the same major.

    Source: CUDA C++ Programming Guide, "Binary Compatibility".

    Raises
    ------
    Unfit
        There is none.
    """
    fits = [int(one) for one in images if int(one) <= sm and int(one) // 10 == sm // 10]
    if not fits:
        there = ", ".join(f"{int(one) // 10}.{int(one) % 10}" for one in images)
        raise Unfit(
            f"this GPU has compute capability {sm // 10}.{sm % 10}, and the bundle's images are "
            f"for {there}: prepare one with --target for it"
        )
    return images[str(max(fits))]


def copies_of(nbytes: float, l2_bytes: int, small: bool) -> int:
    """Copies of weights of which all others, together twice the cache, are read between two uses
    of one; of tiny ones fewer, which stay in the cache."""
    wanted = 1 + max(1, -(-2 * l2_bytes // max(int(nbytes), 1)))
    return 2 if small else min(wanted, MOST_COPIES)


class Layer:
    """One layer's weights and kernels.

    Parameters
    ----------
    gpu : Gpu
    folder : Path
        The bundle.
    described : mapping
        The layer's part of ``bundle.json``.
    copies : int
        Of the weights.
    memory : Memory
    """

    def __init__(
        self, gpu: Gpu, folder: Path, described: Mapping[str, Any], copies: int, memory: Memory
    ) -> None:
        self.gpu, self.n = gpu, int(described["n"])
        image = (folder / image_for(described["images"], gpu.sm)).read_bytes()
        with np.load(folder / described["weights"]) as file:
            self.tile: dict[str, NDArray[Any]] = dict(file)
        arrays: Mapping[str, Any] = described["arrays"]
        self.rows = self._blocks(arrays, int(described["tile_rows"]))
        self.kernels = gpu.load(image)
        made = {name: self._whole(name, **where) for name, where in arrays.items()}
        self.copies = [{name: memory.upload(array) for name, array in made.items()}]
        for _ in range(copies - 1):
            more = {name: memory.take(array.nbytes) for name, array in made.items()}
            for name, address in more.items():
                gpu.copy(address, self.copies[0][name], made[name].nbytes)
            self.copies.append(more)
        gpu.synchronize()

    def _blocks(self, arrays: Mapping[str, Any], tile_rows: int) -> NDArray[np.int64]:
        """Which row of the tile each row of the weights is: random blocks of it."""
        tall = max((where["rows"] for where in arrays.values()), default=1)
        rng = np.random.default_rng(SEED)
        blocks = rng.integers(0, tile_rows // tall, -(-self.n // tall))
        return (blocks[:, None] * tall + np.arange(tall)).ravel()

    def _whole(self, name: str, axis: int, rows: int, count: int) -> NDArray[Any]:
        """An array of all rows: `count` blocks of `rows` along an axis; as it is if `rows` is 0."""
        tile = self.tile[f"weight_{name}"]
        if rows == 0:
            return tile
        return np.take(tile, self.rows[::rows][:count] // rows, axis)


class Case:
    """A layer for so many rows of x.

    Parameters
    ----------
    layer : Layer
    described : mapping
        The case's part of ``bundle.json``.
    memory : Memory
    kernels : Kernels, optional
        Those of a candidate; by default the layer's.
    """

    def __init__(
        self,
        layer: Layer,
        described: Mapping[str, Any],
        memory: Memory,
        kernels: Kernels | None = None,
    ) -> None:
        self._layer, self._described, self._memory = layer, described, memory
        self._kernels = kernels or layer.kernels
        self._graphs: list[Graph] = []
        self._m, self._bits = int(described["m"]), int(described["bits"])
        self._places = {"x": memory.upload(layer.tile[f"x{self._bits}"][: self._m])}
        for name, size in described["buffers"].items():
            if name != "x":
                self._places[name] = memory.take(size)
        self.clear()

    def clear(self) -> None:
        """Forget what was computed: what nobody writes again is NaN."""
        for name, size in self._described["buffers"].items():
            if name != "x":
                self._layer.gpu.fill(self._places[name], size)

    def compute(self) -> None:
        """Once, by the last copy of the weights."""
        launches = self._described["before"] + self._described["product"]
        self._launch(self._layer.copies[-1], launches)

    def error(self) -> tuple[float, float]:
        """How wrong the result is that is there now.

        Returns
        -------
        float, float
            The largest error against the exact product of what the kernels multiply, and the mean
            one against that of x itself; both relative to the root mean square of the result.
        """
        layer = self._layer
        y = self._memory.download(self._places["y"], (self._m, layer.n))
        tile, rows = layer.tile, layer.rows[: layer.n]
        exact, plain = (tile[f"{w}{self._bits}"][: self._m, rows] for w in ("answer", "plain"))
        size = float(np.sqrt(np.mean(exact**2)))
        return float(np.abs(y - exact).max() / size), float(np.abs(y - plain).mean() / size)

    def candidates(self, small: bool) -> dict[str, Candidate]:
        """What is timed: all launches, and those of the product alone."""
        before, product = self._described["before"], self._described["product"]
        made = {"ours": self._candidate(before + product, small)}
        made["product"] = self.product(small) if before else made["ours"]
        return made

    def product(self, small: bool) -> Candidate:
        """The launches of the product alone."""
        return self._candidate(self._described["product"], small)

    def close(self) -> None:
        """Give the graphs back."""
        for graph in self._graphs:
            graph.destroy()
        if self._kernels is not self._layer.kernels:
            self._kernels.unload()

    def _candidate(self, launches: list[dict[str, Any]], small: bool) -> Candidate:
        copies = self._layer.copies

        def work(rounds: int) -> None:
            for _ in range(rounds):
                for weights in copies:
                    self._launch(weights, launches)

        graph, rounds = self._captured(lambda: work(1)), 1
        if not small:
            graph.run()
            rounds = rounds_of(seconds_of(graph.run), len(copies) * len(launches))
            graph = self._captured(lambda: work(rounds))
        return Candidate(graph.run, len(copies) * rounds)

    def _captured(self, work: Callable[[], None]) -> Graph:
        graph = self._layer.gpu.capture(work)
        self._graphs.append(graph)
        return graph

    def _launch(self, weights: Mapping[str, int], launches: list[dict[str, Any]]) -> None:
        places = {**self._places, **weights}
        for launch in launches:
            arguments = [
                (kind, places[value] if kind == "pointer" else value)
                for kind, value in launch["arguments"]
            ]
            self._kernels.launch(launch["kernel"], launch["extents"], arguments)
