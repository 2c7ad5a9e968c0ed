"""A compiled module as a decoder: keys and values go in and come out of every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.bench.generate.decoder import Ports, find_ports
from apq_tvm.errors import BadInput, BadTarget
from apq_tvm.module import damaged, load_module, read_manifest
from apq_tvm.types import Array, TensorSpec


def module_ports(folder: Path) -> Ports:
    """The ports of a compiled module."""
    manifest = read_manifest(folder)
    with damaged(folder):
        inputs, outputs = (
            [TensorSpec(p["name"], p["dtype"], tuple(p["shape"])) for p in manifest[kind]]
            for kind in ("inputs", "outputs")
        )
    return find_ports(inputs, outputs, folder)


def weight_bytes(manifest: Mapping[str, Any]) -> int:
    """Bytes of the linear layers, all of which every token reads; of a table it reads one row."""
    return sum(int(x["bytes"]) for x in manifest["layers"] if x["op"] == "apq.Linear")


class ModuleDecoder:
    """A module whose caches are arrays of its runs.

    Parameters
    ----------
    folder : Path
    threads : int

    Raises
    ------
    BadInput
        It is no decoder.
    BadTarget
        It is a GPU's.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        manifest = read_manifest(folder)
        if manifest["library"].get("gpu"):
            raise BadTarget(f"{folder} is for a GPU; decoders are timed on processors")
        self.ports = module_ports(folder)
        self.weight_bytes = weight_bytes(manifest)
        self._module: Any = load_module(folder)
        self._module.set_num_threads(threads)
        self._caches: dict[str, Array] = {}
        self._length = 0
        logits = manifest["outputs"][0]["shape"][-1]
        self.vocabulary = logits if isinstance(logits, int) else None

    def prefill(self, ids: Sequence[int]) -> None:
        """Take a prompt, with nothing before it."""
        self._length = 0
        self._caches = {spec.name: self.ports.empty(spec) for spec, _ in self.ports.caches}
        self._run(ids)

    def step(self, token: int) -> None:
        """Take one more token."""
        self._run((token,))

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        cut = [slice(None)] * self.ports.axis + [slice(0, length)]
        self._caches = {
            name: np.ascontiguousarray(cache[tuple(cut)]) for name, cache in self._caches.items()
        }
        self._length = length

    def arena(self) -> int | None:
        """Bytes of working memory that the module holds."""
        return int(self._module.memory()["arena"])

    def _run(self, ids: Sequence[int]) -> None:
        feeds = self.ports.feeds(ids, self._length)
        try:
            outputs = self._module.run({**feeds, **self._caches})
        except self._module.ModuleError as error:
            raise BadInput(str(error)) from error
        self._caches = {spec.name: outputs[name] for spec, name in self.ports.caches}
        self._length += len(ids)
