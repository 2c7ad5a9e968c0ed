"""Calibration: the right sums, files that round-trip and refuse, runs that resume."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_decoder
import tiny_llama
from onnx_models import build, rand, save

from apq_tvm.errors import BadInput, BadScheme, OutputExists
from apq_tvm.formats.families import dequantize
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers import quantize
from apq_tvm.quantizers.inputs.calibration_file import CalibrationFile, load, read
from apq_tvm.quantizers.inputs.calibration_file import save as save_file

torch = pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and inputs for it."""
    folder = tmp_path_factory.mktemp("llama")
    np.savez(folder / "data.npz", input_ids=tiny_llama.ids(8, 16))
    return tiny_llama.write(folder), folder / "data.npz"


def mlp(folder: Path, width: int = 16) -> Path:
    """Two linear layers with biases, sequences with a mask."""
    nodes = [
        ("MatMul", "x w", "h"),
        ("Add", "h b", "hb"),
        ("Relu", "hb", "r"),
        ("MatMul", "r v", "m"),
        ("Add", "m c", "y0"),
        ("Unsqueeze", "attention_mask last", "m3"),
        ("Cast", "m3", "mf", {"to": 1}),
        ("Mul", "y0 mf", "y"),
    ]
    weights = {"w": rand(width, 24), "b": rand(24), "v": rand(24, 8), "c": rand(8)}
    inputs = {"x": ("float32", ["n", "s", width]), "attention_mask": ("int64", ["n", "s"])}
    return save(build(nodes, inputs, "y", {**weights, "last": np.array([2])}), folder)


def masked_data(folder: Path, width: int = 16) -> tuple[Path, np.ndarray, np.ndarray]:
    x = rand(20, 6, width, seed=7)
    mask = (np.arange(6) < np.arange(20)[:, None] % 6 + 1).astype(np.int64)
    np.savez(folder / "data.npz", x=x, attention_mask=mask)
    return folder / "data.npz", x, mask


def run(model: Path, data: Path, output: Path, **options: Any) -> dict[str, Any]:
    from apq_tvm.calibrate import calibrate

    return calibrate(model, data, output, **options)


def test_statistics_by_hand(tmp_path: Path) -> None:
    model = mlp(tmp_path)
    data, x, mask = masked_data(tmp_path)
    report = run(model, data, tmp_path / "c", weigh=False)
    file = load(tmp_path / "c", import_onnx(model))
    stats = file.calibration.layers["n_h"]
    rows = x[mask != 0]  # padding does not count
    assert report["rows"] == stats.samples == len(rows)
    np.testing.assert_allclose(stats.mean, rows.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stats.mean_square, np.square(rows).mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.absmax, np.abs(rows).max(0))
    assert stats.hessian is not None
    np.testing.assert_allclose(stats.hessian, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-5)
    assert "E[x^2]" in file.calibration.sensitivity and stats.importance == 0


def test_rows_are_weighed_by_gradients(llama: tuple[Path, Path], tmp_path: Path) -> None:
    """The last token of a sequence predicts nothing: its gradient, and so its weight, is 0."""
    from apq_tvm.quantizers.inputs.statistics import collect, finish

    model = import_onnx(llama[0])
    ids = tiny_llama.ids(8, 16)
    calls = [{"input_ids": ids}]
    known = finish(model, collect(model, calls))
    other = ids.copy()
    other[:, -1] = (other[:, -1] + 1) % 48
    # The last token is a target of the one before it, but what it is itself is no layer's weight.
    head = known.layers["lm_head"]
    again = finish(model, collect(model, [{"input_ids": other}])).layers["lm_head"]
    assert "weighed" in known.sensitivity and head.importance > 0
    assert head.hessian is not None and again.hessian is not None
    assert np.abs(head.hessian - again.hessian).max() < 0.2 * np.abs(head.hessian).max()
    plain = finish(model, collect(model, calls, weigh=False)).layers["lm_head"]
    assert not np.allclose(plain.mean_square, head.mean_square, rtol=1e-2)


