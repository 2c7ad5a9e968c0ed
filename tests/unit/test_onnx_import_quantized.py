"""Files that come quantized: codes arrive bit for bit, and what is wrong with them is named."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_models import build, check, feeds_for, only, ops, rand, run_node, run_onnx, save

from apq_tvm.errors import ApqError, ImportFailed, UnsupportedModel
from apq_tvm.formats import dequantize
from apq_tvm.onnx_import import import_onnx
from apq_tvm.onnx_import.codes import Codes, to_tensor
from apq_tvm.onnx_import.expansions import EXPANSIONS
from apq_tvm.onnx_import.packed import meaning, unpack
from apq_tvm.onnx_import.reference import run_reference
from apq_tvm.quantizers import quantize
from apq_tvm.types import ImportedModel, QuantizedTensor

MS = {"com.microsoft": 1}
RNG = np.random.default_rng(0)
HALF = 2.0**-10  # of float16 scales beside float32 ones


def kept(model: ImportedModel, op: str = "apq.Linear") -> QuantizedTensor:
    """The tensor of the only layer."""
    tensor = model.quantized[only(model, op).inputs[1 if op == "apq.Linear" else 0]]
    weight = model.weights[only(model, op).inputs[1 if op == "apq.Linear" else 0]]
    error = np.abs(dequantize(tensor) - weight).max()
    assert error <= HALF * np.abs(weight).max()
    return tensor


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 codes [..., n] in bytes, the first one lowest."""
    per = 8 // bits
    shape = (*codes.shape[:-1], -(-codes.shape[-1] // per) * per)
    padded = np.zeros(shape, np.uint8)
    padded[..., : codes.shape[-1]] = codes
    parts = padded.reshape(*shape[:-1], -1, per)
    return np.bitwise_or.reduce(parts << (np.arange(per, dtype=np.uint8) * bits), axis=-1)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_packing_is_undone(bits: int, rows: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, count)).astype(np.uint8)
    np.testing.assert_array_equal(unpack(pack(codes, bits), bits, count), codes)


# MatMulNBits


def nbits(
    folder: Path,
    bits: int = 4,
    block: int = 32,
    n: int = 6,
    k: int = 64,
    zeros: str = "",
    extra: str = "",
    attrs: dict[str, Any] | None = None,
    **weights: np.ndarray,
) -> tuple[Path, np.ndarray, np.ndarray | None]:
    """A MatMulNBits, its codes [N, K] and zero points [N, blocks]."""
    blocks = -(-k // block)
    codes = RNG.integers(0, 1 << bits, (n, k)).astype(np.uint8)
    padded = np.zeros((n, blocks * block), np.uint8)
    padded[:, :k] = codes
    given = {
        "w": pack(padded, bits).reshape(n, blocks, -1),
        "s": (np.abs(rand(n * blocks)) / 10 + 0.01).astype(np.float32),
    }
    zero = RNG.integers(0, 1 << bits, (n, blocks)).astype(np.uint8) if zeros else None
    if zeros == "packed":
        assert zero is not None
        given["z"] = pack(zero, bits).reshape(-1)
    elif zeros == "float":
        assert zero is not None
        given["z"] = zero.astype(np.float32).reshape(-1)
    words = f"x w s {'z' if zeros else '_'} {extra}"
    sizes = {"K": k, "N": n, "bits": bits, "block_size": block}
    node = ("com.microsoft.MatMulNBits", words, "y", {**sizes, **(attrs or {})})
    inputs = {"x": ("float32", ["b", "s0", k])}
    path = save(build([node], inputs, "y", {**given, **weights}, domains=MS), folder)
    return path, codes, zero


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
        ({"s": np.full(12, np.nan, np.float32)}, UnsupportedModel, "NaN.*'s'"),
        ({"w": np.zeros((6, 2, 16), np.int8)}, ImportFailed, "'w' is int8"),
        ({"zeros": "packed", "z": np.zeros(5, np.uint8)}, ImportFailed, "'z'.*6"),
        ({"zeros": "float", "z": np.zeros(5, np.float32)}, ImportFailed, "'z'.*12"),
        ({"extra": "order", "order": np.zeros(64, np.int32)}, UnsupportedModel, "g_idx 'order'"),
    ],
)
def test_matmul_nbits_that_is_wrong(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    path, _, _ = nbits(tmp_path, **change)
    with pytest.raises(error, match=message):
        import_onnx(path)


def test_fractional_zero_points_keep_the_layer_float(tmp_path: Path) -> None:
    path, _, _ = nbits(tmp_path, zeros="float", z=np.full(12, 7.5, np.float32))
    model = check(path, {"b": 1, "s0": 2}, tolerance=1e-4)
    assert not model.quantized
    result = quantize(model, "W4A8g32")
    assert not result.layers and "no integers" in result.notes["n_y"]


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


# DequantizeLinear

TYPES = {
    "int8": (np.int8, 8, 13),
    "uint8": (np.uint8, 8, 13),
    "int4": (ml_dtypes.int4, 4, 21),
    "uint4": (ml_dtypes.uint4, 4, 21),
    "int2": (ml_dtypes.int2, 2, 25),
    "uint2": (ml_dtypes.uint2, 2, 25),
}


def integers(kind: str, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Random values of a type, and the codes 0 .. 2^bits - 1 that they are."""
    dtype, bits, _ = TYPES[kind]
    codes = RNG.integers(0, 1 << bits, shape)
    low = 1 << (bits - 1) if kind.startswith("int") else 0
    return (codes - low).astype(dtype), codes.astype(np.uint8)


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


# Integer products


def near(path: Path, tolerance: float, rows: int = 5) -> ImportedModel:
    """Import; the float result is near ONNX Runtime's, which rounds activations."""
    model = import_onnx(path)
    feeds = feeds_for(model, {"b": rows, "s": 3})
    want, got = run_onnx(path, feeds), run_reference(model, feeds, run_node)
    for name, value in want.items():
        wide = value.astype(np.float64)
        error = np.sqrt(((got[name] - wide) ** 2).mean() / (wide**2).mean())
        assert error < tolerance, (name, error)
    return model


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["QInt8", "QUInt8"])
def test_quantize_dynamic_of_onnxruntime(tmp_path: Path, per_channel: bool, kind: str) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    nodes = [
        ("Gather", "t ids", "x"),
        ("MatMul", "x w", "h"),
        ("Add", "h c", "r"),
        ("Relu", "r", "g"),
        ("MatMul", "g v", "y"),
    ]
    weights = {"t": rand(40, 32), "w": rand(32, 24, seed=1), "c": rand(24), "v": rand(24, 32)}
    source = save(build(nodes, {"ids": ("int64", ["b", "s"])}, "y", weights, 13), tmp_path)
    path = tmp_path / "quantized.onnx"
    quantize_dynamic(source, path, weight_type=QuantType[kind], per_channel=per_channel)
    assert "MatMulInteger" in {n.op_type for n in onnx.load(path).graph.node}
    model = near(path, 0.03)
    assert ops(model) == {"apq.Embedding": 1, "apq.Linear": 2} and len(model.quantized) == 3
    stored = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(path).graph.initializer}
    offset = 128 if kind == "QInt8" else 0
    for node in model.nodes:
        if node.op == "apq.Linear":
            letter = "w" if model.weights[node.inputs[1]].shape == (24, 32) else "v"
            codes = stored[f"{letter}_quantized"].astype(np.int32) + offset
            np.testing.assert_array_equal(model.quantized[node.inputs[1]].codes, codes.T)
    assert sum("activations are rounded by the scheme" in n for n in model.notes.values()) == 1


