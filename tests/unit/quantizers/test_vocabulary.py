"""Heads and tables of a vocabulary get 6 bits where fewer are asked for, and users are told."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import smollm2

from apq_tvm.formats import parse_scheme
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers.guided import Guidance, quantize_guided
from apq_tvm.quantizers.vocabulary import NOTE, vocabulary_types
from apq_tvm.types import ImportedModel, QuantizedModel
from tests.unit import tiny_llama

UP = "model.layers.0.mlp.up_proj"
TABLE, HEAD = "model.embed_tokens", "lm_head"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImportedModel:
    weights = tiny_llama.weights()
    table = np.random.default_rng(0).standard_normal((320, tiny_llama.CONFIG.width)) * 0.2
    weights["model.embed_tokens.weight"] = table.astype(np.float32)
    config = replace(tiny_llama.CONFIG, vocabulary=320)
    path = tmp_path_factory.mktemp("llama") / "words.onnx"
    path.write_bytes(smollm2.build(config, weights).SerializeToString())
    return import_onnx(path)


def schemes(quantized: QuantizedModel) -> dict[str, str]:
    return {name: str(quantized.tensors[key].scheme) for name, key in quantized.layers.items()}


@pytest.mark.parametrize(
    ("asked", "given"),
    [("W4A8g32", "W6A8g32"), ("W3zA8g64", "W6zA8g64"), ("W1A16g128", "W6A16g128"),
     ("W2sA8", "W6A8g32"), ("nl4", "W6A8g32"), ("W4mA8g32", "W6A8g32")],
)  # fmt: skip
def test_head_and_table_get_six_bits(model: ImportedModel, asked: str, given: str) -> None:
    quantized = quantize_guided(model, asked, {}, Guidance(), search=False)
    found = schemes(quantized)
    assert (found[HEAD], found[TABLE], found[UP]) == (given, given, asked)
    assert quantized.layers[HEAD] == quantized.layers[TABLE]  # and are stored once
    assert quantized.notes[HEAD] == quantized.notes[TABLE] == NOTE
    assert UP not in quantized.notes


@pytest.mark.parametrize("asked", ["W6A8g32", "W8A8", "anyprec3-8", "float"])
def test_others_are_as_asked(model: ImportedModel, asked: str) -> None:
    quantized = quantize_guided(model, asked, {}, Guidance(), search=False)
    assert {schemes(quantized).get(name, "float") for name in (HEAD, UP)} == {asked}
    assert NOTE not in quantized.notes.values()


def test_the_users_word_counts(model: ImportedModel) -> None:
    quantized = quantize_guided(model, "W4A8g32", {HEAD: "W4A8g32"}, Guidance(), search=False)
    found = schemes(quantized)
    assert (found[HEAD], found[TABLE]) == ("W4A8g32", "W6A8g32")
    assert NOTE not in quantized.notes.get(HEAD, "")


def test_a_budget_chooses_for_them_too(model: ImportedModel) -> None:
    quantized = quantize_guided(model, "W4A8g32", {}, Guidance(target_bpw=6.0), search=False)
    assert "chosen for 6 bits" in quantized.notes[HEAD]
    assert NOTE not in "".join(quantized.notes.values())


def test_small_tables_and_models_without_a_head(model: ImportedModel, tmp_path: Path) -> None:
    scheme = None
    assert vocabulary_types(model, scheme) == {}
    quantized = quantize_guided(tiny_llama.load(tmp_path), "W4A8g32", {}, Guidance(), search=False)
    assert schemes(quantized)[HEAD] == "W4A8g32"
    headless = replace(model, nodes=tuple(n for n in model.nodes if n.name != HEAD))
    assert schemes(quantize_guided(headless, "W4A8g32", {}, Guidance(), False))[TABLE] == "W4A8g32"


def test_learned_layers_keep_their_schemes(model: ImportedModel) -> None:
    """A head that was learned in 4 bits is no 6-bit head; what was not learned is, as without."""
    scheme = parse_scheme("W4A8g32")
    asked = quantize_guided(model, "W4A8g32", {HEAD: "W4A8g32"}, Guidance(), search=False)
    head = asked.tensors[asked.layers[HEAD]]
    assert list(vocabulary_types(model, scheme, {HEAD: head})) == [f"^{re.escape(TABLE)}$"]
    six = quantize_guided(model, "W4A8g32", {}, Guidance(), search=False)
    given = {HEAD: six.tensors[six.layers[HEAD]]}
    assert vocabulary_types(model, scheme, given) == vocabulary_types(model, scheme)