@pytest.mark.parametrize("hessian", [True, False])
def test_errors_of_tokens_that_a_mean_adds_up_matter_more(tmp_path: Path, hessian: bool) -> None:
    """Of 16 tokens that are alike 16 times as much as of those that have nothing in common."""
    from apq_tvm.quantizers.inputs.statistics import collect, finish

    nodes = [("MatMul", "x w", "h"), ("MatMul", "z v", "k"), ("Add", "h k", "both"),
             ("ReduceMean", "both", "y", {"axes": [1], "keepdims": 0})]  # fmt: skip
    inputs = dict.fromkeys("xz", ("float32", ["n", 16, 32]))
    weights = {"w": rand(32, 8), "v": rand(32, 8, seed=1)}
    model = import_onnx(save(build(nodes, inputs, "y", weights, 17), tmp_path))
    different = rand(256, 16, 32)
    call = {"x": different, "z": np.repeat(different[:, :1], 16, 1)}
    layers = finish(model, collect(model, [call], hessian=hessian)).layers
    assert 11 < layers["n_k"].importance / layers["n_h"].importance < 22


def test_fisher_is_the_squared_gradient(llama: tuple[Path, Path]) -> None:
    from apq_tvm.quantizers.inputs.statistics import collect, finish
    from apq_tvm.quantizers.learn.result_loss import next_token_loss
    from apq_tvm.quantizers.torch.graph import TorchGraph

    model = import_onnx(llama[0])
    ids = tiny_llama.ids(2, 40)
    calls = [{"input_ids": ids[:1]}, {"input_ids": ids[1:]}]
    known = finish(model, collect(model, calls, fisher=True))
    assert known.sensitivity.startswith("Fisher")
    name = "model.layers.1.mlp.down_proj"
    weight = next(n.inputs[1] for n in model.nodes if n.name == name)
    graph, expected = TorchGraph(model), 0.0
    for call in calls:
        leaf = graph.weights[weight].clone().requires_grad_()
        values, symbols = graph.begin(call)
        out = graph.run_nodes(model.nodes, values, symbols, ["logits"], weights={weight: leaf})
        loss = next_token_loss(out["logits"], torch.from_numpy(call["input_ids"]), None)
        expected = expected + torch.autograd.grad(loss, leaf)[0].square().numpy() / 2
    np.testing.assert_allclose(known.layers[name].fisher, expected, rtol=1e-3, atol=1e-12)


def test_tables_matter_as_much_as_their_rows_gradients(tmp_path: Path) -> None:
    """Per token, as layers do: one row of positions serves a whole batch."""
    from apq_tvm.quantizers.inputs.statistics import collect, finish
    from apq_tvm.quantizers.learn.result_loss import next_token_loss

    words, places, w = rand(20, 8), rand(16, 8, seed=1), rand(8, 20, seed=2)
    nodes = [("Gather", "words input_ids", "word"), ("Gather", "places positions", "place"),
             ("Add", "word place", "x"), ("MatMul", "x w", "logits")]  # fmt: skip
    inputs = {"input_ids": ("int64", ["n", "s"]), "positions": ("int64", ["s"])}
    weights = {"words": words, "places": places, "w": w}
    model = import_onnx(save(build(nodes, inputs, "logits", weights), tmp_path))
    ids = np.random.default_rng(0).integers(0, 20, (8, 16))
    call = {"input_ids": ids, "positions": np.arange(16)}
    word, place = (torch.from_numpy(table) for table in (words[ids], places))
    loss = next_token_loss(
        (word.requires_grad_() + place.requires_grad_()) @ torch.from_numpy(w),
        torch.from_numpy(ids), None,
    )  # fmt: skip
    loss.backward()
    found = finish(model, collect(model, [call])).tables
    for name, rows in (("n_word", word), ("n_place", place)):
        assert rows.grad is not None
        assert found[name] == pytest.approx(float(rows.grad.square().sum()) / (8 * 16 * 8))
    assert finish(model, collect(model, [call], fisher=True)).tables == pytest.approx(found)
    assert not finish(model, collect(model, [call], weigh=False)).tables


