"""Operators over windows of an image: padding and output sizes are worked out here, once.

Pooling becomes ``apq.PoolFirst`` and padding ``apq.Pad``, which carry what `sizes` may have made of
symbolic extents; a convolution keeps its operator and gets plain ``pads``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.onnx_import.graph import Graph, with_attrs
from apq_tvm.onnx_import.symbolic.dims import (
    Dim,
    as_attr,
    bounds,
    floordiv,
    maximum,
    minimum,
    parse,
)
from apq_tvm.onnx_import.symbolic.infer import elements, infer
from apq_tvm.onnx_import.symbolic.resize import rewrite_resize
from apq_tvm.onnx_import.symbolic.shapes import Rewritten, carried
from apq_tvm.onnx_import.symbolic.values import contents
from apq_tvm.types import Node


@dataclass(frozen=True)
class Windows:
    """How windows lie over the spatial axes of an image, one entry per axis.

    Parameters
    ----------
    kernel, strides, dilations : sequence of int
    before, after : sequence of int or Expr
        Padding; the windows of ``ceil_mode`` may reach past it.
    out : sequence of int or Expr
        Number of windows.
    """

    kernel: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    before: Sequence[Dim]
    after: Sequence[Dim]
    out: Sequence[Dim]

    @property
    def fixed(self) -> bool:
        """Whether all padding is known."""
        return all(isinstance(pad, int) for pad in (*self.before, *self.after))


def windows(node: Node, extents: Sequence[Dim], kernel: Sequence[int]) -> Windows:
    """Padding and number of windows of a convolution or pooling (ONNX, ``auto_pad``).

    Raises
    ------
    ImportFailed
        The attributes do not fit the image; the message names the node.
    """
    rank, attrs = len(extents), node.attrs
    strides = tuple(attrs.get("strides") or (1,) * rank)
    dilations = tuple(attrs.get("dilations") or (1,) * rank)
    pads = tuple(attrs.get("pads") or (0,) * (2 * rank))
    auto = attrs.get("auto_pad", "NOTSET")
    if (len(kernel), len(strides), len(dilations), len(pads)) != (rank, rank, rank, 2 * rank) or (
        min((*kernel, *strides, *dilations), default=1) < 1
    ):
        raise ImportFailed(
            f"{node.op} {node.name!r}: kernel_shape {list(kernel)}, strides {list(strides)}, "
            f"dilations {list(dilations)} and pads {list(pads)} do not fit {rank} spatial axes"
        )
    before: list[Dim] = []
    after: list[Dim] = []
    out: list[Dim] = []
    for axis, extent in enumerate(extents):
        step = strides[axis]
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        if auto.startswith("SAME"):
            count = floordiv(extent + (step - 1), step)
            total = maximum((count - 1) * step + reach - extent, 0)
            half = floordiv(total, 2)
            first, last = (half, total - half) if auto.endswith("UPPER") else (total - half, half)
        else:
            given = (0, 0) if auto == "VALID" else (pads[axis], pads[axis + rank])
            first, last = given
            free = extent + (first + last) - reach
            count = floordiv(free, step) + 1
            if attrs.get("ceil_mode", 0) and auto == "NOTSET":
                # The last window must start inside the image or the padding before it.
                inside = floordiv(extent + (first - 1), step) + 1
                count = minimum(floordiv(free + (step - 1), step) + 1, inside)
        before.append(first)
        after.append(last)
        out.append(count)
    return Windows(tuple(kernel), strides, dilations, before, after, out)


def _image(graph: Graph, value: str) -> tuple[Dim, ...] | None:
    """The shape of a value with batch, channels and at least one spatial axis."""
    shape = graph.known_shape(value)
    return None if shape is None or len(shape) < 3 else shape


def _conv(graph: Graph, node: Node) -> Rewritten:
    """``auto_pad`` becomes ``pads``, or a node of its own where those depend on the size."""
    if node.attrs.get("auto_pad", "NOTSET") == "NOTSET":
        return None
    x, w = _image(graph, node.inputs[0]), graph.known_shape(node.inputs[1])
    if x is None or w is None:
        return None
    found = windows(node, x[2:], tuple(int(d) for d in w[2:]))  # type: ignore[arg-type]
    attrs = {key: value for key, value in node.attrs.items() if key != "auto_pad"}
    if found.fixed:
        return replace(node, attrs={**attrs, "pads": (*found.before, *found.after)})
    padded = graph.fresh(f"{node.inputs[0]}.padded")
    grown = [d + a + b for d, a, b in zip(x[2:], found.before, found.after, strict=True)]
    pad = replace(
        carried(
            graph,
            "apq.Pad",
            node,
            (*x[:2], *grown),
            mode="constant",
            before=(0, 0, *(as_attr(d) for d in found.before)),
        ),
        name=graph.fresh(f"{node.name}.pad"),
        outputs=(padded,),
    )
    inner = replace(
        node,
        inputs=(padded, *node.inputs[1:]),
        attrs={**attrs, "pads": (0,) * (2 * len(grown))},
    )
    return [pad, inner]


def _pool(graph: Graph, node: Node) -> Rewritten:
    """MaxPool, AveragePool and LpPool as ``apq.PoolFirst``."""
    x = _image(graph, node.inputs[0])
    if x is None or len([out for out in node.outputs if out]) > 1:
        return None
    kernel = tuple(node.attrs.get("kernel_shape", ()))
    found = windows(node, x[2:], kernel)
    for extent, size, before, out in zip(x[2:], kernel, found.before, found.out, strict=True):
        high = bounds(out)[1]
        if high is not None and high < 1:
            raise ImportFailed(
                f"{node.op} {node.name!r}: no window of {size} fits an axis of {extent} padded by "
                f"{before}"
            )
    return carried(
        graph,
        "apq.PoolFirst",
        node,
        (*x[:2], *found.out),
        kind={"MaxPool": "max", "AveragePool": "average", "LpPool": "lp"}[node.op],
        kernel=found.kernel,
        strides=found.strides,
        dilations=found.dilations,
        before=tuple(as_attr(d) for d in found.before),
        after=tuple(as_attr(d) for d in found.after),
        ceil=bool(node.attrs.get("ceil_mode", 0)),
        include_pad=bool(node.attrs.get("count_include_pad", 0)),
        p=int(node.attrs.get("p", 2)),
    )


PAD_MODES = ("constant", "reflect", "edge", "wrap")


def _pad(graph: Graph, node: Node) -> Rewritten:
    """Pad as ``apq.Pad``; negative pads cut off (ONNX opset 11 to 25)."""
    x = graph.known_shape(node.inputs[0])
    pads = elements(contents(graph, node.inputs[1]))
    axes = _inputs(graph, node, 3)
    if x is None or pads is None or axes is None:
        return None
    at = [int(a) % len(x) for a in axes] or list(range(len(x)))  # type: ignore[arg-type]
    mode = node.attrs.get("mode", "constant")
    if len(pads) != 2 * len(at) or len(set(at)) != len(at):
        raise ImportFailed(
            f"Pad {node.name!r}: {len(pads)} pads do not fit {len(at)} of {len(x)} axes"
        )
    if mode not in PAD_MODES:
        raise UnsupportedModel(f"Pad {node.name!r}: mode {mode!r}; known are {PAD_MODES}")
    before: list[Dim] = [0] * len(x)
    shape = list(x)
    for position, axis in enumerate(at):
        before[axis] = pads[position]
        shape[axis] = x[axis] + pads[position] + pads[position + len(at)]
    if all(pad == 0 for pad in pads):
        return node.inputs[0]
    new = carried(
        graph, "apq.Pad", node, shape, mode=mode, before=tuple(as_attr(d) for d in before)
    )
    value = node.inputs[2] if len(node.inputs) > 2 else ""
    return replace(new, inputs=(*new.inputs, value)) if value and mode == "constant" else new


def _inputs(graph: Graph, node: Node, position: int) -> list[Dim] | None:
    """Contents of an optional input: empty where it is absent, None where they are unknown."""
    if len(node.inputs) <= position or not node.inputs[position]:
        return []
    return elements(contents(graph, node.inputs[position]))


def _conv_transpose(graph: Graph, node: Node) -> Rewritten:
    """What every axis was given is spelled out, so that dynamic sizes need no special case."""
    attrs = node.attrs
    if attrs.get("auto_pad", "NOTSET") != "VALID":
        return None
    rank = len(graph.shape(node.inputs[0]) or ()) - 2
    return with_attrs(node, {"auto_pad": "NOTSET", "pads": (0,) * (2 * rank)})


RULES: dict[str, Callable[[Graph, Node], Rewritten]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "LpPool": _pool,
    "Pad": _pad,
    "Resize": rewrite_resize,
    "Upsample": rewrite_resize,
}
SIZED = ("MaxPool", "AveragePool", "LpPool", "Pad", "Resize", "Upsample")


def infer_windows(graph: Graph, node: Node) -> None:
    """Record the shape that one of `SIZED` makes; ONNX's inference does not compute with symbols.

    Raises
    ------
    ImportFailed, UnsupportedModel
        As the rewriting below.
    """
    if node.op not in SIZED or graph.known_shape(node.outputs[0]) is not None:
        return
    new = RULES[node.op](graph, node)
    if isinstance(new, Node):
        graph.shapes[node.outputs[0]] = tuple(parse(dim) for dim in new.attrs["shape"])
    elif isinstance(new, str):
        graph.shapes[node.outputs[0]] = graph.shape(new) or ()


def rewrite_windows(graph: Graph) -> None:
    """Write what no other pass took in with everything that follows from the sizes."""
    for node in graph.each():
        rule = RULES.get(node.op)
        new = None if rule is None else rule(graph, node)
        if isinstance(new, str):
            new = Node("Identity", node.name, (new,), node.outputs[:1])
        if new is not None:
            made = new if isinstance(new, list) else [new]
            for each in made:
                infer(graph, each)
            graph.replace(node, *made)
    graph.sweep()