def test_scales_multiplied_one_after_the_other(tmp_path: Path) -> None:
    nodes = [
        ("DynamicQuantizeLinear", "x", "a s z"),
        ("MatMulInteger", "a q z", "i"),
        ("Cast", "i", "f", {"to": 1}),
        ("Mul", "ws f", "g"),
        ("Mul", "g s", "y"),
    ]
    values, codes = integers("int8", 32, 6)
    inputs = {"x": ("float32", ["b", 32])}
    path = save(build(nodes, inputs, "y", {"q": values, "ws": np.abs(rand(6)) + 0.1}), tmp_path)
    model = near(path, 0.03)
    assert ops(model) == {"apq.Linear": 1}
    np.testing.assert_array_equal(kept(model).codes, codes.T)


def test_an_integer_product_of_other_integers_stays(tmp_path: Path) -> None:
    nodes = [("MatMulInteger", "a q", "y")]
    weights = {"q": integers("int8", 32, 6)[0]}
    path = save(build(nodes, {"a": ("uint8", ["b", 32])}, "y", weights), tmp_path)
    assert ops(check(path, {"b": 3})) == {"MatMulInteger": 1}


@pytest.mark.parametrize("op", ["DynamicQuantizeMatMul", "MatMulIntegerToFloat"])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_integer_products(tmp_path: Path, op: str, bias: bool) -> None:
    values, codes = integers("uint8", 32, 6)
    weights = {"q": values, "ws": np.abs(rand(6)) + 0.1, "wz": np.full(6, 125, np.uint8)}
    weights |= {"c": rand(6)} if bias else {}
    end = "c" if bias else ""
    if op == "DynamicQuantizeMatMul":
        nodes = [(f"com.microsoft.{op}", f"x q ws wz {end}", "y")]
    else:
        nodes = [
            ("DynamicQuantizeLinear", "x", "a s z"),
            (f"com.microsoft.{op}", f"a q s ws z wz {end}", "y"),
        ]
    inputs = {"x": ("float32", ["b", 32])}
    path = save(build(nodes, inputs, "y", weights, domains=MS), tmp_path)
    model = near(path, 0.03)
    assert ops(model) == {"apq.Linear": 1}
    np.testing.assert_array_equal(kept(model).codes, codes.T)


SCALES = {"xs": np.float32(0.02), "xz": np.uint8(130), "s": np.abs(rand(6)) + 0.1}


