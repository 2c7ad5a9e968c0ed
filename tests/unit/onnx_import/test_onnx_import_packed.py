"""Weights that ONNX Runtime packs: their codes arrive bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_models import build, check, only, ops, rand, save
from quantized_onnx import HALF, MS, RNG, kept, nbits, pack

from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.formats import dequantize
from apq_tvm.onnx_import import import_onnx
from apq_tvm.onnx_import.integers.packed import unpack
from apq_tvm.quantizers import quantize


@settings(max_examples=30)
@given(st.sampled_from([2, 4, 8]), st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_packing_is_undone(bits: int, rows: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, count)).astype(np.uint8)
    np.testing.assert_array_equal(unpack(pack(codes, bits), bits, count), codes)


# MatMulNBits


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("zeros", ["", "packed", "float"])
def test_matmul_nbits(tmp_path: Path, bits: int, block: int, zeros: str) -> None:
    path, codes, zero = nbits(tmp_path, bits, block, k=2 * block + 16, zeros=zeros)
    # ONNX Runtime has no 8 bits with float zero points on CPUs.
    computed = bits < 8 or zeros != "float"
    model = check(path, {"b": 2, "s0": 3}, tolerance=1e-4) if computed else import_onnx(path)
    tensor = kept(model)
    np.testing.assert_array_equal(tensor.codes, codes)
    assert (tensor.scheme.bits, tensor.scheme.group_size) == (bits, block)
    assert tensor.scheme.zero_points == bool(zeros)
    if zero is not None:
        np.testing.assert_array_equal(tensor.zeros, zero)


@pytest.mark.parametrize(("k", "group", "groups"), [(1024, 256, 4), (512, -1, 1), (1000, 256, 4)])
def test_matmul_nbits_in_blocks_of_512(tmp_path: Path, k: int, group: int, groups: int) -> None:
    """Which ONNX Runtime writes for other processors, and does not compute on CPUs."""
    path, codes, _ = nbits(tmp_path, block=512, k=k)
    tensor = kept(import_onnx(path))
    np.testing.assert_array_equal(tensor.codes, codes)
    scales = {i.name: i for i in onnx.load(path).graph.initializer}["s"]
    wide = np.repeat(onnx.numpy_helper.to_array(scales).reshape(6, -1), 512, axis=1)[:, :k]
    want = (codes.astype(np.float32) - 8) * wide
    np.testing.assert_allclose(dequantize(tensor), want, rtol=HALF)
    assert tensor.scheme.group_size == group and tensor.scales.shape == (6, groups)
    if groups > 1:
        np.testing.assert_array_equal(tensor.scales[:, 0], tensor.scales[:, 1])


def test_matmul_nbits_with_a_bias_and_the_groups_in_order(tmp_path: Path) -> None:
    order = np.arange(64, dtype=np.int32) // 32
    path, _, _ = nbits(tmp_path, extra="_ bias", bias=rand(6))
    model = check(path, {"b": 1, "s0": 2}, tolerance=1e-4)
    assert ops(model) == {"apq.Linear": 1} and only(model, "apq.Linear").inputs[2]
    path, codes, _ = nbits(tmp_path, extra="order", order=order, attrs={"accuracy_level": 4})
    np.testing.assert_array_equal(kept(import_onnx(path)).codes, codes)


@pytest.mark.parametrize("zeros", ["", "packed", "float"])
def test_matmul_nbits_with_groups_out_of_order(tmp_path: Path, zeros: str) -> None:
    """``desc_act`` of GPTQ: columns are sorted by group, and so is what the layer reads."""
    order = np.random.default_rng(1).permutation(np.arange(80, dtype=np.int32) // 32)
    path, codes, zero = nbits(tmp_path, k=80, zeros=zeros, extra="order", order=order)
    # ONNX Runtime 1.31 takes packed zero points of other groups than the specification says.
    sizes = {"b": 2, "s0": 3}
    model = import_onnx(path) if zeros == "packed" else check(path, sizes, tolerance=1e-4)
    assert ops(model) == {"Gather": 1, "apq.Linear": 1}
    columns = np.argsort(order, kind="stable")
    np.testing.assert_array_equal(kept(model).codes, codes[:, columns])
    if zero is not None:
        np.testing.assert_array_equal(kept(model).zeros, zero)


def test_layers_that_read_alike_are_sorted_once(tmp_path: Path) -> None:
    order = np.arange(64, dtype=np.int32)[::-1] // 32
    path, _, _ = nbits(tmp_path, extra="order", order=order)
    model = onnx.load(path)
    again = model.graph.node.add()
    again.CopyFrom(model.graph.node[0])
    again.name, again.output[0] = "second", "z"
    model.graph.node.add(op_type="Add", input=["y", "z"], output=["sum"])
    model.graph.output[0].name = "sum"
    imported = import_onnx(save(model, tmp_path))
    assert ops(imported)["Gather"] == 1


def test_layers_that_share_codes_share_the_tensor(tmp_path: Path) -> None:
    path, _, _ = nbits(tmp_path, n=64)
    model = onnx.load(path)
    again = model.graph.node.add()
    again.CopyFrom(model.graph.node[0])
    again.name, again.input[0], again.output[0] = "second", "y", "z"
    model.graph.output[0].name = "z"
    imported = import_onnx(save(model, tmp_path))
    assert ops(imported) == {"apq.Linear": 2} and len(imported.quantized) == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"attrs": {"bits": 3}}, UnsupportedModel, "3 bits; 2, 4, 8"),
        ({"attrs": {"block_size": 48}}, ImportFailed, "block_size 48"),
        ({"attrs": {"K": 96}}, ImportFailed, r"'w' is uint8 \[6, 2, 16\].*N=6, K=96"),
        ({"attrs": {"N": 0}}, ImportFailed, "N=0"),
        ({"attrs": {"weight_prepacked": 1}}, UnsupportedModel, "prepacked"),
        ({"s": np.ones(11, np.float32)}, ImportFailed, "scales 's'.*12"),
        ({"s": np.full(12, np.inf, np.float32)}, UnsupportedModel, "scales 's'.*infinite"),
        ({"s": np.full(12, np.nan, np.float32)}, UnsupportedModel, "scales 's'.*NaN"),
        ({"w": np.zeros((6, 2, 16), np.int8)}, ImportFailed, "'w' is int8"),
        ({"zeros": "packed", "z": np.zeros(5, np.uint8)}, ImportFailed, "'z'.*6"),
        ({"zeros": "float", "z": np.zeros(5, np.float32)}, ImportFailed, "'z'.*12"),
        ({"zeros": "float", "z": np.full(12, np.nan, np.float32)}, UnsupportedModel, "'z' are NaN"),
        (
            {"extra": "order", "order": np.zeros(64, np.int32)},
            UnsupportedModel,
            "does not put 32",
        ),
        ({"extra": "order", "order": np.zeros(63, np.int32)}, ImportFailed, "63 entries for K=64"),
    ],
)
def test_matmul_nbits_that_is_wrong(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    path, _, _ = nbits(tmp_path, **change)
    with pytest.raises(error, match=message):
        import_onnx(path)


def test_matmul_nbits_of_integers_is_refused(tmp_path: Path) -> None:
    path, _, _ = nbits(tmp_path)
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    with pytest.raises(ImportFailed, match=r"int64.* is no tensor of floats"):
        import_onnx(save(model, tmp_path))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("block", [32, 512])
def test_fractional_zero_points_become_minima(tmp_path: Path, bits: int, block: int) -> None:
    """As HQQ finds them, for ONNX Runtime's quantizer too; some lie outside the codes."""
    k, count = (64, 12) if block == 32 else (512, 6)
    z = np.random.default_rng(0).uniform(-0.7, 2**bits, count).astype(np.float32)
    path, codes, _ = nbits(tmp_path, bits, block, zeros="float", z=z, k=k)
    model = import_onnx(path) if block == 512 else check(path, {"b": 1, "s0": 2}, tolerance=1e-4)
    tensor = kept(model)
    np.testing.assert_array_equal(tensor.codes, codes)
    assert tensor.scheme.family == "min" and "minima in float16" in str(model.notes)
    wide = np.abs(tensor.scales.astype(np.float32)).max()
    float_weight = next(w for w in model.weights.values() if w.shape == codes.shape)
    np.testing.assert_allclose(dequantize(tensor), float_weight, rtol=HALF, atol=0.01 * wide)
    result = quantize(model, "W4A8g32")
    assert str(next(iter(result.tensors.values())).scheme) == str(tensor.scheme)


