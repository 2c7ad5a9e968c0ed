"""Activations, residuals, attention and layer normalisation in the spellings exporters use."""

from __future__ import annotations

from math import pi, sqrt
from pathlib import Path

import numpy as np
import pytest
from onnx_models import build, check, only, ops, rand, save

X = {"x": ("float32", ["b", "s", 8])}
SIZES = ({"b": 1, "s": 1}, {"b": 2, "s": 5})
OPSETS = (11, 13, 17, 21)
LINEAR = [("MatMul", "x w", "h"), ("Add", "h c", "l")]
WEIGHTS = {"w": rand(8, 8), "c": rand(8, seed=1), "w2": rand(8, 8, seed=2)}


def f32(value: float) -> np.ndarray:
    return np.array(value, np.float32)


CONSTANTS = {
    "half": f32(0.5),
    "one": f32(1),
    "two": f32(2),
    "three": f32(3),
    "root2": f32(sqrt(2)),
    "inv_root2": f32(sqrt(0.5)),
    "cubic": f32(0.044715),
    "root2pi": f32(sqrt(2 / pi)),
    "ones": np.ones((1, 1, 1), np.float32),
}

# GELU of l as y, in the operand orders of torch, TensorFlow, JAX and onnxruntime's own tools.
GELUS = {
    "torch": [
        ("Div", "l root2", "a"),
        ("Erf", "a", "e"),
        ("Add", "e one", "f"),
        ("Mul", "l f", "g"),
        ("Mul", "g half", "y"),
    ],
    "constant first": [
        ("Mul", "inv_root2 l", "a"),
        ("Erf", "a", "e"),
        ("Add", "one e", "f"),
        ("Mul", "half f", "g"),
        ("Mul", "g l", "y"),
    ],
    "half first": [
        ("Mul", "half l", "g"),
        ("Mul", "l inv_root2", "a"),
        ("Erf", "a", "e"),
        ("Add", "e ones", "f"),
        ("Mul", "f g", "y"),
    ],
}
TANH_GELUS = {
    "pow": [
        ("Pow", "l three", "p"),
        ("Mul", "cubic p", "q"),
        ("Add", "l q", "r"),
        ("Mul", "root2pi r", "t"),
        ("Tanh", "t", "u"),
        ("Add", "one u", "v"),
        ("Mul", "half l", "z"),
        ("Mul", "z v", "y"),
    ],
    "products": [
        ("Mul", "l l", "p"),
        ("Mul", "p l", "p3"),
        ("Mul", "p3 cubic", "q"),
        ("Add", "q l", "r"),
        ("Mul", "r root2pi", "t"),
        ("Tanh", "t", "u"),
        ("Add", "u one", "v"),
        ("Mul", "v half", "z"),
        ("Mul", "l z", "y"),
    ],
    "nested": [
        ("Mul", "cubic l", "p"),
        ("Mul", "l p", "p2"),
        ("Mul", "l p2", "q"),
        ("Add", "l q", "r"),
        ("Mul", "root2pi r", "t"),
        ("Tanh", "t", "u"),
        ("Add", "ones u", "v"),
        ("Mul", "half v", "z"),
        ("Mul", "l z", "y"),
    ],
    "factored": [
        ("Mul", "l l", "p"),
        ("Mul", "p cubic", "q"),
        ("Add", "q one", "r"),
        ("Mul", "l root2pi", "s1"),
        ("Mul", "s1 r", "t"),
        ("Tanh", "t", "u"),
        ("Add", "u one", "v"),
        ("Mul", "l v", "z"),
        ("Mul", "z half", "y"),
    ],
}


def used(nodes: list[tuple], weights: dict) -> dict:
    read = {word for node in nodes for word in node[1].split()}
    return {name: array for name, array in weights.items() if name in read}


def fused(tmp_path: Path, after: list[tuple], outputs: str = "y", opset: int = 17):
    """Import a layer ``l`` followed by `after`."""
    nodes = [*LINEAR, *after]
    weights = used(nodes, {**WEIGHTS, **CONSTANTS})
    return check(save(build(nodes, X, outputs, weights, opset), tmp_path), *SIZES)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("spelling", GELUS)
