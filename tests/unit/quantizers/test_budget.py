"""The budget solver finds the optimum of small cases, and the plan meets its budget."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_models import build, rand, save

from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.formats import bits_per_weight, parse_scheme
from apq_tvm.onnx_import import import_onnx
from apq_tvm.progress import Silent
from apq_tvm.quantizers import budget, quantize
from apq_tvm.quantizers.guided import Guidance, plan_budget, quantize_guided
from apq_tvm.quantizers.stored import storage
from apq_tvm.types import Calibration, ImportedModel, LayerStats

CASES = st.lists(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0, 10)), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


@settings(max_examples=80)
@given(CASES, st.integers(1, 120))
def test_solver_is_optimal(case: list[list[tuple[int, float]]], limit: int) -> None:
    bits = [[b for b, _ in item] for item in case]
    errors = [[e for _, e in item] for item in case]
    all_choices = itertools.product(*(range(len(item)) for item in case))
    totals = [
        sum(errors[i][c] for i, c in enumerate(choice))
        for choice in all_choices
        if sum(bits[i][c] for i, c in enumerate(choice)) <= limit
    ]
    found = budget.solve(bits, errors, limit)
    if not totals:
        assert found is None
        return
    assert found is not None
    assert sum(bits[i][c] for i, c in enumerate(found)) <= limit
    assert sum(errors[i][c] for i, c in enumerate(found)) == pytest.approx(min(totals))


def test_many_states_stay_near_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    bits = [sorted(rng.integers(1, 10**6, 6).tolist()) for _ in range(40)]
    errors = [sorted(rng.random(6).tolist(), reverse=True) for _ in range(40)]
    limit = sum(b[2] for b in bits)

    def total() -> float:
        choice = budget.solve(bits, errors, limit)
        assert choice is not None
        assert sum(b[c] for b, c in zip(bits, choice, strict=True)) <= limit
        return sum(e[c] for e, c in zip(errors, choice, strict=True))

    good = total()
    monkeypatch.setattr(budget, "STATES", 200)
    assert good <= total() <= 1.02 * good


def test_plan_meets_its_budget(tmp_path: Path) -> None:
    model = tiny_llama.load(tmp_path)
    errors = []
    for target in (3.5, 4.5, 6.0):
        plan = plan_budget(model, "W4A8", {}, Guidance(target_bpw=target), None, Silent())
        assert plan.bits_per_weight <= target
        assert set(plan.schemes) == {
            n.name for n in model.nodes if n.op in ("apq.Linear", "apq.Embedding")
        }
        errors.append(sum(plan.errors.values()))
    assert errors == sorted(errors, reverse=True)


def test_guided_quantization_uses_the_plan_and_notes_it(tmp_path: Path) -> None:
    model = tiny_llama.load(tmp_path)
    rule = {"down_proj": "W8A8"}
    quantized = quantize_guided(model, "W4A16", rule, Guidance(target_bpw=4.0), search=False)
    schemes = {node: quantized.tensors[key].scheme for node, key in quantized.layers.items()}
    assert str(schemes["model.layers.0.mlp.down_proj"]) == "W8A8"
    assert all(s.act_bits == 16 for node, s in schemes.items() if "down_proj" not in node)
    assert "chosen for 4 bits" in quantized.notes["model.layers.0.mlp.up_proj"]
    plain = quantize(model, "W4A16", rule, search=False)
    assert set(plain.layers) == set(quantized.layers)


@pytest.mark.parametrize(
    ("scheme", "guidance", "words"),
    [
        ("W4A8", Guidance(target_bpw=1.0), "the smallest candidates take [23]"),
        ("W4A8", Guidance(target_bpw=3.0, candidates=("W8A8", "W4A8g32")), "cannot be met"),
        ("float", Guidance(target_bpw=3.0), "leaves none to choose"),
        ("W4A8", Guidance(target_bpw=3.0, candidates=("float",)), "no candidate"),
    ],
)
def test_impossible_budgets_are_named(
    tmp_path: Path, scheme: str, guidance: Guidance, words: str
) -> None:
    with pytest.raises(BadScheme, match=words):
        quantize_guided(tiny_llama.load(tmp_path), scheme, {}, guidance)


def test_candidates_without_a_budget_are_refused() -> None:
    with pytest.raises(BadInput, match="--target-bpw chooses among"):
        Guidance(candidates=("cb2", "cb3"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ImportedModel:
    """Most weights are in a table, as in the demo model; one table is too small to quantize."""
    weights = {"words": rand(300, 32), "kinds": rand(2, 32, seed=1), "w": rand(32, 64, seed=2),
               "b": rand(64, seed=3), "v": rand(64, 32, seed=4)}  # fmt: skip
    nodes = [("Gather", "words ids", "word"), ("Gather", "kinds types", "kind"),
             ("Add", "word kind", "x"), ("MatMul", "x w", "h"), ("Add", "h b", "hb"),
             ("MatMul", "hb v", "y")]  # fmt: skip
    inputs = {"ids": ("int64", ["n", "s"]), "types": ("int64", ["n", "s"])}
    folder = tmp_path_factory.mktemp("encoder")
    return import_onnx(save(build(nodes, inputs, "y", weights), folder))


def calibrated(model: ImportedModel, tables: dict[str, float]) -> Calibration:
    layers = {
        node.name: LayerStats(*(np.ones(model.weights[node.inputs[1]].shape[1], np.float32),) * 3,
                              samples=64, importance=1.0)
        for node in model.nodes if node.op == "apq.Linear"
    }  # fmt: skip
    return Calibration(layers, model.sha256, "", tables)


@pytest.mark.parametrize(
    ("rules", "target"), [({}, 3.7), ({"n_y": "float"}, 8.0), ({"word": "W4A8"}, 5.0)], ids=str
)
def test_the_budget_is_for_all_that_is_stored(
    encoder: ImportedModel, rules: dict[str, str], target: float
) -> None:
    """Embeddings were counted at the bits of --scheme, so that 3.2 bits could not be met."""
    guidance = Guidance(target_bpw=target)
    plan = plan_budget(encoder, "W4A8g32", rules, guidance, None, Silent())
    quantized = quantize_guided(encoder, "W4A8g32", rules, guidance, search=False)
    assert plan.bits_per_weight == pytest.approx(storage(quantized).all.bits, abs=1e-4)
    assert target - 0.8 < plan.bits_per_weight <= target
    assert ("n_word" in plan.schemes) == ("word" not in rules)


@pytest.mark.parametrize("candidates", [(), ("cb2", "cb3"), ("W8A8", "W4A8g32")], ids=str)
def test_the_remedy_of_a_budget_works(encoder: ImportedModel, candidates: tuple[str, ...]) -> None:
    guidance = Guidance(target_bpw=1.0, candidates=candidates)
    with pytest.raises(BadScheme, match=r"weights that are float.*; ask for \d") as caught:
        quantize_guided(encoder, "W4A8", {}, guidance)
    assert ("candidates of fewer bits" in str(caught.value)) == ("W8A8" in candidates)
    possible = float(re.findall(r"ask for ([\d.]+) or more", str(caught.value))[0])
    quantized = quantize_guided(encoder, "W4A8", {}, replace(guidance, target_bpw=possible))
    assert possible - 2e-3 < storage(quantized).all.bits <= possible
    table = quantized.tensors[quantized.layers["n_word"]].scheme
    assert table.family == "int" and table.bits == (4 if "W8A8" in candidates else 2)


def test_tables_that_matter_get_bits(encoder: ImportedModel) -> None:
    bits = []
    for importance in (1e-4, 1.0, 1e4):
        calibration = calibrated(encoder, {"n_word": importance})
        plan = plan_budget(encoder, "W4A8g32", {}, Guidance(target_bpw=4.2), calibration, Silent())
        scheme = parse_scheme(plan.schemes["n_word"])
        assert scheme is not None
        bits.append(scheme.bits)
    assert bits == sorted(bits) and bits[0] < bits[-1]


def test_a_calibration_that_knows_no_tables_is_refused(encoder: ImportedModel) -> None:
    guidance, known = Guidance(target_bpw=4.2), calibrated(encoder, {})
    with pytest.raises(BadInput, match=r"how much embedding 'n_word' matters.*calibrate anew"):
        plan_budget(encoder, "W4A8g32", {}, guidance, known, Silent())
    plan_budget(encoder, "W4A8g32", {"n_word": "W4A8"}, Guidance(target_bpw=6.0), known, Silent())


def test_a_table_and_its_head_in_two_forms_take_the_bits_of_both(tmp_path: Path) -> None:
    """cb3 is for products alone: the same weight is stored once more, in integers."""
    model = tiny_llama.load(tmp_path)
    guidance = Guidance(target_bpw=9.5, candidates=("cb2", "cb3"))
    quantized = quantize_guided(model, "cb3", {}, guidance, search=False)
    plan = plan_budget(model, "cb3", {}, guidance, None, Silent())
    assert quantized.layers["lm_head"] != quantized.layers["model.embed_tokens"]
    assert storage(quantized).all.bits == pytest.approx(plan.bits_per_weight, rel=0.02)


@pytest.mark.all_cases
def test_codebooks_of_two_and_three_bits_are_mixed(tmp_path: Path) -> None:
    """As in the paper's table at 3.2 bits: the layers that need the third bit get it."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((512, 64)).astype(np.float32) for i in range(8)}
    weights["w3"], weights["w6"] = np.sign(weights["w3"]), np.sign(weights["w6"])  # easy
    nodes = [("MatMul", f"x w{i}", f"y{i}") for i in range(8)]
    graph = build(nodes, {"x": ("float32", ["rows", 512])}, " ".join(f"y{i}" for i in range(8)),
                  weights)  # fmt: skip
    model = import_onnx(save(graph, tmp_path))
    guidance = Guidance(target_bpw=3.2, candidates=("cb2", "cb3"))
    quantized = quantize_guided(model, "cb2", {}, guidance, search=False)
    schemes = {node: str(quantized.tensors[key].scheme) for node, key in quantized.layers.items()}
    assert {node for node, scheme in schemes.items() if scheme == "cb2"} == {"n_y3", "n_y6"}
    bits = np.mean([bits_per_weight(tensor) for tensor in quantized.tensors.values()])
    assert bits == pytest.approx((2 * 2.4375 + 6 * 3.4375) / 8) and bits <= 3.2
    with pytest.raises(BadScheme, match=r"the smallest candidates take 2\.43"):
        quantize_guided(model, "cb2", {}, replace(guidance, target_bpw=2.4))


def test_fisher_information_weighs_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "SAMPLE_ROWS", 16)  # fewer than the weights have
    model = tiny_llama.load(tmp_path)
    calls = [{"input_ids": tiny_llama.ids(2, 16, seed)} for seed in range(2)]
    pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")
    from apq_tvm.quantizers.inputs.statistics import collect, finish

    calibration = finish(model, collect(model, calls, fisher=True))
    layers = {n.name: n.inputs[1] for n in model.nodes if n.op == "apq.Linear"}
    words = ("cb3", "anyprec4-4", "bcq2", "W5A8")
    plan = budget.choose_schemes(model, layers, words, 6.0, calibration)
    assert plan.bits_per_weight <= 6.0 and set(plan.schemes) == set(layers)
