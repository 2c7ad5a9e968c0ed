"""Updates of one place by many indices, which no two threads may make at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import apq_tvm
from apq_tvm.module import load_module
from tests.onnx_models import build, save

ROWS, COLUMNS, RUNS = 5000, 32, 30


@pytest.mark.parametrize("reduction", ["add", "mul", "min"])
def test_two_threads_give_what_one_does(reduction: str, tmp_path: Path) -> None:
    nodes = [
        ("ScatterElements", "x elements u", "by_elements", {"axis": 0, "reduction": reduction}),
        ("ScatterND", "x rows u", "by_rows", {"reduction": reduction}),
    ]
    inputs = {
        "x": ("float32", ["n", COLUMNS]),
        "u": ("float32", ["e", COLUMNS]),
        "elements": ("int64", ["e", COLUMNS]),
        "rows": ("int64", ["e", 1]),
    }
    model = save(build(nodes, inputs, "by_elements by_rows", opset=18), tmp_path)
    apq_tvm.compile(model, tmp_path / f"scattered_{reduction}", scheme="float", target="host")
    module = load_module(tmp_path / f"scattered_{reduction}")
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 9, (ROWS, 1))
    feeds = {
        "x": np.ones((9, COLUMNS), np.float32),
        "u": rng.uniform(0.99, 1.01, (ROWS, COLUMNS)).astype(np.float32),
        "elements": np.broadcast_to(rows, (ROWS, COLUMNS)).copy(),
        "rows": rows,
    }
    wanted = feeds["x"].copy()
    ufunc = {"add": np.add, "mul": np.multiply, "min": np.minimum}[reduction]
    ufunc.at(wanted, rows[:, 0], feeds["u"])
    for threads in (1, 2):
        module.set_num_threads(threads)
        for _ in range(RUNS):
            for name, got in module.run(feeds).items():
                np.testing.assert_array_equal(got, wanted, f"{name}, {threads} threads")
