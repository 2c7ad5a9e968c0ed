"""Loops whose rounds shapes decide: a captured run has the kernels of them all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from apq_tvm import pipeline
from apq_tvm.codegen.cuda.simulator import Simulator
from apq_tvm.errors import UnsupportedModel
from apq_tvm.module import load_module
from tests import control_models
from tests.onnx_models import build, rand, save, session_of
from tests.recurrent_models import SIZES, VARIANTS, feeds, joined


@pytest.mark.parametrize(
    "names",
    [
        ["lstm_two", "gru_late", "rnn"],
        pytest.param(list(VARIANTS), marks=pytest.mark.all_cases),
    ],
    ids=["few", "all"],
)
def test_recurrent_layers_match_onnxruntime(names: list[str], gpu: None, tmp_path: Path) -> None:
    onnx = save(joined(names), tmp_path)
    options = {"target": "rtx-3090", "scheme": "float", "search": False}
    pipeline.compile(onnx, tmp_path / "recurrent", images=Simulator(checked=True), **options)
    module, session = load_module(tmp_path / "recurrent"), session_of(onnx)
    outputs = [output.name for output in session.get_outputs()]
    for steps, batch in SIZES:
        drawn = feeds(steps, batch)
        given = {info.name: drawn[info.name] for info in module.inputs}
        found = module.run(given)
        for name, value in zip(outputs, session.run(outputs, given), strict=True):
            np.testing.assert_allclose(found[name], value, atol=2e-5, err_msg=name)


def test_ids_of_many_rounds(program, tmp_path: Path) -> None:
    """More rounds than a run has layers that look up: a round's bad id is told as any other."""

    def value(name: str, kind: int, shape: list[str | int]) -> object:
        return helper.make_tensor_value_info(name, kind, shape)

    body = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "id"], ["row"], name="look_up"),
            helper.make_node("Add", ["state", "row"], ["next"]),
        ],
        "body",
        [value("state", TensorProto.FLOAT, ["n", 8]), value("id", TensorProto.INT64, ["n"])],
        [value("next", TensorProto.FLOAT, ["n", 8])],
    )
    nodes = [("Scan", "start ids", "y", {"body": body, "num_scan_inputs": 1})]
    inputs = {"start": ("float32", ["n", 8]), "ids": ("int64", ["t", "n"])}
    onnx = save(build(nodes, inputs, "y", {"table": rand(9, 8)}), tmp_path)
    options = {"target": "rtx-3090", "scheme": "float", "search": False}
    pipeline.compile(onnx, tmp_path / "scan", images=Simulator(), **options)
    np.save(tmp_path / "table.npy", rand(9, 8))
    text = """
    import numpy as np
    import scan
    ids = np.arange(600).reshape(300, 2) % 9
    start = np.zeros((2, 8), np.float32)
    y = scan.run(start=start, ids=ids)["y"]
    np.testing.assert_allclose(y, np.load("table.npy")[ids].sum(0), rtol=1e-4)
    ids[280, 1] = 9
    try:
        scan.run(start=start, ids=ids)
    except scan.InputError as error:
        print(error)
    """
    done = program(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert "id 9 (element 1) is outside its table of 9 rows" in done.stdout


def test_what_data_decide_is_refused(tmp_path: Path) -> None:
    """Branches, and loops that stop when they will."""
    onnx = save(control_models.joined(), tmp_path)
    with pytest.raises(UnsupportedModel, match="a loop or branch that its data decide"):
        pipeline.compile(onnx, tmp_path / "m", target="rtx-3090", images=Simulator())
