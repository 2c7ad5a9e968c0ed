"""Trees as tables, out of the attributes of any operator that holds some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apq_tvm.types import Array

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
"""In the order in which ``TreeEnsemble`` numbers them."""

LESS_OR_EQUAL = MODES.index("BRANCH_LEQ")

LONGEST = 1000
DIFFERENT = "its lists of nodes have different lengths, or none"
MOST_TARGETS = 1 << 24


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
    first : ndarray of int64
        [n + 1]: what node i says are entries ``first[i]`` to ``first[i + 1]`` of the next two.
    targets : ndarray of int64
    values : ndarray of the type of the thresholds
        That of a target.
    roots, depths : ndarray of int64
        [trees]; comparisons on the longest way of each.
    """

    features: Array
    thresholds: Array
    modes: Array
    yes: Array
    no: Array
    missing: Array
    first: Array
    targets: Array
    values: Array
    roots: Array
    depths: Array


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
    nodes = _Numbered(_integers(attrs, "nodes_treeids"), _integers(attrs, "nodes_nodeids"))
    count = len(nodes.trees)
    kinds = _kinds(attrs["nodes_modes"])
    ways = [_integers(attrs, f"nodes_{kind}nodeids") for kind in ("true", "false")]
    if any(len(table) != count for table in (kinds, *ways)):
        raise ValueError(DIFFERENT)
    inner, own = kinds >= 0, np.arange(count)
    yes, no = (own.copy(), own)
    for leads, numbers in zip((yes, no), ways, strict=True):
        leads[inner] = nodes.find(nodes.trees[inner], numbers[inner])
    thresholds = _listed(attrs, "nodes_values")
    values, places = _listed(attrs, f"{leaf}_weights"), _integers(attrs, f"{leaf}_ids")
    at = nodes.find(_integers(attrs, f"{leaf}_treeids"), _integers(attrs, f"{leaf}_nodeids"))
    if not len(at) == len(places) == len(values):
        raise ValueError("its lists of leaves have different lengths")
    _check_targets(targets)
    wrong = places[(places < 0) | (places >= targets)]
    if len(wrong):
        raise ValueError(f"a leaf's weight is of {leaf} {wrong[0]}")
    missed = _integers(attrs, "nodes_missing_value_tracks_true", np.zeros(count)) > 0
    features = _integers(attrs, "nodes_featureids")
    roots = np.unique(nodes.trees, return_index=True)[1]  # a tree's first, for ONNX Runtime
    return _checked(features, thresholds, kinds, yes, no, missed, (at, places, values), roots)


class _Numbered:
    """Nodes by the number of their tree and their own in it.

    Raises
    ------
    ValueError
        Two nodes have the same numbers.
    """

    def __init__(self, trees: Array, numbers: Array) -> None:
        if len(trees) != len(numbers):
            raise ValueError(DIFFERENT)
        self.trees = trees
        self._trees, self._numbers = np.unique(trees), np.unique(numbers)
        keys, _ = self._keys(trees, numbers)
        self._order = np.argsort(keys)
        self._sorted = keys[self._order]
        if (self._sorted[1:] == self._sorted[:-1]).any():
            raise ValueError("two nodes of a tree have one number")

    def _keys(self, trees: Array, numbers: Array) -> tuple[Array, Array]:
        """One number for both, and where there is one."""
        there = np.ones(len(trees), bool)
        places = []
        for known, wanted in ((self._trees, trees), (self._numbers, numbers)):
            place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            there &= known[place] == wanted if len(known) else False
            places.append(place)
        return places[0] * len(self._numbers) + places[1], there

    def find(self, trees: Array, numbers: Array) -> Array:
        """Where the nodes of these numbers are.

        Raises
        ------
        ValueError
            One is nowhere.
        """
        if len(trees) != len(numbers):
            raise ValueError(DIFFERENT)
        keys, there = self._keys(trees, numbers)
        place = np.minimum(np.searchsorted(self._sorted, keys), max(len(self._sorted) - 1, 0))
        there &= self._sorted[place] == keys if len(self._sorted) else False
        if not there.all():
            lost = int(np.argmin(there))
            raise ValueError(f"tree {trees[lost]} has no node {numbers[lost]}")
        return self._order[place]


