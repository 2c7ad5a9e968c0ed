"""Decision trees: every row walks down every tree, and the leaves it gets to are added up.

A leaf leads to itself, so that the walks of several trees can go side by side, `STEPS` nodes at a
time without a branch to guess: a step waits for the last one's node, but not for those of others.
They end when none of them moves any more. A task takes some rows through the same trees, whose
nodes so stay near.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Expr, i64

ROWS = 16
"""Rows of a task."""

STEPS = 4
"""Nodes between two questions whether a walk still moves."""

FEATURE, THRESHOLD, YES, NO = range(4)
"""Columns of a node: the column of x that is compared, with what (float32 in its bits; of float64
nothing, they are a table of their own), and the nodes where either answer leads."""

COMPARED = (
    lambda x, t: x <= t,
    lambda x, t: x < t,
    lambda x, t: x >= t,
    lambda x, t: x > t,
    lambda x, t: tirx.EQ(x, t),
    lambda x, t: tirx.EQ(tirx.EQ(x, t).astype("int32"), tirx.const(0, "int32")),
)
"""In the order of the modes of ``TreeEnsemble``. In LLVM TVM's ``!=`` of NaN is false."""


@dataclass(frozen=True)
class TreesSpec:
    """What the trees of a function have in common.

    Parameters
    ----------
    dtype : str
        Of features, thresholds and results: ``"float32"`` or ``"float64"``.
    targets : int
        Columns of the result.
    how : str
        ``"SUM"``, or ``"MIN"`` or ``"MAX"`` of one target.
    modes : tuple of int
        Comparisons that occur (`COMPARED`); of several each node has one.
    missing : bool
        Nodes say whether NaN is a yes.
    least : int
        Columns that x must have; 0 where that is known.
    side : int
        Trees of a group, whose walks go side by side.
    """

    dtype: str
    targets: int
    how: str
    modes: tuple[int, ...]
    missing: bool
    least: int = 0
    side: int = 8

    @property
    def tables(self) -> tuple[str, ...]:
        """What else nodes say."""
        return ("modes",) * (len(self.modes) > 1) + ("missing",) * self.missing


def trees(spec: TreesSpec) -> Any:
    """The results of a forest.

    Parameters
    ----------
    spec : TreesSpec

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x [N, F], nodes int32 [n, 4], first int32 [n + 1], targets int32 [e], values [e], roots
        int32 [groups, side], depths int32 [groups], [thresholds float64 [n]], [modes int32 [n]],
        [missing int32 [n]], y [N, targets])``: a leaf adds ``values[first[i] : first[i + 1]]`` to
        ``targets``; attr ``apq.op`` = "trees".
    """
    rows, columns, nodes, entries, groups = (
        tirx.Var(name, "int64") for name in ("rows", "columns", "nodes", "entries", "groups")
    )
    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            b.func_name("trees")
            b.func_attr({"apq.op": "trees", "op_pattern": 8, "tirx.noalias": True})

            def argument(name: str, shape: Sequence[Any], dtype: str = "int32") -> Any:
                return b.match_buffer(b.arg(name, b.handle()), list(shape), dtype)

            x = argument("x", (rows, columns), spec.dtype)
            tables = {"nodes": argument("nodes", (nodes, i64(4)))}
            first = argument("first", (nodes + 1,))
            targets = argument("targets", (entries,))
            values = argument("values", (entries,), spec.dtype)
            roots, depths = (
                argument("roots", (groups, i64(spec.side))),
                argument("depths", (groups,)),
            )
            if spec.dtype == "float64":
                tables["thresholds"] = argument("thresholds", (nodes,), "float64")
            for name in spec.tables:
                tables[name] = argument(name, (nodes,))
            y = argument("y", (rows, i64(spec.targets)), spec.dtype)
            with b.grid((rows + ROWS - 1) // ROWS) as task, b.sblock("trees"):
                block = b.axis.remap("S", [task])
                at = b.sblock_alloc_buffer((i64(spec.side),), "int32")
                moved = b.sblock_alloc_buffer((i64(1),), "int32")
                held = tirx.min(i64(ROWS), rows - block * ROWS)
                with b.serial(0, held) as r, b.serial(0, i64(spec.targets)) as c:
                    b.buffer_store(y, _start(spec), [block * ROWS + r, c])
                with b.serial(0, groups) as group, b.serial(0, held) as r:
                    row = block * ROWS + r

                    def step(tree: int, watched: bool, row: Expr = row) -> None:
                        led = _led(spec, tables, x, row, at[tree])
                        if watched:
                            changed = tirx.NE(led, at[tree]).astype("int32")
                            b.buffer_store(moved, moved[0] | changed, [0])
                        b.buffer_store(at, led, [tree])

                    for tree in range(spec.side):
                        b.buffer_store(at, roots[group, tree], [tree])
                    b.buffer_store(moved, tirx.const(1, "int32"), [0])
                    rounds = (depths[group].astype("int64") + STEPS - 1) // STEPS
                    with b.serial(0, rounds), b.If(tirx.NE(moved[0], 0)), b.Then():
                        b.buffer_store(moved, tirx.const(0, "int32"), [0])
                        for number in range(STEPS):
                            for tree in range(spec.side):
                                step(tree, number == STEPS - 1)
                    for tree in range(spec.side):
                        start = first[at[tree]].astype("int64")
                        with b.serial(0, first[at[tree] + 1].astype("int64") - start) as e:
                            place = [row, targets[start + e]]
                            b.buffer_store(y, _joined(spec, y[*place], values[start + e]), place)
    func = builder.get()
    return func.with_attr("apq.least", [[columns, i64(spec.least)]]) if spec.least else func


def _led(spec: TreesSpec, tables: dict[str, Any], x: Any, row: Expr, here: Expr) -> Expr:
    """The node behind a node."""
    nodes = tables["nodes"]
    if spec.dtype == "float64":
        threshold = tables["thresholds"][here]
    else:
        threshold = tirx.reinterpret("float32", nodes[here, THRESHOLD])
    yes = _answer(spec, tables, x[row, nodes[here, FEATURE]], threshold, here)
    return nodes[here, NO - yes.astype("int32")]


def _start(spec: TreesSpec) -> Expr:
    if spec.how == "SUM":
        return tirx.const(0.0, spec.dtype)
    infinite = tirx.infinity(spec.dtype)
    return infinite if spec.how == "MIN" else -infinite


def _joined(spec: TreesSpec, total: Expr, value: Expr) -> Expr:
    if spec.how == "SUM":
        return total + value
    return tirx.min(total, value) if spec.how == "MIN" else tirx.max(total, value)


def _answer(
    spec: TreesSpec, tables: dict[str, Any], value: Expr, threshold: Expr, here: Expr
) -> Expr:
    """Whether the comparison of a node says yes."""
    yes = COMPARED[spec.modes[0]](value, threshold)
    for mode in spec.modes[1:]:
        is_mode = tirx.EQ(tables["modes"][here], tirx.const(mode, "int32"))
        yes = tirx.Select(is_mode, COMPARED[mode](value, threshold), yes)
    if spec.missing:
        counts = tables["missing"][here].astype("bool")
        yes = yes | (tirx.isnan(value) & counts)
    return yes