@pytest.mark.parametrize("zero", [np.inf, 1e4])
def test_zero_points_that_nothing_says_keep_the_layer_float(tmp_path: Path, zero: float) -> None:
    path, _, _ = nbits(tmp_path, zeros="float", z=np.full(12, zero + 0.5, np.float32))
    if np.isinf(zero):
        with pytest.raises(UnsupportedModel, match="NaN or infinite"):
            import_onnx(path)
        return
    result = quantize(import_onnx(path), "W4A8g32")
    assert not result.layers and "of a step off" in result.notes["n_y"]


@pytest.mark.parametrize(("scale", "why"), [(1e5, "beyond 65504"), (1e-9, "float16 can only say")])
def test_scales_beyond_float16_keep_the_layer_float(tmp_path: Path, scale: float, why: str) -> None:
    path, _, _ = nbits(tmp_path, s=np.full(12, scale, np.float32))
    result = quantize(import_onnx(path), "W4A8g32")
    assert not result.layers and why in result.notes["n_y"]


def test_onnxruntimes_own_quantizer(tmp_path: Path) -> None:
    pytest.importorskip("onnx_ir", reason="onnxruntime's MatMulNBitsQuantizer needs it")
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    inputs = {"x": ("float32", ["b", 96])}
    for symmetric in (True, False):
        source = build([("MatMul", "x w", "y")], inputs, "y", {"w": rand(96, 8)})
        quantizer = MatMulNBitsQuantizer(source, block_size=32, is_symmetric=symmetric)
        quantizer.process()
        path = save(quantizer.model.model, tmp_path)
        model = check(path, {"b": 4}, tolerance=1e-4)
        assert str(kept(model).scheme) == ("W4A8g32" if symmetric else "W4zA8g32")


