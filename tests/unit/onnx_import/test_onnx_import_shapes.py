"""What a graph computes from the shapes of its inputs is decided at import."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_models import build, check, only, ops, rand, save

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import import import_onnx

INT = np.int64
X = {"x": ("float32", ["b", "s", 12])}
IDS = {"ids": ("int64", ["b", "s"])}
SIZES = ({"b": 1, "s": 1}, {"b": 2, "s": 5}, {"b": 3, "s": 4})
OPSETS = (11, 13, 17, 21)

# Length of axis `i` of x, as torch exports it: a vector of one entry named {name}{i}.
ZERO_ONE = {"i0": np.array(0, INT), "i1": np.array(1, INT), "axis0": np.array([0], INT)}


def dim(opset: int, i: int, x: str = "x") -> list[tuple]:
    """Nodes that make ``d{i}``, the vector [length of axis i]."""
    nodes: list[tuple] = [
        ("Shape", x, f"shape{i}"),
        ("Gather", f"shape{i} i{i}", f"g{i}", {"axis": 0}),
    ]
    if opset < 13:
        return [*nodes, ("Unsqueeze", f"g{i}", f"d{i}", {"axes": [0]})]
    return [*nodes, ("Unsqueeze", f"g{i} axis0", f"d{i}")]


def used(nodes: list[tuple], weights: dict) -> dict:
    """Those weights that some node reads: ONNX Runtime warns about the others."""
    read = {word for node in nodes for word in node[1].split()}
    return {name: array for name, array in weights.items() if name in read}


@pytest.mark.parametrize("opset", OPSETS)
def test_heads_are_split_and_merged_with_constant_targets(tmp_path: Path, opset: int) -> None:
    nodes = [
        *dim(opset, 0),
        *dim(opset, 1),
        ("Concat", "d0 d1 heads width", "split", {"axis": 0}),
        ("Reshape", "x split", "h"),
        ("Transpose", "h", "t", {"perm": [0, 2, 1, 3]}),
        ("Relu", "t", "r"),
        ("Transpose", "r", "u", {"perm": [0, 2, 1, 3]}),
        ("Concat", "d0 d1 whole", "merge", {"axis": 0}),
        ("Reshape", "u merge", "y"),
    ]
    weights = {
        **ZERO_ONE,
        "heads": np.array([3], INT),
        "width": np.array([4], INT),
        "whole": np.array([12], INT),
    }
    path = save(build(nodes, X, "y", used(nodes, weights), opset), tmp_path)
    model = check(path, *SIZES)
    assert ops(model) == {"Reshape": 2, "Transpose": 2, "Relu": 1}
    targets = sorted(array.tolist() for array in model.weights.values())
    assert targets == [[0, 0, 3, 4], [0, 0, 12]]


def test_a_reshape_that_merges_symbols_uses_minus_one(tmp_path: Path) -> None:
    nodes = [("Reshape", "x t", "flat"), ("Relu", "flat", "y")]
    path = save(build(nodes, X, "y", {"t": np.array([-1, 12], INT)}), tmp_path)
    model = check(path, *SIZES)
    assert model.outputs[0].shape == ("b * s", 12)
    assert [array.tolist() for array in model.weights.values()] == [[-1, 12]]


def test_a_reshape_no_constant_can_express_carries_its_shape(tmp_path: Path) -> None:
    nodes = [
        *dim(17, 0),
        *dim(17, 1),
        ("Concat", "d1 d0 rest", "target", {"axis": 0}),
        ("Reshape", "x target", "y"),
    ]
    weights = {**ZERO_ONE, "rest": np.array([12], INT)}
    model = check(save(build(nodes, X, "y", weights), tmp_path), *SIZES)
    assert only(model, "apq.Reshape").attrs["shape"] == ("s", "b", 12)
    assert ops(model) == {"apq.Reshape": 1}


def test_a_reshape_to_the_same_shape_is_dropped(tmp_path: Path) -> None:
    nodes = [("Shape", "x", "t"), ("Relu", "x", "r"), ("Reshape", "r t", "z"), ("Neg", "z", "y")]
    assert ops(check(save(build(nodes, X, "y"), tmp_path), *SIZES)) == {"Relu": 1, "Neg": 1}


def test_reshapes_in_a_row_become_one(tmp_path: Path) -> None:
    nodes = [("Reshape", "x a", "h"), ("Reshape", "h c", "y")]
    weights = {"a": np.array([0, -1], INT), "c": np.array([0, -1, 3, 4], INT)}
    path = save(build(nodes, X, "y", weights), tmp_path)
    assert ops(check(path, *SIZES)) == {"Reshape": 1}


@pytest.mark.parametrize("opset", OPSETS)
def test_expand_with_the_exporters_minus_one_test(tmp_path: Path, opset: int) -> None:
    """torch writes ``where(shape == -1, 1, shape)`` in front of every expand."""
    nodes = [
        *dim(opset, 0),
        *dim(opset, 1),
        ("Concat", "d0 d1", "shape", {"axis": 0}),
        ("Reshape", "shape minus", "flat"),
        ("Shape", "flat", "rank"),
        ("ConstantOfShape", "rank", "ones", {"value": np.array([1], INT)}),
        ("Mul", "ones minus_one", "negative"),
        ("Equal", "flat negative", "same"),
        ("Where", "same ones flat", "target"),
        ("Expand", "row target", "y"),
    ]
    weights = {
        **ZERO_ONE,
        "minus": np.array([-1], INT),
        "minus_one": np.array(-1, INT),
        "row": np.array([[7]], INT),
    }
    path = save(build(nodes, X, "y", used(nodes, weights), opset), tmp_path)
    model = check(path, *SIZES)
    assert ops(model) == {"apq.Full": 1}
    assert only(model, "apq.Full").attrs["shape"] == ("b", "s")


def test_expand_of_a_computed_value_carries_its_shape(tmp_path: Path) -> None:
    nodes = [
        ("Shape", "x", "t"),
        ("ReduceMax", "x", "m", {"axes": [2]}),
        ("Expand", "m t", "y"),
    ]
    model = check(save(build(nodes, X, "y"), tmp_path), *SIZES)
    assert only(model, "apq.Expand").attrs["shape"] == ("b", "s", 12)


def test_position_rows_are_sliced_and_limit_the_length(tmp_path: Path) -> None:
    nodes = [
        *dim(17, 1, "ids"),
        ("Slice", "table start d1 axis step", "positions"),
        ("Gather", "rows positions", "p"),
        ("Gather", "words ids", "w"),
        ("Add", "w p", "y"),
    ]
    weights = {
        **ZERO_ONE,
        "table": np.arange(16)[None],
        "start": np.array([0], INT),
        "axis": np.array([1], INT),
        "step": np.array([1], INT),
        "rows": rand(16, 8),
        "words": rand(5, 8, seed=1),
    }
    model = check(save(build(nodes, IDS, "y", used(nodes, weights)), tmp_path), *SIZES)
    assert ops(model) == {"apq.Slice": 1, "apq.Embedding": 2, "Add": 1}
    assert only(model, "apq.Slice").attrs["shape"] == (1, "s")
    assert model.limits == {"s": 16}


def test_a_range_over_a_length(tmp_path: Path) -> None:
    nodes = [
        ("Shape", "ids", "shape"),
        ("Gather", "shape i1", "n"),
        ("Range", "i0 n i1", "positions"),
        ("Gather", "rows positions", "y"),
    ]
    weights = {**ZERO_ONE, "rows": rand(16, 8)}
    model = check(save(build(nodes, IDS, "y", used(nodes, weights)), tmp_path), *SIZES)
    assert ops(model) == {"apq.Range": 1, "apq.Embedding": 1}
    attrs = only(model, "apq.Range").attrs
    assert (attrs["start"], attrs["delta"], attrs["shape"]) == (0, 1, ("s",))
    assert model.limits == {"s": 16}


@pytest.mark.parametrize(("start", "delta"), [(2, 1), (0, 2), (1, 3), (7, -2)])
def test_ranges_of_other_steps(tmp_path: Path, start: int, delta: int) -> None:
    nodes = [
        ("Shape", "ids", "shape"),
        ("Gather", "shape i1", "n"),
        ("Range", "start n delta" if delta > 0 else "n minus delta", "y"),
    ]
    weights = {
        **ZERO_ONE,
        "start": np.array(start, INT),
        "delta": np.array(delta, INT),
        "minus": np.array(-1, INT),
    }
    path = save(build(nodes, IDS, "y", used(nodes, weights)), tmp_path)
    check(path, *({"b": 1, "s": s} for s in range(1, 9)))


def test_a_causal_mask_is_cut_from_its_buffer(tmp_path: Path) -> None:
    nodes = [
        *dim(17, 1),
        ("Slice", "buffer start d1 axis2 step", "rows"),
        ("Slice", "rows start d1 axis3 step", "mask"),
        ("Transpose", "x", "xt", {"perm": [0, 2, 1]}),
        ("MatMul", "x xt", "scores"),
        ("Unsqueeze", "scores axis1", "s4"),
        ("Where", "mask s4 low", "y"),
    ]
    weights = {
        **ZERO_ONE,
        "buffer": np.tril(np.ones((1, 1, 8, 8), bool)),
        "start": np.array([0], INT),
        "axis1": np.array([1], INT),
        "axis2": np.array([2], INT),
        "axis3": np.array([3], INT),
        "step": np.array([1], INT),
        "low": np.array(-1e9, np.float32),
    }
    model = check(save(build(nodes, X, "y", used(nodes, weights)), tmp_path), *SIZES)
    assert model.limits == {"s": 8}
    assert ops(model)["apq.Slice"] == 2
    assert model.outputs[0].shape == ("b", 1, "s", "s")


@pytest.mark.parametrize(
    ("start", "end", "shape"),
    [
        (0, 2**63 - 1, ("b", "s", 12)),
        (0, 10**9, ("b", "s", 12)),
        (1, 2**31 - 1, ("b", "s - 1", 12)),
        (0, -1, ("b", "s - 1", 12)),
        (-1, 2**63 - 1, ("b", 1, 12)),
        (0, 1, ("b", 1, 12)),
        (-2, -1, None),
        (0, 3, ("b", "min(3, s)", 12)),
    ],
)
def test_slices_of_a_symbolic_axis(
    tmp_path: Path, start: int, end: int, shape: tuple | None
) -> None:
    weights = {"start": np.array([start]), "end": np.array([end]), "axis": np.array([1], INT)}
    path = save(build([("Slice", "x start end axis", "y")], X, "y", weights), tmp_path)
    model = check(path, *({"b": 2, "s": s} for s in (2, 3, 4, 9)))
    if shape is not None:
        assert model.outputs[0].shape == shape


@pytest.mark.parametrize("step", [2, 3])
def test_slices_with_steps(tmp_path: Path, step: int) -> None:
    weights = {
        "start": np.array([1, 0]),
        "end": np.array([2**63 - 1, 12]),
        "axis": np.array([1, -1], INT),
        "step": np.array([step, 5]),
    }
    path = save(build([("Slice", "x start end axis step", "y")], X, "y", weights), tmp_path)
    check(path, *({"b": 2, "s": s} for s in (1, 2, 3, 4, 9)))


def test_a_negative_step_over_a_known_axis_stays_a_slice(tmp_path: Path) -> None:
    weights = {
        "start": np.array([-1]),
        "end": np.array([-(2**63)]),
        "axis": np.array([2], INT),
        "step": np.array([-1]),
    }
    path = save(build([("Slice", "x start end axis step", "y")], X, "y", weights), tmp_path)
    assert ops(check(path, *SIZES)) == {"Slice": 1}


@pytest.mark.parametrize("index", [0, -1])
@pytest.mark.parametrize("scalar", [True, False])
def test_one_entry_of_an_axis_is_a_slice(tmp_path: Path, index: int, scalar: bool) -> None:
    weights = {"i": np.array(index if scalar else [index], INT)}
    path = save(build([("Gather", "x i", "y", {"axis": 1})], X, "y", weights), tmp_path)
    model = check(path, *SIZES)
    assert ops(model)["apq.Slice"] == 1
    assert ops(model)["Reshape"] == int(scalar)


def test_scattered_or_doubtful_entries_stay_a_gather(tmp_path: Path) -> None:
    nodes = [("Gather", "x i", "y", {"axis": 2}), ("Gather", "x j", "z", {"axis": 1})]
    weights = {"i": np.array([3, 1, 2], INT), "j": np.array(2, INT)}
    path = save(build(nodes, X, "y z", weights), tmp_path)
    assert ops(check(path, {"b": 2, "s": 3})) == {"Gather": 2}


def test_dimensions_used_as_numbers(tmp_path: Path) -> None:
    nodes = [
        ("Shape", "x", "shape"),
        ("Gather", "shape i1", "n"),
        ("Cast", "n", "length", {"to": 1}),
        ("ReduceSum", "x axis1", "total", {"keepdims": 0}),
        ("Div", "total length", "y"),
        ("Mul", "shape shape", "squares"),
    ]
    weights = {**ZERO_ONE, "axis1": np.array([1], INT)}
    path = save(build(nodes, X, "y shape squares n", used(nodes, weights)), tmp_path)
    model = check(path, *SIZES)
    dims = {n.outputs[0]: n.attrs["dims"] for n in model.nodes if n.op == "apq.Dims"}
    squares = ("b * b", "s * s", 144)
    assert dims == {"n": ("s",), "shape": ("b", "s", 12), "squares": squares, "length": ("s",)}


def test_dimensions_as_a_matrix(tmp_path: Path) -> None:
    nodes = [("Shape", "x", "shape"), ("Unsqueeze", "shape axis0", "y")]
    path = save(build(nodes, X, "y", {"axis0": np.array([0], INT)}), tmp_path)
    assert ops(check(path, *SIZES)) == {"apq.Dims": 1, "Reshape": 1}


def test_the_size_of_known_axes_is_a_constant(tmp_path: Path) -> None:
    nodes = [
        ("Shape", "x", "shape"),
        ("Gather", "shape two", "width"),
        ("Cast", "width", "f", {"to": 1}),
        ("Sqrt", "f", "root"),
        ("Div", "x root", "y"),
    ]
    model = check(save(build(nodes, X, "y", {"two": np.array(2, INT)}), tmp_path), *SIZES)
    assert ops(model) == {"Div": 1}


@pytest.mark.parametrize("op", ["Size", "ReduceProd"])
def test_products_of_dimensions(tmp_path: Path, op: str) -> None:
    nodes = [("Size", "x", "n")]
    if op == "ReduceProd":
        nodes = [("Shape", "x", "d"), ("ReduceProd", "d", "n")]
    nodes += [("Reshape", "n minus", "t"), ("Reshape", "x t", "y")]
    path = save(build(nodes, X, "y", {"minus": np.array([-1], INT)}), tmp_path)
    model = check(path, *SIZES)
    assert model.outputs[0].shape == ("12 * b * s",)


def test_arithmetic_on_dimensions(tmp_path: Path) -> None:
    """Halves of the last axis, written with Div, Sub, Min and Max on its length."""
    nodes = [
        ("Shape", "x", "shape"),
        ("Gather", "shape two_1", "width"),
        ("Div", "width two_1", "half"),
        ("Max", "half one_1", "at"),
        ("Slice", "x at width axis", "right"),
        ("Slice", "x zero_1 at axis", "left"),
        ("Neg", "right", "minus"),
        ("Concat", "minus left", "y", {"axis": -1}),
    ]
    weights = {
        "two_1": np.array([2], INT),
        "one_1": np.array([1], INT),
        "zero_1": np.array([0], INT),
        "axis": np.array([-1], INT),
    }
    model = check(save(build(nodes, X, "y", weights), tmp_path), *SIZES)
    assert model.outputs[0].shape == ("b", "s", 12)
    assert set(ops(model)) == {"Slice", "Neg", "Concat"}


def test_tile_of_an_axis_of_one_is_an_expand(tmp_path: Path) -> None:
    nodes = [*dim(17, 0), ("Concat", "d0 one one", "r", {"axis": 0}), ("Tile", "row r", "y")]
    weights = {**ZERO_ONE, "one": np.array([1], INT), "row": rand(1, 3, 4)}
    model = check(save(build(nodes, X, "y", used(nodes, weights)), tmp_path), *SIZES)
    assert ops(model) == {"apq.Expand": 1}


def test_tile_with_known_repeats(tmp_path: Path) -> None:
    path = save(build([("Tile", "x r", "y")], X, "y", {"r": np.array([1, 2, 3], INT)}), tmp_path)
    assert check(path, *SIZES).outputs[0].shape == ("b", "2 * s", 36)


@pytest.mark.parametrize("opset", OPSETS)
def test_squeeze_and_unsqueeze(tmp_path: Path, opset: int) -> None:
    def axes(op: str, x: str, y: str, axis: int) -> tuple:
        if opset < 13:
            return (op, x, y, {"axes": [axis]})
        return (op, f"{x} a{axis}", y)

    nodes = [axes("Unsqueeze", "x", "u", 1), ("Relu", "u", "r"), axes("Squeeze", "r", "y", 1)]
    weights = {} if opset < 13 else {"a1": np.array([1], INT)}
    model = check(save(build(nodes, X, "y", weights, opset), tmp_path), *SIZES)
    assert model.outputs[0].shape == ("b", "s", 12)


def test_flatten(tmp_path: Path) -> None:
    for axis in (0, 1, 2, 3, -1):
        path = save(build([("Flatten", "x", "y", {"axis": axis})], X, "y"), tmp_path)
        model = check(path, *SIZES)
        assert set(ops(model)) <= {"Reshape", "apq.Reshape"}


def test_concat_pad_split_and_pool_add_up_symbols(tmp_path: Path) -> None:
    nodes = [
        ("Concat", "x x", "c", {"axis": 1}),
        ("Pad", "c pads", "p"),
        ("Split", "p", "left right", {"axis": 2}),
        ("MaxPool", "left", "y", {"kernel_shape": [3], "pads": [1, 1]}),
        ("Neg", "right", "z"),
    ]
    weights = {"pads": np.array([0, 1, 0, 0, 0, 4], INT)}
    model = check(save(build(nodes, X, "y z", weights), tmp_path), *SIZES)
    assert [spec.shape for spec in model.outputs] == [
        ("b", "2 * s + 1", 8),
        ("b", "2 * s + 1", 8),
    ]


def test_dimensions_that_must_be_equal_become_one(tmp_path: Path) -> None:
    inputs = {"x": ("float32", ["b", "s", 8]), "m": ("float32", ["batch", "length", 1])}
    nodes = [("Mul", "x m", "h"), ("MatMul", "h w", "y")]
    path = save(build(nodes, inputs, "y", {"w": rand(8, 6)}), tmp_path)
    sizes = {"b": 2, "s": 3, "batch": 2, "length": 3}
    model = check(path, sizes)
    assert model.inputs[0].shape[:2] == model.inputs[1].shape[:2] == model.outputs[0].shape[:2]


def test_two_names_of_one_batch_become_one(tmp_path: Path) -> None:
    """GPT-2's attention_mask.view(batch, -1), with a batch that has another name there."""
    inputs = {"x": ("float32", ["b", "s", 8]), "m": ("float32", ["batch", "length"])}
    nodes = [
        ("Shape", "x", "shape"),
        ("Slice", "shape zero one", "first"),
        ("Concat", "first minus", "target", {"axis": 0}),
        ("Reshape", "m target", "rows"),
        ("Unsqueeze", "rows two", "column"),
        ("Mul", "x column", "y"),
    ]
    weights = {
        "zero": np.array([0], INT),
        "one": np.array([1], INT),
        "two": np.array([2], INT),
        "minus": np.array([-1], INT),
    }
    path = save(build(nodes, inputs, "y", weights), tmp_path)
    model = check(path, {"b": 2, "s": 3, "batch": 2, "length": 3})
    assert model.inputs[0].shape[:2] == model.inputs[1].shape
    assert "apq.Reshape" not in ops(model)


