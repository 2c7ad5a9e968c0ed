"""ABQ-LLM's learning on data that it did not see: never worse than where it might have started."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import smollm2
import tiny_llama

from apq_tvm.calibrate import calibrate
from apq_tvm.evaluation.simulate import Simulation
from apq_tvm.formats import parse_scheme
from apq_tvm.learn import ABQ_STEPS, default_epochs, learn_codes
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers import quantize, quantize_tensor
from apq_tvm.quantizers.inputs.calibration_file import load
from apq_tvm.quantizers.learn.learned import from_arrays
from apq_tvm.types import QuantizedModel

torch = pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")

Files = tuple[Path, Path, Path]

APART = {"input_ids": tiny_llama.apart()}


OUTLIERS = (5, 9)
"""Channels of the stream that are 30 times as large behind norms, as language models have them."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model with outliers, inputs, and its calibration."""
    folder = tmp_path_factory.mktemp("abq")
    weights = tiny_llama.weights()
    for name, weight in weights.items():
        if name.endswith("layernorm.weight"):
            weight[list(OUTLIERS)] *= 30
    model = folder / "tiny.onnx"
    model.write_bytes(smollm2.build(tiny_llama.CONFIG, weights).SerializeToString())
    np.savez(folder / "data.npz", input_ids=tiny_llama.ids(16, 16))
    calibrate(model, folder / "data.npz", folder / "calib")
    return model, folder / "data.npz", folder / "calib"


def lost(quantized: QuantizedModel, files: Files) -> float:
    """Squared error of logits on tokens that nothing was learned from."""
    exact = Simulation(QuantizedModel(import_onnx(files[0]), {}, {})).run(APART)["logits"]
    return float(np.square(Simulation(quantized).run(APART)["logits"] - exact).mean())


def learned(files: Files, out: Path) -> tuple[float, dict[str, float]]:
    """What W2*A8 loses as ABQ learns it in a few steps, and what its blocks started from."""
    report = learn_codes(*files, out, kind="abq", scheme="W2*A8", epochs=3, rows=1)
    assert report["judged_apart"] and len(report["kept_apart"]) == len(report["alphas"]) == 2
    assert all(after <= before for before, after in report["kept_apart"].values())
    model = import_onnx(files[0])
    file = load(out, model)
    known = from_arrays(file.extra, file.notes)
    quantized = quantize(
        model, "W2*A8", calibration=file.calibration, method="learned", learned=known
    )
    return lost(quantized, files), report["alphas"]


def test_two_bits_are_not_ruined(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Balance vectors that always start as SmoothQuant's lose more here than plain rounding."""
    from apq_tvm.quantizers.learn import abq_start

    calibration = load(files[2], import_onnx(files[0])).calibration
    plain = lost(quantize(import_onnx(files[0]), "W2*A8", calibration=calibration), files)
    ours, _ = learned(files, tmp_path / "ours")
    monkeypatch.setattr(abq_start, "ALPHAS", (0.0,))
    unscaled, alphas = learned(files, tmp_path / "unscaled")
    assert set(alphas.values()) == {0.0}
    monkeypatch.setattr(abq_start, "ALPHAS", (0.6,))
    smooth, _ = learned(files, tmp_path / "smooth")
    assert ours <= plain and ours <= 1.001 * unscaled
    assert smooth > plain


def test_both_ends_of_five_levels_are_learned() -> None:
    from apq_tvm.quantizers.torch.round import LearnedRounding

    scheme = parse_scheme("W2*A8g32")
    assert scheme is not None
    w = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32) + 0.1
    rounding = LearnedRounding(quantize_tensor(w, scheme), torch.from_numpy(w), "layer")
    upper, lower = rounding.parameters()
    rounding.weight(torch.from_numpy(w)).square().sum().backward()
    assert upper.grad.abs().min() > 0 and lower.grad.abs().min() > 0
    with torch.no_grad():
        before = rounding.finish(torch.from_numpy(w)).scales
        lower *= 1.5
        assert (rounding.finish(torch.from_numpy(w)).scales > before).all()


def test_compensation_is_of_the_first_three_and_last_four_blocks() -> None:
    from apq_tvm.quantizers.learn import abq_start

    assert [abq_start.is_compensated(at, 10) for at in range(10)] == [
        *[True] * 3, *[False] * 3, *[True] * 4,
    ]  # fmt: skip
    assert all(abq_start.is_compensated(at, 7) for at in range(7))


@pytest.mark.parametrize(("calls", "epochs"), [(128, 10), (32, 11), (8, 43), (1, 300)])
def test_steps_are_three_hundred_at_least(calls: int, epochs: int) -> None:
    from apq_tvm.quantizers.learn.learning_run import split

    assert default_epochs("abq", calls) == epochs
    assert default_epochs("abq", calls) * len(split(calls)[0]) >= ABQ_STEPS
    assert default_epochs("finetune", calls) == 2
