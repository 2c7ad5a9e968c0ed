"""From sums to probabilities and labels, as linear models and trees of ``ai.onnx.ml`` end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.classical.rows import as_float, as_rows
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Node


def labels(steps: Steps) -> list[int]:
    """The labels of a classifier.

    Raises
    ------
    UnsupportedModel
        They are strings.
    """
    attrs = steps.node.attrs
    if attrs.get("classlabels_strings"):
        raise steps.refuse(
            "its labels are strings; train it on numbers, or remove the label and its operators "
            "from the model"
        )
    return list(attrs.get("classlabels_int64s") or attrs.get("classlabels_ints") or ())


def transformed(steps: Steps, scores: str, kind: str) -> str:
    """Scores [N, C] behind a ``post_transform``.

    Raises
    ------
    UnsupportedModel
        PROBIT.
    """
    if kind == "NONE":
        return scores
    if kind == "LOGISTIC":
        return steps("Sigmoid", scores)
    if kind == "SOFTMAX":
        return steps("Softmax", scores, axis=1)
    if kind != "SOFTMAX_ZERO":
        raise steps.refuse(f"post_transform {kind} cannot be compiled; take the scores (NONE)")
    # Softmax whose zeros stay: they count nothing and get nothing.
    size = steps("Abs", scores)
    is_zero = steps("Less", size, steps.number(1e-7))
    shares = steps("Softmax", scores, axis=1)
    return steps("Where", is_zero, steps.number(0), shares)


def two_columns(steps: Steps, score: str, kind: str, shares: bool) -> str:
    """The scores of both classes out of that of the second.

    Parameters
    ----------
    steps : Steps
    score : str
        [N, 1]
    kind : str
        The ``post_transform``.
    shares : bool
        It counts from 0 to 1: the first class has the rest, unless a sigmoid follows.
    """
    if shares and kind != "LOGISTIC":
        return steps("Concat", steps("Sub", steps.number(1), score), score, axis=1)
    both = steps("Concat", steps("Neg", score), score, axis=1)
    return steps("Sigmoid", both) if kind == "LOGISTIC" else both


def picked(steps: Steps, scores: str, known: list[int]) -> str:
    """The label of the first greatest score of each row."""
    at = steps("ArgMax", scores, axis=1, keepdims=0)
    if known == list(range(len(known))):
        return at
    return steps("Gather", steps.constant(np.asarray(known, np.int64)), at)


def positive(steps: Steps, score: str, known: list[int], above: float) -> str:
    """The second of two labels where a score [N, 1] is above a number, else the first."""
    column = steps.reshape(score, steps.shape(score)[0])
    chosen = steps("Greater", column, steps.number(above))
    second, first = (steps.number(label, "int64") for label in (known[1], known[0]))
    return steps("Where", chosen, second, first)


def _product(steps: Steps, rows: int) -> str:
    """``x · coefficientsᵀ + intercepts`` [N, rows]."""
    attrs, graph = steps.node.attrs, steps.graph
    x = as_rows(steps, as_float(steps, steps.node.inputs[0]))
    matrix = np.asarray(attrs["coefficients"], np.float32).reshape(rows, -1).T  # [columns, rows]
    weight = graph.add_weight(f"{steps.node.name}.coefficients", np.ascontiguousarray(matrix))
    y = steps("MatMul", x, weight)
    if not attrs.get("intercepts"):
        return y
    bias = np.asarray(attrs["intercepts"], np.float32).reshape(-1)
    return steps("Add", y, graph.add_weight(f"{steps.node.name}.intercepts", bias))


def linear_regressor(graph: Graph, node: Node) -> list[Node]:
    """LinearRegressor: a layer."""
    steps = Steps(graph, node)
    y = _product(steps, int(node.attrs.get("targets", 1)))
    return steps.done(transformed(steps, y, node.attrs.get("post_transform", "NONE")))


def linear_classifier(graph: Graph, node: Node) -> list[Node]:
    """LinearClassifier: a layer, the greatest score's label and what the scores are made into.

    Raises
    ------
    UnsupportedModel
        Labels are strings.
    """
    steps, kind = Steps(graph, node), node.attrs.get("post_transform", "NONE")
    known = labels(steps)
    rows = max(len(node.attrs.get("intercepts", ())), 1)
    scores = _product(steps, rows)
    if rows > 1:
        return steps.done(picked(steps, scores, known), transformed(steps, scores, kind))
    if len(known) == 2:
        label = positive(steps, scores, known, 0)
        return steps.done(label, two_columns(steps, scores, kind, shares=True))
    return steps.done(positive(steps, scores, [0, 1], 0), transformed(steps, scores, kind))


SCORES: dict[str, Callable[[Graph, Node], list[Node]]] = {
    "LinearClassifier": linear_classifier,
    "LinearRegressor": linear_regressor,
}
