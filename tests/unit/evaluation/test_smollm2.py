"""``examples/smollm2.py``: a small Llama in ONNX against numpy, and texts that are disjoint."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import smollm2
import smollm2_gguf
import smollm2_ort
import smollm2_table
import smollm2_text

from apq_tvm.onnx_import import import_onnx

ort = pytest.importorskip("onnxruntime")

CONFIG = smollm2.Config(
    layers=2, width=64, hidden=96, vocabulary=53, heads=4, kv_heads=2, rope_base=1e4, epsilon=1e-5
)
INT8_LOGITS = 0.05  # mean error of logits, relative to their size, of 8-bit weights and activations


def make_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    c, kv = CONFIG, CONFIG.kv_heads * CONFIG.head_width
    shapes = {
        "self_attn.q_proj": (c.width, c.width),
        "self_attn.k_proj": (kv, c.width),
        "self_attn.v_proj": (kv, c.width),
        "self_attn.o_proj": (c.width, c.width),
        "mlp.gate_proj": (c.hidden, c.width),
        "mlp.up_proj": (c.hidden, c.width),
        "mlp.down_proj": (c.width, c.hidden),
        "input_layernorm": (c.width,),
        "post_attention_layernorm": (c.width,),
    }
    weights = {
        f"model.layers.{layer}.{name}.weight": rng.standard_normal(shape) / np.sqrt(shape[-1])
        for layer in range(c.layers)
        for name, shape in shapes.items()
    }
    weights["model.embed_tokens.weight"] = rng.standard_normal((c.vocabulary, c.width))
    weights["model.norm.weight"] = rng.standard_normal(c.width)
    return {name: w.astype(np.float32) for name, w in weights.items()}


WEIGHTS = make_weights()


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.epsilon) * weight


def turn(x: np.ndarray) -> np.ndarray:
    """Rotary embedding of [heads, tokens, d] by complex multiplication."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * CONFIG.rope_base ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


def forward(ids: np.ndarray) -> np.ndarray:
    """Logits of one sequence in float64, token by token attention written out."""
    c, w = CONFIG, {name: a.astype(np.float64) for name, a in WEIGHTS.items()}
    x = w["model.embed_tokens.weight"][ids]
    causal = np.tril(np.ones((len(ids), len(ids)), bool))
    for layer in range(c.layers):
        at = f"model.layers.{layer}"

        def heads(y: np.ndarray, name: str, at: str = at) -> np.ndarray:
            rows = y @ w[f"{at}.self_attn.{name}.weight"].T
            return rows.reshape(len(ids), -1, c.head_width).swapaxes(0, 1)

        y = norm(x, w[f"{at}.input_layernorm.weight"])
        q, k, v = turn(heads(y, "q_proj")), turn(heads(y, "k_proj")), heads(y, "v_proj")
        mixed = []
        for head in range(c.heads):
            kv = head // (c.heads // c.kv_heads)
            scores = np.where(causal, q[head] @ k[kv].T / np.sqrt(c.head_width), -np.inf)
            share = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(share / share.sum(-1, keepdims=True) @ v[kv])
        x = x + np.concatenate(mixed, -1) @ w[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, w[f"{at}.post_attention_layernorm.weight"])
        gate = y @ w[f"{at}.mlp.gate_proj.weight"].T
        y = gate / (1 + np.exp(-gate)) * (y @ w[f"{at}.mlp.up_proj.weight"].T)
        x = x + y @ w[f"{at}.mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    for name, cache in (("plain", False), ("cache", True)):
        model = smollm2.build(CONFIG, WEIGHTS, cache)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, path / f"{name}.onnx")
    return path


def session(path: Path) -> Any:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_logits_are_those_of_a_llama(folder: Path) -> None:
    ids = np.random.default_rng(1).integers(0, CONFIG.vocabulary, (3, 9))
    (logits,) = session(folder / "plain.onnx").run(["logits"], {"input_ids": ids})
    expected = np.stack([forward(row) for row in ids])
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)


def test_decoding_token_by_token_gives_the_same(folder: Path) -> None:
    ids = np.random.default_rng(2).integers(0, CONFIG.vocabulary, (2, 7))
    (expected,) = session(folder / "plain.onnx").run(["logits"], {"input_ids": ids})
    model = session(folder / "cache.onnx")
    names = [output.name for output in model.get_outputs()]
    empty = np.zeros((2, CONFIG.kv_heads, 0, CONFIG.head_width), np.float32)
    past = {v.name: empty for v in model.get_inputs() if v.name != "input_ids"}
    for start, end in ((0, 3), (3, 4), (4, 7)):
        outputs = dict(
            zip(names, model.run(None, {"input_ids": ids[:, start:end], **past}), strict=True)
        )
        np.testing.assert_allclose(outputs["logits"], expected[:, start:end], rtol=1e-3, atol=1e-3)
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
    assert past["past_key_values.1.value"].shape[2] == 7


