"""Support vector machines of ``ai.onnx.ml``: distances to vectors, and sums weighted by class."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import comb

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.classical.rows import as_float, as_rows
from apq_tvm.onnx_import.operators.classical.scores import labels, picked, transformed, two_columns
from apq_tvm.onnx_import.operators.standard import reduced
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Array, Node


def _numbers(steps: Steps, name: str) -> Array:
    return np.asarray(steps.node.attrs.get(name, ()), np.float32).reshape(-1)


def _weight(steps: Steps, name: str, array: Array) -> str:
    return steps.graph.add_weight(f"{steps.node.name}.{name}", np.ascontiguousarray(array))


def _kernel(steps: Steps, count: int) -> str:
    """How alike each row and each of `count` support vectors are: [N, count].

    Raises
    ------
    UnsupportedModel
        The vectors do not fit the rows, or there is no such kernel.
    """
    kind = steps.node.attrs.get("kernel_type", "LINEAR")
    x = as_rows(steps, as_float(steps, steps.node.inputs[0]))
    rows, columns = steps.shape(x)
    flat, parameters = _numbers(steps, "support_vectors"), _numbers(steps, "kernel_params")
    columns = steps.size(columns, "number of columns")
    if flat.size != count * columns or (kind != "LINEAR" and parameters.size != 3):
        raise steps.refuse(
            f"{flat.size} numbers are not {count} support vectors of {columns} columns, or its "
            f"kernel has {parameters.size} parameters, not 3"
        )
    vectors = flat.reshape(count, columns)
    gamma, offset, degree = (steps.number(v) for v in (*parameters.tolist(), 0, 0, 0)[:3])
    if kind == "RBF":
        # No product: it would be a layer to quantize, and what is left of its sums small.
        apart = steps("Sub", steps.reshape(x, rows, 1, columns), _weight(steps, "vectors", vectors))
        squares = reduced(steps, "ReduceSum", steps("Mul", apart, apart), (2,), False)
        return steps("Exp", steps("Neg", steps("Mul", squares, gamma)))
    alike = steps("MatMul", x, _weight(steps, "vectors", vectors.T))
    if kind == "LINEAR":
        return alike
    scaled = steps("Add", steps("Mul", alike, gamma), offset)
    if kind == "SIGMOID":
        return steps("Tanh", scaled)
    if kind != "POLY":
        raise steps.refuse(f"no kernel is called {kind!r}")
    return steps("Pow", scaled, degree)


def _rho(steps: Steps, count: int) -> str:
    """What is added to `count` sums: [count]."""
    rho = _numbers(steps, "rho")
    if rho.size != count:
        raise steps.refuse(f"it has {rho.size} numbers rho, not {count}")
    return _weight(steps, "rho", rho)


def _sums(steps: Steps, x: str, matrix: Array, rho: str) -> str:
    """``x · matrix + rho`` [N, columns of the matrix]."""
    return steps("Add", steps("MatMul", x, _weight(steps, "coefficients", matrix)), rho)


def regressor(graph: Graph, node: Node) -> list[Node]:
    """SVMRegressor; ``one_class`` tells 1 inside from -1 outside."""
    steps, count = Steps(graph, node), int(node.attrs.get("n_supports", 0))
    x = node.inputs[0]
    kernel = _kernel(steps, count) if count else as_rows(steps, as_float(steps, x))
    y = _sums(steps, kernel, _numbers(steps, "coefficients").reshape(-1, 1), _rho(steps, 1))
    if node.attrs.get("one_class", 0):
        inside = steps("Greater", y, steps.number(0))
        return steps.done(steps("Where", inside, steps.number(1), steps.number(-1)))
    return steps.done(transformed(steps, y, node.attrs.get("post_transform", "NONE")))


def classifier(graph: Graph, node: Node) -> list[Node]:
    """SVMClassifier: every two classes are told apart, and the one most often preferred is it.

    Raises
    ------
    UnsupportedModel
        Probabilities are asked for, which ONNX Runtime finds step by step, or there are no
        support vectors.
    """
    steps, attrs = Steps(graph, node), node.attrs
    known, sizes = labels(steps), np.asarray(attrs.get("vectors_per_class", ()), np.int64)
    if attrs.get("prob_a") or len(sizes) != len(known) or len(known) < 2 or sizes.min() < 0:
        raise steps.refuse(
            "only the scores of support vectors of at least two classes can be compiled; train "
            "the model with probability=False"
        )
    rho = _rho(steps, comb(len(known), 2))  # as many as there are pairs of classes
    pairs, ends = list(combinations(range(len(known)), 2)), np.cumsum([0, *sizes])
    flat, count = _numbers(steps, "coefficients"), int(ends[-1])
    if flat.size != (len(known) - 1) * count:
        raise steps.refuse(f"{flat.size} coefficients are not {len(known) - 1} x {count}")
    rows = flat.reshape(len(known) - 1, count)
    matrix = np.zeros((count, len(pairs)), np.float32)
    for column, (one, other) in enumerate(pairs):
        for own, row in ((one, other - 1), (other, one)):
            here = slice(ends[own], ends[own + 1])
            matrix[here, column] = rows[row, here]
    scores = _sums(steps, _kernel(steps, count), matrix, rho)
    label = picked(steps, _votes(steps, scores, pairs, len(known)), known)
    kind = attrs.get("post_transform", "NONE")
    if len(known) == 2:
        return steps.done(label, two_columns(steps, scores, kind, shares=False))
    return steps.done(label, transformed(steps, scores, kind))


def _votes(steps: Steps, scores: str, pairs: list[tuple[int, int]], classes: int) -> str:
    """How often each class is preferred [N, classes], exact in every scheme: it is no layer."""
    above, other = np.zeros((2, len(pairs), classes), np.float32)
    for row, (one, two) in enumerate(pairs):
        above[row, one], other[row, two] = 1, 1
    rows = steps.shape(scores)[0]
    first = steps("Greater", steps.reshape(scores, rows, len(pairs), 1), steps.number(0))
    votes = steps("Where", first, _weight(steps, "first", above), _weight(steps, "other", other))
    return reduced(steps, "ReduceSum", votes, (1,), False)


SVM: dict[str, Callable[[Graph, Node], list[Node]]] = {
    "SVMClassifier": classifier,
    "SVMRegressor": regressor,
}
