"""Fourier transforms along axes whose length only a run knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx_models import build, check, save

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import import import_onnx

NODES = [
    ("DFT", "real", "y0", {"axis": 1}),
    ("DFT", "real", "y1", {"axis": 2, "onesided": 1}),
    ("DFT", "complex", "y2", {"axis": 2}),
    ("DFT", "complex", "y3", {"axis": 1, "inverse": 1}),
]
INPUTS = {name: ("float32", ["b", "s", "n", i + 1]) for i, name in enumerate(("real", "complex"))}


def test_lengths_of_a_run(tmp_path: Path) -> None:
    path = save(build(NODES, INPUTS, "y0 y1 y2 y3", {}), tmp_path)
    check(path, {"b": 2, "s": 5, "n": 8}, {"b": 1, "s": 1, "n": 1}, {"b": 1, "s": 12, "n": 7})


def test_half_a_spectrum_of_any_length_is_refused(tmp_path: Path) -> None:
    nodes = [("DFT", "complex", "y", {"axis": 1, "inverse": 1, "onesided": 1})]
    with pytest.raises(UnsupportedModel, match=r"DFT 'n_y': its signal length is s"):
        import_onnx(save(build(nodes, INPUTS, "y", {}), tmp_path))
