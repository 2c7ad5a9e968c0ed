"""Schemes tried without compiling, on models of a few layers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_models import build

from apq_tvm.errors import BadInput, BadScheme, OutputFailed
from apq_tvm.evaluation.compare import Calls, Reference
from apq_tvm.evaluation.language import Language
from apq_tvm.evaluation.layers import layer_errors, relative
from apq_tvm.evaluation.results import Results, run_key
from apq_tvm.evaluation.schemes import SchemeEvaluator
from apq_tvm.evaluation.simulate import Simulation, decoded_model
from apq_tvm.formats import dequantize, parse_scheme
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers import quantize
from apq_tvm.quantizers.stored import storage
from apq_tvm.types import ImportedModel, QuantizedModel

torch = pytest.importorskip("torch")

from apq_tvm.quantizers.torch.round import round_activations  # noqa: E402

VOCABULARY, WIDTH = 50, 32


@pytest.fixture
def model(tmp_path: Path) -> ImportedModel:
    """Embedding, one layer, a head tied to the embedding: logits of the next token."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    weights = {"table": table, "w": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 6}
    nodes = [
        ("Gather", "table input_ids", "x"),
        ("MatMul", "x w", "h"),
        ("Tanh", "h", "t"),
        ("Transpose", "table", "head", {"perm": [1, 0]}),
        ("MatMul", "t head", "logits"),
    ]
    inputs = {"input_ids": ("int64", ["batch", "seq"])}
    path = tmp_path / "model.onnx"
    onnx.save(build(nodes, inputs, "logits", weights), path)
    return import_onnx(path)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (4, 16))
    np.savez(tmp_path / "tokens.npz", input_ids=ids)
    return tmp_path / "tokens.npz"


def float_model(model: ImportedModel) -> QuantizedModel:
    return QuantizedModel(model, {}, {})


@pytest.mark.parametrize(
    "word",
    ["W4A8", "W4A8g16", "W4A8tg16", "W4A4", "W4A32", "W4A16g16", "anyprec3-4", "anyprec3-4sA8g16"],
)
def test_activations_are_rounded_as_kernels_do(word: str) -> None:
    scheme = parse_scheme(word)
    x = np.random.default_rng(2).standard_normal((3, 40)).astype(np.float32)
    x[1] = 0
    rounded = round_activations(torch.from_numpy(x), scheme).numpy()
    if not scheme.integer_acts:
        np.testing.assert_array_equal(rounded, x)
        return
    limit = 2 ** (scheme.act_bits - 1) - 1
    if scheme.asymmetric_acts:
        low, top = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
        low, top = np.minimum(low, 0), np.maximum(top, 0)
        scale = (top - low) / np.float32(253)
        zero = np.rint((low + top) / 2 / np.where(scale > 0, scale, 1))
        codes = np.rint(x / np.where(scale > 0, scale, 1)) - zero
        assert np.abs(codes).max() <= limit and word in ("W4A8", "W4A8tg16")
        np.testing.assert_allclose(rounded, (codes + zero) * scale, atol=1e-5)
        return
    size = 40 if scheme.act_group == -1 else scheme.act_group
    for start in range(0, 40, size):
        part = x[:, start : start + size]
        scale = np.abs(part).max(axis=1, keepdims=True) / np.float32(limit)
        codes = np.rint(part / np.where(scale > 0, scale, 1))
        assert np.abs(codes).max() <= limit
        np.testing.assert_allclose(rounded[:, start : start + size], codes * scale, atol=1e-6)


def test_one_bit_activations_are_refused() -> None:
    scheme = parse_scheme("W4A1")
    with pytest.raises(BadInput, match="1 bit are not simulated"):
        round_activations(torch.ones(2, 3), scheme)


def test_simulation_computes_with_decoded_weights(model: ImportedModel) -> None:
    quantized = quantize(model, "W3A8g16", {"logits": "W6A32"})
    ids = np.array([[3, 7, 49]])
    (result,) = Simulation(quantized).run({"input_ids": ids}).values()
    tensors = {name: quantized.tensors[key] for name, key in quantized.layers.items()}
    x = dequantize(tensors["n_x"])[ids]
    h = round_activations(torch.from_numpy(x), tensors["n_h"].scheme).numpy()
    t = np.tanh(h @ dequantize(tensors["n_h"]).T)
    np.testing.assert_allclose(result, t @ dequantize(tensors["n_logits"]).T, atol=1e-4)


