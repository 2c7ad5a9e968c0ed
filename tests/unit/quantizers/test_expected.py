"""Means of layers' inputs, estimated without data, beside those of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx_models import build, rand, save

from apq_tvm.formats import dequantize
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers import quantize
from apq_tvm.quantizers.inputs.expected import INPUTS, expected_means
from apq_tvm.quantizers.torch.graph import TorchGraph, plain_product
from apq_tvm.types import ImportedModel


def network(folder: Path) -> ImportedModel:
    """Images through every kind of operator that means are followed through."""
    weights = {
        "stem": rand(48, 3, 3, 3), "stem_b": rand(48), "six": np.float32(6), "zero": np.float32(0),
        "deep": rand(48, 1, 3, 3), "deep_b": rand(48), "slope": 0.1 * np.abs(rand(48, 1, 1)),
        "side": 0.3 * rand(32, 48, 1, 1), "side_b": rand(32),
        "gate": 0.3 * rand(80, 80, 1, 1), "gate_b": rand(80), "shift": rand(1, 80, 1, 1),
        "half": np.array([40, 40], np.int64), "tokens": np.array([1, -1, 64], np.int64),
        "gamma": rand(40), "beta": rand(40), "mlp": 0.3 * rand(40, 64), "last": rand(64, 16),
        "cut": np.array([0], np.int64), "end": np.array([4], np.int64),
    }  # fmt: skip
    nodes = [
        ("Conv", "x stem stem_b", "a", {"pads": [1, 1, 1, 1]}),
        ("Clip", "a zero six", "b"),
        ("Conv", "b deep deep_b", "c", {"group": 48}),
        ("PRelu", "c slope", "d"),
        ("Conv", "d side side_b", "e"),
        ("LeakyRelu", "e", "f"),
        ("Concat", "d f", "g", {"axis": 1}),
        ("GlobalAveragePool", "g", "h"),
        ("Conv", "h gate gate_b", "i"),
        ("Sigmoid", "i", "j"),
        ("Mul", "g j", "k"),
        ("Add", "k shift", "l"),
        ("Split", "l half", "m n", {"axis": 1}),
        ("Sub", "m n", "o"),
        ("MaxPool", "o", "p", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Transpose", "p", "q", {"perm": [0, 2, 3, 1]}),
        ("LayerNormalization", "q gamma beta", "r"),
        ("MatMul", "r mlp", "s"),
        ("Gelu", "s", "t"),
        ("Reshape", "t tokens", "u"),
        ("Slice", "u cut end", "v"),
        ("MatMul", "v last", "y"),
    ]
    inputs = {"x": ("float32", [1, 3, 34, 34])}
    return import_onnx(save(build(nodes, inputs, "y", weights, opset=20), folder))


def test_estimates_are_near_the_means_of_a_run(tmp_path: Path) -> None:
    model, seen = network(tmp_path), {}

    def product(node, x, w, bias):  # type: ignore[no-untyped-def]
        seen[node.name] = x.reshape(-1, x.shape[-1]).mean(0).numpy()
        return plain_product(node, x, w, bias)

    noise = np.random.default_rng(0).standard_normal((1, 3, 34, 34)).astype(np.float32)
    TorchGraph(model).run({"x": noise}, product=product)
    found = expected_means(model)
    assert set(found) == set(seen) and len(seen) == 5
    assert INPUTS[0] == (0, 1)
    for name in list(seen)[1:]:  # the first one's mean is 0
        estimate, mean = found[name][0], seen[name]
        cosine = estimate @ mean / np.linalg.norm(estimate) / np.linalg.norm(mean)
        assert cosine > 0.95, name
        assert 0.8 < np.linalg.norm(estimate) / np.linalg.norm(mean) < 1.25, name

    quantized = quantize(model, "W8A8")
    for node in model.nodes:
        if node.op != "apq.Linear" or node.name not in list(seen)[1:]:
            continue
        assert "expected means" in quantized.notes[node.name]
        w = model.weights[node.inputs[1]]
        plain = quantize(model, "W8A8", search=False)
        off, before = (
            np.square((dequantize(q.tensors[q.layers[node.name]]) - w) @ seen[node.name]).sum()
            for q in (quantized, plain)
        )
        assert off < 0.4 * before, node.name


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    weights = {"first": rand(16, 32), "then": rand(32, 16), "behind": rand(16, 16)}
    nodes = [
        ("MatMul", "x first", "a"),
        ("MatMul", "a then", "b"),
        ("CumSum", "b axis", "d"),
        ("MatMul", "d behind", "y"),
    ]
    graph = build(nodes, {"x": ("float32", [4, 16])}, "y", {**weights, "axis": np.int64(0)})
    model = import_onnx(save(graph, tmp_path))
    assert set(expected_means(model)) == {"n_a", "n_b"}
    assert "n_y" not in quantize(model, "W8A8").notes
