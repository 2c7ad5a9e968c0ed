"""Which layer a call is of: its weights lie where the weights file says."""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apq_tvm.bench.profile.recorded import CallRecord


@dataclass(frozen=True)
class LayerOf:
    """A layer of the manifest, as far as its costs go.

    Parameters
    ----------
    name : str
    looks_up : bool
        An embedding: of its table only some rows are read.
    n, k : int
    integer : bool
        Whether activations are rounded, so that products are of int8.
    """

    name: str
    looks_up: bool
    n: int
    k: int
    integer: bool
    kernels: tuple[str, ...] = ()
    """What its kernels' functions are called, up to the problem's sizes."""
    bits: Mapping[str, int] = field(default_factory=dict)
    """Of those that read some of the weights' bits alone."""

    def runs(self, kernel: str) -> bool:
        """Whether a kernel's function may be one of this layer's."""
        return kernel.startswith(self.kernels)

    def share_of_planes(self, kernel: str) -> float:
        """How much of the planes of bits a kernel's function reads."""
        mine = [bits for name, bits in self.bits.items() if kernel.startswith(name)]
        return mine[0] / max(self.bits.values()) if mine else 1.0


def weight_names(weights: Path) -> dict[int, str]:
    """Names of the tensors of a safetensors file by where they start in it, ascending."""
    with weights.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    return {
        8 + size + entry["data_offsets"][0]: name
        for name, entry in sorted(
            ((n, e) for n, e in header.items() if n != "__metadata__"),
            key=lambda item: item[1]["data_offsets"][0],
        )
        if not name.startswith("_pad.")
    }


class Layers:
    """Finds the layer of a call.

    Parameters
    ----------
    manifest : mapping
        ``manifest.json`` of the module.
    weights : Path
        Its weights file.
    """

    def __init__(self, manifest: Mapping[str, Any], weights: Path) -> None:
        names = weight_names(weights)
        self._starts, self._names = list(names), list(names.values())
        self._layers = {layer["name"]: _read(layer) for layer in manifest["layers"]}

    def of(self, call: CallRecord) -> LayerOf | None:
        """The layer whose weights a call reads; None where they are of none."""
        for tensor in call.tensors:
            if tensor.weight < 0 or not tensor.nbytes:
                continue
            name = self._names[bisect_right(self._starts, tensor.weight) - 1]
            # {layer}.{array}, and @1 where several devices lay it out differently
            layer = self._layers.get(name.rpartition(".")[0])
            if layer is not None:
                return self._sharing(layer, call.kernel)
        return None

    def holds_planes(self, weight: int) -> bool:
        """Whether what lies so far behind the beginning of the weights are planes of bits."""
        name = self._names[bisect_right(self._starts, weight) - 1]
        return name.rpartition(".")[2].partition("@")[0] == "planes"

    def _sharing(self, layer: LayerOf, kernel: str) -> LayerOf:
        """The layer, or one that shares its weights: a head does with the embedding."""
        if layer.runs(kernel):
            return layer
        sizes, others = (layer.n, layer.k), self._layers.values()
        same = (other for other in others if (other.n, other.k) == sizes and other.runs(kernel))
        return next(same, layer)


def _read(layer: Mapping[str, Any]) -> LayerOf:
    integer = bool(layer["activations"]) and layer["activations"] != "float"
    looks_up = layer["op"] == "apq.Embedding"
    kernels = tuple(kernel["kernel"] for kernel in layer["kernels"])
    bits = {kernel["kernel"]: kernel["bits"] for kernel in layer["kernels"] if kernel.get("bits")}
    return LayerOf(layer["name"], looks_up, layer["n"], layer["k"], integer, kernels, bits)
