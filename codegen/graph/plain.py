"""The graph of a module as plain data: what the C emitter prints, free of tvm.

A value lives in one of four places: a graph input, a weight of the weights file, a small constant
of the C source, or a buffer, which is in the arena or is a graph output. Dimensions are C
expressions of the symbols.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.types import Variant

Array = NDArray[Any]

ATTENDING = ("attention", "attention_quantize_words", "cached_attention")
"""``apq.op`` of attention: behind q come keys; over none of them all that it writes is 0."""

GROWING = ("cache", "coded_cache")
"""``apq.op`` of what writes behind what its results hold already."""


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
    """A symbolic dimension: its names in C and in messages, the axis it is from, its bounds.

    With `input` -1 the runtime gives it, as number `axis` of what it gives.
    """

    c_name: str
    name: str
    input: int
    axis: int
    limit: int | None = None
    least: int | None = None


@dataclass
class Buffer:
    """A tensor the graph allocates; `first` and `last` are the steps that use it.

    `output` is the graph output whose memory it is, if it is one. `segment` is the number of
    `Sizes` steps that its size waits for: 0 where it follows from the inputs. What `grows` outlives
    the runs of a session.
    """

    name: str
    dtype: str
    dims: tuple[str, ...]
    first: int = -1
    last: int = -1
    output: int | None = None
    segment: int = 0
    grows: bool = False


@dataclass(frozen=True)
class IdCheck:
    """Before the call, elements of argument `arg` must be in ``lowest .. rows - 1``.

    `lowest` and `rows` are C expressions; every element is checked, or of `columns` that lie side
    by side the one at `column`.
    """

    layer: str
    arg: int
    lowest: str
    rows: str
    column: int = 0
    columns: int = 1


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
    products : str
        C expression: multiply-adds that the function tells of (`apq_tvm.codegen.graph.products`).
    id_checks : tuple of IdCheck
    comment : str
        How the call reads in Relax.
    outputs : int
        How many arguments at the end the call writes.
    grows : bool
        Whether the tensors it writes may hold a part already (`apq_tvm.ops.graph.caches.grown`).
    attends : bool
        Whether all that it writes is 0 where its second argument is empty (`ATTENDING`).
    """

    kernel: str
    variants: tuple[Variant, ...]
    rows: str
    args: tuple[Tensor | str, ...]
    work: str
    id_checks: tuple[IdCheck, ...]
    comment: str
    precision: int = -1
    outputs: int = 1
    grows: bool = False
    attends: bool = False
    products: str = "0"


@dataclass(frozen=True)
class Condition:
    """Must hold for the input shapes: a C condition and the message when it does not.

    Among the steps, it must hold where it stands: a branch that does not run asks nothing.
    """

    test: str
    message: str


@dataclass(frozen=True)
class Copy:
    """The bytes of one value become those of another of the same shape.

    Parameters
    ----------
    target, source : Tensor
    target_row, source_row : str
        C expression: which entry along an axis before the first is meant; ``""`` where the tensor
        has no such axis.
    """

    target: Tensor
    source: Tensor
    target_row: str = ""
    source_row: str = ""


@dataclass(frozen=True)
class Region:
    """Where a region of steps starts or ends; regions are nested properly.

    Parameters
    ----------
    kind : str
        ``"loop"``, ``"end_loop"``, ``"then"``, ``"else"`` or ``"end_if"``.
    number : int
        Of the loop: its C counter is ``i{number}``.
    trip : str or Tensor
        A loop's largest number of rounds: a C expression, or an int64 of no dimensions.
    condition : Tensor or None
        A boolean: of ``"then"``, and of a loop that may stop earlier, read before every round.
    counter : Tensor or None
        An int64 that holds the number of the round.
    keeps : tuple of Tensor
        What must outlive the rounds of a loop: values it carries or collects.
    """

    kind: str
    number: int = 0
    trip: str | Tensor = ""
    condition: Tensor | None = None
    counter: Tensor | None = None
    keeps: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """Entries of a tensor become dimensions; buffers that wait for them get their memory.

    Parameters
    ----------
    source : Tensor
        int64, of constant shape.
    dims : tuple of str
        Per entry the C name of the dimension it gives, or a C expression that it must equal.
    names : tuple of str
        Those of `dims` that are given here.
    layer : str
        For messages.
    conditions : tuple of Condition
        Must hold once these sizes are known.
    """

    source: Tensor
    dims: tuple[str, ...]
    names: tuple[str, ...]
    layer: str
    conditions: tuple[Condition, ...] = ()