@pytest.mark.parametrize("name", ["plain", "cache"])
def test_importer_finds_every_layer(name: str, folder: Path) -> None:
    model = import_onnx(folder / f"{name}.onnx")
    ops = Counter(node.op for node in model.nodes)
    assert ops["apq.Linear"] == 7 * CONFIG.layers + 1
    assert ops["apq.Embedding"] == 1
    linear = {node.name: node for node in model.nodes if node.op == "apq.Linear"}
    assert linear["model.layers.1.mlp.gate_proj"].attrs["activation"] == "silu"
    assert linear["lm_head"].inputs[1] == "model.embed_tokens.weight"  # tied, stored once


def test_the_form_of_onnx_runtime_is_the_same_model() -> None:
    model = smollm2_ort.build(CONFIG, WEIGHTS, bits=8, head=8)
    quantized = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in quantized.get_outputs()]
    ids = np.random.default_rng(2).integers(0, CONFIG.vocabulary, (1, 7))
    empty = np.zeros((1, CONFIG.kv_heads, 0, CONFIG.head_width), np.float32)
    kinds = [f"{layer}.{kind}" for layer in range(CONFIG.layers) for kind in ("key", "value")]
    past = {f"past_key_values.{kind}": empty for kind in kinds}
    logits = []
    for start, end in ((0, 4), (4, 5), (5, 7)):
        feeds = {"input_ids": ids[:, start:end], "attention_mask": np.ones((1, end), np.int64)}
        outputs = dict(zip(names, quantized.run(None, {**feeds, **past}), strict=True))
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
        logits.append(outputs["logits"][0])
    error = np.concatenate(logits) - forward(ids[0])
    assert np.abs(error).mean() < INT8_LOGITS * np.abs(forward(ids[0])).mean()


def test_rows_of_pairs_become_halves() -> None:
    halves = np.arange(2 * 6, dtype=np.float32).reshape(12, 1)  # 2 heads of 6 channels
    pairs = halves.reshape(2, 2, 3, 1).swapaxes(1, 2).reshape(12, 1)  # as llama.cpp converts
    assert pairs[:4, 0].tolist() == [0, 3, 1, 4]
    np.testing.assert_array_equal(smollm2.halves_from_pairs(pairs, 2), halves)


def test_gguf_file_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APQ_SMOLLM2", "/absent.gguf")
    with pytest.raises(FileNotFoundError, match=r"/absent\.gguf is not a file"):
        smollm2.find()


class Words:
    """A tokenizer whose tokens are the numbers in a text."""

    def encode(self, text: str) -> Any:
        return type("Encoding", (), {"ids": [int(w) for w in text.split() if w.isdigit()]})


def numbers(path: Path, count: int, first: int) -> Path:
    paragraphs = ["\n".join(f"{first + i + j:06d}" for j in range(50)) for i in range(0, count, 50)]
    text = "\n\n".join(["short", "| a | table |", *paragraphs])
    path.write_bytes(gzip.compress(text.encode()))
    return path


def test_calibration_and_evaluation_are_disjoint(tmp_path: Path) -> None:
    texts = [numbers(tmp_path / "a.gz", 9000, 0), numbers(tmp_path / "b.gz", 5000, 500_000)]
    seen = smollm2_text.calibration(Words(), texts, (5, 3))
    asked = smollm2_text.evaluation(Words(), texts, (4, 2))
    assert seen.shape == (8, 512) and asked.shape == (6, 512)
    assert seen.dtype == asked.dtype == np.int64
    assert not set(seen.flat) & set(asked.flat)
    assert len(set(asked.flat)) == asked.size
    assert (asked[:4] < 500_000).all() and (asked[4:] >= 500_000).all()
    with pytest.raises(ValueError, match=r"b\.gz: \d+ tokens, 9 windows of 512"):
        smollm2_text.evaluation(Words(), texts, (1, 9))
    with pytest.raises(FileNotFoundError, match="apt-get install jargon-text"):
        smollm2_text.evaluation(Words(), [tmp_path / "absent.gz"], (1,))


def test_slices_are_large_enough() -> None:
    predicted = sum(smollm2_text.EVALUATION_WINDOWS) * (smollm2_text.WINDOW - 1)
    assert predicted >= 8192
    assert sum(smollm2_text.CALIBRATION_WINDOWS) == 128