def test_a_symbol_that_must_be_a_number_becomes_it(tmp_path: Path) -> None:
    path = save(build([("Add", "x table", "y")], X, "y", {"table": rand(1, 7, 12)}), tmp_path)
    model = check(path, {"b": 2, "s": 7})
    assert model.inputs[0].shape == ("b", 7, 12)


def test_unnamed_dimensions_get_names(tmp_path: Path) -> None:
    inputs = {"x": ("float32", [None, None, 8])}
    path = save(build([("MatMul", "x w", "y")], inputs, "y", {"w": rand(8, 6)}), tmp_path)
    model = check(path, {"x_dim_0": 2, "x_dim_1": 3})
    assert model.outputs[0].shape == ("x_dim_0", "x_dim_1", 6)


def test_question_marks_are_no_names(tmp_path: Path) -> None:
    inputs = {"x": ("float32", ["?", "?", 8])}
    path = save(build([("Relu", "x", "y")], inputs, "y"), tmp_path)
    assert check(path, {"x_dim_0": 2, "x_dim_1": 3}).inputs[0].shape == ("x_dim_0", "x_dim_1", 8)


@pytest.mark.parametrize("name", ["batch size", "2nd", "lambda", "min", "a.b", "x-y", "späte"])
def test_odd_names_of_dimensions_can_be_computed_with(tmp_path: Path, name: str) -> None:
    inputs = {"x": ("float32", [name, "s", 8])}
    path = save(build([("Reshape", "x t", "y")], inputs, "y", {"t": np.array([-1])}), tmp_path)
    dims = check_odd(path)
    assert all(d.isidentifier() for d in dims)


