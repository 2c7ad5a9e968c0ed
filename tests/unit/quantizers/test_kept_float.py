"""Layers that stay float unasked: small ones, thin convolutions, spectra, routers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_models import NodeSpec, build, rand, save

from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers import quantize


def test_thin_convolutions_stay_float(tmp_path: Path) -> None:
    weights = {"first": rand(16, 3, 3, 3), "wide": rand(32, 16, 1, 1), "last": rand(32, 16)}
    nodes = [
        ("Conv", "x first", "a", {"pads": [1, 1, 1, 1]}),
        ("Conv", "a wide", "b"),
        ("GlobalAveragePool", "b", "mean"),
        ("Flatten", "mean", "flat"),
        ("MatMul", "flat last", "y"),
    ]
    path = save(build(nodes, {"x": ("float32", [1, 3, 8, 8])}, "y", weights), tmp_path)
    model = import_onnx(path)
    found = quantize(model, "W8A8")
    assert set(found.layers) == {"n_b", "n_y"}
    assert "16 outputs of 27 inputs" in found.notes["n_a"]
    assert "n_a" in quantize(model, "W8A8", {"n_a": "W8A8"}).layers
    assert "n_a" in quantize(model, "W8A32").layers


SPECTRUM: list[NodeSpec] = [
    ("MatMul", "x cosines", "re"),
    ("MatMul", "x sines", "im"),
    ("Mul", "re re", "re2"),
    ("Pow", "im two", "im2"),
    ("Add", "re2 im2", "power"),
    ("MatMul", "power bands", "mel"),
]
WEIGHTS = {
    "cosines": rand(64, 33), "sines": rand(64, 33), "bands": abs(rand(33, 20)),
    "last": rand(20, 16), "two": np.float32(2), "tiny": np.float32(1e-9), "most": np.float32(9),
}  # fmt: skip


@pytest.mark.parametrize(
    ("between", "kept"),
    [
        ([("Clip", "mel tiny", "seen")], {"n_re", "n_im", "n_mel"}),
        ([("Add", "mel tiny", "sum"), ("Sqrt", "sum", "seen")], {"n_re", "n_im", "n_mel"}),
        ([("Sigmoid", "mel", "seen")], set()),  # its small results come from large operands
        ([("Relu", "mel", "fused"), ("Add", "fused two", "seen")], set()),
    ],
)
def test_layers_that_a_logarithm_reads_stay_float(
    tmp_path: Path, between: list[NodeSpec], kept: set[str]
) -> None:
    nodes = [*SPECTRUM, *between, ("Log", "seen", "levels"), ("MatMul", "levels last", "y")]
    model = import_onnx(save(build(nodes, {"x": ("float32", [5, 64])}, "y", WEIGHTS), tmp_path))
    found = quantize(model, "W8A8")
    assert {name for name, why in found.notes.items() if "logarithm" in why} == kept
    assert set(found.layers) == {"n_re", "n_im", "n_mel", "n_y"} - kept
    assert set(quantize(model, "W8A8", {"n_": "W8A8"}).layers) == {"n_re", "n_im", "n_mel", "n_y"}


def test_only_three_layers_before_a_logarithm_stay_float(tmp_path: Path) -> None:
    nodes = [("MatMul", f"{'xabcd'[i]} w{i}", "abcde"[i]) for i in range(5)]
    weights = {f"w{i}": rand(16, 16) for i in range(5)}
    graph = build([*nodes, ("Log", "e", "y")], {"x": ("float32", [3, 16])}, "y", weights)
    assert set(quantize(import_onnx(save(graph, tmp_path)), "W4A32").layers) == {"n_a", "n_b"}


CHOSEN: dict[str, list[NodeSpec]] = {
    "logits": [("TopK", "route one", "best which")],
    "shares": [("Softmax", "route", "shares"), ("TopK", "shares one", "best which")],
    "bias": [
        ("Sigmoid", "route", "shares"),
        ("Add", "shares bias", "sum"),
        ("ArgMax", "sum", "which", {"axis": -1}),
    ],
}


@pytest.mark.parametrize("how", CHOSEN)
def test_routers_stay_float(tmp_path: Path, how: str) -> None:
    weights = {"gate": rand(32, 24), "bias": rand(24), "one": np.array([1]), "table": rand(24, 32)}
    chosen = [("MatMul", "x gate", "route"), *CHOSEN[how]]
    nodes = [*chosen, ("Gather", "table which", "row"), ("MatMul", "row gate", "y")]
    model = import_onnx(save(build(nodes, {"x": ("float32", ["m", 32])}, "y", weights), tmp_path))
    found = quantize(model, "W8A8")
    assert "n_route" not in found.layers and "n_y" in found.layers
    assert "chosen by its greatest results" in found.notes["n_route"]
    assert "n_route" in quantize(model, "W8A8", {"n_route": "W8A8"}).layers
    output = build(chosen, {"x": ("float32", ["m", 32])}, "which", weights)
    assert "n_route" in quantize(import_onnx(save(output, tmp_path)), "W8A8").layers


@pytest.mark.parametrize(("outputs", "axis"), [(513, -1), (24, 0)])
def test_words_and_positions_are_no_routes(tmp_path: Path, outputs: int, axis: int) -> None:
    weights = {"head": rand(32, outputs), "table": rand(outputs, 8)}
    nodes = [
        ("MatMul", "x head", "logits"),
        ("ArgMax", "logits", "word", {"axis": axis}),
        ("Gather", "table word", "y"),
    ]
    graph = build(nodes, {"x": ("float32", [5, 32])}, "y", weights)
    assert "n_logits" in quantize(import_onnx(save(graph, tmp_path)), "W8A8").layers