def test_erf_gelu(tmp_path: Path, spelling: str, opset: int) -> None:
    model = fused(tmp_path, GELUS[spelling], opset=opset)
    assert ops(model) == {"apq.Linear": 1}
    assert only(model, "apq.Linear").attrs["activation"] == "gelu"


@pytest.mark.parametrize("spelling", TANH_GELUS)
def test_tanh_gelu(tmp_path: Path, spelling: str) -> None:
    model = fused(tmp_path, TANH_GELUS[spelling])
    assert ops(model) == {"apq.Linear": 1}
    assert only(model, "apq.Linear").attrs["activation"] == "gelu_tanh"


@pytest.mark.parametrize("kind", ["none", "tanh"])
def test_the_gelu_operator(tmp_path: Path, kind: str) -> None:
    model = fused(tmp_path, [("Gelu", "l", "y", {"approximate": kind})], opset=20)
    activation = only(model, "apq.Linear").attrs["activation"]
    assert activation == ("gelu" if kind == "none" else "gelu_tanh")


def test_gelu_of_something_else_is_a_node(tmp_path: Path) -> None:
    nodes = [("Neg", "x", "l"), *GELUS["torch"]]
    model = check(save(build(nodes, X, "y", used(nodes, CONSTANTS)), tmp_path), *SIZES)
    assert ops(model) == {"Neg": 1, "apq.Gelu": 1}


@pytest.mark.parametrize("other", ["half", "one", "root2"])
def test_what_only_looks_like_gelu_stays(tmp_path: Path, other: str) -> None:
    """Each constant of GELU matters."""
    wrong = {other: CONSTANTS[other] * np.float32(1.1)}
    nodes = [*LINEAR, *GELUS["torch"]]
    weights = used(nodes, {**WEIGHTS, **CONSTANTS, **wrong})
    model = check(save(build(nodes, X, "y", weights), tmp_path), *SIZES)
    assert ops(model)["Erf"] == 1


def test_gelu_whose_inside_is_read_elsewhere_stays(tmp_path: Path) -> None:
    model = fused(tmp_path, [*GELUS["torch"], ("Neg", "e", "z")], "y z")
    assert ops(model)["Erf"] == 1


@pytest.mark.parametrize("op", ["Relu", "Tanh", "Sigmoid"])
def test_plain_activations(tmp_path: Path, op: str) -> None:
    model = fused(tmp_path, [(op, "l", "y")])
    assert ops(model) == {"apq.Linear": 1}
    assert only(model, "apq.Linear").attrs["activation"] == op.lower()
    assert only(model, "apq.Linear").outputs == ("y",)


@pytest.mark.parametrize("order", ["l g", "g l"])
def test_silu(tmp_path: Path, order: str) -> None:
    model = fused(tmp_path, [("Sigmoid", "l", "g"), ("Mul", order, "y")])
    assert ops(model) == {"apq.Linear": 1}
    assert only(model, "apq.Linear").attrs["activation"] == "silu"


def test_silu_of_something_else_stays(tmp_path: Path) -> None:
    nodes = [("Neg", "x", "l"), ("Sigmoid", "l", "g"), ("Mul", "l g", "y")]
    model = check(save(build(nodes, X, "y"), tmp_path), *SIZES)
    assert ops(model) == {"Neg": 1, "Sigmoid": 1, "Mul": 1}


def test_a_result_that_others_read_gets_no_activation(tmp_path: Path) -> None:
    for outputs, extra in (("y z", [("Neg", "l", "z")]), ("y l", [])):
        model = fused(tmp_path, [("Relu", "l", "y"), *extra], outputs)
        assert only(model, "apq.Linear").attrs["activation"] == ""


@pytest.mark.parametrize("order", ["l x", "x l"])
def test_residual(tmp_path: Path, order: str) -> None:
    model = fused(tmp_path, [("Add", order, "y")])
    assert ops(model) == {"apq.Linear": 1}
    assert only(model, "apq.Linear").inputs[3] == "x"


