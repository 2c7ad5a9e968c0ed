"""Dimensions of 0, in inputs and in constants, against ONNX Runtime.

Results without elements cost no kernel; what a kernel makes of operands without elements is the
value its sum or its maximum begins with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import apq_tvm
from apq_tvm.module import load_module
from tests.onnx_models import build, joined, rand, save, session_of

SIZES = {"b": 2, "s": 3, "t": 5, "k": 4}
LONG = np.int64(np.iinfo(np.int64).max)
WHOLE = "Mean L2 LogSum LogSumExp"
HEADS = [
    ("Reshape", "x split", "h"),
    ("Transpose", "h", "q", {"perm": [0, 2, 1, 3]}),
    ("Reshape", "y split", "g"),
    ("Transpose", "g", "keys", {"perm": [0, 2, 3, 1]}),
    ("Transpose", "g", "values", {"perm": [0, 2, 1, 3]}),
    ("MatMul", "q keys", "scores"),
    ("Softmax", "scores", "p"),
    ("MatMul", "p values", "o"),
    ("Transpose", "o", "o1", {"perm": [0, 2, 1, 3]}),
    ("Reshape", "o1 whole", "o2"),
    ("MatMul", "o2 w", "z"),
]


def of(*dims: str | int, dtype: str = "float32") -> tuple[str, list[str | int]]:
    return dtype, list(dims)


# name: (nodes, inputs, outputs, weights)
GRAPHS: dict[str, tuple[Any, ...]] = {
    "attention": (
        HEADS,
        {"x": of("b", "s", 32), "y": of("b", "t", 32)},
        "z",
        {"split": [0, 0, 4, 8], "whole": [0, 0, 32], "w": rand(32, 32) / 5},
    ),
    "products": (
        [("MatMul", "x y", "z"), ("Softmax", "z", "p", {"axis": 0})],
        {"x": of("b", "k"), "y": of("k", 6)},
        "z p",
        {},
    ),
    "reduced": (
        [
            ("ReduceSum", "x first", "sum", {"keepdims": 0}),
            *(("Reduce" + op, "x", op, {"axes": [0]}) for op in ("Max", "Mean", "Prod", "L2")),
            ("CumSum", "x first", "sums"),
        ],
        {"x": of("b", 4)},
        "sum Max Mean Prod L2 sums",
        {"first": np.array([0])},
    ),
    "whole": (
        [(f"Reduce{op}", "i", op, {"axes": [0]}) for op in WHOLE.split()],
        {"i": of("b", 3, dtype="int32")},
        WHOLE,
        {},
    ),
    "moved": (
        [
            ("Concat", "x y", "c", {"axis": 1}),
            ("Concat", "y x", "d", {"axis": 1}),
            ("Slice", "x two far one", "to_nothing"),
            ("Pad", "x around", "padded"),
            ("Reshape", "x flat", "rows"),
        ],
        {"x": of("b", "s", 8), "y": of("b", "t", 8)},
        "c d to_nothing padded rows",
        {
            "one": [1],
            "two": [2],
            "far": [LONG],
            "around": [0, 1, 0, 0, 1, 0],
            "flat": [-1, 8],
        },
    ),
    "found": (
        [
            ("Gather", "w i", "g"),
            ("ScatterND", "w at u", "n"),
            ("NonZero", "u", "nz"),
            ("TopK", "u two", "best where"),
            ("TopK", "u none", "no nowhere"),
        ],
        {"i": of("s", dtype="int64"), "at": of("t", 1, dtype="int64"), "u": of("t", 8)},
        "g n nz best where no nowhere",
        {"w": rand(6, 8), "two": [2], "none": [0]},
    ),
    "constants": (
        [
            ("Concat", "x nothing", "c", {"axis": 0}),
            ("MatMul", "nothing w", "m"),
            ("MatMul", "narrow flat", "zeros"),
            ("Gather", "x no_ids", "g", {"axis": 1}),
            ("Slice", "x two two one", "s"),
            ("ReduceSum", "s one", "r"),
        ],
        {"x": of("b", 4)},
        "c m zeros g s r",
        {
            "nothing": np.zeros((0, 4), np.float32),
            "w": rand(4, 3),
            "narrow": np.zeros((3, 0), np.float32),
            "flat": np.zeros((0, 2), np.float32),
            "no_ids": np.zeros(0, np.int64),
            "one": [1],
            "two": [2],
        },
    ),
}  # fmt: skip


def feeds(inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shapes = {name: [sizes.get(d, d) for d in shape] for name, (_, shape) in inputs.items()}
    return {n: rng.integers(0, 3, s).astype(inputs[n][0]) for n, s in shapes.items()}


def test_every_dimension_may_be_0(tmp_path: Path) -> None:
    """One of them, and all of them."""
    nodes, inputs, outputs, weights = joined(GRAPHS)
    path = save(build(nodes, inputs, " ".join(outputs), weights), tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="W8A8")
    module, session, wrong = load_module(tmp_path / "compiled"), session_of(path), []
    assert module.manifest["least"] == {}
    for sizes in (SIZES, *({**SIZES, d: 0} for d in SIZES), dict.fromkeys(SIZES, 0)):
        given = feeds(inputs, sizes)
        wanted = dict(zip(outputs, session.run(outputs, given), strict=True))
        into = {name: np.full_like(v, 7) for name, v in wanted.items() if name != "found.nz"}
        got = module.run(given, into=into)  # where a kernel writes nothing, 7 is left
        for name, value in wanted.items():
            same = got[name].shape == value.shape and got[name].dtype == value.dtype
            if not same or not np.allclose(got[name], value, atol=0.05):
                wrong.append(f"{name} at {sizes}: {got[name]} instead of {value}")
    assert not wrong, "\n".join(wrong)


def test_dimensions_are_fixed_at_0(tmp_path: Path) -> None:
    """``--dim s=0``: of queries without rows, and of sums over nothing."""
    nodes, inputs, outputs, weights = joined(
        {name: GRAPHS[name] for name in ("attention", "products")}
    )
    path = save(build(nodes, inputs, " ".join(outputs), weights), tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="W8A8", dims={"s": 0, "k": 0})
    given = feeds(inputs, {**SIZES, "s": 0, "k": 0})
    got = load_module(tmp_path / "compiled").run(given)
    for name, value in zip(outputs, session_of(path).run(outputs, given), strict=True):
        np.testing.assert_allclose(got[name], value, err_msg=name, strict=True)