def test_loss_ignores_padding() -> None:
    from apq_tvm.quantizers.learn.result_loss import next_token_loss

    logits = torch.randn(1, 4, 5)
    ids = torch.tensor([[1, 2, 3, 4]])
    short = next_token_loss(logits[:, :2], ids[:, :2], None)
    masked = next_token_loss(logits, ids, torch.tensor([[1, 1, 0, 0]]))
    assert float(short) == pytest.approx(float(masked))


def test_files_round_trip_and_belong_to_a_model(llama: tuple[Path, Path], tmp_path: Path) -> None:
    model = import_onnx(llama[0])
    run(llama[0], llama[1], tmp_path / "c", fisher=True)
    file = load(tmp_path / "c", model)
    save_file(tmp_path / "d", file)
    again = read(tmp_path / "d")
    for name, stats in file.calibration.layers.items():
        twin = again.calibration.layers[name]
        for key in ("mean_square", "mean", "absmax", "hessian", "fisher"):
            np.testing.assert_array_equal(getattr(stats, key), getattr(twin, key))
        assert (stats.samples, stats.importance) == (twin.samples, twin.importance)
    assert file.calibration.tables and file.calibration.tables == again.calibration.tables
    with pytest.raises(BadInput, match="another model"):
        load(tmp_path / "c", replace(model, sha256="0" * 64))
    bad = {n: replace(s, mean=s.mean[:3]) for n, s in file.calibration.layers.items()}
    save_file(tmp_path / "e", CalibrationFile(replace(file.calibration, layers=bad)))
    with pytest.raises(BadInput, match="mean of layer"):
        load(tmp_path / "e", model)
    bad = {n: replace(s, absmax=s.absmax * np.nan) for n, s in file.calibration.layers.items()}
    save_file(tmp_path / "f", CalibrationFile(replace(file.calibration, layers=bad)))
    with pytest.raises(BadInput, match=r"absmax of layer .* is not finite"):
        load(tmp_path / "f", model)
    small = np.eye(3, dtype=np.float32)
    bad = {n: replace(s, hessian=small) for n, s in file.calibration.layers.items()}
    save_file(tmp_path / "g", CalibrationFile(replace(file.calibration, layers=bad)))
    with pytest.raises(BadInput, match=r"H of layer .* has shape \(3, 3\)"):
        load(tmp_path / "g", model)


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{}", b"PK not safetensors" * 9])
def test_broken_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(BadInput, match=r"safetensors|calibration file"):
        read(tmp_path / "c")


def test_files_may_be_named_by_str(llama: tuple[Path, Path], tmp_path: Path) -> None:
    import apq_tvm
    from apq_tvm.calibrate import calibrate, known_statistics
    from apq_tvm.evaluate import evaluate_scheme
    from apq_tvm.learn import learn_codes
    from apq_tvm.pipeline import plan
    from apq_tvm.report import make_report

    model, data = map(str, llama)
    out, page = str(tmp_path / "c"), str(tmp_path / "r.html")
    report = calibrate(model, data, out)
    assert known_statistics(model, out)["layers"] == report["layers"] == 15
    learned = str(tmp_path / "l")
    learn_codes(model, data, out, learned, kind="abq", scheme="W3A8", epochs=1)
    guidance = apq_tvm.Guidance(calibration=learned, method="learned")
    chosen = plan(model, target="znver3", scheme="W3A8", guidance=guidance)
    assert any("learned (abq)" in note for note in chosen.quantized.notes.values())
    assert evaluate_scheme(model, "W4A8", data, calibration=out, method="gptq")["outputs"]
    made = make_report(model, data, ["W8A8"], page, json_output=f"{page}.json", calibration=out)
    assert Path(page).is_file() and Path(f"{page}.json").is_file()
    assert made["calibration"] == out


