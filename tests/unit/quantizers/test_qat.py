"""Training codes end to end comes closer than training what they refer to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from test_distill import Files, divergence

from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.formats.families import check_tensor
from apq_tvm.learn import learn_codes
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers import quantize
from apq_tvm.quantizers.inputs.calibration_file import load
from apq_tvm.quantizers.learn.learned import Learned, from_arrays
from apq_tvm.quantizers.vocabulary import NOTE

torch = pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model, inputs, and its calibration."""
    return tiny_llama.calibrated(tmp_path_factory.mktemp("qat"), samples=128)


@pytest.mark.parametrize(
    ("scheme", "method", "most"),
    [
        ("W3A8g16", "gptq", 0.93),
        *(
            pytest.param(scheme, method, 0.98, marks=pytest.mark.all_cases)
            for scheme, method in (("nl4", "rtn"), ("cb3", "gptq"), ("W2*A8", "gptq"))
        ),
    ],
)
def test_codes_learn_with_scales(
    files: Files, tmp_path: Path, scheme: str, method: str, most: float
) -> None:
    """Better than scales alone."""
    path, data, statistics = files
    model = import_onnx(path)
    calibration = load(statistics, model).calibration
    start = quantize(model, scheme, calibration=calibration, method=method)
    found = {"start": divergence(model, start)}
    for kind in ("distill", "qat"):
        out = tmp_path / kind
        given = {"kind": kind, "scheme": scheme, "method": method, "epochs": 4, "rows": 2}
        report = learn_codes(path, data, statistics, out, rate=1e-2, **given)
        file = load(out, model)
        learned = from_arrays(file.extra, file.notes)
        end = quantize(
            model, scheme, calibration=file.calibration, method="learned", learned=learned
        )
        found[kind] = divergence(model, end)
    assert found["qat"] < min(most * found["distill"], 0.9 * found["start"]), found
    before, after = report["kept_apart"]["model"]
    assert report["judged_apart"] and after < before
    moved = 0
    for name, tensor in learned.tensors.items():
        check_tensor(tensor, name)
        moved += int((tensor.codes != start.tensors[start.layers[name]].codes).sum())
    assert moved > 0
    assert ("model.layers.0.input_layernorm", 1) in learned.weights


def test_an_interrupted_run_goes_on(files: Files, tmp_path: Path) -> None:
    from apq_tvm.quantizers.learn.blockwise import learn
    from apq_tvm.quantizers.learn.learning_run import Run

    model = import_onnx(files[0])
    calibration = load(files[2], model).calibration
    start = quantize(model, "W3A8", calibration=calibration)
    calls = [{"input_ids": ids[None]} for ids in tiny_llama.ids(64, 16)]
    run = Run(model, start, calls, calibration, "qat", 3, Learned("qat"))
    seen: list[int] = []

    def interrupt(now: Run) -> None:
        seen.append(now.done)
        if seen == [1, 2]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(run, interrupt)
    half = run.learned
    learn(run, interrupt)
    assert seen == [1, 2, 3]
    plain = Run(model, start, calls, calibration, "qat", 3, Learned("qat"))
    learn(plain)
    assert run.losses["model"][0] == plain.losses["model"][0]  # of the start, not of epoch 2
    assert run.losses["model"][1] < 1.1 * plain.losses["model"][1]
    losses = [
        divergence(model, quantized)
        for quantized in (
            start,
            *(
                quantize(model, "W3A8", calibration=calibration, method="learned", learned=learned)
                for learned in (half, run.learned)
            ),
        )
    ]
    assert losses[2] < losses[1] < losses[0]


