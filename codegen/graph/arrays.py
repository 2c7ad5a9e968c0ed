"""Weights and constants of a graph, each stored once, and the element types there are."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from apq_tvm.codegen.graph.plain import Array, Graph, Place, Tensor
from apq_tvm.errors import UnsupportedModel
from apq_tvm.types import TensorSpec

# A constant of up to this many bytes is written into the C source, others go to the weights file.
SMALL_CONSTANT_BYTES = 256
DTYPES = frozenset(
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64".split()
)


class Arrays:
    """Puts arrays into a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._by_content: dict[str, str] = {}  # hash of an array → its name among the weights

    def weight(self, name: str, array: Array) -> Tensor:
        """An array as a weight, stored once however often its content appears."""
        array = np.asarray(array)
        dims = tuple(str(d) for d in array.shape)
        dtype = known_dtype(str(array.dtype), name)
        digest = hashlib.sha256(
            np.ascontiguousarray(array).view(np.uint8).data if array.ndim else array.tobytes()
        )
        key = f"{digest.hexdigest()}:{dtype}:{array.shape}"
        if key not in self._by_content:
            self._by_content[key] = name
            self._graph.weights[name] = array
        return Tensor(Place.WEIGHT, self._by_content[key], dtype, dims)

    def constant(self, array: Array) -> Tensor:
        """An array that nobody named: in the C source if it is small."""
        dtype = known_dtype(str(array.dtype), "a constant")
        digest = hashlib.sha256(array.tobytes() + f"{dtype}{array.shape}".encode()).hexdigest()[:12]
        if array.nbytes > SMALL_CONSTANT_BYTES:
            return self.weight(f"const.{digest}", array)
        name = f"c_{digest}"
        self._graph.constants[name] = array
        return Tensor(Place.CONSTANT, name, dtype, tuple(str(d) for d in array.shape))


def declared_dtype(dtype: str, spec: TensorSpec) -> str:
    """The type a user sees: bfloat16 is bits of 16 to kernels."""
    return "bfloat16" if (dtype, spec.dtype) == ("uint16", "bfloat16") else dtype


def known_dtype(dtype: Any, name: str) -> str:
    """An element type as text.

    Raises
    ------
    UnsupportedModel
        None of `DTYPES`; the message says what `name` it has.
    """
    if str(dtype) not in DTYPES:
        raise UnsupportedModel(f"'{name}' has type {dtype}; known are {', '.join(sorted(DTYPES))}")
    return str(dtype)