def test_table_is_sorted_by_bits() -> None:
    score = {"tokens": 9, "float_perplexity": 30.0, "kl_mean": 0.5, "top1": 0.9}
    results = [
        {"scheme": "cb3", "method": "rtn", "linear_bits_per_weight": 3.4,
         "language": {**score, "perplexity": 60.0, "ratio": 2.0}},
        {"scheme": "W8A8", "method": "gptq", "linear_bits_per_weight": 8.02,
         "language": {**score, "perplexity": 30.3, "ratio": 1.01}},
    ]  # fmt: skip
    lines = smollm2_table.markdown(results).splitlines()
    assert "9 tokens; float: perplexity 30.00" in lines[0]
    assert lines[4] == "| `W8A8` gptq | 8.020 | 30.30 | 1.0100 | 0.5000 | 90.0% |"
    assert lines[5] == "| `cb3` | 3.400 | 60.00 | 2.0000 | 0.5000 | 90.0% |"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """The weights above as llama.cpp stores them, with a tokenizer of bytes and one merge."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(CONFIG.layers)
    writer.add_embedding_length(CONFIG.width)
    writer.add_feed_forward_length(CONFIG.hidden)
    writer.add_vocab_size(CONFIG.vocabulary)
    writer.add_head_count(CONFIG.heads)
    writer.add_head_count_kv(CONFIG.kv_heads)
    writer.add_rope_freq_base(CONFIG.rope_base)
    writer.add_layer_norm_rms_eps(CONFIG.epsilon)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "1", "2", "Ġ", "ab", "12"])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_tensor("token_embd.weight", WEIGHTS["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", WEIGHTS["model.norm.weight"])
    for layer in range(CONFIG.layers):
        for name, stored in smollm2.LAYER_WEIGHTS.items():
            weight = WEIGHTS[f"model.layers.{layer}.{name}.weight"]
            heads = {"attn_q": CONFIG.heads, "attn_k": CONFIG.kv_heads}.get(stored)
            if heads:
                half = CONFIG.head_width // 2
                weight = weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)
            writer.add_tensor(f"blk.{layer}.{stored}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf"


def test_gguf_is_read_back(gguf_file: Path) -> None:
    config, weights = smollm2.read_gguf(gguf_file)
    assert weights.keys() == WEIGHTS.keys()
    for name, weight in WEIGHTS.items():
        np.testing.assert_array_equal(weights[name], weight, err_msg=name)
    assert config.epsilon == pytest.approx(CONFIG.epsilon)
    assert config.rope_base == CONFIG.rope_base
    assert (config.heads, config.kv_heads, config.head_width) == (4, 2, 16)


@pytest.mark.parametrize(("kind", "steps"), [("Q8_0", 127), ("Q4_0", 7)])
def test_gguf_is_rounded(kind: str, steps: int, gguf_file: Path, tmp_path: Path) -> None:
    rounded = smollm2_gguf.write(gguf_file, tmp_path / "rounded.gguf", kind)
    config, weights = smollm2.read_gguf(rounded)
    assert config == smollm2.read_gguf(gguf_file)[0]
    for name, weight in WEIGHTS.items():
        exact = weight.ndim == 1
        most = 127 if name == "model.embed_tokens.weight" else steps
        step = 0 if exact else np.abs(weight).max() / most
        np.testing.assert_allclose(weights[name], weight, atol=1.01 * step, err_msg=name)


def test_a_model_can_be_cut_short(gguf_file: Path, tmp_path: Path) -> None:
    path = smollm2.write(gguf_file, tmp_path / "short.onnx", layers=1)
    names = {node.name for node in onnx.load(path).graph.node}
    assert "model.layers.0.mlp.down_proj" in names and "lm_head" in names
    assert not any(name.startswith("model.layers.1.") for name in names)


def test_encoders_are_tabled_in_order() -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")
    import encoder_table

    row = {"bits": 4.5, "stored": 8.5, "none": 0.25, "calibrated": 0.125}
    tables = {name: dict.fromkeys(encoder_table.SCHEMES, row) for name in "ab"}
    rows = encoder_table.rows(encoder_table.SCHEMES, tables)
    assert [(row["scheme"], row["method"]) for row in rows] == list(encoder_table.SCHEMES)
    found = {"none": 0.25, "calibrated": 0.125}
    assert (rows[0]["bits"], rows[0]["stored"]) == (4.5, 8.5)
    assert rows[0]["errors"] == {"a": found, "b": found}


def test_tokenizer_splits_digits(gguf_file: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = smollm2.read_tokenizer(gguf_file)
    assert tokenizer.encode("ab 12ab").tokens == ["ab", "Ġ", "1", "2", "ab"]