def check_odd(path: Path) -> list[str]:
    """Symbols of the first input, after a run."""
    from apq_tvm.onnx_import import import_onnx

    dims = [d for d in import_onnx(path).inputs[0].shape if isinstance(d, str)]
    check(path, dict(zip(dims, (2, 3), strict=True)))
    return dims


def test_squeeze_of_whatever_is_one(tmp_path: Path) -> None:
    """Before a reshape it makes no difference what is dropped; else a run alone would know."""
    nodes = [("Squeeze", "x", "a"), ("Reshape", "a to", "y")]
    given = {"x": ("float32", ["b", 1, 4])}
    model = build(nodes, given, "y", {"to": np.array([-1, 2])})
    check(save(model, tmp_path), {"b": 1}, {"b": 3})
    path = save(build([("Squeeze", "x", "y")], given, "y"), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"Squeeze 'n_y': .*--dim b=SIZE"):
        import_onnx(path)
    assert import_onnx(path, {"b": 1}).outputs[0].shape == (4,)


def test_a_reshape_says_what_a_size_is_before_a_broadcast_does(tmp_path: Path) -> None:
    """The mask is added where batch meets sequence; khmersm, exported with a batch of 1."""
    nodes = [
        ("Transpose", "x", "turned", {"perm": [1, 0, 2]}),
        ("Reshape", "turned whole", "rows"),  # [s, b, 12] to [s, 1, 3, 4]: b is 1
        ("ReduceMean", "rows", "level", {"axes": [1, 2, 3], "keepdims": 1}),
        ("Reshape", "mask wide", "masked"),
        ("Add", "level masked", "y"),
    ]
    inputs = {**X, "mask": ("float32", ["b", "s"])}
    weights = {"whole": np.array([0, 1, 3, 4]), "wide": np.array([1, 1, 1, -1])}
    path = save(build(nodes, inputs, "y", weights, opset=17), tmp_path)
    model = check(path, {"s": 1}, {"s": 5})
    assert [spec.shape for spec in model.inputs] == [(1, "s", 12), (1, "s")]


