"""Trees as tables, out of the attributes of any operator that holds some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from apq_tvm.types import Array

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
"""In the order in which ``TreeEnsemble`` numbers them."""


LONGEST = 1000
MOST_WEIGHTS = 1 << 26


@dataclass(frozen=True)
class Forest:
    """Nodes of all trees, [n] each; a leaf leads to itself.

    Parameters
    ----------
    features, yes, no : ndarray of int64
        The column that is compared, and where either answer leads.
    thresholds : ndarray of float32 or float64
    modes : ndarray of int64
        Index in `MODES`; -1 of a leaf.
    missing : ndarray of bool
        NaN is a yes.
    weights : ndarray of the type of the thresholds
        [n, targets]; zeros but at leaves.
    roots : ndarray of int64
        [trees]
    depth : int
        Comparisons on the longest way.
    """

    features: Array
    thresholds: Array
    modes: Array
    yes: Array
    no: Array
    missing: Array
    weights: Array
    roots: Array
    depth: int


def _listed(attrs: Mapping[str, Any], name: str) -> Array:
    """Numbers of a list, or of the tensor that holds it in double precision."""
    tensor = attrs.get(f"{name}_as_tensor")
    if tensor is not None:
        return np.asarray(tensor).reshape(-1)
    return np.asarray(attrs.get(name, ()), np.float32).reshape(-1)


def by_numbers(attrs: Mapping[str, Any], leaf: str, targets: int) -> Forest:
    """``TreeEnsembleClassifier`` and ``TreeEnsembleRegressor``: nodes have numbers in their trees.

    Parameters
    ----------
    attrs : mapping of str to Any
    leaf : str
        How names of leaves' attributes begin: ``class`` or ``target``.
    targets : int

    Raises
    ------
    ValueError
        Nodes that are not there, or ways that lead in circles.
    """
    trees, numbers = attrs["nodes_treeids"], attrs["nodes_nodeids"]
    at = {key: i for i, key in enumerate(zip(trees, numbers, strict=True))}
    if len(at) < len(trees):
        raise ValueError("two nodes of a tree have one number")
    kinds = [_kind(mode) for mode in attrs["nodes_modes"]]

    def child(i: int, number: int) -> int:
        if kinds[i] < 0:
            return i
        if (trees[i], number) not in at:
            raise ValueError(f"tree {trees[i]} has no node {number}")
        return at[trees[i], number]

    count = len(at)
    yes, no = (
        np.array([child(i, n) for i, n in enumerate(attrs[f"nodes_{kind}nodeids"])], np.int64)
        for kind in ("true", "false")
    )
    thresholds = _listed(attrs, "nodes_values")
    values = _listed(attrs, f"{leaf}_weights")
    weights = _zeros(count, targets, values)
    keys = zip(attrs[f"{leaf}_treeids"], attrs[f"{leaf}_nodeids"], strict=True)
    for key, target, value in zip(keys, attrs[f"{leaf}_ids"], values, strict=True):
        if key not in at or not 0 <= target < targets:
            raise ValueError(f"a leaf's weight is of node {key}, {leaf} {target}")
        weights[at[key], target] += value
    missing = attrs.get("nodes_missing_value_tracks_true") or (0,) * count
    features = np.asarray(attrs["nodes_featureids"], np.int64)
    missed = np.array(missing) > 0
    roots = np.unique(np.asarray(trees), return_index=True)[1]  # a tree's first, for ONNX Runtime
    return _checked(features, thresholds, np.array(kinds), yes, no, missed, weights, roots)


def _zeros(count: int, targets: int, like: Array) -> Array:
    """Weights of no leaf yet: [count, targets]."""
    if not 0 < targets * count <= MOST_WEIGHTS:
        raise ValueError(f"{targets} targets of {count} nodes are more than {MOST_WEIGHTS} weights")
    return np.zeros((count, targets), like.dtype)


def _kind(mode: str) -> int:
    """The place of a mode in `MODES`, -1 of a leaf."""
    if mode != "LEAF" and mode not in MODES:
        raise ValueError(f"nodes of mode {mode} cannot be compared")
    return -1 if mode == "LEAF" else MODES.index(mode)


def by_leaves(attrs: Mapping[str, Any]) -> Forest:
    """``TreeEnsemble``: nodes and leaves have tables of their own.

    Raises
    ------
    ValueError
        Nodes that are not there, ways that lead in circles, or sets of members.
    """
    splits, values = (np.asarray(attrs[name]) for name in ("nodes_splits", "leaf_weights"))
    inner, count = len(splits), len(splits) + len(values)
    kinds = np.asarray(attrs["nodes_modes"]).astype(np.int64)
    if kinds.max(initial=0) >= len(MODES):
        raise ValueError("members of sets (BRANCH_MEMBER) cannot be compared")
    ways = []
    for kind in ("true", "false"):
        to, is_leaf = (np.asarray(attrs[f"nodes_{kind}{part}"]) for part in ("nodeids", "leafs"))
        ways.append(np.concatenate([to + inner * (is_leaf != 0), np.arange(inner, count)]))
    yes, no = ways
    targets, places = int(attrs["n_targets"]), np.asarray(attrs["leaf_targetids"])
    if places.min(initial=0) < 0 or places.max(initial=0) >= targets:
        raise ValueError("a leaf's target is out of range")
    weights = _zeros(count, targets, values)
    weights[np.arange(inner, count), places] = values
    leaves = np.zeros(len(values), np.int64)
    given = np.asarray(attrs.get("nodes_missing_value_tracks_true") or np.zeros(inner))
    return _checked(
        np.concatenate([np.asarray(attrs["nodes_featureids"], np.int64), leaves]),
        np.concatenate([splits, leaves.astype(splits.dtype)]),
        np.concatenate([kinds, leaves - 1]),
        yes,
        no,
        np.concatenate([given > 0, leaves > 0]),
        weights,
        np.asarray(attrs["tree_roots"], np.int64),
    )


def _checked(
    features: Array,
    thresholds: Array,
    modes: Array,
    yes: Array,
    no: Array,
    missing: Array,
    weights: Array,
    roots: Array,
) -> Forest:
    """The tables and the depth, once every way is known to end."""
    count, leaf = len(modes), modes < 0
    tables = (features, thresholds, yes, no, missing)
    if any(len(table) != count for table in tables) or not count:
        raise ValueError("its lists of nodes have different lengths, or none")
    if min(yes.min(), no.min(), features.min()) < 0 or max(yes.max(), no.max()) >= count:
        raise ValueError("a branch leads to a node that is not there")
    if not len(roots) or roots.min() < 0 or roots.max() >= count:
        raise ValueError("no tree has a root")
    level, depth = np.unique(roots), 0
    while not leaf[level].all():
        depth += 1
        if depth > min(count, LONGEST):
            raise ValueError(f"nodes lead in a circle, or over more than {LONGEST} others")
        level = np.unique(np.concatenate([yes[level], no[level]]))
    return Forest(features, thresholds, modes, yes, no, missing, weights, roots, depth)