def test_a_tied_head_of_packed_codes_shares_them(tmp_path: Path) -> None:
    """As onnxruntime-genai writes it: the table is a view of the head's weight."""
    codes = RNG.integers(0, 16, (20, 64)).astype(np.uint8)
    nodes = [
        ("Reshape", "w flat", "t"),
        ("Reshape", "s grid", "ts"),
        ("com.microsoft.GatherBlockQuantized", "t ids ts", "e", {"block_size": 32}),
        (
            "com.microsoft.MatMulNBits",
            "e w s",
            "y",
            {"N": 20, "K": 64, "bits": 4, "block_size": 32},
        ),
    ]
    weights = {
        "w": pack(codes, 4).reshape(20, 2, 16),
        "s": np.abs(rand(40)) + 0.1,
        "flat": np.array([20, 32]),
        "grid": np.array([20, 2]),
    }
    path = save(build(nodes, {"ids": ("int64", ["b"])}, "y", weights, 21, domains=MS), tmp_path)
    model = check(path, {"b": 3}, tolerance=1e-4)
    assert only(model, "apq.Linear").inputs[1] == only(model, "apq.Embedding").inputs[0]
    (tensor,) = model.quantized.values()
    np.testing.assert_array_equal(tensor.codes, codes)


def test_codes_beside_the_model_are_mapped(tmp_path: Path) -> None:
    path, codes, _ = nbits(tmp_path)
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="model.data")
    np.testing.assert_array_equal(kept(import_onnx(path)).codes, codes)
    data = (tmp_path / "model.data").read_bytes()
    (tmp_path / "model.data").write_bytes(data[:100])
    with pytest.raises(ImportFailed, match="truncated"):
        import_onnx(path)


def test_blocks_beyond_all_bounds_take_no_memory(tmp_path: Path) -> None:
    codes = RNG.integers(0, 16, (6, 32)).astype(np.uint8)
    nodes = [("DequantizeLinear", "q s", "w", {"axis": 0, "block_size": 2**40})]
    nodes.append(("MatMul", "x w", "y"))
    weights = {"q": codes.T, "s": np.abs(rand(1, 6)) + 0.1}
    path = save(build(nodes, {"x": ("float32", ["b", 32])}, "y", weights, 21), tmp_path)
    np.testing.assert_array_equal(kept(import_onnx(path)).codes, codes)
    attrs = {"block_size": 2**40, "K": 2**40}
    path, _, _ = nbits(tmp_path, attrs=attrs)
    with pytest.raises(ImportFailed, match="'w' is uint8"):
        import_onnx(path)


# GatherBlockQuantized


def table(folder: Path, kind: str, zeros: bool = False, **change: Any) -> tuple[Path, np.ndarray]:
    bits = change.pop("bits", 4)
    dtype = {"int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4}.get(kind)
    codes = RNG.integers(0, 1 << bits, (10, 64)).astype(np.uint8)
    data = pack(codes, bits)
    zero = RNG.integers(0, 1 << bits, (10, 2)).astype(np.uint8)
    weights = {"q": data, "s": np.abs(rand(10, 2)) + 0.1}
    if dtype is not None:
        low = 8 if kind == "int4" else 0
        weights["q"] = (codes.astype(np.int32) - low).astype(dtype)
        zero = (zero.astype(np.int32) - low).astype(dtype)
    if zeros:
        weights["z"] = pack(zero, bits) if dtype is None else zero
    weights |= change.pop("weights", {})
    attrs = {"block_size": 32, **({"bits": bits} if dtype is None else {}), **change}
    node = ("com.microsoft.GatherBlockQuantized", f"q ids s {'z' if zeros else ''}", "y", attrs)
    inputs = {"ids": ("int64", ["b", "s"])}
    return save(build([node], inputs, "y", weights, 21, domains=MS), folder), codes


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("kind", "bits"), [("int4", 4), ("uint4", 4), ("uint8", 4), ("uint8", 8), ("uint8", 2)]
)
def test_gather_block_quantized(tmp_path: Path, kind: str, bits: int, zeros: bool) -> None:
    path, codes = table(tmp_path, kind, zeros, bits=bits)
    model = check(path, {"b": 2, "s": 3})
    assert ops(model) == {"apq.Embedding": 1}
    np.testing.assert_array_equal(kept(model, "apq.Embedding").codes, codes)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gather_axis": 1, "quantize_axis": 0}, UnsupportedModel, "gather_axis 0"),
        ({"block_size": 8}, ImportFailed, "block_size 8"),
        ({"weights": {"s": np.ones((10, 3), np.float32)}}, ImportFailed, "scales 's'.*20"),
        ({"weights": {"q": np.zeros((10, 64), np.int32)}}, UnsupportedModel, "a table of int32"),
    ],
)
def test_gather_block_quantized_that_is_wrong(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    path, _ = table(tmp_path, "uint8", **change)
    with pytest.raises(error, match=f"GatherBlockQuantized 'n_y'.*{message}"):
        import_onnx(path)
