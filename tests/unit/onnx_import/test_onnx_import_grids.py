"""``AffineGrid`` whose size is that of an input, as torch's exporter writes such models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, check, save


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("spatial", [["h", 7], ["d", 5, "w"]])
def test_sizes_of_an_input(tmp_path: Path, spatial: list[Any], corners: int) -> None:
    rank = len(spatial)
    nodes = [("Shape", "x", "size"), ("AffineGrid", "t size", "y", {"align_corners": corners})]
    inputs = {
        "x": ("float32", ["b", 2, *spatial]),
        "t": ("float32", ["b", rank, rank + 1]),
    }
    path = save(build(nodes, inputs, "y", opset=20), tmp_path)
    check(path, {"b": 2, "h": 4, "d": 3, "w": 6}, {"b": 1, "h": 2, "d": 2, "w": 3})


def test_sizes_that_are_constants_stay(tmp_path: Path) -> None:
    nodes = [("AffineGrid", "t size", "y")]
    path = save(
        build(
            nodes,
            {"t": ("float32", ["b", 2, 3])},
            "y",
            {"size": np.array([2, 3, 4, 5])},
            opset=20,
        ),
        tmp_path,
    )
    check(path, {"b": 2})
