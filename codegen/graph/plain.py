"""The graph of a module as plain data: what the C emitter prints, free of tvm.

A value lives in one of four places: a graph input, a weight of the weights file, a small constant
of the C source, or a buffer, which is in the arena or is a graph output. Dimensions are C
expressions of the symbols.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.types import Variant

Array = NDArray[Any]


class Place(Enum):
    """Where a value's bytes are."""

    INPUT = "input"
    WEIGHT = "weight"
    CONSTANT = "constant"
    BUFFER = "buffer"


@dataclass(frozen=True)
class Tensor:
    """A value, or a reshaped view of one.

    Parameters
    ----------
    place : Place
    key : int or str
        Number of the input or buffer, name of the weight or constant.
    dtype : str
        numpy name.
    dims : tuple of str
        C expressions.
    """

    place: Place
    key: int | str
    dtype: str
    dims: tuple[str, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(np.dtype(self.dtype).itemsize)


@dataclass
class Symbol:
    """A symbolic dimension: its names in C and in messages, the axis it is from, its bounds."""

    c_name: str
    name: str
    input: int
    axis: int
    limit: int | None = None
    least: int | None = None


@dataclass
class Buffer:
    """A tensor the graph allocates; `first` and `last` are the calls that use it.

    `output` is the graph output whose memory it is, if it is one.
    """

    name: str
    dtype: str
    dims: tuple[str, ...]
    first: int = -1
    last: int = -1
    output: int | None = None


@dataclass(frozen=True)
class IdCheck:
    """Before the call, every element of argument `arg` must be in ``lowest .. rows - 1``."""

    layer: str
    arg: int
    lowest: int
    rows: int


@dataclass(frozen=True)
class Call:
    """One kernel call.

    Parameters
    ----------
    kernel : str
        PrimFunc name; when `variants` is not empty, only what messages and comments call it.
    variants : tuple of Variant
        Chosen by `rows`, and by the layer's bits where they are chosen at run time.
    rows : str
        C expression of ``shape[0]`` of the first argument.
    precision : int
        Index in `Graph.precisions` where the layer's bits are chosen at run time; else -1.
    args : tuple of Tensor or str
        In the kernel's order; a str is a C integer expression.
    work : str
        C expression of type double: estimated nanoseconds on one thread.
    id_checks : tuple of IdCheck
    comment : str
        How the call reads in Relax.
    """

    kernel: str
    variants: tuple[Variant, ...]
    rows: str
    args: tuple[Tensor | str, ...]
    work: str
    id_checks: tuple[IdCheck, ...]
    comment: str
    precision: int = -1


@dataclass(frozen=True)
class Precision:
    """A layer whose bits are chosen at run time, and between which."""

    layer: str
    least: int
    most: int


@dataclass(frozen=True)
class Port:
    """A graph input or output: ONNX name, dtype, C dims, and how messages write each dim.

    `may_be_empty` is the axis that may be 0 long, -1 if there is none.
    """

    name: str
    dtype: str
    dims: tuple[str, ...]
    shown: tuple[str, ...]
    may_be_empty: int = -1


@dataclass(frozen=True)
class Condition:
    """Must hold for the input shapes: a C condition and the message when it does not."""

    test: str
    message: str


@dataclass
class Graph:
    """A module's graph in execution order.

    `derived` are dimensions computed from those of the inputs: name in C and expression.
    `results` holds the value of every output; `direct` tells the outputs whose buffer is written in
    place (the others are copied at the end).
    """

    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    derived: dict[str, str] = field(default_factory=dict)
    weights: dict[str, Array] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    results: tuple[Tensor, ...] = ()
    conditions: list[Condition] = field(default_factory=list)
    precisions: list[Precision] = field(default_factory=list)

    def kernels(self) -> list[str]:
        """Every PrimFunc that some call may run, sorted."""
        names: set[str] = set()
        for call in self.calls:
            names.update(variant.func for variant in call.variants if variant.func)
            if not call.variants:
                names.add(call.kernel)
        return sorted(names)


def place_outputs(graph: Graph) -> None:
    """Set lifetimes, and let each output that is a buffer of its own be written in place.

    Parameters
    ----------
    graph : Graph
        Changed in place. Buffers that no call uses keep ``first`` = -1 and get no memory.
    """
    for number, call in enumerate(graph.calls):
        for arg in call.args:
            if isinstance(arg, Tensor) and arg.place is Place.BUFFER:
                buffer = graph.buffers[int(arg.key)]
                buffer.first = number if buffer.first < 0 else buffer.first
                buffer.last = number
    for number, result in enumerate(graph.results):
        if result.place is Place.BUFFER:
            buffer = graph.buffers[int(result.key)]
            if buffer.output is None:
                buffer.output = number


def total_weight_bytes(weights: Mapping[str, Array]) -> int:
    """Bytes of all weights, without padding."""
    return sum(w.nbytes for w in weights.values())
