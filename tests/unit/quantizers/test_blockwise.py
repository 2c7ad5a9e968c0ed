"""Block-wise learning lowers the loss, folds exactly and resumes; its file is what compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama

from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.evaluation.simulate import Simulation
from apq_tvm.formats import parse_scheme
from apq_tvm.formats.families import FAMILIES, check_tensor, dequantize
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers import quantize, quantize_tensor
from apq_tvm.quantizers.inputs.calibration_file import load, read
from apq_tvm.quantizers.learn.learned import Learned, from_arrays, to_arrays
from apq_tvm.types import QuantizedModel

torch = pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, inputs, and its calibration."""
    return tiny_llama.calibrated(tmp_path_factory.mktemp("learn"), samples=48)


def logits(quantized: QuantizedModel, ids: np.ndarray) -> np.ndarray:
    """Of the quantized model as it is compiled, tables of embeddings included."""
    return Simulation(quantized).run({"input_ids": ids})["logits"]


def learned(
    files: tuple[Path, Path, Path], scheme: str, kind: str, method: str, out: Path, epochs: int = 5
) -> None:
    from apq_tvm.learn import learn_codes

    model, data, calibration = files
    learn_codes(
        model,
        data,
        calibration,
        out,
        kind=kind,
        scheme=scheme,
        method=method,
        epochs=epochs,
        rows=4,
    )


@pytest.mark.parametrize(
    ("scheme", "kind", "method"),
    [
        pytest.param("W3A8", "abq", "rtn", marks=pytest.mark.all_cases),
        pytest.param("W3zA8g16", "abq", "rtn", marks=pytest.mark.all_cases),
        pytest.param("W2*A8", "abq", "rtn", marks=pytest.mark.all_cases),
        ("W3zA8g16", "abq", "gptq"),
        ("W3A8g16", "finetune", "rtn"),
        ("W3A8g16", "train", "rtn"),
        pytest.param("W2zA8g32", "train", "rtn", marks=pytest.mark.all_cases),
        pytest.param("nl4", "train", "rtn", marks=pytest.mark.all_cases),
    ],
)
def test_learning_comes_closer_to_the_float_model(
    files: tuple[Path, Path, Path], tmp_path: Path, scheme: str, kind: str, method: str
) -> None:
    """Closer than the method it starts from, on data that nothing was learned from."""
    learned(files, scheme, kind, method, tmp_path / "c", 12)
    model = import_onnx(files[0])
    file = load(tmp_path / "c", model)
    result = from_arrays(file.extra, file.notes)
    assert result is not None and result.kind == kind and len(result.tensors) == 14
    start = quantize(model, scheme, calibration=file.calibration, method=method)
    end = quantize(model, scheme, calibration=file.calibration, method="learned", learned=result)
    assert end.notes["model.layers.0.mlp.up_proj"] == f"learned ({kind})"
    ids = tiny_llama.apart()  # nothing was learned from these
    exact = logits(QuantizedModel(model, {}, {}), ids)
    before, after = (np.square(logits(q, ids) - exact).mean() for q in (start, end))
    assert after < 0.97 * before


@pytest.mark.parametrize("family", [f.examples[0] for f in FAMILIES if f.name != "anyprec"])
def test_decoders_mean_what_the_family_means(family: str) -> None:
    from apq_tvm.quantizers.torch.decode import Decoder

    scheme = parse_scheme(family)
    assert scheme is not None
    w = np.random.default_rng(0).standard_normal((48, 300)).astype(np.float32)
    tensor = quantize_tensor(w, scheme)
    decoder = Decoder(tensor, "layer")
    np.testing.assert_allclose(
        decoder.weight().detach().numpy(), dequantize(tensor), rtol=1e-5, atol=1e-5
    )
    # Learning towards w lowers the error, and what is stored is what was learned.
    optimizer = torch.optim.Adam(decoder.parameters(), lr=5e-3)
    target, errors = torch.from_numpy(w), []
    for _ in range(30):
        error = (decoder.weight() - target * 1.1).square().mean()
        errors.append(float(error.detach()))
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    assert errors[-1] < errors[0]
    end = decoder.finish()
    check_tensor(end, "layer")
    np.testing.assert_allclose(
        decoder.weight().detach().numpy(), dequantize(end), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("text", ["W1A8g16", "W2A8", "W3zA8g32", "W4A8g32", "W8A8", "W2*A8g32"])
def test_learned_rounding_starts_and_ends_as_the_format(text: str) -> None:
    from apq_tvm.quantizers.torch.round import LearnedRounding

    scheme = parse_scheme(text)
    assert scheme is not None
    w = np.random.default_rng(1).standard_normal((8, 70)).astype(np.float32)
    w[3] = 0
    start = quantize_tensor(w, scheme)
    rounding = LearnedRounding(start, torch.from_numpy(w), "layer")
    value = rounding.weight(torch.from_numpy(w))
    end = rounding.finish(torch.from_numpy(w))
    check_tensor(end, "layer")
    np.testing.assert_allclose(value.detach().numpy(), dequantize(end), rtol=1e-3, atol=1e-6)
    error = [np.square(dequantize(t) - w).mean() for t in (start, end)]
    assert error[1] <= 1.05 * error[0] + 1e-9
    value.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in rounding.parameters())


