"""Codes chosen anew block by block suit what quantized blocks give, are never worse, and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama

from apq_tvm.errors import BadInput
from apq_tvm.formats import parse_scheme
from apq_tvm.formats.families import check_tensor, dequantize
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers import quantize_tensor
from apq_tvm.quantizers.feedback.error_feedback import output_error
from apq_tvm.quantizers.inputs.calibration_file import read
from apq_tvm.types import LayerStats

torch = pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, inputs, and its calibration."""
    return tiny_llama.calibrated(tmp_path_factory.mktemp("feedback"))


def finetune(files: tuple[Path, Path, Path], scheme: str, out: Path) -> None:
    from apq_tvm.learn import learn_codes

    learn_codes(*files, out, kind="finetune", scheme=scheme, method="gptq", epochs=2, rows=2)


def correlated(k: int, seed: int) -> LayerStats:
    """Statistics of inputs whose channels depend on each other."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((400, k)) @ rng.standard_normal((k, k))).astype(np.float32)
    h = (x.T @ x / len(x)).astype(np.float32)
    return LayerStats(h.diagonal().copy(), x.mean(0), np.abs(x).max(0), len(x), h)


@pytest.mark.parametrize(
    "text", ["W3A8", "W3zA8g16", "nl4", "cb3", "W2*A8g32", "mixed24", "bcq2g32", "anyprec3-5"]
)
def test_codes_suit_the_new_statistics(text: str) -> None:
    from apq_tvm.quantizers.learn.block_feedback import codes_anew

    scheme = parse_scheme(text)
    assert scheme is not None
    w = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    old, new = correlated(64, 1), correlated(64, 2)
    start = quantize_tensor(w, scheme, stats=old)
    end = codes_anew(w, start, new, "layer")
    check_tensor(end, "layer")
    for bits in scheme.widths:
        before, after = (
            output_error(dequantize(t, bits) - w, new.hessian, new.mean_square)
            for t in (start, end)
        )
        assert after < 0.9 * before


def test_codes_that_are_better_already_stay() -> None:
    from apq_tvm.quantizers.learn.block_feedback import codes_anew

    scheme = parse_scheme("W4A8")
    assert scheme is not None
    w = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    exact = quantize_tensor(w, scheme)
    w = dequantize(exact)  # nothing is lost
    again = codes_anew(w, exact, correlated(32, 1), "layer")
    np.testing.assert_array_equal(dequantize(again), w)


def test_a_layer_without_input_is_named() -> None:
    from apq_tvm.quantizers.learn.block_feedback import codes_anew

    scheme = parse_scheme("W4A8")
    assert scheme is not None
    w = np.ones((4, 8), np.float32)
    zero = np.zeros(8, np.float32)
    stats = LayerStats(zero, zero, zero, 100, np.zeros((8, 8), np.float32))
    with pytest.raises(BadInput, match="'layer': its input is 0 in every calibration sample"):
        codes_anew(w, quantize_tensor(w, scheme), stats, "layer")


def test_rows_weigh_as_in_calibration(files: tuple[Path, Path, Path]) -> None:
    from apq_tvm.progress import Silent
    from apq_tvm.quantizers.inputs.statistics import collect
    from apq_tvm.quantizers.learn.row_weights import row_weights
    from apq_tvm.quantizers.torch.graph import TorchGraph

    model = import_onnx(files[0])
    calls = [{"input_ids": ids[None]} for ids in tiny_llama.ids(3, 16)]
    name = "model.layers.1.mlp.up_proj"
    found = row_weights(TorchGraph(model), calls, {name}, Silent())
    assert [set(weights) for weights in found] == [{name}] * 3
    assert [weights[name].shape for weights in found] == [(16,)] * 3
    sums = collect(model, calls).sums[name]
    total = sum(float(weights[name].sum()) for weights in found)
    squares = sum(float(weights[name].square().sum()) for weights in found)
    # Gradients are of bfloat16 products here, of float32 there.
    assert total == pytest.approx(sums.weight, rel=0.05)
    assert squares == pytest.approx(sums.power, rel=0.1)


def test_finetuning_after_feedback_resumes_as_if_not_interrupted(
    files: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from apq_tvm.quantizers import quantize
    from apq_tvm.quantizers.inputs.calibration_file import load
    from apq_tvm.quantizers.learn import blockwise
    from apq_tvm.quantizers.learn.learned import from_arrays

    finetune(files, "W3A8", tmp_path / "whole")
    plain, seen = blockwise.train, []

    def interrupted(*given: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(1)
        plain(*given)

    monkeypatch.setattr(blockwise, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finetune(files, "W3A8", tmp_path / "parts")
    monkeypatch.undo()
    finetune(files, "W3A8", tmp_path / "parts")
    whole, parts = read(tmp_path / "whole"), read(tmp_path / "parts")
    assert set(whole.extra) == set(parts.extra)
    for key, array in whole.extra.items():
        np.testing.assert_array_equal(array, parts.extra[key], err_msg=key)
    # Codes of later blocks are other ones than error feedback on float inputs chose.
    model = import_onnx(files[0])
    learned = from_arrays(whole.extra, whole.notes)
    assert learned is not None
    start = quantize(model, "W3A8", calibration=load(files[2], model).calibration, method="gptq")
    name = "model.layers.1.mlp.up_proj"
    assert (learned.tensors[name].codes != start.tensors[start.layers[name]].codes).any()


def test_the_biases_make_good_the_new_mean_error() -> None:
    from apq_tvm.quantizers.learn.block_feedback import codes_anew

    scheme = parse_scheme("W3A8")
    assert scheme is not None
    w = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    stats = correlated(32, 3)
    far = LayerStats(
        stats.mean_square + 25,
        stats.mean + 5,
        stats.absmax + 5,
        stats.samples,
        (stats.hessian + 5 * (stats.mean[:, None] + stats.mean) + 25).astype(np.float32),
    )
    start = quantize_tensor(w, scheme, stats=far)
    end = codes_anew(w, start, far, "layer", biased=True)
    mean = far.mean.astype(np.float64)
    assert far.hessian is not None
    centred = (far.hessian - np.outer(mean, mean)).astype(np.float32)
    before, after = (
        output_error(dequantize(t) - w, centred, far.mean_square) for t in (start, end)
    )
    assert after < 0.9 * before
