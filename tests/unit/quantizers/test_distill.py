"""End-to-end tuning comes closer to the float model, keeps codes, and starts from any method."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tiny_llama

from apq_tvm.errors import BadInput
from apq_tvm.formats import parse_scheme
from apq_tvm.formats.families import check_tensor, dequantize
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers import quantize
from apq_tvm.quantizers.inputs.calibration_file import load
from apq_tvm.quantizers.learn.learned import Learned, from_arrays
from apq_tvm.types import ImportedModel, QuantizedModel

torch = pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")

Files = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model, inputs, and its calibration."""
    return tiny_llama.calibrated(tmp_path_factory.mktemp("distill"), samples=24)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps are taken here, so they are large."""
    from apq_tvm.quantizers.learn import distill

    monkeypatch.setattr(distill, "RATE", 1e-2)


def divergence(model: ImportedModel, quantized: QuantizedModel, bits: int = 0) -> float:
    """From the float model, activations rounded, on tokens that nothing was learned from."""
    from apq_tvm.evaluation.simulate import Simulation

    ids = {"input_ids": tiny_llama.apart()}
    runs = [Simulation(QuantizedModel(model, {}, {})), Simulation(quantized, bits)]
    full, got = (torch.from_numpy(run.run(ids)["logits"]).log_softmax(-1) for run in runs)
    return float((full.exp() * (full - got)).sum(-1).mean())


def distilled(
    files: Files,
    scheme: str,
    method: str,
    out: Path,
    statistics: Path | None = None,
    epochs: int = 5,
) -> tuple[ImportedModel, QuantizedModel, Learned]:
    from apq_tvm.learn import learn_codes

    model, data, calibration = files
    learn_codes(
        model, data, statistics or calibration, out,
        kind="distill", scheme=scheme, method=method, epochs=epochs, rows=1,
    )  # fmt: skip
    imported = import_onnx(model)
    file = load(out, imported)
    result = from_arrays(file.extra, file.notes)
    assert result is not None and result.kind == "distill" and len(result.tensors) == 15
    quantized = quantize(
        imported, scheme, calibration=file.calibration, method="learned", learned=result
    )
    return imported, quantized, result


@pytest.mark.parametrize(
    ("scheme", "method", "most"),
    [
        ("W3A8g16", "gptq", 0.98),
        pytest.param("nl4", "rtn", 0.98, marks=pytest.mark.all_cases),
        # A scale for each row is all that is learned: found 0.995.
        pytest.param("W4A8", "smoothquant+gptq", 0.998, marks=pytest.mark.all_cases),
        pytest.param("mixed24", "gptq", 0.98, marks=pytest.mark.all_cases),
    ],
)
def test_tuning_lowers_the_divergence_and_keeps_codes(
    files: Files, tmp_path: Path, scheme: str, method: str, most: float
) -> None:
    model, end, learned = distilled(files, scheme, method, tmp_path / "c")
    calibration = load(files[2], model).calibration
    start = quantize(model, scheme, calibration=calibration, method=method)
    for name, tensor in learned.tensors.items():
        check_tensor(tensor, name)
        np.testing.assert_array_equal(tensor.codes, start.tensors[start.layers[name]].codes)
    assert divergence(model, end) < most * divergence(model, start)
    # Gains before quantized layers are trained
    assert ("model.layers.0.input_layernorm", 1) in learned.weights


def test_every_width_gets_closer_and_stays_a_prefix(files: Files, tmp_path: Path) -> None:
    model, end, learned = distilled(files, "anyprec2-4", "rtn", tmp_path / "c", epochs=9)
    start = quantize(model, "anyprec2-4", calibration=load(files[2], model).calibration)
    assert not learned.weights
    for name, tensor in learned.tensors.items():
        check_tensor(tensor, name)
        np.testing.assert_array_equal(tensor.codes, start.tensors[start.layers[name]].codes)
    for bits in (2, 3, 4):
        assert divergence(model, end, bits) < 0.95 * divergence(model, start, bits)


def test_what_only_gets_worse_stays(files: Files, tmp_path: Path) -> None:
    model, end, learned = distilled(files, "anyprec3-6", "rtn", tmp_path / "c", epochs=9)
    start = quantize(model, "anyprec3-6", calibration=load(files[2], model).calibration)
    for name, tensor in learned.tensors.items():
        check_tensor(tensor, name)
        before = start.tensors[start.layers[name]].tables
        same = {key for key, table in tensor.tables.items() if np.array_equal(table, before[key])}
        # At this rate tables of 16 and 32 entries only got worse, for rows of 16 and 32 weights.
        assert same == {"centroids4", "centroids5", "halves"}
    assert divergence(model, end, 3) < 0.97 * divergence(model, start, 3)
    for bits in (4, 5, 6):
        assert divergence(model, end, bits) == divergence(model, start, bits)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_rate_that_ruins_everything_changes_nothing(files: Files, interrupted: bool) -> None:
    from apq_tvm.quantizers.learn.blockwise import Run, learn

    model = import_onnx(files[0])
    start = quantize(model, "W3A8g16")
    calls = [{"input_ids": ids[None]} for ids in tiny_llama.ids(4, 16)]
    calibration = load(files[2], model).calibration
    run = Run(model, start, calls, calibration, "distill", 2, Learned("distill"), rate=1e4)

    def interrupt(now: Run) -> None:
        if interrupted and now.done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        learn(run, interrupt)
    assert run.done == (1 if interrupted else 2)
    learned = learn(run)
    assert run.losses["model"][0] == run.losses["model"][1]
    nodes = {node.name: node for node in model.nodes}
    for (name, index), value in learned.weights.items():
        np.testing.assert_array_equal(value, model.weights[nodes[name].inputs[index]])
    for name, tensor in learned.tensors.items():
        np.testing.assert_array_equal(tensor.scales, start.tensors[start.layers[name]].scales)


def test_layers_without_a_choice_stay_beside_those_with_one(files: Files) -> None:
    from apq_tvm.quantizers.learn.blockwise import Run, learn

    model = import_onnx(files[0])
    start = quantize(model, "anyprec2-4", {"lm_head|embed_tokens": "W8A8"})
    calls = [{"input_ids": ids[None]} for ids in tiny_llama.ids(4, 16)]
    run = Run(
        model, start, calls, load(files[2], model).calibration, "distill", 4, Learned("distill")
    )
    tensors = learn(run).tensors
    assert set(run.losses) == {f"model at {bits} bits" for bits in (2, 3, 4)}
    assert all(after <= before for before, after in run.losses.values())
    assert run.losses["model at 2 bits"][1] < run.losses["model at 2 bits"][0]
    head, layer = tensors["lm_head"], tensors["model.layers.0.mlp.up_proj"]
    np.testing.assert_array_equal(head.scales, start.tensors[start.layers["lm_head"]].scales)
    assert layer.scheme.widths == (2, 3, 4)


@pytest.mark.parametrize(
    ("schemes", "widths"),
    [
        (("anyprec3-8", "W8A8"), [3, 4, 6, 8]),
        (("anyprec3-6",), [3, 4, 6]),
        (("anyprec5-8",), [6, 8]),
        (("anyprec3-5",), [3, 4, 5]),
        (("anyprec3-8c1",), [3, 4, 5, 6]),
        (("anyprec3-8", "anyprec3-5"), [3, 4]),
        (("anyprec7-8c1",), [7]),
        (("W4A8",), [0]),
    ],
)
def test_widths_that_share_a_table_do_not_all_train_it(
    schemes: tuple[str, ...], widths: list[int]
) -> None:
    from apq_tvm.quantizers.learn.distill import trained_widths

    assert trained_widths([scheme for text in schemes if (scheme := parse_scheme(text))]) == widths


def test_tuning_follows_block_wise_learning(files: Files, tmp_path: Path) -> None:
    from apq_tvm.learn import learn_codes

    model, data, calibration = files
    given = {"scheme": "W3A8", "epochs": 3, "rows": 2}
    learn_codes(model, data, calibration, tmp_path / "b", kind="abq", **given)
    file = load(tmp_path / "b", import_onnx(model))
    first = from_arrays(file.extra, file.notes)
    assert first is not None
    imported, end, second = distilled(files, "W3A8", "learned", tmp_path / "c", tmp_path / "b")
    start = quantize(
        imported, "W3A8", calibration=file.calibration, method="learned", learned=first
    )
    assert divergence(imported, end) < 0.95 * divergence(imported, start)
    name = "model.layers.0.mlp.up_proj"
    np.testing.assert_array_equal(first.tensors[name].codes, second.tensors[name].codes)
    with pytest.raises(BadInput, match="starts from --method rtn or gptq, not learned"):
        learn_codes(
            model, data, tmp_path / "b", tmp_path / "d", kind="finetune", method="learned", **given
        )


def test_tuning_resumes_after_an_epoch(files: Files) -> None:
    from apq_tvm.quantizers.learn.blockwise import Run, learn

    model = import_onnx(files[0])
    calibration = load(files[2], model).calibration
    start = quantize(model, "W3A8", calibration=calibration)
    calls = [{"input_ids": ids[None]} for ids in tiny_llama.ids(4, 16)]
    run = Run(model, start, calls, calibration, "distill", 4, Learned("distill"))
    seen: list[int] = []

    def interrupt(now: Run) -> None:
        seen.append(now.done)
        if now.done == 2 and len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(run, interrupt)
    half = quantize(model, "W3A8", calibration=calibration, method="learned", learned=run.learned)
    learn(run, interrupt)
    end = quantize(model, "W3A8", calibration=calibration, method="learned", learned=run.learned)
    assert seen == [1, 2, 3, 4]
    losses = [divergence(model, q) for q in (start, half, end)]
    assert losses[2] < losses[1] < losses[0]
    key = end.layers["model.layers.0.mlp.up_proj"]
    assert dequantize(end.tensors[key]).shape == (64, 32)