Step = Call | Condition | Copy | Region | Sizes


def tensors_of(step: Step) -> list[Tensor]:
    """Every value that a step touches."""
    if isinstance(step, Call):
        return [arg for arg in step.args if isinstance(arg, Tensor)]
    if isinstance(step, Copy):
        return [step.target, step.source]
    if isinstance(step, Condition):
        return []
    if isinstance(step, Sizes):
        return [step.source]
    values = (step.trip, step.condition, step.counter, *step.keeps)
    return [value for value in values if isinstance(value, Tensor)]


@dataclass(frozen=True)
class Precision:
    """A layer whose bits are chosen at run time, and between which."""

    layer: str
    least: int
    most: int


@dataclass(frozen=True)
class Port:
    """A graph input or output: ONNX name, dtype, C dims, and how messages write each dim.

    `late` tells that the shape depends on data, `cut` that the first axis is `Graph.batch`.
    """

    name: str
    dtype: str
    dims: tuple[str, ...]
    shown: tuple[str, ...]
    late: bool = False
    cut: bool = False


@dataclass(frozen=True)
class Kept:
    """What sessions need.

    Parameters
    ----------
    feeds : tuple of str
        What goes to each input: ``"past"``, or as in `apq_tvm.types.State`.
    ids, logits : int
        Input and output.
    past_axis : int
        Of inputs that are caches, the one that counts tokens.
    presents : frozenset of int
        Outputs that sessions do not want.
    """

    feeds: tuple[str, ...]
    ids: int
    past_axis: int
    logits: int
    presents: frozenset[int]


@dataclass(frozen=True)
class Stage:
    """Steps from `first` on that take the same number of images at once, and their weights."""

    first: int
    weight_bytes: int


@dataclass
class Graph:
    """A module's graph in execution order.

    `derived` are dimensions computed from others: name in C and expression; `run_sizes` the C names
    of those that `Sizes` steps give.
    `results` holds the value of every output; `direct` tells the outputs whose buffer is written in
    place (the others are copied at the end). `batch` is the number of the symbol along which runs
    may be cut into parts (`apq_tvm.onnx_import.apart`), -1 if there is none; `stages` are what such
    parts may be cut into in turn (`apq_tvm.codegen.graph.stages`). `kept` is of decoders that have
    sessions.
    """

    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    derived: dict[str, str] = field(default_factory=dict)
    run_sizes: tuple[str, ...] = ()
    weights: dict[str, Array] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    results: tuple[Tensor, ...] = ()
    conditions: list[Condition] = field(default_factory=list)
    precisions: list[Precision] = field(default_factory=list)
    batch: int = -1
    kept: Kept | None = None
    stages: tuple[Stage, ...] = ()

    @property
    def calls(self) -> list[Call]:
        """The kernel calls among the steps."""
        return [step for step in self.steps if isinstance(step, Call)]

    def expressions(self) -> set[str]:
        """Every sum, difference and product of sizes that is computed, the parts of others too."""
        texts = {d for port in (*self.inputs, *self.outputs) for d in port.dims}
        texts |= {d for buffer in self.buffers for d in buffer.dims}
        texts |= {condition.test for condition in self.conditions}
        for step in self.steps:
            if isinstance(step, Condition):
                texts.add(step.test)
            elif isinstance(step, Sizes):
                texts |= {*step.dims, *(condition.test for condition in step.conditions)}
            elif isinstance(step, Call):
                texts |= {step.rows, *(arg for arg in step.args if isinstance(arg, str))}
            elif isinstance(step, Region) and isinstance(step.trip, str):
                texts.add(step.trip)
            for tensor in tensors_of(step):
                texts |= set(tensor.dims)
        return {part for text in texts for part in parenthesised(text)}

    @property
    def sizes(self) -> list[Sizes]:
        """The steps that make dimensions of data, in order."""
        return [step for step in self.steps if isinstance(step, Sizes)]

    def waits_for(self, text: str) -> int:
        """How many of `sizes` must have run before a C expression is known."""
        if not self.run_sizes:
            return 0
        numbers = {name: i + 1 for i, step in enumerate(self.sizes) for name in step.names}
        words, last, seen = re.findall(r"\w+", text), 0, set[str]()
        while words:
            word = words.pop()
            last = max(last, numbers.get(word, 0))
            if word in self.derived and word not in seen:
                seen.add(word)
                words += re.findall(r"\w+", self.derived[word])
        return last

    def kernels(self) -> list[str]:
        """Every PrimFunc that some call may run, sorted."""
        names: set[str] = set()
        for call in self.calls:
            names.update(variant.func for variant in call.variants if variant.func)
            if not call.variants:
                names.add(call.kernel)
        return sorted(names)