def test_a_reshape_to_numbers_says_what_a_size_is(tmp_path: Path) -> None:
    for target, sizes in (([1, 24], (2, "s")), ([4, 3, 2], (2, "s"))):
        nodes = [("Slice", "x zero one axis", "first"), ("Reshape", "first to", "y")]
        weights = {
            "to": np.array(target), "zero": np.array([0]), "one": np.array([1]),
            "axis": np.array([1]),
        }  # fmt: skip
        path = save(build(nodes, X, "y", weights), tmp_path)
        assert import_onnx(path).inputs[0].shape == (*sizes, 12)


def test_sizes_worked_out_for_at_least_one_say_so(tmp_path: Path) -> None:
    """Of x[1:] there are s - 1 rows, unless s may be 0."""
    nodes = [("Slice", "x one far one", "y"), ("Relu", "x", "z"), ("Gemm", "x w", "g")]
    weights = {"one": np.array([1]), "far": np.array([2**31]), "w": rand(4, 4)}
    path = save(build(nodes, {"x": ("float32", ["s", 4])}, "z g", weights), tmp_path)
    assert import_onnx(path).least == {}
    weights["one"], weights["axis"] = np.array([1]), np.array([0])
    nodes[0] = ("Slice", "x one far axis", "y")
    path = save(build(nodes, {"x": ("float32", ["s", 4])}, "y z g", weights), tmp_path)
    assert import_onnx(path).least == {"s": 1}
    bounded = import_onnx(path, {"s": (0, 9)})
    assert bounded.least == {"s": 0}
    assert bounded.outputs[0].shape == ("max(-(min(1, s)) + s, 0)", 4)


