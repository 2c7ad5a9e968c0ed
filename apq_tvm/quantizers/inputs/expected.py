"""What linear layers read on average, estimated from the weights alone.

A network's inputs may be anything, but biases and activations say a good deal of the mean of every
channel behind them: that behind a ReLU6 is 0 where the bias is far below 0, and 6 where it is far
above. Means and variances are followed through the graph, channel by channel, as if channels were
independent and sums normally distributed (after Nagel et al., "Data-Free Quantization Through
Weight Equalization and Bias Correction", ICCV 2019, appendix C, where BatchNorm gives them;
exported files have none). They are followed for several inputs at once, grey, dark and light ones.

An operator without a rule ends the search on its path: layers behind it are rounded as if all their
channels had the same mean, and their notes do not speak of expected means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from apq_tvm.quantizers.inputs.moments import F64, FUNCTIONS, LAYER_FUNCTIONS, Moments
from apq_tvm.types import F32, ImportedModel, Node

INPUTS = ((0.0, 1.0), (0.0, 0.0), (0.5, 0.25), (-0.5, 0.25))
"""Mean and variance of the model's inputs."""

CHUNK = 1 << 22
"""Weights looked at together."""

ALIKE = 0.5
"""How far neighbouring pixels go together: the correlation of a depthwise convolution's taps."""


def expected_means(model: ImportedModel) -> dict[str, F32]:
    """Estimated means of what linear layers read.

    Parameters
    ----------
    model : ImportedModel

    Returns
    -------
    dict of str to float32 [S, K]
        By the layer's name; for S different inputs of the model. Layers of which nothing is known
        are absent.
    """
    search = _Search(model)
    with np.errstate(all="ignore"):
        for node in model.nodes:
            search.follow(node)
    return search.found


class _Search:
    """The walk through one graph."""

    def __init__(self, model: ImportedModel) -> None:
        self.model = model
        self.found: dict[str, F32] = {}
        mean, variance = np.array(INPUTS).T
        alike = Moments(mean[:, None], variance[:, None])
        self.known = {spec.name: alike for spec in model.inputs if spec.dtype == "float32"}

    def follow(self, node: Node) -> None:
        """Estimate what a node makes."""
        rule = RULES.get(node.op)
        x = self.of(node.inputs[0]) if node.inputs and node.inputs[0] else None
        if x is None or rule is None:
            return
        made = rule(self, node, x)
        several = made if isinstance(made, list) else [made] * len(node.outputs)
        for name, moments in zip(node.outputs, several, strict=False):
            if name and moments is not None and moments.finite:
                self.known[name] = moments

    def of(self, value: str) -> Moments | None:
        """What is known of a value; of a constant, its channels'."""
        array = self.model.weights.get(value)
        if array is None:
            return self.known.get(value)
        if array.dtype != np.float32 or not array.size:
            return None
        return Moments.constant(array, len(INPUTS))

    def sizes(self, value: str) -> Sequence[int | str]:
        """A value's shape; nothing where it is not known."""
        spec = self.model.value_specs.get(value)
        return spec.shape if spec is not None else ()


def _function(search: _Search, node: Node, x: Moments) -> Moments | None:
    """A function of one value and of constants that differ along its channels alone."""
    constants: list[F64 | None] = []
    for name in node.inputs[1:]:
        other = search.of(name) if name else None
        if name and (other is None or other.spread or not other.goes_with(x)):
            return None
        constants.append(None if other is None else other.mean)
    while constants and constants[-1] is None:
        constants.pop()
    return x.through(lambda v: FUNCTIONS[node.op](node.attrs, v, *constants))


