"""The graph while it is being normalised: a list of nodes, the weights, and facts about values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np

from apq_tvm.errors import ImportFailed
from apq_tvm.onnx_import.integers.codes import Codes
from apq_tvm.onnx_import.symbolic.dims import (
    Call,
    Dim,
    evaluate,
    is_run,
    maximum,
    minimum,
    parse,
    run_symbols,
    symbol,
    symbols,
)
from apq_tvm.types import Array, Node, TensorSpec

Shape = tuple[Dim | None, ...]
Inner = tuple[tuple[str, ...], str]

FLOATS = ("float32", "float64")
"""Those that `apq_tvm.onnx_import.passes.widen` leaves; such constants can be weights of layers."""


@dataclass(frozen=True)
class Part:
    """A part of a sequence: a tensor, or its entries along an axis, which is kept as 1 or not."""

    value: str
    axis: int | None = None
    keep: bool = False


@dataclass
class Graph:
    """A graph that passes rewrite in place.

    Nodes stay in topological order: a rewrite puts the new node where the last node it replaces
    stood. `outputs` are value names and never change; everything else may be renamed.

    Parameters
    ----------
    name : str
    opset : int
        Of the default domain.
    inputs, outputs : list of TensorSpec
    nodes : list of Node
    weights : dict of str to ndarray
    shapes, dtypes, values : dict
        By value: what `infer` and `values` know.
    limits, least : dict of str to int
        As in `apq_tvm.types.ImportedModel`.
    dim_names : dict of str to str
        By the ONNX name of a symbolic dimension: its name here, an identifier.
    same : dict of str to str
        Symbols that must equal another symbol or a number.
    settled : dict of str to str
        Symbols whose number a Reshape says; that comes before what a broadcast wants equal.
    sums : dict of str to str
        Symbols that were found to equal a sum of others.
    lengths : dict of str to str
        Such symbols that are replaced by it: the length of an attention mask is that of the past
        and the new tokens together.
    codes : dict of str to Codes
        By weight: the integers it was dequantized from.
    notes : dict of str to str
        As in `apq_tvm.types.ImportedModel`.
    caches : dict of str to int
        Inputs that hold a cache, and the axis along which it grows.
    run_sizes : dict of (str, int) to str
        Entries of values that become dimensions, and the symbols that stand for them.
    floors : frozenset of Call
        Quotients that are not negative, since windows have them as sizes (`symbolic.floors`).
    undecided : set of Call
        Those of which it would have to be known.
    equal : dict of str to str
        Symbols that were found to be another dimension.
    written_out : int
        Nodes that rounds of loops were written out as.
    inside : list of str
        While nodes are inferred: the branches of Ifs that are open, by their tokens.
    found_inside : dict of (tuple of str, str) to str
        What must be equal where certain branches run: those, a symbol, and the dimension it is.
    sums_inside : dict of (tuple of str, str) to str
        Likewise, of symbols that were found to equal a sum of others.
    equal_inside : dict of (tuple of str, str) to str
        Such that are replaced there.
    other_branch : dict of str to str
        By token: that of the other branch of the same If.
    sequences : dict of str to tuple of Part
        What the sequences that were met hold.
    inferred : dict
        What ONNX's inference gave: types and shapes of outputs, by what they depend on.
    as_written : bool
        Activations are rounded as the file says, and not by a scheme.
    """

    name: str
    opset: int
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    nodes: list[Node]
    weights: dict[str, Array]
    shapes: dict[str, Shape] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    least: dict[str, int] = field(default_factory=dict)
    dim_names: dict[str, str] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    settled: dict[str, str] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)
    lengths: dict[str, str] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    codes: dict[str, Codes] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    caches: dict[str, int] = field(default_factory=dict)
    run_sizes: dict[tuple[str, int], str] = field(default_factory=dict)
    floors: frozenset[Call] = frozenset()
    undecided: set[Call] = field(default_factory=set)
    equal: Mapping[str, str] = field(default_factory=dict)
    written_out: int = 0
    inside: list[str] = field(default_factory=list)
    found_inside: dict[Inner, str] = field(default_factory=dict)
    sums_inside: dict[Inner, str] = field(default_factory=dict)
    equal_inside: Mapping[Inner, str] = field(default_factory=dict)
    other_branch: dict[str, str] = field(default_factory=dict)
    sequences: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    inferred: dict[Any, list[tuple[str, Shape | None] | None]] = field(default_factory=dict)
    as_written: bool = False

    def __post_init__(self) -> None:
        self._names: set[str] = {n.name for n in self.nodes} | set(self.weights)
        self._names |= {v for n in self.nodes for v in (*n.inputs, *n.outputs)}
        self._names |= {spec.name for spec in (*self.inputs, *self.outputs)}
        self._last: dict[str, int] = {}
        self.index()

    def index(self) -> None:
        """Rebuild who makes and who reads each value; after this the rewrites below may be used."""
        self.maker: dict[str, Node] = {}
        self.uses: Counter[str] = Counter(spec.name for spec in self.outputs)
        for node in self.nodes:
            self.maker.update((out, node) for out in node.outputs if out)
            self.uses.update(v for v in node.inputs if v)

    def fresh(self, base: str) -> str:
        """A name nothing has yet, `base` if possible."""
        name, count = base, self._last.get(base, 1)
        while name in self._names:
            count += 1
            name = f"{base}_{count}"
        self._names.add(name)
        self._last[base] = count
        return name

    def cache_dims(self) -> list[int | str]:
        """Lengths of the caches among the inputs."""
        axes = ((spec, self.caches.get(spec.name)) for spec in self.inputs)
        return [spec.shape[axis] for spec, axis in axes if axis is not None]

    def input_dim(self, name: str) -> Dim:
        """What a dimension of the signature stands for."""
        text = self.lengths.get(name)
        if text is None:
            return self._kept(symbol(name))  # a length may name what was found to be another
        dim: Dim = evaluate(text, {part: self.input_dim(part) for part in symbols(parse(text))})
        return dim

    def run_size(self, value: str, entry: int) -> Dim:
        """The dimension that an entry of `value` is when the model runs."""
        name = self.run_sizes.setdefault((value, entry), f"run{len(self.run_sizes)}")
        return self._kept(symbol(name))

    def _kept(self, dim: Dim) -> Dim:
        """`dim` without the symbols that were found to be another dimension."""
        return replaced(dim, self.equal)

    def equal_in(self, branches: tuple[str, ...]) -> dict[str, str]:
        """Symbols that are another dimension where `branches` run, beside what holds around."""
        found = self.equal_inside.items()
        return {name: dim for (place, name), dim in found if place == branches}

    def rank(self, value: str) -> int | None:
        """Number of dimensions of a value or weight."""
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def shape(self, value: str) -> Shape | None:
        """Dimensions of a value or weight, None where unknown."""
        weight = self.weights.get(value)
        return self.shapes.get(value) if weight is None else weight.shape

    def dtype(self, value: str) -> str | None:
        """numpy name of the element type of a value or weight."""
        weight = self.weights.get(value)
        return self.dtypes.get(value) if weight is None else weight.dtype.name

    def known_shape(self, value: str) -> tuple[Dim, ...] | None:
        """The shape if every dimension is known, if only by an expression."""
        shape = self.shape(value)
        if shape is None or any(dim is None for dim in shape):
            return None
        return shape  # type: ignore[return-value]

    def only_use(self, value: str) -> bool:
        """Whether exactly one node reads `value`, and it is no graph output."""
        return self.uses[value] == 1

    def made_by(self, value: str, *ops: str) -> Node | None:
        """The node that makes `value`, if it is one of `ops`."""
        node = self.maker.get(value)
        return node if node is not None and node.op in ops else None

    def scalar(self, value: str) -> float | None:
        """The value of a one-element constant."""
        weight = self.weights.get(value)
        if weight is None or weight.size != 1 or weight.dtype.kind not in "fiub":
            return None
        return float(weight.reshape(()))

    def constant_operand(self, node: Node) -> float | None:
        """The one-element constant among the inputs of `node`."""
        values = (self.scalar(v) for v in node.inputs)
        return next((v for v in values if v is not None), None)

    def add_weight(self, base: str, array: Array) -> str:
        """Store `array` under a fresh name."""
        name = self.fresh(base)
        self.weights[name] = array
        return name

    def each(self) -> Iterator[Node]:
        """The nodes in order, while rewrites go on: the current node behind each output."""
        for name in [next(out for out in node.outputs if out) for node in self.nodes]:
            node = self.maker.get(name)
            if node is not None:
                yield node

    def replace(self, old: Node, *new: Node) -> None:
        """Put `new` where `old` stood; the last of them makes the outputs of `old`.

        Nodes that nothing reads any more go at once.
        """
        at = self._position(old)
        self.nodes[at : at + 1] = new
        for node in new:
            self.maker.update((out, node) for out in node.outputs if out)
            self.uses.update(v for v in node.inputs if v)
        self._release(old.inputs)

    def _position(self, node: Node) -> int:
        return next(i for i, other in enumerate(self.nodes) if other is node)

    def _release(self, values: Iterable[str]) -> None:
        for value in values:
            if not value:
                continue
            self.uses[value] -= 1
            node = self.maker.get(value)
            if node is not None and node.op == SIZES:
                continue  # dimensions may be made of it: `sweep` looks
            if node is not None and not any(self.uses[out] for out in node.outputs):
                for out in node.outputs:
                    self.maker.pop(out, None)
                del self.nodes[self._position(node)]
                self._release(node.inputs)

    def sweep(self) -> None:
        """Drop nodes and weights that no output depends on."""
        live = {spec.name for spec in self.outputs}
        sizes = bool(self.run_sizes)
        kept = []
        for node in reversed(self.nodes):
            made = defined(node) if sizes else ()
            if live.intersection((*node.outputs, *made)):
                live.update(v for v in node.inputs if v)
                live.update(self.mentioned(node) if sizes else ())
                kept.append(_without_unread_outputs(node, live))
        self.nodes = kept[::-1]
        self.weights = {name: array for name, array in self.weights.items() if name in live}
        self.index()

    def mentioned(self, node: Node) -> frozenset[str]:
        """Symbols that only a run knows in the attributes of a node and the shapes it makes."""
        found: set[str] = set()
        for value in node.attrs.values():
            for entry in value if isinstance(value, tuple) else (value,):
                if isinstance(entry, str) and "run" in entry and node.op.startswith("apq."):
                    found |= {word for word in re.findall(r"\w+", entry) if is_run(word)}
        for output in node.outputs:
            for dim in self.shapes.get(output) or ():
                found |= run_symbols(dim) if dim is not None else set()
        return frozenset(found)

    def describe(self, value: str) -> str:
        """A value with its type, for error messages."""
        shape = self.shape(value)
        dims = "?" if shape is None else ", ".join("?" if d is None else str(d) for d in shape)
        return f"{value!r} {self.dtype(value) or '?'}[{dims}]"


SIZES = "apq.Sizes"


def replaced(dim: Dim, equal: Mapping[str, str]) -> Dim:
    """`dim` with symbols replaced by the dimensions that they are equal to."""
    while known := {name for name in symbols(dim) if name in equal}:
        parts = {name: symbol(name) for name in symbols(dim)}
        parts |= {name: parse(equal[name]) for name in known}  # type: ignore[misc]
        dim = evaluate(str(dim), parts, minimum, maximum)
    return dim


def defined(node: Node) -> tuple[str, ...]:
    """Symbols that `node` gives their sizes when it runs."""
    if node.op != SIZES:
        return ()
    return tuple(dim for dim in node.attrs["dims"] if isinstance(dim, str) and is_run(dim))


# Operators all of whose outputs are there, read or not: of Split they say how many parts there are,
# those of a region's start, and of a branch's end, stand where its inputs do.
WHOLE = frozenset("DynamicQuantizeLinear Split TopK apq.Loop apq.Then apq.Else apq.EndIf".split())


def _without_unread_outputs(node: Node, live: set[str]) -> Node:
    """Without the optional outputs at the end that nobody reads, e.g. a Dropout's mask."""
    outputs = list(node.outputs)
    if node.op in WHOLE or "dtypes" in node.attrs:
        return node  # operators of ours make every output, some as scratch memory
    while len(outputs) > 1 and outputs[-1] not in live:
        outputs.pop()
    return node if len(outputs) == len(node.outputs) else replace(node, outputs=tuple(outputs))