def test_columns_of_any_batch_become_images(tmp_path: Path) -> None:
    """MobileViT v2 by torch's new exporter: its next layers read the size of the batch."""
    nodes = [("Col2Im", "x image block", "y", {"strides": [2, 2]}), ("Shape", "y", "sizes")]
    weights = {"image": np.array([6, 8]), "block": np.array([2, 2])}
    path = save(build(nodes, {"x": ("float32", ["b", 12, 12])}, "y sizes", weights, 18), tmp_path)
    assert import_onnx(path).outputs[0].shape == ("b", 3, 6, 8)


def test_fractions_counted_up_to_a_size_are_no_sizes_of_a_run(tmp_path: Path) -> None:
    """``arange(0.5, height)``, as rotary embeddings of images have it, and backwards."""
    nodes = [
        *dim(17, 1),
        ("Cast", "g1", "limit", {"to": 1}),
        ("Range", "half limit one", "y"),
        ("Range", "limit half back", "z"),
        ("Range", "limit one half", "none"),
        ("Sub", "limit limit", "zero"),
        ("Range", "zero limit third", "thirds"),
    ]
    numbers = {"half": 0.5, "one": 1.0, "back": -0.75, "third": 1 / 3}
    weights = {**ZERO_ONE, **{name: np.array(v, np.float32) for name, v in numbers.items()}}
    graph = build(nodes, X, "y z none thirds", used(nodes, weights))
    model = check(save(graph, tmp_path), *SIZES)
    assert not ops(model).keys() & {"apq.Numbers", "apq.Sizes"}