def _linear(search: _Search, node: Node, x: Moments) -> Moments | None:
    weights = search.model.weights
    w, bias, residual = (*node.inputs[1:], "", "")[:3]
    if w not in weights or not x.along(-1, weights[w].shape[1]):
        return None
    wide, weight = x.wide(weights[w].shape[1]), weights[w]
    mean, variance = wide.mean.astype(np.float32), wide.variance.astype(np.float32)
    search.found[node.name] = mean
    rows = max(1, CHUNK // weight.shape[1])
    parts = [weight[i : i + rows] for i in range(0, len(weight), rows)]
    sums = np.concatenate([mean @ part.T for part in parts], 1, dtype=np.float64)
    squares = [variance @ np.square(part).T for part in parts]
    made = Moments(sums, np.concatenate(squares, 1, dtype=np.float64))
    if bias:
        made = Moments(made.mean + weights[bias], made.variance)
    return _finished(search, node, made, residual)


def _depthwise(search: _Search, node: Node, x: Moments) -> Moments | None:
    taps = search.model.weights[node.inputs[1]].astype(np.float64)
    if node.attrs.get("inputs") or not x.along(-1, taps.shape[1]):
        return None
    bias = search.model.weights[node.inputs[2]] if node.inputs[2] else 0.0
    square = (1 - ALIKE) * np.square(taps).sum(0) + ALIKE * np.square(taps.sum(0))
    made = Moments(x.mean * taps.sum(0) + bias, x.variance * square)
    return _finished(search, node, made, "")


def _finished(search: _Search, node: Node, y: Moments, residual: str) -> Moments | None:
    """Behind a layer's activation and residual."""
    name, after = node.attrs.get("activation", ""), node.attrs.get("after", False)
    other = search.of(residual) if residual else None
    if (residual and other is None) or (name and name not in LAYER_FUNCTIONS):
        return None
    if other is not None and after:
        return (y + other).through(LAYER_FUNCTIONS[name]) if other.goes_with(y) else None
    y = y.through(LAYER_FUNCTIONS[name]) if name else y
    if other is None:
        return y
    return y + other if other.goes_with(y) else None


def _arithmetic(search: _Search, node: Node, x: Moments) -> Moments | None:
    other = search.of(node.inputs[1])
    if other is None or not other.goes_with(x):
        return None
    if node.op == "Add":
        return x + other
    if node.op == "Sub":
        return x + other.map(np.negative, np.positive)
    if node.op == "Mul":
        return x * other
    return None if (other.mean == 0).any() else x * other.map(np.reciprocal, np.zeros_like)


def _windows(search: _Search, node: Node, x: Moments) -> Moments | None:
    first, count = node.attrs["channels"]
    taps = int(np.prod(node.attrs["kernel"]))
    if x.alike or x.axis != -1:
        return x if x.alike else None
    return x.map(lambda v: np.tile(v[:, first : first + count], taps))


def _same(search: _Search, node: Node, x: Moments) -> Moments | None:
    """What moves or picks along other axes than that of the channels."""
    sizes = search.sizes(node.outputs[0])
    return x if x.alike or (len(sizes) >= -x.axis and sizes[x.axis] == x.count) else None


def _pool(search: _Search, node: Node, x: Moments) -> Moments | None:
    if node.attrs["kind"] == "max":
        x = Moments(x.mean + np.sqrt(x.variance) / 2, x.variance, x.axis)
    return _same(search, node, x)


def _transpose(search: _Search, node: Node, x: Moments) -> Moments | None:
    rank = len(search.sizes(node.outputs[0]))
    perm = node.attrs.get("perm", tuple(range(rank))[::-1])
    if x.alike or rank != len(perm):
        return x if x.alike else None
    return Moments(x.mean, x.variance, list(perm).index(x.axis + rank) - rank)


def _reshape(search: _Search, node: Node, x: Moments) -> Moments | None:
    """The channels as they were, or the last axis joined with those before it."""
    old, new = search.sizes(node.inputs[0]), search.sizes(node.outputs[0])
    if x.alike or not old or not new:
        return x if x.alike else None
    ones = all(size == 1 for size in old[len(old) + x.axis + 1 :])
    width = new[-1]
    if not ones or not isinstance(width, int) or width % x.count:
        return None
    return Moments(x.mean, x.variance).map(lambda v: np.tile(v, width // x.count))


def _reduced(search: _Search, node: Node, x: Moments) -> Moments | None:
    """Means over pixels, of which many are alike."""
    calm = x.map(np.positive, lambda v: v / 4)
    return (_same if node.attrs.get("keepdims", 1) else _reshape)(search, node, calm)


def _concat(search: _Search, node: Node, x: Moments) -> Moments | None:
    parts, rank = [search.of(name) for name in node.inputs], len(search.sizes(node.outputs[0]))
    axis = node.attrs["axis"] - (rank if node.attrs["axis"] >= 0 else 0)
    wide = []
    for name, part in zip(node.inputs, parts, strict=True):
        size = search.sizes(name)[axis] if rank == len(search.sizes(name)) > 0 else ""
        if part is None or not isinstance(size, int) or not part.along(axis, size):
            return _same(search, node, x)
        wide.append(part.wide(size))
    mean, variance = ([getattr(p, key) for p in wide] for key in ("mean", "variance"))
    return Moments(np.concatenate(mean, 1), np.concatenate(variance, 1), axis)


def _split(search: _Search, node: Node, x: Moments) -> list[Moments | None]:
    rank, axis = len(search.sizes(node.inputs[0])), node.attrs.get("axis", 0)
    axis -= rank if axis >= 0 else 0
    if x.alike or axis != x.axis:
        return [x] * len(node.outputs)
    shapes = [search.sizes(name) for name in node.outputs]
    sizes = [shape[axis] for shape in shapes if len(shape) == rank]
    ends = np.cumsum([size for size in sizes if isinstance(size, int)])
    if len(ends) != len(shapes) or ends[-1] != x.count:
        return [None] * len(shapes)
    starts = (0, *ends[:-1])
    return [
        Moments(x.mean[:, a:b], x.variance[:, a:b], axis) for a, b in zip(starts, ends, strict=True)
    ]


def _layer_norm(search: _Search, node: Node, x: Moments) -> Moments | None:
    gamma, beta = (*node.inputs[1:], "")[:2]
    scale, shift = search.of(gamma), search.of(beta) if beta else None
    if scale is None or (beta and shift is None) or x.axis != -1:
        return None
    if not scale.goes_with(x) or (shift is not None and not shift.goes_with(x)):
        return None
    mean = x.mean - (x.mean.mean(1, keepdims=True) if node.op == "LayerNormalization" else 0.0)
    size = np.sqrt((np.square(mean) + x.variance).mean(1, keepdims=True) + 1e-12)
    made = Moments(mean / size, x.variance / np.square(size)) * scale
    return made if shift is None else made + shift


def _table(search: _Search, node: Node, table: Moments) -> Moments:
    return table


RULES: Mapping[str, Callable[[_Search, Node, Moments], Any]] = {
    **dict.fromkeys(FUNCTIONS, _function),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), _arithmetic),
    **dict.fromkeys(("apq.Reshape", "Reshape", "Squeeze", "Unsqueeze"), _reshape),
    **dict.fromkeys(
        ("apq.Assume", "apq.Pad", "apq.Resize", "apq.ResizeAxes", "apq.Slice", "Slice", "Identity"),
        _same,
    ),
    **dict.fromkeys(
        ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), _layer_norm
    ),
    **dict.fromkeys(("apq.Pool", "apq.PoolFirst"), _pool),
    "Concat": _concat,
    "ReduceMean": _reduced,
    "Split": _split,
    "Transpose": _transpose,
    "apq.Depthwise": _depthwise,
    "apq.Embedding": _table,
    "apq.Linear": _linear,
    "apq.Windows": _windows,
}
"""``(search, node, moments of its first input) -> moments of its outputs, or None``."""