def sort_nodes(nodes: list[Node], known: Iterable[str]) -> list[Node]:
    """Topological order, stable.

    Parameters
    ----------
    nodes : list of Node
    known : iterable of str
        Values that exist before any node ran: inputs and weights.

    Raises
    ------
    ImportFailed
        A value nobody makes, or a cycle; the message names the nodes.
    """
    ready, made = set(known) | {""}, {out for node in nodes for out in node.outputs}
    for node in nodes:
        for value in node.inputs:
            if value not in made and value not in ready:
                raise ImportFailed(
                    f"{node.op} {node.name!r} reads {value!r}, which no node, input or weight makes"
                )
    readers: dict[str, list[int]] = {}
    missing = [len({v for v in node.inputs if v not in ready}) for node in nodes]
    for i, node in enumerate(nodes):
        for value in {v for v in node.inputs if v not in ready}:
            readers.setdefault(value, []).append(i)
    # Of those whose inputs are there, the first in the file.
    order, free = [], [i for i, count in enumerate(missing) if not count]
    while free:
        node = nodes[heappop(free)]
        order.append(node)
        for value in node.outputs:
            for i in readers.pop(value, ()):
                missing[i] -= 1
                if not missing[i]:
                    heappush(free, i)
    if len(order) < len(nodes):
        left = [node for node, count in zip(nodes, missing, strict=True) if count]
        names = ", ".join(repr(node.name) for node in _on_cycle(left))
        raise ImportFailed(f"the graph has a cycle through the nodes {names}")
    return order


def _on_cycle(nodes: list[Node]) -> list[Node]:
    """The nodes of one cycle among `nodes`, each of which waits for another."""
    maker = {out: node for node in nodes for out in node.outputs}
    path: list[Node] = []
    node = nodes[0]
    while all(node is not seen for seen in path):
        path.append(node)
        node = next(maker[value] for value in node.inputs if value in maker)
    start = next(i for i, seen in enumerate(path) if seen is node)
    return path[start:]


def with_attrs(node: Node, attrs: Mapping[str, Any]) -> Node:
    """`node` with some attributes changed."""
    return replace(node, attrs={**node.attrs, **attrs})


def np_dtype(elem_type: int) -> str:
    """numpy name of an ONNX element type."""
    from onnx import helper

    return str(np.dtype(helper.tensor_dtype_to_np_dtype(elem_type)).name)


def type_number(dtype: str) -> int:
    """ONNX's element type of a numpy name."""
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
