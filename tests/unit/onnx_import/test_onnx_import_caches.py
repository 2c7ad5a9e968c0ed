"""Lengths of caches and masks that an exporter gave names of their own are found to be one.

torch.export names every dimension that it is told nothing about (``Dim.AUTO``).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx_models import build, check, ops, save

from apq_tvm.onnx_import import import_onnx
from apq_tvm.types import ImportedModel

KEYS = {"k": ("float32", ["b", "past", 4]), "new": ("float32", ["b", "s", 4])}
VALUES = {"v": ("float32", ["b", "other", 4])}
MASK = {"m": ("int64", ["b", "total"])}
JOINED = [
    ("Relu", "new", "fresh"),
    ("Concat", "k fresh", "keys", {"axis": 1}),
    ("Concat", "v fresh", "values", {"axis": 1}),
]
LENGTHS = [
    ("Shape", "k", "past", {"start": 1, "end": 2}),
    ("Shape", "keys", "all", {"start": 1, "end": 2}),
]
NUMBERS = {"axis": np.array([1]), "zero": np.array([0]), "far": np.array([2**31 - 1])}


def shapes(model: ImportedModel) -> dict[str, tuple[int | str, ...]]:
    return {spec.name: spec.shape for spec in model.inputs}


def test_sums_with_a_common_part(tmp_path: Path) -> None:
    nodes = [*JOINED, ("Mul", "keys values", "y")]
    path = save(build(nodes, {**KEYS, **VALUES}, "y"), tmp_path)
    given = shapes(import_onnx(path))
    assert given["k"] == given["v"] and given["new"] == ("b", "s", 4)
    length = str(given["k"][1])
    check(path, *({"b": 2, length: past, "s": 3} for past in (0, 1, 5)))


def test_a_mask_that_is_cut_behind_the_past(tmp_path: Path) -> None:
    """``positions[:, past:]`` of what the mask says, added to the new tokens."""
    nodes = [
        *JOINED[:2],
        *LENGTHS[:1],
        ("Slice", "m past far axis", "late"),
        ("Cast", "late", "real", {"to": 1}),
        ("Unsqueeze", "real two", "column"),
        ("Add", "new column", "y"),
    ]
    weights = {**NUMBERS, "two": np.array([2])}
    del weights["zero"]
    path = save(build(nodes, {**KEYS, **MASK}, "y keys", weights), tmp_path)
    assert import_onnx(path).outputs[0].shape == ("b", "s", 4)
    check(path, *({"b": 2, "past": past, "s": 3, "total": past + 3} for past in (0, 1, 5)))


def test_a_mask_that_is_cut_to_a_layers_keys(tmp_path: Path) -> None:
    """It is as long as they are, and so is the cache of another layer."""
    second = [("Concat", "v fresh", "others", {"axis": 1}), ("Shape", "others", "every",
              {"start": 1, "end": 2})]  # fmt: skip
    nodes = [
        *JOINED[:2],
        *LENGTHS[1:],
        ("Slice", "m zero all axis", "first"),
        *second,
        ("Slice", "first zero every axis", "second"),
        ("Cast", "second", "y", {"to": 1}),
    ]
    weights = {name: NUMBERS[name] for name in ("zero", "axis")}
    path = save(build(nodes, {**KEYS, **VALUES, **MASK}, "y keys others", weights), tmp_path)
    model = import_onnx(path)
    given = shapes(model)
    assert given["k"] == given["v"] and "apq.Slice" not in ops(model)
    length = str(given["k"][1])
    check(path, *({"b": 2, length: past, "s": 3, "total": past + 3} for past in (0, 1, 5)))


def test_a_table_of_floats_may_be_longer(tmp_path: Path) -> None:
    """Rotary tables are cut alike, and are as long as somebody made them."""
    nodes = [*JOINED[:2], *LENGTHS[1:], ("Slice", "table zero all axis", "y")]
    weights = {name: NUMBERS[name] for name in ("zero", "axis")}
    table = {"table": ("float32", ["b", "long", 4])}
    path = save(build(nodes, {**KEYS, **table}, "y keys", weights), tmp_path)
    assert shapes(import_onnx(path))["table"] == ("b", "long", 4)
    check(path, {"b": 2, "past": 2, "s": 3, "long": 9})


def test_heads_that_share_keys_behind_a_merge(tmp_path: Path) -> None:
    """torch.export merges batch and heads, swaps the last two axes and splits other heads."""
    nodes = [
        ("Shape", "x", "shape"),
        *(("Gather", f"shape i{i}", f"d{i}") for i in (0, 3)),
        ("Concat", "minus d3 eight", "merged", {"axis": 0}),
        ("Reshape", "x merged", "flat"),
        ("Transpose", "flat", "swapped", {"perm": [0, 2, 1]}),
        ("Concat", "d0 six eight d3", "split", {"axis": 0}),
        ("Reshape", "swapped split", "y"),
    ]
    numbers = {"i0": [0], "i3": [3], "minus": [-1], "eight": [8], "six": [6]}
    weights = {name: np.array(value) for name, value in numbers.items()}
    path = save(build(nodes, {"x": ("float32", ["b", 2, 3, "t", 8])}, "y", weights), tmp_path)
    model = check(path, {"b": 1, "t": 1}, {"b": 2, "t": 5})
    assert ops(model) == {"Reshape": 1, "Transpose": 1}