def test_residual_after_an_activation(tmp_path: Path) -> None:
    model = fused(tmp_path, [("Relu", "l", "r"), ("Add", "x r", "y")])
    layer = only(model, "apq.Linear")
    assert ops(model) == {"apq.Linear": 1}
    assert (layer.attrs["activation"], layer.inputs[3]) == ("relu", "x")


def test_an_activation_after_a_residual_comes_last(tmp_path: Path) -> None:
    model = fused(tmp_path, [("Add", "x l", "a"), ("Relu", "a", "y")])
    layer = only(model, "apq.Linear")
    assert ops(model) == {"apq.Linear": 1}
    assert (layer.attrs["activation"], layer.attrs["after"], layer.inputs[3]) == ("relu", True, "x")


def test_of_two_layers_the_later_adds_the_earlier(tmp_path: Path) -> None:
    for order in ("l m", "m l"):
        model = fused(tmp_path, [("MatMul", "x w2", "m"), ("Add", order, "y")])
        assert ops(model) == {"apq.Linear": 2}
        assert model.nodes[1].inputs[3] == model.nodes[0].outputs[0]


def test_a_residual_that_is_broadcast_stays_an_add(tmp_path: Path) -> None:
    nodes = [*LINEAR, ("ReduceMax", "x", "m", {"axes": [1]}), ("Add", "l m", "y")]
    model = check(save(build(nodes, X, "y", used(nodes, WEIGHTS)), tmp_path), {"b": 2, "s": 5})
    assert only(model, "apq.Linear").inputs[3] == ""


def test_a_layer_added_to_itself_stays(tmp_path: Path) -> None:
    assert ops(fused(tmp_path, [("Add", "l l", "y")])) == {"apq.Linear": 1, "Add": 1}


def test_a_layer_read_twice_keeps_its_residual_apart(tmp_path: Path) -> None:
    model = fused(tmp_path, [("Add", "l x", "y"), ("Neg", "l", "z")], "y z")
    assert ops(model) == {"apq.Linear": 1, "Add": 1, "Neg": 1}


# Layer normalisation

AFFINE = {"g": rand(8, seed=2), "t": rand(8, seed=3), "eps": f32(1e-5), **CONSTANTS}


def layer_norm(opset: int, square: tuple, divide: list[tuple], affine: list[tuple]) -> list[tuple]:
    def mean(x: str, y: str) -> tuple:
        if opset < 18:
            return ("ReduceMean", x, y, {"axes": [-1]})
        return ("ReduceMean", f"{x} last", y)

    return [
        mean("x", "m"),
        ("Sub", "x m", "d"),
        square,
        mean("sq", "var"),
        ("Add", "var eps", "ve"),
        ("Sqrt", "ve", "std"),
        *divide,
        *affine,
    ]


SQUARES = {"pow": ("Pow", "d two", "sq"), "mul": ("Mul", "d d", "sq")}
DIVIDES = {
    "div": [("Div", "d std", "n")],
    "reciprocal": [("Reciprocal", "std", "i"), ("Mul", "d i", "n")],
    "one over": [("Div", "one std", "i"), ("Mul", "i d", "n")],
}
AFFINES = {
    "scale and bias": [("Mul", "n g", "ng"), ("Add", "ng t", "y")],
    "constant first": [("Mul", "g n", "ng"), ("Add", "t ng", "y")],
    "scale": [("Mul", "n g", "y")],
    "neither": [("Identity", "n", "y")],
}


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("divide", DIVIDES)
@pytest.mark.parametrize("affine", AFFINES)
@pytest.mark.parametrize("opset", [11, 17, 21])
def test_layer_norm(tmp_path: Path, square: str, divide: str, affine: str, opset: int) -> None:
    nodes = layer_norm(opset, SQUARES[square], DIVIDES[divide], AFFINES[affine])
    weights = used(nodes, {**AFFINE, "last": np.array([-1], np.int64)})
    model = check(save(build(nodes, X, "y", weights, opset), tmp_path), *SIZES)
    assert ops(model) == {"LayerNormalization": 1}
    node = only(model, "LayerNormalization")
    assert node.attrs["axis"] == -1
    assert node.attrs["epsilon"] == pytest.approx(1e-5)
    assert model.weights[node.inputs[1]].shape == (8,)


