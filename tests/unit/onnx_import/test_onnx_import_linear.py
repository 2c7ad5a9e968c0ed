"""MatMul, Gemm and Gather with constants become layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_models import build, check, only, ops, rand, save, well_formed

from apq_tvm.onnx_import import import_onnx

OPSETS = (11, 13, 17, 21)
X = {"x": ("float32", ["b", "s", 8])}
X2 = {"x": ("float32", ["b", 8])}
SIZES = ({"b": 1, "s": 1}, {"b": 2, "s": 5})


@pytest.mark.parametrize("opset", OPSETS)
def test_matmul_with_bias(tmp_path: Path, opset: int) -> None:
    nodes = [("MatMul", "x w", "h"), ("Add", "b h", "y")]
    weights = {"w": rand(8, 6), "b": rand(6)}
    model = check(save(build(nodes, X, "y", weights, opset), tmp_path), *SIZES)
    layer = only(model, "apq.Linear")
    assert ops(model) == {"apq.Linear": 1}
    assert layer.name == "n_h"
    assert layer.inputs == ("x", "w.T", "b", "")
    assert model.weights["w.T"].shape == (6, 8)
    assert model.weights["w.T"].flags.c_contiguous


@pytest.mark.parametrize("shape", [(6,), (1, 6), (1, 1, 6), (1,), ()])
def test_constants_that_broadcast_over_outputs_are_biases(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    nodes = [("MatMul", "x w", "h"), ("Add", "h c", "y")]
    weights = {"w": rand(8, 6), "c": rand(*shape, seed=3)}
    model = check(save(build(nodes, X, "y", weights), tmp_path), *SIZES)
    assert ops(model) == {"apq.Linear": 1}
    assert model.weights[only(model, "apq.Linear").inputs[2]].shape == (6,)


@pytest.mark.parametrize("shape", [(5, 1), (5, 6), (1, 5, 1)])
def test_constants_over_rows_stay_adds(tmp_path: Path, shape: tuple[int, ...]) -> None:
    nodes = [("MatMul", "x w", "h"), ("Add", "h c", "y")]
    weights = {"w": rand(8, 6), "c": rand(*shape)}
    model = check(save(build(nodes, X, "y", weights), tmp_path), {"b": 2, "s": 5})
    assert ops(model) == {"apq.Linear": 1, "Add": 1}


def test_a_bias_of_higher_rank_stays_an_add(tmp_path: Path) -> None:
    nodes = [("MatMul", "x w", "h"), ("Add", "h c", "y")]
    weights = {"w": rand(8, 6), "c": rand(1, 1, 6)}
    model = check(save(build(nodes, X2, "y", weights), tmp_path), {"b": 3})
    assert ops(model) == {"apq.Linear": 1, "Add": 1}


def test_a_result_that_others_read_gets_no_bias(tmp_path: Path) -> None:
    nodes = [("MatMul", "x w", "h"), ("Add", "h c", "y"), ("Neg", "h", "z")]
    weights = {"w": rand(8, 6), "c": rand(6)}
    model = check(save(build(nodes, X, "y z", weights), tmp_path), *SIZES)
    assert only(model, "apq.Linear").inputs[2] == ""


def test_a_result_that_is_an_output_gets_no_bias(tmp_path: Path) -> None:
    nodes = [("MatMul", "x w", "h"), ("Add", "h c", "y")]
    weights = {"w": rand(8, 6), "c": rand(6)}
    model = check(save(build(nodes, X, "h y", weights), tmp_path), *SIZES)
    assert ops(model) == {"apq.Linear": 1, "Add": 1}


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_matmul_with_the_constant_on_the_left(tmp_path: Path, rank: int) -> None:
    shape = ["a", 2, 8, "n"][-rank:] if rank > 1 else [8]
    inputs = {"x": ("float32", shape)}
    model = check(
        save(build([("MatMul", "w x", "y")], inputs, "y", {"w": rand(6, 8)}), tmp_path),
        {"a": 2, "n": 3},
    )
    assert only(model, "apq.Linear").inputs[1] == "w"
    assert ops(model)["Transpose"] == (0 if rank == 1 else 2)


def test_a_vector_times_a_matrix(tmp_path: Path) -> None:
    inputs = {"x": ("float32", [8])}
    model = check(save(build([("MatMul", "x w", "y")], inputs, "y", {"w": rand(8, 6)}), tmp_path))
    assert ops(model) == {"apq.Linear": 1}


def test_a_matrix_behind_axes_of_one_is_a_layer(tmp_path: Path) -> None:
    path = save(build([("MatMul", "x w", "y")], X, "y", {"w": rand(1, 8, 6)}), tmp_path)
    assert ops(check(path, *SIZES)) == {"apq.Linear": 1}


def test_batched_constants_stay_matmul(tmp_path: Path) -> None:
    inputs = {"x": ("float32", ["b", 3, 5, 8])}
    path = save(build([("MatMul", "x w", "y")], inputs, "y", {"w": rand(3, 8, 6)}), tmp_path)
    assert ops(check(path, {"b": 2})) == {"MatMul": 1}


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("side", ["right", "left"])
def test_gemm(tmp_path: Path, opset: int, trans_a: int, trans_b: int, side: str) -> None:
    attrs = {"transA": trans_a, "transB": trans_b, "alpha": 0.5, "beta": 2.0}
    shape: list[int | str] = [8, "b"] if trans_a else ["b", 8]
    weight = rand(6, 8) if trans_b else rand(8, 6)
    read = "x w c"
    if side == "left":
        shape = ["b", 8] if trans_b else [8, "b"]
        weight, read = (rand(8, 6) if trans_a else rand(6, 8)), "w x c"
    inputs = {"x": ("float32", shape)}
    bias = rand(6) if side == "right" else rand(6, 1)
    model = build([("Gemm", read, "y", attrs)], inputs, "y", {"w": weight, "c": bias}, opset)
    imported = check(save(model, tmp_path), {"b": 1}, {"b": 4})
    layer = only(imported, "apq.Linear")
    assert layer.name == "n_y"
    assert "Gemm" not in ops(imported)
    if side == "right":
        assert layer.inputs[2]
        assert ops(imported)["Transpose"] == trans_a


@pytest.mark.parametrize("shape", [(6,), (1, 6), (1,), (), (4, 6), (4, 1)])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_gemm_biases_that_broadcast(tmp_path: Path, shape: tuple[int, ...], beta: float) -> None:
    weights = {"w": rand(8, 6), "c": rand(*shape, seed=5)}
    path = save(build([("Gemm", "x w c", "y", {"beta": beta})], X2, "y", weights), tmp_path)
    model = check(path, {"b": 4})
    per_row = bool(shape) and shape[0] == 4 and beta != 0.0
    assert ops(model)["Add"] == int(per_row)
    assert bool(only(model, "apq.Linear").inputs[2]) == (not per_row and beta != 0.0)


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_gemm_with_a_computed_bias(tmp_path: Path, beta: float) -> None:
    inputs = {**X2, "c": ("float32", [6])}
    path = save(
        build([("Gemm", "x w c", "y", {"beta": beta})], inputs, "y", {"w": rand(8, 6)}), tmp_path
    )
    model = check(path, {"b": 4})
    assert ops(model)["apq.Linear"] == 1
    assert ops(model)["Mul"] == int(beta != 1.0)


def test_gemm_without_bias(tmp_path: Path) -> None:
    path = save(build([("Gemm", "x w", "y")], X2, "y", {"w": rand(8, 6)}), tmp_path)
    assert ops(check(path, {"b": 4})) == {"apq.Linear": 1}


def test_gemm_of_two_computed_values_stays(tmp_path: Path) -> None:
    inputs = {**X2, "z": ("float32", [8, 6])}
    path = save(build([("Gemm", "x z", "y")], inputs, "y"), tmp_path)
    assert ops(check(path, {"b": 4})) == {"Gemm": 1}


@pytest.mark.parametrize("opset", OPSETS)
def test_weights_are_reached_through_what_only_moves_them(tmp_path: Path, opset: int) -> None:
    squeeze = {"axes": [0]} if opset < 13 else {}
    nodes = [
        ("Identity", "w", "w1"),
        ("Transpose", "w1", "w2", {"perm": [1, 0]}),
        ("Reshape", "w2 shape", "w3"),
        ("Squeeze", "w3" if opset < 13 else "w3 axes", "w4", squeeze),
        ("Cast", "w4", "w5", {"to": 1}),
        ("MatMul", "x w5", "y"),
    ]
    weights = {
        "w": rand(6, 8).astype(np.float64),
        "shape": np.array([1, 8, 6], np.int64),
        "axes": np.array([0], np.int64),
    }
    if opset < 13:
        del weights["axes"]
    model = check(save(build(nodes, X, "y", weights, opset), tmp_path), *SIZES)
    assert ops(model) == {"apq.Linear": 1}
    np.testing.assert_array_equal(
        model.weights[only(model, "apq.Linear").inputs[1]], weights["w"].astype(np.float32)
    )


def test_a_shared_weight_is_stored_once(tmp_path: Path) -> None:
    nodes = [
        ("Transpose", "w", "t1"),
        ("Transpose", "w", "t2"),
        ("MatMul", "x t1", "a"),
        ("MatMul", "a t2", "b"),
        ("MatMul", "b twin", "y"),
    ]
    w = rand(8, 8)
    model = check(save(build(nodes, X, "y", {"w": w, "twin": w.T.copy()}), tmp_path), *SIZES)
    names = {node.inputs[1] for node in model.nodes if node.op == "apq.Linear"}
    assert len(names) == len(model.weights) == 1
    assert [node.name for node in model.nodes] == ["n_a", "n_b", "n_y"]


def test_a_tied_embedding_and_output_layer_share_their_table(tmp_path: Path) -> None:
    nodes = [("Gather", "table ids", "h"), ("Transpose", "table", "t"), ("MatMul", "h t", "y")]
    inputs = {"ids": ("int64", ["b", "s"])}
    model = check(save(build(nodes, inputs, "y", {"table": rand(10, 8)}), tmp_path), *SIZES)
    assert ops(model) == {"apq.Embedding": 1, "apq.Linear": 1}
    assert set(model.weights) == {"table"}


@pytest.mark.parametrize("ids", ["int32", "int64"])
@pytest.mark.parametrize("shape", [["b", "s"], ["b"], []])
def test_embedding(tmp_path: Path, ids: str, shape: list[str]) -> None:
    nodes = [("Gather", "table ids", "y", {"axis": 0})]
    path = save(build(nodes, {"ids": (ids, shape)}, "y", {"table": rand(5, 8)}), tmp_path)
    sizes = {"b": 2, "s": 4}
    dims = [sizes[d] for d in shape]
    feeds = {"ids": np.random.default_rng(0).integers(-5, 5, dims).astype(ids)}
    assert ops(check(path, sizes, feeds=feeds)) == {"apq.Embedding": 1}


def test_tables_of_integers_and_other_axes_are_no_embeddings(tmp_path: Path) -> None:
    nodes = [("Gather", "t ids", "a"), ("Gather", "f ids", "b", {"axis": 1})]
    weights = {"t": np.arange(12).reshape(6, 2), "f": rand(3, 6)}
    path = save(build(nodes, {"ids": ("int64", ["b"])}, "a b", weights), tmp_path)
    assert ops(check(path, {"b": 3})) == {"Gather": 2}


def test_float64_layers_compute_in_float32(tmp_path: Path) -> None:
    inputs = {"x": ("float64", ["b", 8]), "ids": ("int64", ["b"])}
    nodes = [
        ("Gather", "table ids", "e"),
        ("Add", "x e", "h"),
        ("MatMul", "h w", "m"),
        ("Add", "m c", "y"),
    ]
    weights = {
        "table": rand(5, 8).astype(np.float64),
        "w": rand(8, 6).astype(np.float64),
        "c": rand(6).astype(np.float64),
    }
    model = check(save(build(nodes, inputs, "y", weights), tmp_path), {"b": 3})
    assert ops(model)["apq.Linear"] == ops(model)["apq.Embedding"] == 1
    assert model.outputs[0].dtype == "float64"


@pytest.mark.parametrize("elem", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16])
def test_half_precision_weights_are_read_as_float32(tmp_path: Path, elem: int) -> None:
    nodes = [("Cast", "w", "w32", {"to": 1}), ("MatMul", "x w32", "y")]
    model = build(nodes, X, "y", {"w": rand(8, 6)})
    wide = onnx.numpy_helper.to_array(model.graph.initializer[0])
    half = wide.astype(onnx.helper.tensor_dtype_to_np_dtype(elem))
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(half, "w"))
    imported = check(save(model, tmp_path), *SIZES)
    assert ops(imported) == {"apq.Linear": 1}
    np.testing.assert_array_equal(imported.weights["w.T"], half.astype(np.float32).T)


@pytest.mark.parametrize("opset", OPSETS)
def test_a_float16_model_is_float32_inside(tmp_path: Path, opset: int) -> None:
    nodes = [
        ("MatMul", "x w", "h"),
        ("Add", "h c", "a"),
        ("Cast", "a", "wide", {"to": 1}),
        ("Sqrt", "wide", "root"),
        ("Cast", "root", "narrow", {"to": 10}),
        ("Mul", "narrow two", "y"),
    ]
    weights = {
        "w": np.abs(rand(8, 6)).astype(np.float16),
        "c": np.full(6, 50, np.float16),
        "two": np.array(2, np.float16),
    }
    inputs = {"x": ("float16", ["b", 8])}
    path = save(build(nodes, inputs, "y root", weights, opset), tmp_path)
    model = check(path, {"b": 3}, tolerance=3e-3)
    assert (model.inputs[0].dtype, model.outputs[0].dtype) == ("float16", "float16")
    assert model.outputs[1].dtype == "float32"
    assert ops(model) == {"apq.Linear": 1, "Cast": 2, "Sqrt": 1, "Mul": 1}
    assert all(array.dtype == np.float32 for array in model.weights.values())


@pytest.mark.parametrize("opset", (13, 21))
def test_dequantized_constants_are_weights(tmp_path: Path, opset: int) -> None:
    nodes = [("DequantizeLinear", "q s z", "w", {"axis": 1}), ("MatMul", "x w", "y")]
    weights = {
        "q": np.random.default_rng(0).integers(-128, 128, (8, 6)).astype(np.int8),
        "s": np.abs(rand(6)),
        "z": np.arange(6).astype(np.int8),
    }
    model = check(save(build(nodes, X, "y", weights, opset), tmp_path), *SIZES)
    assert ops(model) == {"apq.Linear": 1}


def test_integer_products_are_no_layers(tmp_path: Path) -> None:
    weights = {"w": np.arange(48).reshape(8, 6).astype(np.int32)}
    path = save(build([("MatMul", "x w", "y")], {"x": ("int32", ["b", 8])}, "y", weights), tmp_path)
    assert ops(check(path, {"b": 3})) == {"MatMul": 1}


def test_a_convolution_over_an_open_size_is_a_layer(tmp_path: Path) -> None:
    inputs = {"x": ("float32", ["b", 3, "h", 9])}
    nodes = [("Conv", "x w", "y", {"pads": [1, 1, 1, 1], "strides": [2, 2]})]
    model = check(
        save(build(nodes, inputs, "y", {"w": rand(4, 3, 3, 3)}), tmp_path),
        {"b": 1, "h": 7},
        {"b": 2, "h": 8},
    )
    assert ops(model) == {"Transpose": 2, "apq.Windows": 1, "apq.Linear": 1}
    assert model.outputs[0].shape == ("b", 4, "(h + 1) // 2", 5)


def test_a_layer_between_reshapes_works_without_them(tmp_path: Path) -> None:
    """GPT-2's Conv1D: view(-1, K), addmm, view back; the residual can then be fused."""
    nodes = [
        ("Reshape", "x flat", "h"),
        ("Gemm", "h w c", "g"),
        ("Shape", "x", "shape"),
        ("Reshape", "g shape", "r"),
        ("Add", "x r", "y"),
    ]
    weights = {"flat": np.array([-1, 8]), "w": rand(8, 8), "c": rand(8)}
    model = check(save(build(nodes, X, "y", weights), tmp_path), *SIZES)
    assert ops(model) == {"apq.Linear": 1}
    assert only(model, "apq.Linear").inputs[3] == "x"


def test_nodes_without_names_or_with_one_name_get_their_own(tmp_path: Path) -> None:
    nodes = [("MatMul", "x w", "a"), ("MatMul", "a w", "b"), ("MatMul", "b w", "y")]
    model = build(nodes, X, "y", {"w": rand(8, 8)})
    model.graph.node[0].name = ""
    model.graph.node[1].name = model.graph.node[2].name = "same"
    imported = import_onnx(save(model, tmp_path))  # onnxruntime refuses equal names
    well_formed(imported)
    assert [node.name for node in imported.nodes] == ["MatMul_0", "same", "same_2"]
