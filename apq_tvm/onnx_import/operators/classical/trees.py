"""Decision trees: as many steps down as the deepest has, all trees and rows at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.classical.forest import MODES, Forest, by_leaves, by_numbers
from apq_tvm.onnx_import.operators.classical.rows import SHARED, as_rows, rounded
from apq_tvm.onnx_import.operators.classical.scores import (
    labels,
    picked,
    positive,
    transformed,
    two_columns,
)
from apq_tvm.onnx_import.operators.standard import reduced
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Array, Node

DEEPEST = 64
COMPARED = ("LessOrEqual", "Less", "GreaterOrEqual", "Greater", "Equal", "Equal")
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")


class _Walk:
    """Steps down the trees of a forest; its tables are constants of the graph."""

    def __init__(self, steps: Steps, forest: Forest) -> None:
        self.steps, self.forest = steps, forest
        x = as_rows(steps, steps.node.inputs[0])
        self.rows, columns = steps.shape(x)
        if isinstance(columns, int) and forest.features.max() >= columns:
            raise ValueError(f"column {forest.features.max()} is compared, x has {columns}")
        kind = steps.graph.dtype(x)
        double = kind == "float64" or forest.thresholds.dtype == np.float64
        self.kind = "float64" if double else "float32"
        self.x = x if kind == self.kind else steps("Cast", x, to=11 if double else 1)

    def table(self, name: str, array: Array) -> str:
        """A constant that is looked up."""
        return self.steps.graph.add_weight(f"{self.steps.node.name}.{name}", rounded(array))

    def leaves(self) -> str:
        """The leaf that each row [N] gets to in each tree: int64 [N, trees].

        Raises
        ------
        UnsupportedModel
            A tree is very deep.
        """
        steps, forest = self.steps, self.forest
        if forest.depth > DEEPEST:
            raise steps.refuse(
                f"a tree is {forest.depth} levels deep, the most is {DEEPEST}; limit max_depth"
            )
        roots = steps.graph.add_weight(f"{steps.node.name}.roots", forest.roots)
        at = steps.expand(roots, self.rows, len(forest.roots))
        tables = {
            "features": forest.features,
            "thresholds": forest.thresholds.astype(self.kind),
            "yes": forest.yes,
            "no": forest.no,
        }
        used = sorted(set(forest.modes[forest.modes >= 0].tolist()))
        if len(used) > 1:
            tables["modes"] = forest.modes
        if forest.missing.any():
            tables["missing"] = forest.missing
        self.names = {name: self.table(name, array) for name, array in tables.items()}
        for _ in range(forest.depth):
            yes = self._answer(at, used)
            at = steps("Where", yes, self._look(at, "yes"), self._look(at, "no"))
        return at

    def _look(self, at: str, name: str) -> str:
        return self.steps("Gather", self.names[name], at, **SHARED)

    def _answer(self, at: str, used: list[int]) -> str:
        """Whether each comparison says yes."""
        steps = self.steps
        value = steps("GatherElements", self.x, self._look(at, "features"), axis=1, **SHARED)
        threshold = self._look(at, "thresholds")
        yes = self._compared(value, threshold, used[0])
        for mode in used[1:]:
            here = steps("Equal", self._look(at, "modes"), steps.number(mode, "int64"))
            yes = steps("Where", here, self._compared(value, threshold, mode), yes)
        if "missing" in self.names:
            unknown = steps("And", steps("IsNaN", value), self._look(at, "missing"))
            yes = steps("Or", yes, unknown)
        return yes

    def _compared(self, value: str, threshold: str, mode: int) -> str:
        op, steps = COMPARED[mode], self.steps
        if op.endswith("OrEqual") and steps.graph.opset < 12:  # which lack it; NaN is neither
            strict = steps(op.removesuffix("OrEqual"), value, threshold)
            return steps("Or", strict, steps("Equal", value, threshold))
        answer = steps(op, value, threshold)
        return steps("Not", answer) if MODES[mode] == "BRANCH_NEQ" else answer

    def total(self, leaves: str, how: str) -> str:
        """What the leaves say together: [N, targets] in float32."""
        steps, weights = self.steps, self.forest.weights
        if how in ("MIN", "MAX") and weights.shape[1] > 1:
            raise steps.refuse(f"the {how} of several targets cannot be compiled")
        # A column at a time: a matrix that rows are looked up in would be a layer to quantize.
        columns = [
            steps("Gather", self.table(f"weights{i}", column), leaves, **SHARED)
            for i, column in enumerate(weights.astype(self.kind).T)
        ]
        op = {"MIN": "ReduceMin", "MAX": "ReduceMax"}.get(how, "ReduceSum")
        sums = [reduced(steps, op, column, (1,)) for column in columns]
        y = sums[0] if len(sums) == 1 else steps("Concat", *sums, axis=1)
        if how == "AVERAGE":
            y = steps("Div", y, steps.number(len(self.forest.roots), self.kind))
        return y


def _finished(walk: _Walk, y: str, base: Array) -> str:
    """Sums with their base values, in float32."""
    steps = walk.steps
    if base.size:
        y = steps("Add", y, steps.constant(base.astype(walk.kind)))
    return y if walk.kind == "float32" else steps("Cast", y, to=1)


def _base(attrs: Mapping[str, Any]) -> Array:
    """What every row starts with; nothing if it is empty."""
    given = attrs.get("base_values_as_tensor", attrs.get("base_values", ()))
    return np.asarray(given, np.float64).reshape(-1)


def regressor(graph: Graph, node: Node) -> list[Node]:
    """TreeEnsembleRegressor."""
    steps, attrs = Steps(graph, node), node.attrs
    walk = _Walk(steps, by_numbers(attrs, "target", int(attrs.get("n_targets", 1))))
    total = walk.total(walk.leaves(), attrs.get("aggregate_function", "SUM"))
    y = _finished(walk, total, _base(attrs))
    return steps.done(transformed(steps, y, attrs.get("post_transform", "NONE")))


def ensemble(graph: Graph, node: Node) -> list[Node]:
    """TreeEnsemble, of opset 5 of ``ai.onnx.ml``; its output has the type of its input."""
    steps, attrs = Steps(graph, node), node.attrs
    walk = _Walk(steps, by_leaves(attrs))
    y = walk.total(walk.leaves(), AGGREGATES[int(attrs.get("aggregate_function", 1))])
    kind = TRANSFORMS[int(attrs.get("post_transform", 0))]
    return steps.done(transformed(steps, y, kind))


def classifier(graph: Graph, node: Node) -> list[Node]:
    """TreeEnsembleClassifier.

    Two classes whose leaves speak of one of them only have one score; whether it is a share of
    votes or a margin ONNX Runtime tells from the signs of the weights.

    Raises
    ------
    UnsupportedModel
        Labels are strings.
    """
    steps, attrs = Steps(graph, node), node.attrs
    known, kind = labels(steps), attrs.get("post_transform", "NONE")
    spoken = np.unique(np.asarray(attrs["class_ids"], np.int64)).tolist()
    forest, base = by_numbers(attrs, "class", max(len(known), spoken[-1] + 1)), _base(attrs)
    share = bool((forest.weights >= 0).all())
    if len(known) == 2 and len(spoken) == 1:
        forest = replace(forest, weights=forest.weights[:, spoken])
        walk = _Walk(steps, forest)
        score = _finished(walk, walk.total(walk.leaves(), "SUM"), base[-1:])
        label = positive(steps, score, known, 0.5 if share else 0)
        return steps.done(label, two_columns(steps, score, kind, share))
    if len(known) == 2 and base.size:
        raise steps.refuse("it has base values for two classes, and leaves that speak of both")
    walk = _Walk(steps, forest)
    scores = _finished(walk, walk.total(walk.leaves(), "SUM"), base)
    if len(known) == 2:  # ONNX Runtime asks for the second score alone
        label = positive(steps, steps.slice(scores, 1, 1, 2), known, 0)
    else:
        label = picked(steps, scores, known)
    return steps.done(label, transformed(steps, scores, kind))


TREES: dict[str, Callable[[Graph, Node], list[Node]]] = {
    "TreeEnsemble": ensemble,
    "TreeEnsembleClassifier": classifier,
    "TreeEnsembleRegressor": regressor,
}