def test_tied_layers_keep_schemes_of_their_own(model: ImportedModel) -> None:
    quantized = quantize(model, "W2A8g16", {"logits": "W8A8g16", "n_x": "W4A8g16"})
    decoded = decoded_model(quantized)
    assert len(decoded.weights) == 3
    nodes = {node.name: node for node in decoded.nodes}
    assert nodes["n_x"].inputs[0] != nodes["n_logits"].inputs[1]


def test_float_head_stays_exact_beside_a_quantized_embedding(model: ImportedModel) -> None:
    quantized = quantize(model, "W2A8g16", {"logits": "float"})
    nodes = {node.name: node for node in decoded_model(quantized).nodes}
    head = decoded_model(quantized).weights[nodes["n_logits"].inputs[1]]
    assert head is model.weights[nodes["n_logits"].inputs[1]]


def test_a_bad_token_is_refused(model: ImportedModel) -> None:
    with pytest.raises(BadInput, match="refuses the inputs"):
        Simulation(float_model(model)).run({"input_ids": np.array([[VOCABULARY]])})


def test_layer_errors_by_hand(model: ImportedModel) -> None:
    quantized = quantize(model, "W3A32g16")
    ids = np.random.default_rng(3).integers(0, VOCABULARY, (2, 8))
    rows = {row["name"]: row for row in layer_errors(quantized, [{"input_ids": ids}])}
    assert list(rows) == ["n_x", "n_h", "n_logits"]
    w = model.weights["w.T"]
    decoded = dequantize(quantized.tensors[quantized.layers["n_h"]])
    x = model.weights["table"][ids].reshape(-1, WIDTH)
    norm = np.linalg.norm
    assert rows["n_h"]["weight_error"] == pytest.approx(norm(w - decoded) / norm(w), rel=1e-5)
    assert rows["n_h"]["output_error"] == pytest.approx(
        norm(x @ (w - decoded).T) / norm(x @ w.T), rel=1e-4
    )
    assert rows["n_h"]["bits_per_weight"] == 4
    assert rows["n_h"]["shape"] == [WIDTH, WIDTH]
    assert rows["n_x"]["output_error"] is None
    assert storage(quantized).linear.bits == 4


def test_bits_of_a_width_are_its_planes_its_table_and_scales(model: ImportedModel) -> None:
    quantized = quantize(model, "anyprec3-6sA32", {"n_h|n_x": "float"})
    (tensor,) = quantized.tensors.values()
    for bits in (3, 4, 5, 6):
        size = VOCABULARY * WIDTH * bits / 8 + tensor.scales.nbytes
        size += tensor.tables[f"centroids{bits}"].nbytes
        assert storage(quantized, bits).linear.bits * VOCABULARY * WIDTH == 8 * size
    assert storage(quantized).linear.bits > storage(quantized, 6).linear.bits > 6


def test_what_is_stored_stands_beside_what_a_width_reads(
    model: ImportedModel, tokens: Path
) -> None:
    rules = {"n_h|n_x": "float"}
    with SchemeEvaluator(model, tokens, tensor_types=rules, layers=False) as evaluator:
        three, six = (evaluator.evaluate(f"anyprec3-6sA32@{bits}") for bits in (3, 6))
    stored = three["linear_stored_bits_per_weight"]
    assert stored == six["linear_stored_bits_per_weight"] > six["linear_bits_per_weight"]
    assert six["linear_bits_per_weight"] > 6 > three["linear_bits_per_weight"]


def test_without_inputs_only_weights_are_measured(model: ImportedModel) -> None:
    rows = layer_errors(quantize(model, "W8A8g16"))
    assert all(row["output_error"] is None and 0 < row["weight_error"] < 0.01 for row in rows)


def test_relative_of_nothing() -> None:
    assert relative(0, 0) == 0
    assert relative(1, 0) == 1
    assert relative(1, 4) == 0.5


