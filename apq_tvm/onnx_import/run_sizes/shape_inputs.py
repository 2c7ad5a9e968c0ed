"""Operators that are told a size by a tensor whose contents depend on data.

What the tensor says is worked out as sizes from 0 on (``apq.Numbers``), the sizes become symbols
(``apq.Sizes``), and the operator reads those: all rules for symbolic dimensions hold from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import.graph import SIZES, Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic import ratios
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr, maximum, parse
from apq_tvm.onnx_import.symbolic.values import LARGEST, contents, elements
from apq_tvm.types import Node

Known = list[Dim | None]


def entries(graph: Graph, value: str) -> Known:
    """What is known of each entry of a tensor of at most one dimension; empty where it is absent.

    Raises
    ------
    UnsupportedModel
        Nobody knows how many entries there are.
    """
    if not value:
        return []
    known, shape = contents(graph, value), graph.known_shape(value)
    if known is not None:
        return [v if isinstance(v, int) or hasattr(v, "terms") else None for v in known.ravel()]
    count = 1 if shape == () else shape[0] if shape and len(shape) == 1 else None
    if not isinstance(count, int):
        raise UnsupportedModel(
            f"how many numbers {graph.describe(value)} holds depends on data; if it always holds "
            "as many, reshape it to so many in the model"
        )
    if count > LARGEST:
        raise ValueError(f"{graph.describe(value)} is no shape")
    return [None] * count


def sized(steps: Steps, value: str, known: Sequence[Dim | None]) -> str:
    """`value`, an int64 tensor, as one whose entries are dimensions.

    Parameters
    ----------
    steps : Steps
    value : str
    known : sequence of int, Expr or None
        What entries must be; None becomes a symbol.
    """
    graph = steps.graph
    dims = [graph.run_size(value, i) if dim is None else dim for i, dim in enumerate(known)]
    return steps(SIZES, value, dims=tuple(as_attr(dim) for dim in dims))


def numbers(steps: Steps, rule: str, size: int, *inputs: str, **attrs: Any) -> str:
    """``apq.Numbers``: `size` int64 that `apq_tvm.ops.graph.numbers` works out by `rule`."""
    return steps("apq.Numbers", *inputs, rule=rule, shape=(size,), dtype="int64", **attrs)


def _texts(dims: Sequence[Dim]) -> tuple[int | str, ...]:
    return tuple(as_attr(dim) for dim in dims)


def _wide(steps: Steps, value: str) -> str:
    """As int64."""
    return value if steps.graph.dtype(value) == "int64" else steps("Cast", value, to=7)


def _with_input(steps: Steps, index: int, value: str) -> list[Node]:
    """The node with one input replaced, behind what was added."""
    inputs = [*steps.node.inputs]
    inputs[index] = value
    return [*steps.nodes, replace(steps.node, inputs=tuple(inputs))]


def reshape(graph: Graph, node: Node) -> list[Node] | None:
    """Reshape: 0 copies, -1 infers."""
    known, x = entries(graph, node.inputs[1]), graph.known_shape(node.inputs[0])
    if x is None or None not in known:
        return None
    steps, keep = Steps(graph, node), bool(node.attrs.get("allowzero", 0))
    target = _wide(steps, node.inputs[1])
    made = numbers(steps, "reshape", len(known), target, extents=_texts(x), keep_zeros=keep)
    fixed: Known = []
    for i, dim in enumerate(known):
        if dim == 0 and not keep and i < len(x):
            fixed.append(x[i])
        else:
            fixed.append(dim if isinstance(dim, int) and dim > 0 else None)
    return _with_input(steps, 1, sized(steps, made, fixed))


def expand(graph: Graph, node: Node) -> list[Node] | None:
    """Expand: only an axis of 1 grows."""
    known, x = entries(graph, node.inputs[1]), graph.known_shape(node.inputs[0])
    if x is None or None not in known:
        return None
    steps, rank = Steps(graph, node), max(len(known), len(x))
    extents = [1] * (rank - len(x)) + list(x)
    kept = extents[: rank - len(known)]
    extents = extents[len(kept) :]
    target = _wide(steps, node.inputs[1])
    made = numbers(steps, "expand", len(known), target, extents=_texts(extents))
    fixed: Known = [dim if size == 1 else size for dim, size in zip(known, extents, strict=True)]
    token = sized(steps, made, fixed)
    shape = elements(graph.values[token])
    assert shape is not None
    attrs = {"shape": _texts([*kept, *shape])}
    return [*steps.nodes, Node("apq.Expand", node.name, node.inputs[:1], node.outputs, attrs)]


def plain(index: int) -> Callable[[Graph, Node], list[Node] | None]:
    """A rule for operators that take the numbers of an input as they are: sizes from 0 on."""

    def rule(graph: Graph, node: Node) -> list[Node] | None:
        if index >= len(node.inputs) or not node.inputs[index]:
            return None
        value = node.inputs[index]
        known = entries(graph, value)
        if None not in known or str(graph.dtype(value)) not in ("int32", "int64"):
            return None
        steps = Steps(graph, node)
        return _with_input(steps, index, sized(steps, _wide(steps, value), known))

    return rule


def slice_(graph: Graph, node: Node) -> list[Node] | None:
    """Slice: the axes whose limits a run knows, then the others."""
    x = graph.known_shape(node.inputs[0])
    if len(node.inputs) < 3 or x is None:
        return None
    starts, ends, axes, steps_ = (entries(graph, v) for v in (*node.inputs[1:], "", "")[:4])
    if None not in (*starts, *ends, *axes, *steps_):
        return None
    steps = Steps(graph, node)
    if not all(isinstance(v, int) for v in (*axes, *steps_)):
        raise steps.refuse(
            "its axes or steps depend on data; export it with such that are constants, only where "
            "a slice starts and ends may depend on data"
        )
    at = [int(a) % len(x) for a in axes] or list(range(len(starts)))  # type: ignore[arg-type]
    by = [int(s) for s in steps_] or [1] * len(starts)  # type: ignore[arg-type]
    pairs = list(zip(starts, ends, strict=True))
    early = [i for i, pair in enumerate(pairs) if all(isinstance(v, int) for v in pair)]
    late = [i for i in range(len(at)) if i not in early]
    value = node.inputs[0]
    if early:
        limits = [[of[i] for i in early] for of in (starts, ends, at, by)]
        read = [steps.constant(np.asarray(numbers_, np.int64)) for numbers_ in limits]
        value = steps("Slice", value, *read)
        x = steps.shape(value)
    made = numbers(
        steps,
        "slice",
        2 * len(late),
        *(_wide(steps, v) for v in node.inputs[1:3]),
        extents=_texts([x[at[i]] for i in late]),
        positions=tuple(late),
        strides=tuple(by[i] for i in late),
    )
    token = sized(steps, made, _spans(graph, node, late, by))
    found = elements(graph.values[token])
    assert found is not None
    shape = list(x)
    for order_, i in enumerate(late):
        shape[at[i]] = found[2 * order_ + 1]
    attrs = {
        "axes": tuple(at[i] for i in late),
        "starts": _texts(found[::2]),
        "steps": tuple(by[i] for i in late),
        "shape": _texts(shape),
    }
    return [*steps.nodes, Node("apq.Slice", node.name, (value,), node.outputs, attrs)]


def _spans(graph: Graph, node: Node, late: Sequence[int], by: Sequence[int]) -> Known:
    """First element and number of each slice; ``x[i : i + 4]`` has 4 wherever it starts.

    An axis that ends before that is refused by the run: exporters write such slices for windows
    that lie inside.
    """
    last = graph.maker.get(node.inputs[2])
    length = None
    if last is not None and last.op == "Add" and len(late) == 1 and by[late[0]] == 1:
        if node.inputs[1] in last.inputs:
            (other,) = [v for v in last.inputs if v != node.inputs[1]] or [""]
            length = graph.scalar(other) if other else None
    whole = None if length is None or length < 1 else int(length)
    return [entry for _ in late for entry in (None, whole)]


def pad(graph: Graph, node: Node) -> list[Node] | None:
    """Pad: how much is put before, or cut off, and what comes out."""
    x = graph.known_shape(node.inputs[0])
    if len(node.inputs) < 2 or x is None:
        return None
    known = entries(graph, node.inputs[1])
    if None not in known:
        return None
    steps = Steps(graph, node)
    axes = entries(graph, node.inputs[3]) if len(node.inputs) > 3 else []
    if not all(isinstance(v, int) for v in axes):
        raise steps.refuse("its axes must be constants")
    at = [int(a) % len(x) for a in axes] or list(range(len(x)))  # type: ignore[arg-type]
    count = len(at)
    late = [i for i in range(count) if None in (known[i], known[i + count])]
    made = numbers(
        steps,
        "pad",
        3 * len(late),
        _wide(steps, node.inputs[1]),
        extents=_texts([x[at[i]] for i in late]),
        positions=tuple(late),
        count=count,
    )
    found = elements(graph.values[sized(steps, made, [None] * (3 * len(late)))])
    assert found is not None
    before: list[Dim] = [0] * len(x)
    shape = list(x)
    for i in range(count):
        if i not in late:
            first, last = parse(as_attr(known[i] or 0)), parse(as_attr(known[i + count] or 0))
            before[at[i]], shape[at[i]] = first, x[at[i]] + first + last
    for order, i in enumerate(late):
        more, less, shape[at[i]] = found[3 * order : 3 * order + 3]
        before[at[i]] = more - less
    mode = node.attrs.get("mode", "constant")
    attrs = {"mode": mode, "before": _texts(before), "shape": _texts(shape)}
    value = node.inputs[2] if len(node.inputs) > 2 and mode == "constant" else ""
    inputs = (node.inputs[0], value) if value else node.inputs[:1]
    return [*steps.nodes, Node("apq.Pad", node.name, inputs, node.outputs, attrs)]


def _range_size(graph: Graph, node: Node) -> Dim | None:
    """How many numbers a Range of floats has, where sizes say it (``arange(0.5, height)``)."""
    known = [contents(graph, value) for value in node.inputs]
    if any(k is None or k.size != 1 or k.ravel()[0] is None for k in known):
        return None
    start, limit, delta = (k.ravel()[0] for k in known if k is not None)
    far = ratios.sub(limit, start)
    steps = None if far is None else ratios.div(far, delta)
    return None if steps is None else maximum(ratios.ceil(steps), 0)


def range_(graph: Graph, node: Node) -> list[Node] | None:
    """Range: how many numbers there are, then the numbers."""
    known = [entries(graph, v) for v in node.inputs]
    if all(len(k) == 1 and k[0] is not None for k in known) or any(len(k) != 1 for k in known):
        return None
    steps = Steps(graph, node)
    start, _, delta = node.inputs
    size = _range_size(graph, node)
    if size is None:
        count = numbers(steps, "range", 1, *node.inputs)
        (size,) = elements(graph.values[sized(steps, count, [None])]) or [0]
    dtype, counted = str(graph.dtype(start)), steps.range(size)
    if dtype != "int64":
        from onnx import helper

        counted = steps("Cast", counted, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    if known[2][0] != 1:
        counted = steps("Mul", counted, delta)
    if known[0][0] != 0:
        counted = steps("Add", counted, start)
    return steps.done(counted)


SHAPE_INPUTS: dict[str, Callable[[Graph, Node], list[Node] | None]] = {
    "ConstantOfShape": plain(0),
    "Expand": expand,
    "OneHot": plain(1),
    "Pad": pad,
    "Range": range_,
    "Reshape": reshape,
    "Slice": slice_,
    "Split": plain(1),
    "Tile": plain(1),
    "TopK": plain(1),
}
"""By operator; None where the contents are known after all."""
