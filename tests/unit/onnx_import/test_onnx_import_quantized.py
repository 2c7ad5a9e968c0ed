"""Files that come quantized: codes arrive bit for bit, and what is wrong with them is named."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_models import build, check, only, ops, rand, save
from quantized_onnx import MS, RNG, TYPES, integers, kept, nbits

from apq_tvm.errors import ApqError, UnsupportedModel
from apq_tvm.formats import dequantize
from apq_tvm.onnx_import import import_onnx
from apq_tvm.onnx_import.integers.codes import Codes, to_tensor
from apq_tvm.onnx_import.integers.packed import meaning
from apq_tvm.onnx_import.operators.expansions import EXPANSIONS
from apq_tvm.quantizers import quantize

# DequantizeLinear


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("along", ["tensor", "column", "block"])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("layer", ["MatMul", "Gemm"])
def test_dequantize_linear(tmp_path: Path, kind: str, along: str, zero: bool, layer: str) -> None:
    values, codes = integers(kind, 64, 6)
    shape = {"tensor": (), "column": (6,), "block": (2, 6)}[along]
    weights = {"q": values, "s": np.asarray(np.abs(rand(*shape)) + 0.1, np.float32)}
    if zero:
        weights["z"] = integers(kind, *shape)[0]
    attrs: dict[str, Any] = {"axis": 0, "block_size": 32} if along == "block" else {"axis": 1}
    read = "q s z" if zero else "q s"
    nodes: list[Any] = [("DequantizeLinear", read, "w", attrs), ("MatMul", "x w", "y")]
    if layer == "Gemm":
        turned = [("Transpose", "w", "t", {"perm": [1, 0]})]
        gemm = ("Gemm", "x t", "y", {"transB": 1, "alpha": 0.5})
        nodes = [nodes[0], *turned, gemm]
    opset = max(TYPES[kind][2], 21 if along == "block" else 13)
    path = save(build(nodes, {"x": ("float32", ["b", 64])}, "y", weights, opset), tmp_path)
    tensor = kept(import_onnx(path))
    np.testing.assert_array_equal(tensor.codes, codes.T)
    assert tensor.scheme.bits == TYPES[kind][1]
    assert tensor.scheme.group_size == (32 if along == "block" else -1)
    middle = 1 << (TYPES[kind][1] - 1)
    zeros = weights["z"].astype(np.int32) if zero else np.zeros(1)
    assert tensor.scheme.zero_points == bool(
        (zeros + (0 if kind.startswith("u") else middle) != middle).any()
    )
    if TYPES[kind][2] < 25:
        check(path, {"b": 3}, tolerance=1e-4)


def test_rows_of_a_dequantized_table(tmp_path: Path) -> None:
    values, codes = integers("int4", 20, 32)
    weights = {"q": values, "s": np.abs(rand(20, 2)) + 0.1}
    nodes = [
        ("DequantizeLinear", "q s", "t", {"axis": 1, "block_size": 16}),
        ("Gather", "t ids", "y"),
    ]
    path = save(build(nodes, {"ids": ("int64", ["b"])}, "y", weights, 21), tmp_path)
    tensor = kept(check(path, {"b": 3}), "apq.Embedding")
    np.testing.assert_array_equal(tensor.codes, codes)
    assert tensor.scheme.group_size == 16


def test_a_table_of_integers_dequantized_after_the_lookup(tmp_path: Path) -> None:
    values, codes = integers("uint8", 20, 32)
    weights = {"q": values, "s": np.float32(0.02), "z": np.uint8(7)}
    nodes = [("Gather", "q ids", "r"), ("DequantizeLinear", "r s z", "y")]
    path = save(build(nodes, {"ids": ("int64", ["b"])}, "y", weights), tmp_path)
    model = check(path, {"b": 3})
    assert ops(model) == {"apq.Embedding": 1}
    np.testing.assert_array_equal(kept(model, "apq.Embedding").codes, codes)


def test_a_scale_per_input_channel_keeps_the_layer_float(tmp_path: Path) -> None:
    values, _ = integers("int8", 64, 6)
    weights = {"q": values, "s": np.abs(rand(64)) + 0.1}
    nodes = [("DequantizeLinear", "q s", "w", {"axis": 0}), ("MatMul", "x w", "y")]
    path = save(build(nodes, {"x": ("float32", ["b", 64])}, "y", weights), tmp_path)
    model = check(path, {"b": 3}, tolerance=1e-4)
    result = quantize(model, "W4A8g32")
    assert not model.quantized and "groups of 1 along K=64" in result.notes["n_y"]


def test_integers_cast_and_scaled(tmp_path: Path) -> None:
    values, codes = integers("uint8", 64, 6)
    nodes = [
        ("Cast", "q", "f", {"to": 1}),
        ("Sub", "f z", "c"),
        ("Mul", "s c", "w"),
        ("MatMul", "x w", "y"),
    ]
    weights = {"q": values, "z": np.full((1, 6), 120, np.float32), "s": np.abs(rand(1, 6)) + 0.1}
    path = save(build(nodes, {"x": ("float32", ["b", 64])}, "y", weights), tmp_path)
    tensor = kept(check(path, {"b": 3}, tolerance=1e-4))
    np.testing.assert_array_equal(tensor.codes, codes.T)
    np.testing.assert_array_equal(tensor.zeros, np.full((6, 1), 120))


def test_negative_scales_mean_what_they_say(tmp_path: Path) -> None:
    """Of weights they keep their codes; the range of activations is clipped to all the same."""
    weights = {"q": integers("int8", 64, 6)[0], "s": -np.abs(rand(6)) - 0.01}
    weights |= {"one": np.float32(-0.02), "zero": np.int8(3)}
    nodes = [
        ("DequantizeLinear", "q s", "w", {"axis": 1}),
        ("QuantizeLinear", "x one zero", "xq"),
        ("DequantizeLinear", "xq one zero", "xf"),
        ("MatMul", "xf w", "y"),
        ("QuantizeLinear", "y one zero", "z"),
    ]
    path = save(build(nodes, {"x": ("float32", ["b", 64])}, "z", weights), tmp_path)
    model = import_onnx(path)
    assert (kept(model).scales <= 0).all()
    (clip,) = [node for node in model.nodes if node.op == "Clip"]
    low, high = (float(model.weights[name]) for name in clip.inputs[1:])
    assert low < 0 < high
    (last,) = [node for node in model.nodes if node.op == "QuantizeLinear"]
    assert float(model.weights[last.inputs[1]]) < 0


def test_infinite_scales_are_refused(tmp_path: Path) -> None:
    weights = {"q": integers("int8", 64, 6)[0], "s": np.full(6, np.inf, np.float32)}
    nodes = [("DequantizeLinear", "q s", "w", {"axis": 1}), ("MatMul", "x w", "y")]
    path = save(build(nodes, {"x": ("float32", ["b", 64])}, "y", weights), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"scales 's'.*infinite"):
        import_onnx(path)


def test_a_tied_head_of_codes_shares_them(tmp_path: Path) -> None:
    values, codes = integers("int8", 20, 32)
    weights = {"q": values, "s": np.abs(rand(20)) + 0.1}
    nodes = [
        ("DequantizeLinear", "q s", "t", {"axis": 0}),
        ("Gather", "t ids", "e"),
        ("Transpose", "t", "tt", {"perm": [1, 0]}),
        ("MatMul", "e tt", "y"),
    ]
    path = save(build(nodes, {"ids": ("int64", ["b"])}, "y", weights), tmp_path)
    model = check(path, {"b": 3}, tolerance=1e-4)
    assert ops(model) == {"apq.Embedding": 1, "apq.Linear": 1}
    assert only(model, "apq.Linear").inputs[1] == only(model, "apq.Embedding").inputs[0]
    (tensor,) = model.quantized.values()
    np.testing.assert_array_equal(tensor.codes, codes)


# Malformed nodes

WORDS = ["x", "w", "s", "q", "ids", "cos", ""]


@settings(max_examples=150)
@given(
    st.sampled_from(sorted(EXPANSIONS)),
    st.lists(st.sampled_from(WORDS), max_size=9),
    st.dictionaries(
        st.sampled_from(
            "N K bits block_size num_heads kv_num_heads q_num_heads axis scale do_rotary alpha "
            "gather_axis quantize_axis interleaved epsilon qk_matmul_output_mode transB".split()
        ),
        st.one_of(
            st.integers(-3, 70), st.floats(-2, 2), st.sampled_from(["a", ""]), st.just([1, 2])
        ),
        max_size=5,
    ),
)
def test_nodes_of_all_shapes_have_named_errors(
    op: str, inputs: list[str], attrs: dict[str, Any]
) -> None:
    weights = {
        "w": RNG.integers(0, 256, (6, 2, 16)).astype(np.uint8),
        "s": np.ones(12, np.float32),
        "q": np.zeros((64, 6), np.int8),
        "cos": np.ones((8, 4), np.float32),
    }
    given = {"x": ("float32", ["b", "s0", 64]), "ids": ("int64", ["b", "s0"])}
    read = [name or "_" for name in inputs]
    model = build([(op, " ".join(read), "y", attrs)], given, "y", weights, 23, domains=MS)
    with tempfile.TemporaryDirectory() as folder:
        try:
            import_onnx(save(model, Path(folder)))
        except ApqError as error:
            # A sequence is refused as the output that it is.
            assert any(name in str(error) for name in ("n_y", "output 'y'", "operators"))


# From codes to a tensor, and the plan


@settings(max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 130),
    st.sampled_from([2, 4, 8]),
    st.booleans(),
    st.sampled_from([(1, 16), (1, 48), (1, 512), (5, 130), (2, 32)]),
    st.integers(0, 2**32 - 1),
)
def test_tensors_mean_what_the_codes_mean(
    n: int, k: int, bits: int, signed: bool, block: tuple[int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    low = -(1 << (bits - 1)) if signed else 0
    grid = (-(-n // block[0]), -(-k // block[1]))
    codes = Codes(
        rng.integers(low, low + (1 << bits), (n, k)),
        bits,
        low,
        rng.standard_normal(grid).astype(np.float16).astype(np.float32),
        rng.integers(low, low + (1 << bits), grid),
        block,
        "test",
    )
    tensor, note = to_tensor(codes)
    assert tensor is not None and note == "codes of the file (test)"
    np.testing.assert_array_equal(tensor.codes, codes.values - low)
    np.testing.assert_array_equal(dequantize(tensor), meaning(codes))


@pytest.mark.parametrize(
    ("scheme", "got"),
    [
        ("W4A8", "W8zA8"),
        ("W4A8g32", "W8zA8g32"),
        ("W4A8tg32", "W8zA8"),
        ("W4A32g32", "W8zA32"),
        ("cb3", "W8zA8"),
        ("anyprec3-8", "W8zA8g32"),
    ],
)
def test_rows_of_codes_are_cut_where_activations_have_groups(
    tmp_path: Path, scheme: str, got: str
) -> None:
    values, codes = integers("uint8", 80, 24)
    weights = {"q": values, "s": np.abs(rand(24)) + 0.1}
    nodes = [("DequantizeLinear", "q s", "w", {"axis": 1}), ("MatMul", "x w", "y")]
    path = save(build(nodes, {"x": ("float32", ["b", 80])}, "y", weights), tmp_path)
    model = import_onnx(path)
    (tensor,) = quantize(model, scheme).tensors.values()
    assert str(tensor.scheme) == got
    np.testing.assert_array_equal(tensor.codes, codes.T)
    np.testing.assert_array_equal(dequantize(tensor), dequantize(*model.quantized.values()))


def test_the_plan_keeps_codes_unless_a_layer_is_named(tmp_path: Path) -> None:
    path, codes, _ = nbits(tmp_path, n=16, k=64)
    model = import_onnx(path)
    result = quantize(model, "W8A32")
    (key,) = result.tensors
    assert key.endswith(":W4A32g32") and "codes of the file" in result.notes["n_y"]
    np.testing.assert_array_equal(result.tensors[key].codes, codes)
    named = quantize(model, "W8A32", {"n_y": "W2A8g32"})
    (tensor,) = named.tensors.values()
    assert str(tensor.scheme) == "W2A8g32" and not named.notes
    assert not quantize(model, "float").layers
