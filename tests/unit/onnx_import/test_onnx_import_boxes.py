"""ScatterND into a box of consecutive places becomes slices that are joined."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from onnx_models import build, save, session_of
from onnx_reference import run_reference

from apq_tvm.onnx_import import import_onnx


def grid(*lines: list[int]) -> np.ndarray:
    """Indices of every element of a box, int64 [..., axes]."""
    return np.stack(np.meshgrid(*(np.array(line, np.int64) for line in lines), indexing="ij"), -1)


def scattered(path: Path, rows: int | str, indices: np.ndarray, reduction: str = "none") -> int:
    """Compile ``x[indices] = u`` for x [rows, 6, 8]; compare, and say how many scatters stay."""
    axes, box = indices.shape[-1], indices.shape[:-1]
    shape = [*box, *(5, 6, 8)[axes:]]
    model = build(
        [], {"x": ("float32", [rows, 6, 8]), "u": ("float32", shape)}, "y", {"at": indices}
    )
    model.graph.node.append(
        helper.make_node("ScatterND", ["x", "at", "u"], ["y"], reduction=reduction)
    )
    rng = np.random.default_rng(0)
    given = {
        "x": rng.standard_normal((5, 6, 8)).astype(np.float32),
        "u": rng.standard_normal(shape).astype(np.float32),
    }
    file = save(model, path)
    imported = import_onnx(file)
    (wanted,) = session_of(file).run(None, given)
    np.testing.assert_allclose(run_reference(imported, given)["y"], wanted, rtol=1e-6)
    return sum(node.op == "ScatterND" for node in imported.nodes)


@pytest.mark.parametrize("reduction", ["none", "add", "mul"])
@pytest.mark.parametrize(
    "lines",
    [
        ([1, 2],),
        ([0, 1, 2, 3, 4], [2, 3, 4]),
        ([3], [0, 1], [5, 6, 7]),
        ([0, 1], [-2, -1], [4]),
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_boxes(lines: tuple[list[int], ...], reduction: str, tmp_path: Path) -> None:
    assert scattered(tmp_path, 5, grid(*lines), reduction) == 0


@pytest.mark.parametrize(
    "indices",
    [
        grid([0, 2]),  # a step
        grid([2, 1]),  # backwards
        grid([1, 1]),  # one place twice: the later value stays
        grid([1, 2], [0, 1])[..., ::-1].copy(),  # the axes of the box in another order
        grid([1, 2])[:, None, :],  # a box of more axes than are indexed
        np.array([[0, 1], [1, 2]]),  # a diagonal
    ],
)
def test_other_places(indices: np.ndarray, tmp_path: Path) -> None:
    assert scattered(tmp_path, 5, indices) == 1


def test_a_symbolic_number_of_rows(tmp_path: Path) -> None:
    """torch's ``x[:, 1:] = u``: ranges over every axis, the first of a size that a run knows."""
    model = build(
        [
            ("Shape", "x", "s"),
            ("Gather", "s zero", "rows"),
            ("Range", "zero rows one", "r"),
            ("Reshape", "r tall", "first"),
            ("Shape", "u", "box"),
            ("Expand", "first box", "firsts"),
            ("Expand", "second box", "seconds"),
            ("Unsqueeze", "firsts last", "a"),
            ("Unsqueeze", "seconds last", "b"),
        ],
        {"x": ("float32", ["n", 6]), "u": ("float32", ["n", 5])},
        "y",
        {
            "zero": np.array(0), "one": np.array(1), "tall": np.array([-1, 1]),
            "second": np.arange(1, 6), "last": np.array([-1]),
        },
    )  # fmt: skip
    model.graph.node.append(helper.make_node("Concat", ["a", "b"], ["at"], axis=-1))
    model.graph.node.append(helper.make_node("ScatterND", ["x", "at", "u"], ["y"]))
    file = save(model, tmp_path)
    imported = import_onnx(file)
    assert {node.op for node in imported.nodes} == {"Slice", "Concat"}
    given = {
        name: np.random.rand(3, size).astype(np.float32) for name, size in (("x", 6), ("u", 5))
    }
    (wanted,) = session_of(file).run(None, given)
    np.testing.assert_array_equal(run_reference(imported, given)["y"], wanted)