def test_layer_norm_over_two_axes(tmp_path: Path) -> None:
    inputs = {"x": ("float32", ["b", 4, 8])}
    nodes = layer_norm(17, SQUARES["pow"], DIVIDES["div"], AFFINES["scale and bias"])
    nodes = [(*n[:3], {"axes": [1, 2]}) if n[0] == "ReduceMean" else n for n in nodes]
    path = save(build(nodes, inputs, "y", used(nodes, AFFINE)), tmp_path)
    model = check(path, {"b": 3})
    node = only(model, "LayerNormalization")
    assert node.attrs["axis"] == -2
    assert model.weights[node.inputs[1]].shape == (4, 8)


def test_a_mean_over_another_axis_is_no_layer_norm(tmp_path: Path) -> None:
    nodes = layer_norm(17, SQUARES["pow"], DIVIDES["div"], AFFINES["neither"])
    nodes = [(*n[:3], {"axes": [1]}) if n[0] == "ReduceMean" else n for n in nodes]
    model = check(save(build(nodes, X, "y", used(nodes, AFFINE)), tmp_path), {"b": 2, "s": 5})
    assert "LayerNormalization" not in ops(model)


# Broadcasting


def test_an_expanded_mask_is_broadcast_by_its_readers(tmp_path: Path) -> None:
    """Mean pooling as sentence-transformers exports it."""
    inputs = {**X, "mask": ("int64", ["b", "s"])}
    nodes = [
        ("Unsqueeze", "mask last", "m3"),
        ("Shape", "x", "shape"),
        ("Expand", "m3 shape", "wide"),
        ("Cast", "wide", "f", {"to": 1}),
        ("Mul", "x f", "masked"),
        ("ReduceSum", "masked first", "total", {"keepdims": 0}),
        ("ReduceSum", "f first", "count", {"keepdims": 0}),
        ("Clip", "count tiny", "safe"),
        ("Div", "total safe", "y"),
    ]
    weights = {
        "last": np.array([-1], np.int64),
        "first": np.array([1], np.int64),
        "tiny": f32(1e-9),
    }
    model = check(save(build(nodes, inputs, "y", weights), tmp_path), *SIZES)
    assert not {"Expand", "apq.Expand"} & set(ops(model))
    specs = model.value_specs
    (count,) = (n for n in model.nodes if n.op == "Clip")
    assert specs[count.outputs[0]].shape == ("b", 1)


def test_a_reduction_over_an_expanded_axis_runs_after_it(tmp_path: Path) -> None:
    nodes = [
        ("ReduceMax", "x", "m", {"axes": [2]}),
        ("Shape", "x", "shape"),
        ("Expand", "m shape", "wide"),
        ("ReduceSum", "wide last", "y", {"keepdims": 0}),
    ]
    weights = {"last": np.array([-1], np.int64)}
    model = check(save(build(nodes, X, "y", weights), tmp_path), *SIZES)
    assert ops(model)["apq.Expand"] == 1


def test_a_tensor_of_one_number_is_that_number(tmp_path: Path) -> None:
    nodes = [
        ("Shape", "x", "shape"),
        ("ConstantOfShape", "shape", "full", {"value": np.array([2.5], np.float32)}),
        ("Mul", "x full", "y"),
    ]
    assert ops(check(save(build(nodes, X, "y"), tmp_path), *SIZES)) == {"Mul": 1}


def test_token_types_that_are_all_zero_are_one_row(tmp_path: Path) -> None:
    inputs = {"ids": ("int64", ["b", "s"])}
    nodes = [
        ("Shape", "ids", "shape"),
        ("ConstantOfShape", "shape", "zeros", {"value": np.array([0], np.int64)}),
        ("Gather", "words ids", "w"),
        ("Gather", "types zeros", "t"),
        ("Add", "w t", "y"),
    ]
    weights = {"words": rand(5, 8), "types": rand(2, 8, seed=1)}
    model = check(save(build(nodes, inputs, "y", weights), tmp_path), *SIZES)
    assert ops(model) == {"apq.Embedding": 1, "Add": 1}