def test_rounded_activations_become_clipped(tmp_path: Path) -> None:
    values, codes = integers("int8", 32, 6)
    nodes = [
        ("QuantizeLinear", "x xs xz", "a"),
        ("DequantizeLinear", "a xs xz", "d"),
        ("DequantizeLinear", "q s", "w", {"axis": 1}),
        ("MatMul", "d w", "y"),
        ("Neg", "d", "z"),
    ]
    path = save(
        build(nodes, {"x": ("float32", ["b", 32])}, "y z", {**SCALES, "q": values}), tmp_path
    )
    model = near(path, 0.03)
    np.testing.assert_array_equal(kept(model).codes, codes.T)
    found = ops(model)
    assert found["Clip"] == found["QuantizeLinear"] == found["DequantizeLinear"] == 1
    assert "range -2.6 .. 2.5" in model.notes["n_y"]
    clip = only(model, "Clip")
    assert [float(model.weights[v]) for v in clip.inputs[1:]] == pytest.approx([-2.6, 2.5])


@pytest.mark.parametrize("columns", [1, 6])
def test_qlinear_matmul_rounds_its_output(tmp_path: Path, columns: int) -> None:
    values, codes = integers("int8", 32, 6)
    nodes = [
        ("QuantizeLinear", "x xs xz", "a"),
        ("QLinearMatMul", "a xs xz q s wz ys yz", "b"),
        ("DequantizeLinear", "b ys yz", "y"),
    ]
    weights = {
        **{name: SCALES[name] for name in ("xs", "xz")},
        "s": (np.abs(rand(columns)) + 0.1) / 100,
        "wz": np.zeros(columns, np.int8),
        "q": values,
        "ys": np.float32(0.1),
        "yz": np.uint8(128),
    }
    path = save(build(nodes, {"x": ("float32", ["b", 32])}, "y", weights), tmp_path)
    model = near(path, 0.05)
    assert ops(model) == dict.fromkeys(
        ("Clip", "apq.Linear", "QuantizeLinear", "DequantizeLinear"), 1
    )
    np.testing.assert_array_equal(kept(model).codes, codes.T)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["QDQ", "QOperator"])
def test_quantize_static_of_onnxruntime(tmp_path: Path, per_channel: bool, kind: str) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Samples(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [{"x": rand(8, 32, seed=i)} for i in range(4)]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    nodes = [
        ("MatMul", "x w", "h"),
        ("Add", "h c", "r"),
        ("Relu", "r", "g"),
        ("LayerNormalization", "g s b", "n"),
        ("Gemm", "n v d", "m", {"transB": 1}),
        ("Sigmoid", "m", "e"),
        ("Mul", "m e", "f"),
        ("Softmax", "f", "y", {"axis": -1}),
    ]
    weights = {
        **{"w": rand(32, 48) / 6, "c": rand(48), "s": rand(48), "b": rand(48, seed=2)},
        **{"v": rand(16, 48, seed=3) / 7, "d": rand(16)},
    }
    source = save(build(nodes, {"x": ("float32", ["b", 32])}, "y", weights), tmp_path)
    path = tmp_path / "quantized.onnx"
    quantize_static(source, path, Samples(), QuantFormat[kind], per_channel=per_channel)
    model = import_onnx(path)
    assert ops(model)["apq.Linear"] == 2 and len(model.quantized) == 2
    feeds = {"x": rand(16, 32, seed=9)}
    want, exact = run_onnx(path, feeds)["y"], run_onnx(source, feeds)["y"]
    got = run_reference(model, feeds, run_node)["y"]
    # Within what the file's own rounding costs; outputs are rounded to 1/256.
    assert np.abs(got - want).max() < 0.04 and np.abs(got - exact).max() < 0.04
    stored = {i.name: i for i in onnx.load(path).graph.initializer}
    for name, side in (("w", (48, 32)), ("v", (16, 48))):
        codes = onnx.numpy_helper.to_array(stored[f"{name}_quantized"]).astype(np.int16) + 128
        (tensor,) = (t for t in model.quantized.values() if t.codes.shape == side)
        np.testing.assert_array_equal(tensor.codes, codes.reshape(side) if name == "v" else codes.T)


def test_qlinear_matmul_with_rows_of_scales_is_refused(tmp_path: Path) -> None:
    nodes = [("QLinearMatMul", "a s z q s1 z1 s1 z", "y")]
    weights = {
        "s": np.ones(3, np.float32),
        "z": np.zeros((), np.uint8),
        "q": integers("uint8", 32, 6)[0],
        "s1": np.float32(1),
        "z1": np.uint8(0),
    }
    path = save(build(nodes, {"a": ("uint8", [3, 32])}, "y", weights), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"QLinearMatMul 'n_y'.*'s' float32\[3\]"):
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


# Malformed nodes

WORDS = ["x", "w", "s", "q", "ids", "cos", ""]


@settings(max_examples=150, deadline=None)
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
            assert "n_y" in str(error) or "operators" in str(error)


# From codes to a tensor, and the plan


@settings(max_examples=60, deadline=None)
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
