"""Decision trees: one node that walks down all of them, and what is made of its sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.classical.forest import (
    LESS_OR_EQUAL,
    Forest,
    by_leaves,
    by_numbers,
)
from apq_tvm.onnx_import.operators.classical.rows import as_rows
from apq_tvm.onnx_import.operators.classical.scores import (
    labels,
    picked,
    positive,
    transformed,
    two_columns,
)
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Array, Node

TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
SIDE = 12
"""Trees that a row walks down side by side."""

AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")


class _Walk:
    """Steps down the trees of a forest: ``apq.Trees``, whose tables are constants of the graph."""

    def __init__(self, steps: Steps, forest: Forest) -> None:
        self.steps, self.forest = steps, forest
        x = as_rows(steps, steps.node.inputs[0])
        columns, self.least = steps.shape(x)[1], int(forest.features.max()) + 1
        if isinstance(columns, int):
            if self.least > columns:
                raise ValueError(f"column {self.least - 1} is compared, x has {columns}")
            self.least = 0
        kind = steps.graph.dtype(x)
        double = kind == "float64" or forest.thresholds.dtype == np.float64
        self.kind = "float64" if double else "float32"
        self.x = x if kind == self.kind else steps("Cast", x, to=11 if double else 1)
        if forest.missing.any() and isinstance(columns, int):
            self._spread(columns)

    def _spread(self, columns: int) -> None:
        """Where NaN is a yes and ``<=`` is asked, ask of another copy of x: in which it is -inf."""
        forest, steps = self.forest, self.steps
        inner = forest.modes >= 0
        if set(forest.modes[inner].tolist()) != {LESS_OR_EQUAL}:
            return
        least = steps.number(-np.inf, self.kind)
        known = steps("Where", steps("IsNaN", self.x), least, self.x)
        self.x = steps("Concat", self.x, known, axis=1)
        self.forest = replace(
            forest,
            features=forest.features + columns * forest.missing,
            missing=np.zeros_like(forest.missing),
        )

    def total(self, targets: int, how: str) -> str:
        """What the leaves that each row gets to say together: [N, targets].

        Raises
        ------
        UnsupportedModel
            The least or greatest of several targets is asked for.
        """
        steps, forest = self.steps, self.forest
        if how in ("MIN", "MAX") and targets > 1:
            raise steps.refuse(f"the {how} of several targets cannot be compiled")
        modes = tuple(sorted(set(forest.modes[forest.modes >= 0].tolist()))) or (0,)
        names = [
            steps.graph.add_weight(f"{steps.node.name}.{name}", table)
            for name, table in _tables(forest, self.kind, modes).items()
        ]
        y = steps(
            "apq.Trees", self.x, *names, targets=targets, modes=modes, least=self.least,
            how="SUM" if how == "AVERAGE" else how, missing=bool(forest.missing.any()), side=SIDE,
        )  # fmt: skip
        if how == "AVERAGE":
            y = steps("Div", y, steps.number(len(forest.roots), self.kind))
        return y


def _tables(forest: Forest, kind: str, modes: tuple[int, ...]) -> dict[str, Array]:
    """What `apq_tvm.ops.graph.trees` reads, in its order.

    Trees are `SIDE` to a group; a leaf that says nothing, the last node, fills up the last one.
    """
    count, single = len(forest.modes), kind == "float32"
    thresholds = forest.thresholds.astype(kind)
    nodes = np.zeros((count + 1, 4), np.int32)
    nodes[:-1, 0], nodes[:-1, 2], nodes[:-1, 3] = forest.features, forest.yes, forest.no
    nodes[:-1, 1] = thresholds.view(np.int32) if single else 0
    nodes[-1, 2:] = count
    missing = -len(forest.roots) % SIDE
    tables = {
        "nodes": nodes,
        "first": np.append(forest.first, forest.first[-1:]),
        "targets": np.append(forest.targets, 0),  # none may say anything
        "values": np.append(forest.values, 0.0).astype(kind),
        "roots": np.pad(forest.roots, (0, missing), constant_values=count).reshape(-1, SIDE),
        "depths": np.pad(forest.depths, (0, missing)).reshape(-1, SIDE).max(1),
    }
    if not single:
        tables["thresholds"] = np.append(thresholds, 0.0)
    if len(modes) > 1:
        tables["modes"] = np.append(forest.modes, -1)
    if forest.missing.any():
        tables["missing"] = np.append(forest.missing, False)
    own = ("values", "thresholds")
    return {k: table if k in own else table.astype(np.int32) for k, table in tables.items()}


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
    targets = int(attrs.get("n_targets", 1))
    walk = _Walk(steps, by_numbers(attrs, "target", targets))
    total = walk.total(targets, attrs.get("aggregate_function", "SUM"))
    y = _finished(walk, total, _base(attrs))
    return steps.done(transformed(steps, y, attrs.get("post_transform", "NONE")))


def ensemble(graph: Graph, node: Node) -> list[Node]:
    """TreeEnsemble, of opset 5 of ``ai.onnx.ml``; its output has the type of its input."""
    steps, attrs = Steps(graph, node), node.attrs
    walk = _Walk(steps, by_leaves(attrs))
    how = AGGREGATES[int(attrs.get("aggregate_function", 1))]
    y = walk.total(int(attrs["n_targets"]), how)
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
    targets = max(len(known), spoken[-1] + 1)
    forest, base = by_numbers(attrs, "class", targets), _base(attrs)
    share = bool((forest.values >= 0).all())
    if len(known) == 2 and len(spoken) == 1:
        walk = _Walk(steps, replace(forest, targets=np.zeros_like(forest.targets)))
        score = _finished(walk, walk.total(1, "SUM"), base[-1:])
        label = positive(steps, score, known, 0.5 if share else 0)
        return steps.done(label, two_columns(steps, score, kind, share))
    if len(known) == 2 and base.size:
        raise steps.refuse("it has base values for two classes, and leaves that speak of both")
    walk = _Walk(steps, forest)
    scores = _finished(walk, walk.total(targets, "SUM"), base)
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