def _integers(attrs: Mapping[str, Any], name: str, absent: Array | None = None) -> Array:
    given = attrs[name] if absent is None else attrs.get(name, ())
    return np.asarray(given, np.int64) if absent is None or len(given) else absent


def _check_targets(targets: int) -> None:
    if not 0 < targets <= MOST_TARGETS:
        raise ValueError(f"it has {targets} targets, of at most {MOST_TARGETS}")


def _kinds(modes: Sequence[str]) -> Array:
    """The place of every mode in `MODES`, -1 of leaves."""
    places = {"LEAF": -1, **{mode: place for place, mode in enumerate(MODES)}}
    unknown = set(modes) - places.keys()
    if unknown:
        raise ValueError(f"nodes of mode {min(unknown)} cannot be compared")
    return np.fromiter((places[mode] for mode in modes), np.int64, len(modes))


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
    _check_targets(targets)
    if places.min(initial=0) < 0 or places.max(initial=0) >= targets:
        raise ValueError("a leaf's target is out of range")
    leaves = np.zeros(len(values), np.int64)
    given = _integers(attrs, "nodes_missing_value_tracks_true", np.zeros(inner, np.int64))
    return _checked(
        np.concatenate([np.asarray(attrs["nodes_featureids"], np.int64), leaves]),
        np.concatenate([splits, leaves.astype(splits.dtype)]),
        np.concatenate([kinds, leaves - 1]),
        yes,
        no,
        np.concatenate([given > 0, leaves > 0]),
        (np.arange(inner, count), places, values),
        np.asarray(attrs["tree_roots"], np.int64),
    )


def _checked(
    features: Array,
    thresholds: Array,
    modes: Array,
    yes: Array,
    no: Array,
    missing: Array,
    said: tuple[Array, Array, Array],
    roots: Array,
) -> Forest:
    """The tables and the depths, once every way is known to end; `said` are nodes, the targets they
    speak of and what they say."""
    count, leaf = len(modes), modes < 0
    tables = (features, thresholds, yes, no, missing)
    if any(len(table) != count for table in tables) or not count:
        raise ValueError(DIFFERENT)
    if min(yes.min(), no.min(), features.min()) < 0 or max(yes.max(), no.max()) >= count:
        raise ValueError("a branch leads to a node that is not there")
    if not len(roots) or roots.min() < 0 or roots.max() >= count:
        raise ValueError("no tree has a root")
    depths = _depths(yes, no, leaf, roots)
    places, targets, values = said
    if not len(places) == len(targets) == len(values):
        raise ValueError("its lists of leaves have different lengths")
    order = np.argsort(places, kind="stable")
    first = np.searchsorted(places[order], np.arange(count + 1))
    return Forest(
        features, thresholds, modes, yes, no, missing,
        first, targets[order], values[order], roots, depths,
    )  # fmt: skip


def _depths(yes: Array, no: Array, leaf: Array, roots: Array) -> Array:
    """Comparisons on the longest way of each tree: from the leaves up, each node once, since
    branches and even roots may share what is below them.

    Raises
    ------
    ValueError
        A way has no end, or one that is very far.
    """
    inner = np.flatnonzero(~leaf)
    below, above = np.concatenate([yes[inner], no[inner]]), np.concatenate([inner, inner])
    order = np.argsort(below, kind="stable")
    above, first = above[order], np.searchsorted(below[order], np.arange(len(leaf) + 1))
    heights, waits = np.where(leaf, 0, -1), np.full(len(leaf), 2)
    done = np.flatnonzero(leaf)
    for height in range(1, LONGEST + 1):
        counts = first[done + 1] - first[done]
        behind = np.repeat(first[done] - np.cumsum(counts) + counts, counts)
        over = above[behind + np.arange(len(behind))]
        np.subtract.at(waits, over, 1)
        done = np.unique(over[waits[over] == 0])
        if not len(done):
            break
        heights[done] = height
    if (heights[roots] < 0).any():
        raise ValueError(f"nodes lead in a circle, or over more than {LONGEST} others")
    return heights[roots]
