"""Statistics behind quantized layers: what they are, who gets them, and what they gain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama

from apq_tvm.errors import BadInput
from apq_tvm.evaluation.simulate import Simulation
from apq_tvm.onnx_import import import_onnx
from apq_tvm.progress import Silent
from apq_tvm.quantizers import quantize
from apq_tvm.quantizers.guided import Guidance, quantize_guided
from apq_tvm.quantizers.inputs import sequential
from apq_tvm.quantizers.inputs.calibration_file import CalibrationFile, load, save
from apq_tvm.types import QuantizedModel

torch = pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")

Files = tuple[Path, Path, Path]
NAME = "model.layers.0.mlp.up_proj"
APART = {"input_ids": tiny_llama.apart()}


class Told(Silent):
    """Keeps the names of stages."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def stage(self, name: str, total: int | None = None) -> Any:
        self.names.append(name)
        return super().stage(name, total)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model, inputs, and its calibration."""
    return tiny_llama.calibrated(tmp_path_factory.mktemp("sequential"))


def guided(files: Files, scheme: str, asked: bool | None) -> tuple[QuantizedModel, list[str]]:
    told = Told()
    guidance = Guidance(files[2], "gptq", sequential=asked)
    return quantize_guided(import_onnx(files[0]), scheme, {}, guidance, progress=told), told.names


def test_the_choice_is_made_told_and_forced(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, taken in ((None, True), (True, True), (False, False)):
        quantized, told = guided(files, "W3A8g16", asked)
        assert ("gptq: H of layers behind quantized ones" in told) == taken
        assert ("H behind quantized layers" in quantized.notes[NAME]) == taken
    assert any("H of the float model's layers (as asked)" in name for name in told)
    monkeypatch.setattr(sequential, "MOST_PRODUCTS", 10.0)
    quantized, told = guided(files, "W3A8g16", None)
    assert any("--sequential takes it" in name for name in told)
    assert "behind quantized" not in quantized.notes[NAME]
    assert "behind quantized" in guided(files, "W3A8g16", True)[0].notes[NAME]


def test_statistics_are_of_what_quantized_layers_give(files: Files) -> None:
    """Of one layer in the middle, by hand: all before it quantized, none behind it."""
    model = import_onnx(files[0])
    file = load(files[2], model)
    calls = sequential.sequential_calls(model, files[2], file, True, Silent())
    assert calls is not None
    quantized = quantize(model, "W2A8g16", calibration=file.calibration, method="gptq", calls=calls)
    linear = [node.name for node in quantized.model.nodes if node.op == "apq.Linear"]
    read = {node.name: node.inputs[0] for node in model.nodes if node.name in linear}
    from apq_tvm.formats.families import dequantize
    from apq_tvm.quantizers.torch.graph import TorchGraph, plain_lookup
    from apq_tvm.quantizers.torch.round import fake_activations

    schemes = {n: quantized.tensors[quantized.layers[n]].scheme for n in linear}
    walk = sequential.Walk(model, calls, schemes, False, Silent())
    before = linear[: linear.index(NAME)]
    decoded = {n: torch.from_numpy(dequantize(quantized.tensors[key]))
               for n, key in quantized.layers.items()}  # fmt: skip
    for name in before:
        walk.decided([name], quantized.tensors[quantized.layers[name]], file.calibration)
    table = next(n.name for n in model.nodes if n.op == "apq.Embedding")
    walk.decided([table], quantized.tensors[quantized.layers[table]], file.calibration)
    found = walk.stats(NAME, file.calibration.layers[NAME])
    rows = []
    for call in calls:

        def product(node: Any, x: Any, w: Any, bias: Any) -> Any:
            if node.name not in before:
                return torch.nn.functional.linear(x, w, bias)
            x = fake_activations(x, schemes[node.name])
            return torch.nn.functional.linear(x, decoded[node.name], bias)

        x = TorchGraph(model).run(
            call, [read[NAME]], product, lambda node, _, i: plain_lookup(node, decoded[table], i)
        )[read[NAME]]
        rows.append(fake_activations(x.detach().reshape(-1, x.shape[-1]), schemes[NAME]))
    x = torch.cat(rows)
    np.testing.assert_allclose(found.hessian, (x.T @ x / len(x)).numpy(), rtol=2e-3, atol=2e-3)
    assert found.samples == file.calibration.layers[NAME].samples


@pytest.mark.parametrize("scheme", ["W2A8g16", "anyprec3-4", "W2*A8"])
def test_data_kept_apart_lose_no_more(files: Files, scheme: str) -> None:
    model = import_onnx(files[0])
    exact = Simulation(QuantizedModel(model, {}, {})).run(APART)["logits"]

    def lost(asked: bool) -> float:
        got = Simulation(guided(files, scheme, asked)[0]).run(APART)["logits"]
        return float(np.square(got - exact).mean())

    assert lost(True) < 1.05 * lost(False)


def test_what_cannot_be_had_is_named(files: Files, tmp_path: Path) -> None:
    model = import_onnx(files[0])
    file = load(files[2], model)
    moved = tmp_path / "moved"
    save(moved, file)
    told = Told()
    assert sequential.sequential_calls(model, moved, file, None, told) is None
    assert "no longer at" in told.names[0]
    with pytest.raises(BadInput, match=r"--sequential: the inputs of .* are no longer at"):
        sequential.sequential_calls(model, moved, file, True, Silent())
    (tmp_path / "data.npz").write_bytes(b"other")
    with pytest.raises(BadInput, match="is no longer what"):
        sequential.sequential_calls(model, moved, file, True, Silent())
    old = CalibrationFile(file.calibration, {}, {"run": file.notes["run"]})
    with pytest.raises(BadInput, match="does not say where its inputs are"):
        sequential.sequential_calls(model, moved, old, True, Silent())