def test_more_bits_are_closer(model: ImportedModel, tokens: Path) -> None:
    with SchemeEvaluator(model, tokens, language=Language()) as evaluator:
        results = [evaluator.evaluate(f"W{bits}A32g16") for bits in (2, 4, 8)]
    kl = [r["language"]["kl_mean"] for r in results]
    assert kl[0] > kl[1] > kl[2] > 0
    assert all(r["language"]["tokens"] == 60 for r in results)
    floats = {r["language"]["float_perplexity"] for r in results}
    assert len(floats) == 1
    assert [r["bits_per_weight"] for r in results] == [3, 5, 9]
    assert results[0]["weight_error"] > results[1]["weight_error"]


def test_float_perplexity_is_that_of_the_float_model(model: ImportedModel, tokens: Path) -> None:
    ids = np.load(tokens)["input_ids"]
    table, w = model.weights["table"].astype(np.float64), model.weights["w.T"].astype(np.float64)
    logits = np.tanh(table[ids] @ w.T) @ table.T
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    losses = [-math.log(c[t]) for row, ts in zip(chances[:, :-1], ids[:, 1:], strict=True)
              for c, t in zip(row, ts, strict=True)]  # fmt: skip
    with SchemeEvaluator(model, tokens, language=Language(), layers=False) as evaluator:
        score = evaluator.evaluate("W8A8")["language"]
    assert score["float_perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def test_without_language_outputs_are_compared(model: ImportedModel, tokens: Path) -> None:
    with SchemeEvaluator(model, tokens, rows=3) as evaluator:
        result = evaluator.evaluate("W8A8g16")
        assert len(evaluator.calls.batches) == 2
    assert result["language"] is None
    assert result["outputs"]["logits"]["rows"] == 64
    assert 0.999 < result["outputs"]["logits"]["cosine_mean"] < 1


def test_a_scheme_that_quantizes_nothing_is_refused(model: ImportedModel, tokens: Path) -> None:
    with SchemeEvaluator(model, tokens) as evaluator, pytest.raises(BadScheme, match="no layer"):
        evaluator.evaluate("float")
    with (
        SchemeEvaluator(model, tokens) as evaluator,
        pytest.raises(BadInput, match="needs calibration data"),
    ):
        evaluator.evaluate("W4A8", "gptq")


def test_the_float_model_runs_once() -> None:
    runs = []

    def run(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        runs.append(batch)
        return {"y": batch["x"] + 1, "n": np.array(3.0)}

    calls = Calls(({"x": np.ones((1, 2))}, {"x": np.zeros((2, 2))}), None, "")
    with Reference(calls, run, ["y", "n"]) as reference:
        for _ in range(2):
            summary = reference.compare(lambda b: {"y": b["x"] + 1, "n": np.array(3.0)})
    assert len(runs) == 2
    assert summary["outputs"]["y"]["max_abs_error"] == 0


def test_no_room_for_the_float_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, array: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    calls = Calls(({"x": np.ones((1, 2))},), None, "")
    monkeypatch.setattr(np, "save", full)
    with (
        Reference(calls, lambda b: {"y": b["x"]}, ["y"]) as reference,
        pytest.raises(OutputFailed, match=r"No space left.*TMPDIR names another folder"),
    ):
        reference.outputs(0)
    with Reference(calls, lambda b: {"y": b["x"]}, ["y"], keep=False) as reference:
        assert reference.outputs(0)["y"].sum() == 2


def test_results_are_kept_by_key(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = Results(path, "a")
    assert results.get("W4A8") is None
    results.put("W4A8", {"x": 1})
    other = Results(path, "b")
    assert other.get("W4A8") is None
    other.put("W4A8", {"x": 2})
    assert Results(path, "a").get("W4A8") == {"x": 1}
    assert Results(path, "b").get("W4A8") == {"x": 2}
    path.write_text("[")
    with pytest.raises(BadInput, match=r"results\.json is damaged"):
        Results(path, "a")


def test_keys_follow_contents(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("1")
    key = run_key("m", one, rows=3)
    assert key == run_key("m", two, rows=3)
    assert key != run_key("m", two, rows=4)
    assert key != run_key("n", two, rows=3)
    two.write_text("2")
    assert key != run_key("m", two, rows=3)
    assert run_key("m", one, calibration=one) != run_key("m", one, calibration=two)
    with pytest.raises(BadInput, match="absent cannot be read"):
        run_key("m", tmp_path / "absent")
