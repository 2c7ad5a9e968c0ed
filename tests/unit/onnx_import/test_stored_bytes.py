"""A model is as large as its file and the files beside it together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from apq_tvm.onnx_import.external import stored_bytes
from tests.onnx_models import build, save


def test_files_of_weights_count_once(tmp_path: Path) -> None:
    weights = {name: np.ones((32, 16), np.float32) for name in ("v", "w")}
    nodes = [("MatMul", "x v", "a"), ("MatMul", "x w", "b"), ("Add", "a b", "y")]
    path = save(build(nodes, {"x": ("float32", ["m", 32])}, "y", weights), tmp_path)
    assert stored_bytes(path) == path.stat().st_size
    model = onnx.load(path)
    onnx.save_model(model, path, save_as_external_data=True, location="data", size_threshold=0)
    assert (tmp_path / "data").stat().st_size >= 2 * 32 * 16 * 4
    assert stored_bytes(path) == path.stat().st_size + (tmp_path / "data").stat().st_size


def test_a_weight_that_lies_elsewhere_counts_nothing(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.ones(4, np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../other")
    graph = onnx.helper.make_graph([], "g", [], [], [weight])
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    assert stored_bytes(path) == path.stat().st_size
