"""Operators over windows of an image: padding and output sizes are worked out here, once.

Pooling becomes ``apq.PoolFirst`` and padding ``apq.Pad``, which carry what `sizes` may have made of
symbolic extents; a convolution keeps its operator and gets plain ``pads``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.onnx_import.graph import Graph, with_attrs
from apq_tvm.onnx_import.symbolic.carry import Rewritten, carried
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr, bounds, parse
from apq_tvm.onnx_import.symbolic.geometry import windows
from apq_tvm.onnx_import.symbolic.infer import infer
from apq_tvm.onnx_import.symbolic.resize import rewrite_resize
from apq_tvm.onnx_import.symbolic.values import contents, elements
from apq_tvm.types import Node


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
        return replace(node, attrs={**attrs, "pads": (*found.begins, *found.ends)})
    padded = graph.fresh(f"{node.inputs[0]}.padded")
    grown = [d + a + b for d, a, b in zip(x[2:], found.begins, found.ends, strict=True)]
    pad = replace(
        carried(
            "apq.Pad",
            node,
            (*x[:2], *grown),
            mode="constant",
            before=(0, 0, *found.attrs["begins"]),
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
    for extent, size, before, out in zip(x[2:], kernel, found.begins, found.out, strict=True):
        high = bounds(out)[1]
        if high is not None and high < 1:
            raise ImportFailed(
                f"{node.op} {node.name!r}: no window of {size} fits an axis of {extent} padded by "
                f"{before}"
            )
    return carried(
        "apq.PoolFirst",
        node,
        (*x[:2], *found.out),
        kind={"MaxPool": "max", "AveragePool": "average", "LpPool": "lp"}[node.op],
        **found.attrs,
        ceil=bool(node.attrs.get("ceil_mode", 0)),
        padding=bool(node.attrs.get("count_include_pad", 0)),
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
    new = carried("apq.Pad", node, shape, mode=mode, before=tuple(as_attr(d) for d in before))
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
