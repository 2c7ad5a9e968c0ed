"""An ONNX decoder in ONNX Runtime, its caches bound where they lie.

Where grouped queries are ONNX Runtime's own operator, past and present are one buffer of the
longest length, as its own generation library does it: nothing is copied from token to token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.bench.generate.decoder import find_ports
from apq_tvm.errors import BadInput
from apq_tvm.evaluate import open_session, specs_of
from apq_tvm.types import Array, TensorSpec

SHARING = "GroupQueryAttention"
"""The operator whose past and present may be one buffer."""


def read_facts(path: Path) -> tuple[int, bool]:
    """Bytes of weights that every token reads, and whether caches may be shared buffers.

    Tables that only `Gather` reads are looked up, not read.
    """
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    used: dict[str, set[str]] = {}
    for node in graph.node:
        for name in node.input:
            used.setdefault(name, set()).add(node.op_type)
    looked_up = {"Gather", "GatherBlockQuantized"}
    sizes = {
        tensor.name: int(np.prod(tensor.dims))
        * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in graph.initializer
    }
    read = sum(size for name, size in sizes.items() if not used.get(name, set()) <= looked_up)
    kinds = {node.op_type for node in graph.node}
    return read, SHARING in kinds


class OnnxDecoder:
    """An ONNX file as a decoder.

    Parameters
    ----------
    path : Path
    threads, longest : int
        `longest` is the most tokens that it will hold.

    Raises
    ------
    BadInput
        It is no decoder, or ONNX Runtime refuses it.
    """

    def __init__(self, path: Path, threads: int, longest: int) -> None:
        import onnxruntime

        self._session = open_session(path, threads)
        outputs = [
            TensorSpec(o.name, "float32", tuple(o.shape)) for o in self._session.get_outputs()
        ]
        self.ports = find_ports(specs_of(self._session), outputs, path)
        self.cache_bytes = self.ports.cache_bytes(1)
        self.weight_bytes, self._shared = read_facts(path)
        self.how = "one buffer" if self._shared else "caches in and out of every run"
        last = outputs[0].shape[-1] if outputs[0].shape else None
        self.vocabulary = last if isinstance(last, int) else None
        caches = {name for _, name in self.ports.caches}
        self._others = [o.name for o in outputs if o.name not in caches]
        self._value = onnxruntime.OrtValue.ortvalue_from_numpy
        self._longest, self._length = longest, 0
        self._caches = self._fresh(longest if self._shared else 0)

    def _fresh(self, length: int) -> dict[str, Any]:
        return {s.name: self._value(self.ports.empty(s, length)) for s, _ in self.ports.caches}

    def prefill(self, ids: Sequence[int]) -> None:
        """Take a prompt, with nothing before it."""
        self._length = 0
        if not self._shared:
            self._caches = self._fresh(0)
        self._run(ids)

    def step(self, token: int) -> None:
        """Take one more token."""
        self._run((token,))

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        if not self._shared:
            cut = [slice(None)] * self.ports.axis + [slice(0, length)]
            self._caches = {
                name: self._value(np.ascontiguousarray(value.numpy()[tuple(cut)]))
                for name, value in self._caches.items()
            }
        self._length = length

    def arena(self) -> int | None:
        """ONNX Runtime does not tell."""
        return None

    def _run(self, ids: Sequence[int]) -> None:
        if self._length + len(ids) > self._longest:
            raise BadInput(f"{self._length + len(ids)} tokens are more than {self._longest}")
        binding = self._session.io_binding()
        arrays: dict[str, Array] = self.ports.feeds(ids, self._length)
        for name, array in arrays.items():
            binding.bind_cpu_input(name, array)
        for spec, present in self.ports.caches:
            binding.bind_ortvalue_input(spec.name, self._caches[spec.name])
            if self._shared:
                binding.bind_ortvalue_output(present, self._caches[spec.name])
            else:
                binding.bind_output(present)
        for name in self._others:
            binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        if not self._shared:
            outputs = binding.get_outputs()  # in the order they were bound
            self._caches = dict(zip(self._caches, outputs, strict=False))
        self._length += len(ids)
