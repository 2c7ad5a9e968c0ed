"""A Llama compiled with the codes of a GGUF file of many types of blocks, and measured at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import smollm2
from typer.testing import CliRunner

from apq_tvm.cli.main import app
from apq_tvm.module import load_module
from tests.cases.gguf_files import NAMES, encode, meaning, pairs, random_blocks, write

ort = pytest.importorskip("onnxruntime")

CONFIG = smollm2.Config(
    layers=1, width=256, hidden=256, vocabulary=320, heads=4, kv_heads=2, rope_base=1e4,
    epsilon=1e-5,
)  # fmt: skip
KINDS = {
    "attn_q": ("Q4_K", 256, 4e-4), "attn_k": ("Q3_K", 128, 3e-3), "attn_v": ("Q6_K", 128, 1e-4),
    "attn_output": ("Q5_K", 256, 2e-4), "ffn_gate": ("Q2_K", 256, 8e-3),
    "ffn_up": ("Q5_0", 256, 2e-2), "ffn_down": ("Q4_0", 256, 3e-2),
}  # fmt: skip
"""Type, rows and largest scale: weights come to a tenth."""

SCHEMES = {
    "model.embed_tokens": "W6kA8", "lm_head": "W6kA8", "self_attn.q_proj": "W4kA8",
    "self_attn.k_proj": "W3kA8", "self_attn.v_proj": "W6kA8", "self_attn.o_proj": "W5kA8",
    "mlp.gate_proj": "W2sA8", "mlp.up_proj": "W5A8g32", "mlp.down_proj": "W4A8g32",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``lm.onnx`` with what the codes of ``lm.gguf`` mean, and ``tokens.npz``."""
    path, rng = tmp_path_factory.mktemp("codes"), np.random.default_rng(0)
    table = random_blocks("Q6_K", CONFIG.vocabulary, CONFIG.width, 9, 3e-4)
    tensors: dict[str, Any] = {"token_embd.weight": ("Q6_K", table)}
    weights = {"model.embed_tokens.weight": meaning("Q6_K", table)}
    for number, (name, own) in enumerate(NAMES.items()):
        kind, rows, size = KINDS[own]
        raw = random_blocks(kind, rows, 256, number, size)
        weight = meaning(kind, raw)
        heads = {"attn_q": CONFIG.heads, "attn_k": CONFIG.kv_heads}.get(own)
        if heads:
            raw = pairs(raw, heads)  # rows are moved whole
        tensors[f"blk.0.{own}.weight"] = (kind, raw)
        weights[f"model.layers.0.{name}.weight"] = weight.astype(np.float32)
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        weights[f"model.{name}.weight"] = rng.uniform(0.5, 1.5, CONFIG.width).astype(np.float32)
    values = {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}
    write(path / "lm.gguf", tensors, values)
    (path / "lm.onnx").write_bytes(smollm2.build(CONFIG, weights).SerializeToString())
    np.savez(path / "tokens.npz", input_ids=rng.integers(0, CONFIG.vocabulary, (2, 24)))
    return path


def run(*words: object) -> Any:
    result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result


@pytest.mark.all_cases
def test_every_type_is_compiled_and_measured(folder: Path) -> None:
    result = run(
        "compile", folder / "lm.onnx", "-o", folder / "lm_codes", "--codes", folder / "lm.gguf",
        "--inputs", folder / "tokens.npz",
    )  # fmt: skip
    assert "9 of 9 layers and tables have the codes of lm.gguf" in result.stderr
    line = next(line for line in result.stderr.splitlines() if line.startswith("KL to float"))
    assert float(line.split()[3]) < 0.02 and "46 tokens" in line
    assert (
        "codes:   9 of 9 layers have the codes of lm.gguf"
        in run("inspect", folder / "lm_codes").stdout
    )
    layers = load_module(folder / "lm_codes").manifest["layers"]
    for layer in layers:
        name = layer["name"].removeprefix("model.layers.0.")
        assert layer["scheme"] == SCHEMES[name], name
    notes = {layer["name"]: layer["note"] for layer in layers}
    assert notes["lm_head"] == "codes of lm.gguf (token_embd.weight, Q6_K)"


def test_float_activations_give_the_float_model(folder: Path) -> None:
    result = run(
        "compile", folder / "lm.onnx", "-o", folder / "lm_exact", "--codes", folder / "lm.gguf",
        "--scheme", "W4A32g32", "--inputs", folder / "tokens.npz", "--json",
    )  # fmt: skip
    measured = json.loads(result.stdout)["measured"]["language"]
    assert measured["kl_max"] < 1e-6 and measured["top1"] == 1


def test_nothing_need_be_compiled_to_try_codes(folder: Path) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")
    result = run(
        "eval", folder / "lm.onnx", "--scheme", "W4A8g32", "--codes", folder / "lm.gguf",
        "--inputs", folder / "tokens.npz", "--perplexity", "--json",
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert {layer["scheme"] for layer in report["layers"]} == set(SCHEMES.values())
    assert report["language"]["kl_mean"] < 0.02


def test_what_was_decided_unasked_is_said(folder: Path) -> None:
    said = run("compile", folder / "lm.onnx", "--dry-run").stderr
    assert "model.embed_tokens, lm_head: 6 bits, as it is of a vocabulary" in said
    data, end = (folder / "lm.gguf").read_bytes(), 1 << 12  # bytes of the last one, ffn_down
    (folder / "less.gguf").write_bytes(data[:-end] + np.random.default_rng(3).bytes(end))
    said = run("compile", folder / "lm.onnx", "--dry-run", "--codes", folder / "less.gguf").stderr
    assert "model.layers.0.mlp.down_proj: no codes in less.gguf: " in said
    assert "; it is W4A8g32" in said


def test_a_file_of_another_model_is_one_line(folder: Path) -> None:
    w = np.random.default_rng(1).standard_normal((CONFIG.vocabulary, CONFIG.width))
    other = write(folder / "other.gguf", {"token_embd.weight": ("Q8_0", encode("Q8_0", w))})
    words = ["compile", folder / "lm.onnx", "--dry-run", "--codes", other]
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 1
    assert "other.gguf is of another model: 0 of 8 weights" in result.stderr