def parenthesised(text: str) -> list[str]:
    """The parts of a C expression in parentheses of their own, not those of a function."""
    starts: list[int] = []
    parts = []
    for at, letter in enumerate(text):
        if letter == "(":
            starts.append(at)
        elif letter == ")":
            start = starts.pop()
            if start == 0 or not (text[start - 1].isalnum() or text[start - 1] == "_"):
                parts.append(text[start : at + 1])
    return parts


def place_outputs(graph: Graph) -> None:
    """Set lifetimes, and let each output that is a buffer of its own be written in place.

    Parameters
    ----------
    graph : Graph
        Changed in place. Buffers that no call uses keep ``first`` = -1 and get no memory.
    """
    for number, step in enumerate(graph.steps):
        for tensor in tensors_of(step):
            if tensor.place is Place.BUFFER:
                buffer = graph.buffers[int(tensor.key)]
                buffer.first = number if buffer.first < 0 else buffer.first
                buffer.last = number
    _outlive_loops(graph)
    for buffer in graph.buffers:
        buffer.segment = max((graph.waits_for(dim) for dim in buffer.dims), default=0)
    for number, result in enumerate(graph.results):
        if result.place is Place.BUFFER:
            buffer = graph.buffers[int(result.key)]
            if graph.outputs[number].late:
                buffer.last = len(graph.steps)  # it is read there after the run
            elif buffer.output is None:
                buffer.output = number


def _outlive_loops(graph: Graph) -> None:
    """What a loop reads and did not make is needed until its last round."""
    started: list[int] = []
    for number, step in enumerate(graph.steps):
        kind = step.kind if isinstance(step, Region) else ""
        if kind == "loop":
            started.append(number)
        elif kind == "end_loop":
            start = started.pop()  # inner loops end before those around them
            for buffer in graph.buffers:
                if 0 <= buffer.first <= start <= buffer.last <= number:
                    buffer.last = number


def cut_along(graph: Graph, batch: str) -> None:
    """Let runs be cut into parts along a dimension of the signature that the model keeps apart.

    Parameters
    ----------
    graph : Graph
        Changed in place, where no condition or other size is about that dimension.
    batch : str
        Its name, ``""`` for none (`apq_tvm.types.ImportedModel.batch`).
    """
    number = next((i for i, symbol in enumerate(graph.symbols) if symbol.name == batch), -1)
    name = graph.symbols[number].c_name if number >= 0 else ""
    about = [condition.test for condition in graph.conditions]
    about += [step.test for step in graph.steps if isinstance(step, Condition)]
    about += graph.derived.values()
    if not name or graph.run_sizes or any(name in re.findall(r"\w+", text) for text in about):
        return
    graph.batch = number
    graph.inputs, graph.outputs = (
        tuple(replace(port, cut=port.dims[:1] == (name,)) for port in ports)
        for ports in (graph.inputs, graph.outputs)
    )


def total_weight_bytes(weights: Mapping[str, Array]) -> int:
    """Bytes of all weights, without padding."""
    return sum(w.nbytes for w in weights.values())