def test_branches_that_no_sample_took_are_left_out(tmp_path: Path) -> None:
    """A model for two sampling rates is calibrated on one; the other's layers say so."""
    from onnx import helper

    then, other = (
        helper.make_graph(
            [helper.make_node("MatMul", ["x", w], [f"by_{w}"], name=f"by_{w}")],
            w, [], [helper.make_tensor_value_info(f"by_{w}", 1, ["n", 16])],
        )
        for w in "uv"
    )  # fmt: skip
    model = build(
        [("If", "c", "y", {"then_branch": then, "else_branch": other})],
        {"x": ("float32", ["n", 16]), "c": ("bool", [])},
        "y",
        {"u": rand(16, 16), "v": rand(16, 16) + 1},
    )
    path, data, out = save(model, tmp_path), tmp_path / "data.npz", tmp_path / "c"
    np.savez(data, x=rand(64, 16), c=np.array(True))
    assert run(path, data, out)["layers"] == 1
    imported = import_onnx(path)
    result = quantize(imported, "W4A8", calibration=load(out, imported).calibration, method="gptq")
    notes = [result.notes[name] for name in result.layers]
    assert sorted(notes) == ["gptq", "no calibration sample reached it"]


def test_missing_file_and_existing_output(llama: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such calibration file"):
        read(tmp_path / "none")
    (tmp_path / "c").write_text("old")
    with pytest.raises(OutputExists, match="--force"):
        run(llama[0], llama[1], tmp_path / "c")
    assert (tmp_path / "c").read_text() == "old"


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        ({"tokens": tiny_llama.ids()}, {}, "no input of the model"),
        ({"input_ids": tiny_llama.ids()[0]}, {}, "dimensions"),
        ({"input_ids": tiny_llama.ids().astype(np.int32)}, {}, "int32, the model takes int64"),
        ({"input_ids": tiny_llama.ids(2, 3)}, {}, "too few samples"),
        ({"input_ids": tiny_llama.ids(2, 3)}, {"nsamples": 9}, "holds 2 samples"),
        ({"input_ids": tiny_llama.ids(0, 3)}, {}, "no samples"),
    ],
)
def test_bad_inputs_are_named(
    llama: tuple[Path, Path],
    tmp_path: Path,
    arrays: dict[str, np.ndarray],
    options: dict[str, Any],
    words: str,
) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(BadInput, match=words):
        run(llama[0], tmp_path / "bad.npz", tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


def test_nan_and_a_missing_loss_are_named(tmp_path: Path) -> None:
    model = mlp(tmp_path)
    data, x, mask = masked_data(tmp_path)
    with pytest.raises(BadInput, match="no language-model loss"):
        run(model, data, tmp_path / "c", fisher=True)
    x[3, 2, 1] = np.nan
    np.savez(data, x=x, attention_mask=mask)
    with pytest.raises(BadInput, match=r"'x' is nan at \[3, 2, 1\]"):
        run(model, data, tmp_path / "c")


@pytest.fixture
def handled() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as in a command."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("number", "weigh"),
    [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False)],
)
def test_interrupted_runs_resume(
    llama: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    handled: None,
    number: int,
    weigh: bool,
) -> None:
    from apq_tvm.quantizers.inputs import statistics as work

    run(*llama, tmp_path / "whole", rows=1, weigh=weigh)
    name = "_count_gradients" if weigh else "_count_inputs"
    plain, seen = getattr(work, name), []

    def interrupted(*given: Any) -> None:
        seen.append(1)
        if len(seen) == 5:  # in the middle of the fifth call, which must count once
            os.kill(os.getpid(), number)
        plain(*given)

    monkeypatch.setattr(work, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(*llama, tmp_path / "parts", rows=1, weigh=weigh)
    monkeypatch.undo()
    assert (tmp_path / "parts.partial").exists() and not (tmp_path / "parts").exists()
    with pytest.raises(BadInput, match="unfinished run"):
        run(*llama, tmp_path / "parts", rows=2, weigh=weigh)
    report = run(*llama, tmp_path / "parts", rows=1, weigh=weigh)
    assert report["resumed"] == 5 and not (tmp_path / "parts.partial").exists()
    whole, parts = read(tmp_path / "whole"), read(tmp_path / "parts")
    for layer, stats in whole.calibration.layers.items():
        twin = parts.calibration.layers[layer]
        assert stats.hessian is not None and twin.hessian is not None
        np.testing.assert_allclose(stats.hessian, twin.hessian, rtol=1e-5, atol=1e-7)
    assert bool(whole.calibration.tables) == weigh
    assert parts.calibration.tables == pytest.approx(whole.calibration.tables)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "smoothquant"])