def test_places_of_what_is_one_everywhere_are_no_sizes_of_a_run(tmp_path: Path) -> None:
    """torch writes slices that are assigned to as ``nonzero(ones(n))``."""
    nodes = [
        ("Shape", "x", "shape"),
        ("ConstantOfShape", "shape", "ones", {"value": np.array([1], INT)}),
        ("NonZero", "ones", "y"),
        *dim(17, 1),
        ("ConstantOfShape", "d1", "some", {"value": np.array([2.0], np.float32)}),
        ("NonZero", "some", "z"),
        ("ConstantOfShape", "shape", "zeros"),
        ("NonZero", "zeros", "none"),
    ]
    graph = build(nodes, X, "y z none", used(nodes, ZERO_ONE))
    model = check(save(graph, tmp_path), *SIZES)
    assert not ops(model).keys() & {"apq.NonZero", "apq.Numbers", "apq.Sizes"}


def lengths(name: str) -> list[tuple]:
    """``(length - 3) / 2 + 1`` of x, and a Reshape of `name` by it."""
    return [
        *dim(17, 1),
        ("Sub", "d1 three", "less"),
        ("Div", "less two", "half"),
        ("Add", "half one", "count"),
        *dim(17, 0),
        ("Concat", "d0 count heads rest", "target", {"axis": 0}),
        ("Reshape", f"{name} target", "y"),
    ]


