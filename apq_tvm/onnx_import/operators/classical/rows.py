"""What is done to features: scaling, filling gaps, picking and encoding.

The operators' specification is onnx's docs/Operators-ml.md; where it is silent, what ONNX Runtime
does is meant (onnxruntime/core/providers/cpu/ml).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.standard import reduced
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import product
from apq_tvm.types import Array, Node

FEW = 8
"""Numbers of a constant that is named after them."""

SHARED = {"apq.layer": "table"}
"""Of look-ups that cannot lead out of their table, so that all are calls of one function."""


def as_float(steps: Steps, x: str) -> str:
    """A tensor of numbers as float32."""
    return x if steps.graph.dtype(x) == "float32" else steps("Cast", x, to=1)


def as_rows(steps: Steps, x: str) -> str:
    """Features [N, F]: those of one row may come as [F].

    Raises
    ------
    UnsupportedModel
        There are other axes.
    """
    shape = steps.shape(x, 1, 2)
    return x if len(shape) == 2 else steps.reshape(x, 1, shape[0])


def numbers(steps: Steps, name: str, dtype: str = "float32") -> str:
    """An attribute that is a list as a constant [n]."""
    array = np.asarray(steps.node.attrs[name], dtype).reshape(-1)
    if array.size > FEW:
        return steps.graph.add_weight(f"{steps.node.name}.{name}", array)
    return steps.constant(array)


def rounded(table: Array) -> Array:
    """A table [n], or a little longer, so that few lengths occur and the kernels for them.

    scikit-learn's isolation forests have a hundred trees, each with tables of its own.
    """
    step = 1 << max(len(table).bit_length() - 2, 0)
    return np.pad(table, (0, -len(table) % step), "edge")


def scaler(graph: Graph, node: Node) -> list[Node]:
    """``(x - offset) * scale`` by column, or with one number for all."""
    steps = Steps(graph, node)
    centred = as_float(steps, node.inputs[0])
    if node.attrs.get("offset"):
        centred = steps("Sub", centred, numbers(steps, "offset"))
    if node.attrs.get("scale"):
        centred = steps("Mul", centred, numbers(steps, "scale"))
    return steps.done(centred)


def normalizer(graph: Graph, node: Node) -> list[Node]:
    """Rows divided by their norm; those whose norm is 0 stay."""
    steps = Steps(graph, node)
    x = as_float(steps, node.inputs[0])
    last = len(steps.shape(x, 1, 2)) - 1
    ops = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}
    norm = reduced(steps, ops[node.attrs.get("norm", "MAX")], x, (last,))
    nothing = steps("Equal", norm, steps.number(0))
    return steps.done(steps("Div", x, steps("Where", nothing, steps.number(1), norm)))


def imputer(graph: Graph, node: Node) -> list[Node]:
    """Other numbers where there are none, or where one stands for that."""
    steps, x = Steps(graph, node), node.inputs[0]
    kind = str(graph.dtype(x))
    part = "float" if kind.startswith("float") else "int64"
    filled = numbers(steps, f"imputed_value_{part}s", kind)
    gap = node.attrs.get(f"replaced_value_{part}", 0)
    is_gap = steps("IsNaN", x) if gap != gap else steps("Equal", x, steps.number(gap, kind))
    return steps.done(steps("Where", is_gap, filled, x))


def binarizer(graph: Graph, node: Node) -> list[Node]:
    """1 above a threshold, else 0."""
    steps, x = Steps(graph, node), node.inputs[0]
    kind = str(graph.dtype(x))
    above = steps("Greater", x, steps.number(node.attrs.get("threshold", 0.0), kind))
    return steps.done(steps("Where", above, steps.number(1, kind), steps.number(0, kind)))


def feature_extractor(graph: Graph, node: Node) -> list[Node]:
    """Columns by indices of any shape, a row of them where there is one dimension."""
    steps, (x, indices) = Steps(graph, node), node.inputs
    shape, listed = steps.shape(x), steps.shape(indices)
    count = product(listed)
    chosen = indices if len(listed) == 1 else steps.reshape(indices, count)
    picked = steps("Gather", x, chosen, axis=len(shape) - 1)
    return steps.done(steps.reshape(picked, 1, count) if len(shape) == 1 else picked)


def feature_vectorizer(graph: Graph, node: Node) -> list[Node]:
    """Columns of several tensors beside each other."""
    steps = Steps(graph, node)
    parts = []
    for value in node.inputs:
        shape = steps.shape(value, 1, 2)
        parts.append(
            as_float(steps, value if len(shape) == 2 else steps.reshape(value, shape[0], 1))
        )
    return steps.done(steps("Concat", *parts, axis=1))


def one_hot_encoder(graph: Graph, node: Node) -> list[Node]:
    """A new last dimension that is 1 where a number is the category.

    Raises
    ------
    UnsupportedModel
        Categories are strings, or a number of no category is an error.
    """
    steps = Steps(graph, node)
    if not node.attrs.get("cats_int64s"):
        raise steps.refuse("its categories are strings; encode them before the model")
    if not node.attrs.get("zeros", 1):
        raise steps.refuse("a number of no category is an error (zeros=0); export it with zeros=1")
    x = node.inputs[0]
    shape = steps.shape(x)
    whole = x if graph.dtype(x) == "int64" else steps("Cast", x, to=7)
    found = steps("Equal", steps.reshape(whole, *shape, 1), numbers(steps, "cats_int64s", "int64"))
    return steps.done(steps("Cast", found, to=1))


def label_encoder(graph: Graph, node: Node) -> list[Node]:
    """Numbers for numbers, another for all that are not listed.

    Raises
    ------
    UnsupportedModel
        Labels are strings.
    """
    steps, (x,) = Steps(graph, node), node.inputs
    lists = {key.partition("_")[0]: key for key in sorted(node.attrs) if "default" not in key}
    keys, values = (_listed(steps, lists[part]) for part in ("keys", "values"))
    kind = lists["values"].partition("_")[2].rstrip("s")
    default = node.attrs.get(f"default_{kind}", -1 if kind == "int64" else 0.0)
    shape = steps.shape(x)
    keys, values = rounded(keys), rounded(values)  # the first of equal keys counts
    wanted = steps.constant(keys.astype(str(graph.dtype(x))))
    found = steps("Cast", steps("Equal", steps.reshape(x, *shape, 1), wanted), to=6)
    at = steps("ArgMax", found, axis=len(shape), keepdims=0)
    known = steps("Cast", reduced(steps, "ReduceMax", found, (len(shape),), False), to=9)
    other = steps.constant(np.asarray(default, values.dtype).reshape(()))
    listed = steps("Gather", steps.constant(values), at, **SHARED)
    return steps.done(steps("Where", known, listed, other))


def _listed(steps: Steps, name: str) -> Array:
    """Keys or values of a LabelEncoder."""
    array = np.asarray(steps.node.attrs[name]).reshape(-1)
    if "string" in name or array.dtype.kind not in "fiu":
        raise steps.refuse("its labels are strings; encode them before or behind the model")
    return array.astype(np.float32) if name.endswith("floats") else array


ROWS: dict[str, Callable[[Graph, Node], list[Node]]] = {
    "ArrayFeatureExtractor": feature_extractor,
    "Binarizer": binarizer,
    "FeatureVectorizer": feature_vectorizer,
    "Imputer": imputer,
    "LabelEncoder": label_encoder,
    "Normalizer": normalizer,
    "OneHotEncoder": one_hot_encoder,
    "Scaler": scaler,
}
