"""Caches of codes in the simulation, and what makes them cost less: balance, centred keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import smollm2  # noqa: E402
import tiny_decoder  # noqa: E402
from tiny_llama import CONFIG, load, weights  # noqa: E402

from apq_tvm.calibrate import calibrate  # noqa: E402
from apq_tvm.errors import BadInput  # noqa: E402
from apq_tvm.evaluate import evaluate_scheme  # noqa: E402
from apq_tvm.evaluation.cache_balance import _shared, find_balance  # noqa: E402
from apq_tvm.evaluation.cache_centres import Place, nothing_changes, place_of  # noqa: E402
from apq_tvm.evaluation.caches import attentions, with_caches  # noqa: E402
from apq_tvm.evaluation.simulate import Simulation  # noqa: E402
from apq_tvm.formats.caches import CACHES  # noqa: E402
from apq_tvm.learn import learn_codes  # noqa: E402
from apq_tvm.onnx_import import import_onnx  # noqa: E402
from apq_tvm.progress import Silent  # noqa: E402
from apq_tvm.quantizers import guided, quantize_tensor  # noqa: E402
from apq_tvm.quantizers.guided import Guidance, quantize_guided  # noqa: E402
from apq_tvm.quantizers.inputs.cache_balance import (  # noqa: E402
    NOTE,
    PASSED_OVER,
    PREFIX,
    balanced,
    for_caches,
)
from apq_tvm.quantizers.inputs.cache_centres import NOTE as CENTRED  # noqa: E402
from apq_tvm.quantizers.inputs.cache_centres import centred  # noqa: E402
from apq_tvm.quantizers.inputs.calibration_file import read  # noqa: E402
from apq_tvm.sessions.caches import find_pairs  # noqa: E402
from apq_tvm.types import ImportedModel, Node, QuantizedModel, Scheme  # noqa: E402
from tests.simulated import relative  # noqa: E402

LIFTED = replace(CONFIG, layers=1, width=64, rope_base=1e6)
"""Of heads that int4 has groups for, most of whose channels turn slowly."""

CALLS = [
    {"input_ids": np.random.default_rng(i).integers(0, CONFIG.vocabulary, (2, 40))}
    for i in range(3)
]


def outlying(folder: Path, factor: float) -> ImportedModel:
    """A Llama some of whose channels of keys are larger, in layer 0: both of a rotary pair."""
    model = load(folder)
    (node,) = [n for n in model.nodes if "0" in n.name and "k_proj" in n.name]
    weight = model.weights[node.inputs[1]].copy()
    half = CONFIG.head_width // 2
    weight[[1, 1 + half]] *= factor
    return replace(model, weights={**model.weights, node.inputs[1]: weight})


def logits(model: ImportedModel, kv: str = "f32") -> Any:
    return Simulation(QuantizedModel(model, {}, {}), kv=kv).run(CALLS[-1])["logits"]


def test_outlying_channels_are_balanced(tmp_path: Path) -> None:
    model = outlying(tmp_path, 30.0)
    factors, notes = find_balance(model, CALLS[:2], Silent())
    made, layers = balanced(model, factors)
    assert any("channels shared: halves" in text for text in notes.values()), notes
    assert {name.partition("caches.")[2] for name in factors} == set(layers)
    exact = logits(model)
    assert relative(logits(made), exact) < 1e-5
    assert relative(logits(made, "i8"), exact) < 0.5 * relative(logits(model, "i8"), exact)
    for name, scale in factors.items():  # both channels of a rotary pair
        first, second = np.moveaxis(scale.reshape(-1, 2, CONFIG.head_width // 2), 1, 0)
        np.testing.assert_array_equal(first, second, err_msg=name)


def lifted(folder: Path) -> ImportedModel:
    """A Llama whose embeddings, and so keys, have much in common; values have not."""
    some = weights(LIFTED)
    some["model.embed_tokens.weight"] += 3
    some["model.layers.0.input_layernorm.weight"][:] = 1
    some["model.layers.0.self_attn.v_proj.weight"] -= some[
        "model.layers.0.self_attn.v_proj.weight"
    ].mean(1, keepdims=True)
    path = folder / "lifted.onnx"
    path.write_bytes(smollm2.build(LIFTED, some).SerializeToString())
    return import_onnx(path)


@pytest.mark.parametrize("kv", ("i8", "i4"))
def test_what_all_keys_share_is_taken_off(kv: str, tmp_path: Path) -> None:
    model = lifted(tmp_path)
    found, notes = find_balance(model, CALLS[:2], Silent(), CACHES[kv])
    centres = {name: c for name, c in found.items() if name.startswith("centres.")}
    assert len(centres) == 1 and all("keys centred" in note for note in notes.values()), notes
    made, layers = for_caches(model, found, kv, learned=False)
    assert [layer for layer, note in layers.items() if CENTRED in note] == [
        n.name for n in model.nodes if "k_proj" in n.name and n.op == "apq.Linear"
    ]
    assert len(made.nodes) == len(model.nodes) + 1
    exact = logits(model)
    assert relative(logits(made), exact) < 1e-4
    assert relative(logits(made, kv), exact) < 0.8 * relative(logits(model, kv), exact)
    assert for_caches(model, found, "f32", learned=False)[0] is model
    (name, one), *_ = centres.items()
    for array in (one[..., :-1], np.full_like(one, np.nan), one[0]):
        with pytest.raises(BadInput, match=r"centres\."):
            centred(model, {name: array})
    with pytest.raises(BadInput, match="fits no value"):
        centred(model, {"centres.nothing": one})
    with pytest.raises(BadInput, match="fits no value"):
        centred(model, {f"centres.{model.outputs[0].name}": one})


def test_constants_of_grouped_queries(tmp_path: Path) -> None:
    """What GroupQueryAttention appends lies otherwise than its caches do; of values a constant
    would change results, which a run shows."""
    model = import_onnx(tiny_decoder.write(tmp_path))
    pairs = {pair.present: pair for pair in find_pairs(model)}
    (attention,) = attentions(model)
    wrong = replace(attention, keys=attention.values)
    centre = torch.rand(tiny_decoder.KV, tiny_decoder.SIZE) + 1
    call = tiny_decoder.feeds(2, 9, 0)
    for one, fine in ((attention, True), (wrong, False)):
        place = place_of(model, one, pairs)
        assert isinstance(place, Place)
        found = {f"centres.{place.value}": place.array(centre)}
        assert nothing_changes(model, found, call, set(pairs)) == fine


def test_bent_scores_and_shared_keys_are_not_centred(tmp_path: Path) -> None:
    model = lifted(tmp_path)
    attention = next(attentions(model))
    assert isinstance(place_of(model, attention, {}), Place)
    tanh = Node("Tanh", "bend", ("a",), ("b",), {})
    bent = replace(attention, chain=replace(attention.chain, bend=(tanh,)))
    assert "bent" in str(place_of(model, bent, {}))
    sunk = replace(attention, chain=replace(attention.chain, sink="sink"))
    assert "sink" in str(place_of(model, sunk, {}))
    reader = Node("Identity", "reader", (attention.keys.name,), ("copy",), {})
    read_twice = replace(model, nodes=(*model.nodes, reader))
    assert "others read its keys" in str(place_of(read_twice, attention, {}))


def test_int4_groups_that_heads_do_not_have(tmp_path: Path) -> None:
    model = load(tmp_path)
    for refused in (
        lambda: with_caches(model, "i4"),
        lambda: find_balance(model, CALLS, Silent(), "int4"),
    ):
        with pytest.raises(BadInput, match="heads of 8 columns: int4 wants a multiple of 16"):
            refused()


def test_what_is_refused_and_left(tmp_path: Path) -> None:
    model = load(tmp_path)
    assert with_caches(model, "f32") is model
    bare = replace(model, nodes=tuple(n for n in model.nodes if n.op != "apq.Softmax"))
    with pytest.raises(BadInput, match="no attention reads caches"):
        with_caches(bare, "i8")
    layer = next(n for n in model.nodes if n.op == "apq.Linear")
    count = len(model.weights[layer.inputs[1]])
    for array in (np.ones(count + 1, np.float32), np.zeros(count, np.float32)):
        with pytest.raises(BadInput, match="caches"):
            balanced(model, {f"caches.{layer.name}": array})
    assert balanced(model, {"learned.0": np.ones(1)}) == (model, {})
    keys = [n.inputs[1] for n in model.nodes if "k_proj" in n.name and n.op == "apq.Linear"]
    coded = replace(
        model, quantized=dict.fromkeys(keys, quantize_tensor(model.weights[keys[0]], Scheme(4)))
    )
    factors, notes = find_balance(coded, [], Silent())
    assert not factors and all("has codes already" in note for note in notes.values())


@pytest.mark.parametrize("pairing", ("halves", "neighbours"))
def test_mixed_channels_share_the_larger(pairing: str) -> None:
    found = _shared(torch.tensor([[1.0, 4.0, 3.0, 2.0]]), pairing)
    assert found.tolist() == [[3, 4, 3, 4] if pairing == "halves" else [4, 4, 3, 3]]


def test_from_calibration_to_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file keeps factors, `eval` applies them and learning is of balanced rows; of other caches
    there are none, and codes of other files pass over them and say so."""
    np.savez(tmp_path / "in.npz", **CALLS[0])
    unequal, half = weights(), CONFIG.head_width // 2
    unequal["model.layers.0.self_attn.k_proj.weight"][[1, 1 + half]] *= 30
    model = tmp_path / "tiny.onnx"
    model.write_bytes(smollm2.build(CONFIG, unequal).SerializeToString())
    for kv in ("f32", "i8"):
        report = calibrate(model, tmp_path / "in.npz", tmp_path / kv, hessian=False, kv=kv)
        assert ("caches" in report) == (kv == "i8")
    found = read(tmp_path / "i8").extra
    factors = [name for name in found if name.startswith("caches.")]
    assert factors and all(name.startswith(("caches.", "centres.")) for name in found)
    made = quantize_guided(import_onnx(model), "W8A8", {}, Guidance(tmp_path / "i8"), kv="i8")
    balanced_layers = {name.removeprefix(PREFIX) for name in factors}
    assert {k for k, note in made.notes.items() if NOTE in note} == balanced_layers
    file = tmp_path / "learned"
    learn_codes(model, tmp_path / "in.npz", tmp_path / "i8", file, kind="finetune", scheme="W8A8",
                epochs=1)  # fmt: skip
    made = quantize_guided(import_onnx(model), "W8A8", {}, Guidance(file, "learned"))
    assert {k for k, note in made.notes.items() if NOTE in note} == balanced_layers
    exact = logits(import_onnx(model))
    assert relative(Simulation(made).run(CALLS[-1])["logits"], exact) < 0.1
    monkeypatch.setattr(guided, "keep_codes", lambda m, *_: SimpleNamespace(model=m, missing={}))
    given = Guidance(tmp_path / "i8", codes="file")
    made = quantize_guided(import_onnx(model), "W8A8", {}, given, kv="i8")
    assert {k for k, note in made.notes.items() if PASSED_OVER in note} == balanced_layers
    errors = {
        kv: evaluate_scheme(
            model, "W8A8", tmp_path / "in.npz", calibration=tmp_path / "i8", kv=kv, layers=False
        )["outputs"]["logits"]["relative_error"]
        for kv in ("f32", "f16", "i8")
    }
    assert errors["f32"] != errors["i8"] < 2 * errors["f32"]