# Outputs


def test_outputs_keep_their_names(tmp_path: Path) -> None:
    nodes = [
        *LINEAR,
        ("Relu", "l", "y"),
        ("Identity", "y", "again"),
        ("Identity", "x", "input"),
        ("Identity", "w", "weight"),
        ("Cast", "l2", "same", {"to": 1}),
        ("Add", "x x", "l2"),
    ]
    nodes = [*nodes[:-2], nodes[-1], nodes[-2]]
    path = save(build(nodes, X, "again y input weight same", used(nodes, WEIGHTS)), tmp_path)
    model = check(path, *SIZES)
    assert [spec.name for spec in model.outputs] == ["again", "y", "input", "weight", "same"]
    assert ops(model)["apq.Linear"] == 1
    assert only(model, "apq.Linear").attrs["activation"] == "relu"


def test_a_weight_or_an_input_may_itself_be_an_output(tmp_path: Path) -> None:
    from onnx_models import well_formed
    from onnx_reference import run_reference

    from apq_tvm.onnx_import import import_onnx

    model = import_onnx(save(build([("Relu", "x", "y")], X, "y x w", {"w": rand(3)}), tmp_path))
    well_formed(model)
    x = rand(1, 2, 8)
    got = run_reference(model, {"x": x})
    assert list(got) == ["y", "x", "w"]
    np.testing.assert_array_equal(got["x"], x)


# Operators of onnxruntime's own


@pytest.mark.parametrize("op", ["Gelu", "FastGelu", "BiasGelu", "QuickGelu"])
def test_onnxruntimes_gelus(tmp_path: Path, op: str) -> None:
    read = "l c" if op == "BiasGelu" else "l"
    nodes = [("MatMul", "x w", "l"), (f"com.microsoft.{op}", read, "y")]
    weights = used(nodes, WEIGHTS)
    path = save(build(nodes, X, "y", weights, domains={"com.microsoft": 1}), tmp_path)
    model = check(path, *SIZES, tolerance=1e-4 if op == "FastGelu" else 2e-5)
    assert ops(model)["apq.Linear"] == 1
    if op != "QuickGelu":
        assert only(model, "apq.Linear").attrs["activation"].startswith("gelu")


@pytest.mark.parametrize("bias", [True, False])
def test_onnxruntimes_skip_layer_norm(tmp_path: Path, bias: bool) -> None:
    op = "com.microsoft.SkipLayerNormalization"
    inputs = {**X, "skip": ("float32", ["b", "s", 8])}
    read = "x skip g t" + (" c" if bias else "")
    nodes = [(op, read, "y _ _ total".replace("_", "mean", 1).replace("_", "inv"))]
    nodes = [(op, read, "y", {"epsilon": 1e-5})]
    weights = used(nodes, {**AFFINE, "c": rand(8, seed=9)})
    path = save(build(nodes, inputs, "y", weights, domains={"com.microsoft": 1}), tmp_path)
    model = check(path, *SIZES)
    assert ops(model)["LayerNormalization"] == 1


@pytest.mark.parametrize(("op", "opset"), [("Celu", 17), ("Swish", 24)])
def test_operators_that_are_functions_are_inlined(tmp_path: Path, op: str, opset: int) -> None:
    path = save(build([(op, "x", "y")], X, "y", opset=opset), tmp_path)
    model = check(path, *SIZES) if op == "Celu" else None
    if model is None:
        from apq_tvm.onnx_import import import_onnx

        assert set(ops(import_onnx(path))) == {"Sigmoid", "Mul"}


@pytest.mark.parametrize("shape", [(1,), (4, 1), (2, 4, 16)])
def test_norms_whose_scale_is_broadcast(shape: tuple[int, ...], tmp_path: Path) -> None:
    nodes = [("LayerNormalization", "x s b", "y", {"axis": -1})]
    weights = {"s": rand(*shape), "b": rand(16)}
    check(save(build(nodes, {"x": ("float32", [2, 4, 16])}, "y", weights), tmp_path), {})