def test_a_division_that_windows_have_as_their_size_is_one(tmp_path: Path) -> None:
    """Rounded towards 0 it would be another size for lengths below 3, which have no window."""
    nodes = [
        *lengths("rows"),
        ("Transpose", "x", "xt", {"perm": [0, 2, 1]}),
        ("Conv", "xt w", "c", {"strides": [2]}),
        ("Transpose", "c", "rows", {"perm": [0, 2, 1]}),
    ]
    numbers = {"three": [3], "two": [2], "one": [1], "heads": [2], "rest": [4]}
    weights = {**ZERO_ONE, **{name: np.array(v, INT) for name, v in numbers.items()}}
    weights["w"] = rand(8, 12, 3)
    order = [nodes[-3], nodes[-2], nodes[-1], *nodes[:-3]]
    path = save(build(order, X, "y", used(order, weights)), tmp_path)
    model = check(path, {"b": 1, "s": 3}, {"b": 2, "s": 6}, {"b": 3, "s": 9})
    assert not ops(model).keys() & {"apq.Numbers", "apq.Sizes"}
    early = [*nodes[:9], nodes[-3], nodes[-2], nodes[-1], *nodes[9:-3]]
    path = save(build(early, X, "y", used(early, weights)), tmp_path)
    assert not ops(check(path, {"b": 2, "s": 7})).keys() & {"apq.Numbers", "apq.Sizes"}


def test_a_division_without_such_windows_is_rounded_towards_0(tmp_path: Path) -> None:
    nodes = [*lengths("x")[:-1], ("Expand", "x1 target", "y"), ("ReduceMean", "x", "x1")]
    numbers = {"three": [9], "two": [2], "one": [4], "heads": [2], "rest": [4]}
    weights = {**ZERO_ONE, **{name: np.array(v, INT) for name, v in numbers.items()}}
    order = [nodes[-1], *nodes[:-1]]
    model = import_onnx(save(build(order, X, "y", used(order, weights)), tmp_path))
    assert ops(model).keys() & {
        "apq.Sizes"
    }  # by run: (1 - 9) / 2 + 4 is 0, and so is (2 - 9) / 2 + 3
