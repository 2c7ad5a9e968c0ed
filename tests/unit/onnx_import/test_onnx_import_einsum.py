"""Einsum with a constant becomes a layer; equations that are no product of matrices stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, check, only, ops, rand, save

from apq_tvm.errors import ImportFailed
from apq_tvm.quantizers import quantize
from apq_tvm.types import ImportedModel

X = ["b", "s", 16]
SIZES = ({"b": 1, "s": 1}, {"b": 2, "s": 5})
WHOLE = {"apq.Linear": 1}
SPLIT = {**WHOLE, "Reshape": 1}


def imported(
    folder: Path, equation: str, x: list[Any], w: tuple[int, ...], *bias: int, left: bool = False
) -> ImportedModel:
    """Of an Einsum, and an Add behind it where there is a bias; right at both sizes."""
    nodes = [("Einsum", "w x" if left else "x w", "h", {"equation": equation})]
    weights = {"w": rand(*w)}
    if bias:
        nodes.append(("Add", "h c", "y"))
        weights["c"] = rand(*bias, seed=3)
    model = build(nodes, {"x": ("float32", x)}, "y" if bias else "h", weights)
    sizes = SIZES if any(isinstance(dim, str) for dim in x) else ()
    return check(save(model, folder), *sizes)


@pytest.mark.parametrize(
    ("equation", "x", "w", "left", "found"),
    [
        ("bsd,df->bsf", X, (16, 6), False, WHOLE),
        (" b s d , d f -> b s f ", X, (16, 6), False, WHOLE),
        ("fd,bsd->bsf", X, (6, 16), True, WHOLE),
        ("df,bsd->bsf", X, (16, 6), True, WHOLE),
        ("...d,df->...f", X, (16, 6), False, WHOLE),
        ("...d,df", X, (16, 6), False, WHOLE),
        ("d,df->f", [16], (16, 6), False, WHOLE),
        ("bsd,df", X, (16, 6), False, {**WHOLE, "Transpose": 1}),  # an implied "bfs"
        ("bsd,df->fsb", X, (16, 6), False, {**WHOLE, "Transpose": 1}),
        ("bds,df->bsf", ["b", 16, "s"], (16, 6), False, {**WHOLE, "Transpose": 1}),
        ("abc,cde->abde", X, (16, 3, 4), False, SPLIT),
        ("abcd,cde->abe", ["b", "s", 4, 5], (4, 5, 6), False, SPLIT),
        ("bsd,edf->besf", X, (3, 16, 6), False, {**SPLIT, "Transpose": 1}),
        ("bsd,d->bs", X, (16,), False, SPLIT),
    ],
)
def test_products_with_a_constant_are_layers(
    tmp_path: Path, equation: str, x: list[Any], w: tuple[int, ...], left: bool, found: Any
) -> None:
    model = imported(tmp_path, equation, x, w, left=left)
    assert ops(model) == found
    assert only(model, "apq.Linear").name == "n_h"
    assert quantize(model, "W8A8").layers.keys() == {"n_h"}


@pytest.mark.parametrize(
    ("equation", "x", "w"),
    [
        ("bd,d->bd", ["b", 8], (8,)),  # no sum
        ("bd,ef->bdef", ["b", 8], (2, 3)),  # nor one here
        ("bd,df->b", ["b", 8], (8, 6)),  # a sum over an axis of one operand alone
        ("bbd,df->bf", [2, 2, 8], (8, 6)),  # a diagonal
        ("bd,dd->b", ["b", 8], (8, 8)),
    ],
)
def test_other_equations_stay(
    tmp_path: Path, equation: str, x: list[Any], w: tuple[int, ...]
) -> None:
    assert ops(imported(tmp_path, equation, x, w)) == {"Einsum": 1}


def test_one_and_three_operands_stay(tmp_path: Path) -> None:
    inputs = {name: ("float32", ["b", 4, 4]) for name in "xyz"}
    nodes = [
        ("Einsum", "x", "trace", {"equation": "bii->b"}),
        ("Einsum", "x y z", "three", {"equation": "bij,bjk,bkl->bil"}),
    ]
    model = check(save(build(nodes, inputs, "trace three"), tmp_path), {"b": 2})
    assert ops(model) == {"Einsum": 2}


def test_two_computed_operands_are_a_product(tmp_path: Path) -> None:
    inputs = {"q": ("float32", ["b", "s", 2, 8]), "k": ("float32", ["b", "t", 2, 8])}
    nodes = [
        ("Einsum", "k q", "scores", {"equation": "aecd,abcd->acbe"}),
        ("Softmax", "scores", "p"),
        ("Einsum", "p k", "y", {"equation": "acbe,aecd->abcd"}),
    ]
    model = check(save(build(nodes, inputs, "y"), tmp_path), {"b": 2, "s": 3, "t": 5})
    assert ops(model).keys() <= {"apq.MatMul", "Transpose", "apq.Softmax", "MatMul", "apq.Reshape"}


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (4,), (1,), (1, 1, 3, 4), (3, 1)])
def test_a_bias_behind_the_axes_of_a_layer_is_its_own(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """EinsumDense of Keras: an Add behind the Reshape."""
    model = imported(tmp_path, "abc,cde->abde", X, (16, 3, 4), *shape)
    assert ops(model) == SPLIT
    bias = model.weights[only(model, "apq.Linear").inputs[2]]
    want = np.broadcast_to(rand(*shape, seed=3), (1, 1, 3, 4)).reshape(-1)
    np.testing.assert_array_equal(bias, want)


@pytest.mark.parametrize("shape", [(2, 1, 3, 4), (1, 5, 3, 4), (5, 1, 1), (1, 1, 1, 3, 4)])
def test_what_differs_by_row_or_adds_axes_is_no_bias(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    model = imported(tmp_path, "abc,cde->abde", [2, 5, 16], (16, 3, 4), *shape)
    assert ops(model) == {**SPLIT, "Add": 1}
    assert only(model, "apq.Linear").inputs[2] == ""


@pytest.mark.parametrize("other", ["n_h.reshape", "h"])
def test_a_layer_that_is_read_twice_behind_its_reshape_gets_no_bias(
    tmp_path: Path, other: str
) -> None:
    nodes = [
        ("MatMul", "x w", "m"),
        ("Reshape", "m axes", "h"),
        ("Add", "h c", "y"),
        ("Neg", "m" if other == "h" else "h", "z"),
    ]
    weights = {"w": rand(16, 12), "axes": np.array([0, 0, 3, 4]), "c": rand(3, 4)}
    model = check(save(build(nodes, {"x": ("float32", X)}, "y z", weights), tmp_path), *SIZES)
    assert only(model, "apq.Linear").inputs[2] == ""


def test_einsum_of_nothing(tmp_path: Path) -> None:
    assert ops(imported(tmp_path, "bd,df->bf", [3, 0], (0, 6), 6))["apq.Linear"] == 0
    assert ops(imported(tmp_path, "bd,dfg->bfg", [0, 16], (16, 3, 2), 3, 2))["apq.Linear"] == 0


@pytest.mark.parametrize(
    "equation",
    ["bsd,df\x7f", "bsd1,df", "b..d,df->bf", "bsd,df-", ">bsd,df", "bsd,df->bsf->b", "é,df"],
)
def test_what_is_no_equation_is_refused(tmp_path: Path, equation: str) -> None:
    """ONNX's inference never comes back from most of these (a file of tests/fuzz)."""
    with pytest.raises(ImportFailed, match=r"Einsum 'n_h': .* is no equation, such as"):
        imported(tmp_path, equation, X, (16, 6))