def test_every_method_quantizes(llama: tuple[Path, Path], tmp_path: Path, method: str) -> None:
    model = import_onnx(llama[0])
    run(*llama, tmp_path / "c")
    calibration = load(tmp_path / "c", model).calibration
    quantized = quantize(
        model, "W3A8g16", {"lm_head": "W8A8"}, calibration=calibration, method=method
    )
    assert len(quantized.layers) == 16
    note = quantized.notes.get("model.layers.0.self_attn.o_proj", "")
    assert method == "rtn" or method in note
    if method == "gptq":
        assert quantized.notes["lm_head"] == "gptq"
        # With one scheme the head shares its codes with the embedding.
        tied = quantize(model, "W3A8g16", calibration=calibration, method=method)
        assert "embedding table's too" in tied.notes["lm_head"]


def test_models_with_packed_codes_and_caches_are_calibrated(tmp_path: Path) -> None:
    path, data = tiny_decoder.write(tmp_path), tmp_path / "data.npz"
    np.savez(data, **tiny_decoder.feeds(8, 12, 0))
    model = import_onnx(path)
    run(path, data, tmp_path / "c", fisher=True)
    calibration = load(tmp_path / "c", model).calibration
    assert len(calibration.layers) == 6
    assert all(stats.samples == 8 * 12 for stats in calibration.layers.values())
    assert all(stats.fisher is not None for stats in calibration.layers.values())
    # Layers that a rule names are quantized anew, the others keep the file's codes.
    quantized = quantize(model, "W4A8g32", {"n_[ut]$": "W3A8g32"}, calibration=calibration,
                         method="gptq")  # fmt: skip
    schemes = {name: str(quantized.tensors[key].scheme) for name, key in quantized.layers.items()}
    assert sorted(name for name, s in schemes.items() if s == "W3A8g32") == ["n_t", "n_u"]
    assert quantized.notes["n_u"] == "gptq" and "codes of the file" in quantized.notes["n_d"]


def test_biases_take_up_the_mean_error(tmp_path: Path) -> None:
    model = import_onnx(mlp(tmp_path))
    data, x, mask = masked_data(tmp_path)
    run(tmp_path / "model.onnx", data, tmp_path / "c", weigh=False)
    calibration = load(tmp_path / "c", model).calibration
    quantized = quantize(model, "W2A16", calibration=calibration)
    rows = x[mask != 0]
    before, after = (next(n for n in m.nodes if n.name == "n_h") for m in (model, quantized.model))
    exact = rows @ model.weights[before.inputs[1]].T + model.weights[before.inputs[2]]
    tensor = dequantize(quantized.tensors[quantized.layers["n_h"]])
    ours = rows @ tensor.T + quantized.model.weights[after.inputs[2]]
    np.testing.assert_allclose(ours.mean(0), exact.mean(0), rtol=1e-3, atol=1e-4)
    assert np.abs((rows @ (tensor - model.weights[before.inputs[1]]).T).mean(0)).max() > 1e-3


def test_methods_name_what_they_lack(llama: tuple[Path, Path], tmp_path: Path) -> None:
    model = import_onnx(llama[0])
    run(*llama, tmp_path / "c", hessian=False, weigh=False)
    calibration = load(tmp_path / "c", model).calibration
    for method, given, words in (
        ("magic", None, "one of rtn, gptq"),
        ("gptq", None, "needs calibration data"),
        ("gptq", calibration, "--hessian"),
        ("learned", calibration, "nothing learned"),
        ("rtn", replace(calibration, sha256="0"), "another model"),
    ):
        with pytest.raises(BadInput, match=words):
            quantize(model, "W4A8g32", calibration=given, method=method)
    with pytest.raises(BadScheme):
        quantize(model, "W9A8", calibration=calibration)