def test_rounding_has_the_straight_through_gradient() -> None:
    """d(s * clamp(round(w / s)))/dw is 1 inside the range and 0 outside; by hand."""
    from apq_tvm.quantizers.torch.round import through

    w = torch.tensor([0.2, 0.7, 9.0], requires_grad=True)
    value = through(w, torch.round(w)).clamp(-2, 2)
    value.sum().backward()
    assert w.grad is not None
    assert value.tolist() == [0.0, 1.0, 2.0] and w.grad.tolist() == [1.0, 1.0, 0.0]


def test_activations_are_rounded_per_token_or_group() -> None:
    """As kernels round them: W4A8 has a zero point per token, so that 0 .. 100 is 253 steps."""
    from apq_tvm.quantizers.torch.round import fake_activations

    x = torch.tensor([[1.0, 0.5, 100.0, 3.0] + [0.0] * 14])
    token, group = parse_scheme("W4A8"), parse_scheme("W4A8g16")
    plain = parse_scheme("W4A32")
    assert token is not None and group is not None and plain is not None
    step = 100 / 253
    assert fake_activations(x, token)[0, :4].tolist() == pytest.approx(
        [step * round(v / step) for v in (1.0, 0.5, 100.0, 3.0)]
    )
    wide = torch.cat([x[:, :16], torch.full((1, 2), 0.5)], 1)
    assert fake_activations(wide, group)[0, -1].item() == pytest.approx(0.5, rel=1e-5)
    assert torch.equal(fake_activations(x, plain), x)


def test_learning_resumes_after_an_interruption(
    files: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from apq_tvm.quantizers.learn import blockwise

    learned(files, "W3A8", "abq", "rtn", tmp_path / "whole")
    plain, seen = blockwise.train_codes, []

    def interrupted(*given: Any) -> tuple[float, float]:
        if seen:
            raise KeyboardInterrupt
        seen.append(1)
        return plain(*given)

    monkeypatch.setattr(blockwise, "train_codes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        learned(files, "W3A8", "abq", "rtn", tmp_path / "parts")
    monkeypatch.undo()
    with pytest.raises(BadInput, match="unfinished run"):
        learned(files, "W4A8", "abq", "rtn", tmp_path / "parts")
    learned(files, "W3A8", "abq", "rtn", tmp_path / "parts")
    assert not (tmp_path / "parts.learning").exists()
    whole, parts = read(tmp_path / "whole"), read(tmp_path / "parts")
    assert set(whole.extra) == set(parts.extra)
    for key, array in whole.extra.items():
        np.testing.assert_array_equal(array, parts.extra[key], err_msg=key)


def test_learned_codes_round_trip_and_refuse_another_scheme(
    files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    model = import_onnx(files[0])
    calibration = load(files[2], model).calibration
    quantized = quantize(model, "W3zA8g16", calibration=calibration)
    name = "model.layers.0.mlp.up_proj"
    tensor = quantized.tensors[quantized.layers[name]]
    start = Learned("abq", {name: tensor}, {(name, 2): np.ones(64, np.float32)})
    again = from_arrays(*to_arrays(start))
    assert again is not None and again.tensors[name].scheme == tensor.scheme
    np.testing.assert_array_equal(dequantize(again.tensors[name]), dequantize(tensor))
    with pytest.raises(BadInput, match="was learned as W3zA8g16, not W4A8"):
        quantize(model, "W4A8", calibration=calibration, method="learned", learned=again)
    arrays, metadata = to_arrays(start)
    del arrays["learned.0.scales"]
    with pytest.raises(BadInput, match="damaged"):
        from_arrays(arrays, metadata)


def test_bad_requests_are_named(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="one of abq, finetune, train, distill"):
        learned(files, "W3A8", "magic", "rtn", tmp_path / "c")
    with pytest.raises(BadScheme, match="use --learn finetune"):
        learned(files, "nl4", "abq", "rtn", tmp_path / "c")
    with pytest.raises(BadInput, match="nothing to learn"):
        learned(files, "float", "abq", "rtn", tmp_path / "c")