def test_a_model_that_only_gets_worse_stays(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are far too large are not believed."""
    path, data, statistics = files
    model = import_onnx(path)
    given = {"kind": "qat", "scheme": "W8A8", "epochs": 1, "rows": 2, "rate": 3.0}
    report = learn_codes(path, data, statistics, tmp_path / "c", **given)
    before, after = report["kept_apart"]["model"]
    assert after == before
    start = quantize(model, "W8A8", calibration=load(statistics, model).calibration)
    file = load(tmp_path / "c", model)
    learned = from_arrays(file.extra, file.notes)
    for name, tensor in learned.tensors.items():
        np.testing.assert_array_equal(tensor.codes, start.tensors[start.layers[name]].codes)


def test_several_widths_are_refused(files: Files, tmp_path: Path) -> None:
    path, data, statistics = files
    given = {"kind": "qat", "scheme": "anyprec2-4", "epochs": 1}
    with pytest.raises(BadScheme, match=r"layer .*codes of one width are chosen here, anyprec2-4"):
        learn_codes(path, data, statistics, tmp_path / "c", **given)


@pytest.mark.parametrize("kind", ["distill", "qat"])
def test_the_student_is_what_is_quantized(files: Files, kind: str) -> None:
    """Its embedding too, whose table is the head's weight: codes of one are those of the other."""
    from apq_tvm.evaluation.simulate import Simulation
    from apq_tvm.quantizers.learn.blockwise import learn
    from apq_tvm.quantizers.learn.learning_run import Run
    from apq_tvm.quantizers.learn.student import student_of

    model = import_onnx(files[0])
    calibration = load(files[2], model).calibration
    start = quantize(model, "W3A8g16", calibration=calibration)
    assert start.layers["lm_head"] == start.layers["model.embed_tokens"]
    calls = [{"input_ids": ids[None]} for ids in tiny_llama.ids(64, 16)]
    run = Run(model, start, calls, calibration, kind, 2, Learned(kind), rate=1e-2)
    learned = learn(run)
    end = quantize(model, "W3A8g16", calibration=calibration, method="learned", learned=learned)
    ids = {"input_ids": tiny_llama.apart()}
    student = student_of(run)
    student.go_on(learned)
    with torch.no_grad():
        found = student.run(ids, ["logits"], 0)["logits"].numpy()
    wanted, before = (Simulation(q).run(ids)["logits"] for q in (end, start))
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert np.abs(wanted - before).max() > 0.01


def test_candidates_without_a_budget_are_refused(files: Files, tmp_path: Path) -> None:
    path, data, statistics = files
    given = {"kind": "qat", "scheme": "W3A8g16", "candidates": ("W4A8g16",)}
    with pytest.raises(BadInput, match="--candidate names schemes that --target-bpw chooses"):
        learn_codes(path, data, statistics, tmp_path / "c", **given)


def test_schemes_of_a_budget_are_learned_and_compiled(files: Files, tmp_path: Path) -> None:
    """A scheme for every layer, which `compile` takes from the file."""
    from apq_tvm.quantizers.guided import Guidance, quantize_guided

    path, data, statistics = files
    choice = ("W3A8g16", "W4A8g16", "W8A8g16")
    given = {"kind": "qat", "scheme": "W3A8g16", "method": "gptq", "epochs": 1, "rows": 4}
    learn_codes(path, data, statistics, tmp_path / "c", target_bpw=5.5, candidates=choice, **given)
    model = import_onnx(path)
    guidance = Guidance(tmp_path / "c", "learned")
    end = quantize_guided(model, "W3A8g16", {}, guidance)
    found = {
        str(end.tensors[end.layers[n.name]].scheme) for n in model.nodes if n.name in end.layers
    }
    assert len(found) > 1 and found <= set(choice)
    assert not [text for text in end.notes.values() if NOTE in text]  # none is of a vocabulary
    with pytest.raises(BadInput, match=r"was learned as .*, not W4A8"):
        quantize_guided(model, "W4A8", {}, guidance)
    again = {**given, "method": "learned"}
    learn_codes(path, data, tmp_path / "c", tmp_path / "d", **again)
    more = quantize_guided(model, "W3A8g16", {}, Guidance(tmp_path / "d", "learned"))
    assert {n: t.scheme for n, t in more.tensors.items()} == {
        n: t.scheme for n, t in end.tensors.items()
    }
