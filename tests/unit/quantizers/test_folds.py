"""Scales fold exactly, or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from onnx_models import build, rand, run_node, save
from onnx_reference import run_reference

from apq_tvm.onnx_import import import_onnx
from apq_tvm.progress import Silent
from apq_tvm.quantizers.inputs.folds import apply_fold, find_folds, replace_weights
from apq_tvm.quantizers.inputs.scaling import scale_model, smooth_scale
from apq_tvm.types import Calibration, ImportedModel, LayerStats, Scheme


def outputs(model: ImportedModel, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return run_reference(model, feeds, run_node)


def scales(count: int) -> np.ndarray:
    return np.exp(np.random.default_rng(5).standard_normal(count)).astype(np.float32)


def stats_of(k: int) -> LayerStats:
    rng = np.random.default_rng(k)
    x = (rng.standard_normal((256, k)) * np.exp(rng.standard_normal(k))).astype(np.float32)
    return LayerStats(np.square(x).mean(0), x.mean(0), np.abs(x).max(0), len(x), (x.T @ x / len(x)))


def test_every_fold_of_a_llama_is_exact(tmp_path: Path) -> None:
    model = tiny_llama.load(tmp_path)
    folds, reasons = find_folds(model)
    sources = [fold.source.rpartition(".")[2] for fold in folds]
    assert sources == ["input_layernorm", "v_proj", "post_attention_layernorm", "up_proj"] * 2
    assert set(reasons) == {"lm_head"} and "share the weight" in reasons["lm_head"]
    # Two query heads share each key-value head, so their channels share scales.
    grouped = folds[1].channels.reshape(4, 8)
    np.testing.assert_array_equal(grouped[0], grouped[1])
    np.testing.assert_array_equal(grouped[2], grouped[0] + 8)
    feeds = {"input_ids": tiny_llama.ids(2, 6)}
    expected = outputs(model, feeds)["logits"]
    for fold in folds:
        model = apply_fold(model, fold, scales(fold.count))
    np.testing.assert_allclose(outputs(model, feeds)["logits"], expected, rtol=1e-4, atol=1e-4)


def test_relu_passes_scales_and_gelu_does_not(tmp_path: Path) -> None:
    weights = {"w": rand(8, 16), "b": rand(16), "v": rand(16, 4), "u": rand(4, 4)}
    nodes = [
        ("MatMul", "x w", "h"),
        ("Add", "h b", "hb"),
        ("Relu", "hb", "r"),
        ("MatMul", "r v", "m"),
        ("Gelu", "m", "g"),
        ("MatMul", "g u", "y"),
    ]
    path = save(build(nodes, {"x": ("float32", ["n", 8])}, "y", weights, opset=20), tmp_path)
    model = import_onnx(path)
    folds, reasons = find_folds(model)
    assert len(folds) == 1 and folds[0].divided == (1, 2)
    assert sorted(reasons.values())[0].endswith("ends in gelu, which scales do not pass")
    assert "its input is the model's" in reasons.values()
    feeds = {"x": rand(5, 8, seed=4)}
    changed = apply_fold(model, folds[0], scales(16))
    np.testing.assert_allclose(
        outputs(changed, feeds)["y"], outputs(model, feeds)["y"], rtol=1e-4, atol=1e-5
    )


def test_a_norm_that_feeds_a_residual_is_left_alone(demo_onnx: Path) -> None:
    folds, reasons = find_folds(import_onnx(demo_onnx))
    assert [fold.source.rpartition("self/")[2] for fold in folds] == ["value/MatMul"] * 3
    assert sum("residual" in reason for reason in reasons.values()) == 12


def test_shared_weights_get_a_copy() -> None:
    from apq_tvm.types import Node

    nodes = tuple(Node("apq.Linear", n, ("x", "w", "", ""), (n,), {}) for n in "ab")
    model = ImportedModel("m", 17, (), (), nodes, {"w": rand(2, 2)}, {}, "")
    changed = replace_weights(model, {("a", 1): np.zeros((2, 2), np.float32)})
    assert changed.nodes[0].inputs[1] != "w" and changed.nodes[1].inputs[1] == "w"
    np.testing.assert_array_equal(changed.weights["w"], model.weights["w"])
    given = replace_weights(model, {("b", 2): np.ones(2, np.float32)})
    assert given.nodes[1].inputs[2] in given.weights and given.nodes[0].inputs[2] == ""


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_scaled_models_compute_the_same(tmp_path: Path, method: str) -> None:
    model = tiny_llama.load(tmp_path)
    linear = {n.name: model.weights[n.inputs[1]].shape[1] for n in model.nodes if "Lin" in n.op}
    calibration = Calibration({n: stats_of(k) for n, k in linear.items()}, model.sha256, "")
    schemes = {name: Scheme(3, group_size=16) for name in linear}
    scaled, known, notes = scale_model(model, calibration, schemes, method, Silent())
    feeds = {"input_ids": tiny_llama.ids(2, 6)}
    np.testing.assert_allclose(
        outputs(scaled, feeds)["logits"], outputs(model, feeds)["logits"], rtol=2e-4, atol=2e-4
    )
    assert set(notes) == set(linear) and "not scaled" in notes["lm_head"]
    changed = [
        n for n in linear if not np.array_equal(known.layers[n].mean, stats_of(linear[n]).mean)
    ]
    assert len(changed) >= 8
    for name in changed:  # H and E[x²] of what the layer reads now
        stats = known.layers[name]
        assert stats.hessian is not None
        np.testing.assert_allclose(stats.hessian.diagonal(), stats.mean_square, rtol=1e-4)


def test_smoothquant_scale_by_hand(tmp_path: Path) -> None:
    fold = find_folds(tiny_llama.load(tmp_path))[0][0]
    size = np.full(32, 1.0, np.float32)
    size[0] = 16.0
    scale = smooth_scale(fold, size, [np.full((4, 32), 0.25, np.float32)], 0.5)
    assert scale[0] / scale[1] == pytest.approx(4.0)
    assert np.log(scale).mean() == pytest.approx(0.0, abs=1e-6)
