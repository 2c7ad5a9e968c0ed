"""The budget solver finds the optimum of small cases, and the plan meets its budget."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_models import build, save

from apq_tvm.errors import BadScheme
from apq_tvm.formats import bits_per_weight
from apq_tvm.onnx_import import import_onnx
from apq_tvm.progress import Silent
from apq_tvm.quantizers import budget, quantize
from apq_tvm.quantizers.guided import Guidance, plan_budget, quantize_guided

CASES = st.lists(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0, 10)), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


@settings(max_examples=80, deadline=None)
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
