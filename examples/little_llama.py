"""A language model whose weights never were quantized: a Llama of 12 million weights, trained here.

SmolLM2's weights, the only language model that installs by name, come from a 4-bit file, so that
some of what schemes lose on it is that file's. This one is trained in float32 on Perl's manual (the
Debian package ``perl-doc``; its prose is 6 MB), of which every tenth page is kept apart for
evaluation. Schemes are measured as in SmolLM2's table, by one command: training takes 20 minutes
on two cores, the table half an hour. Both go on where they were interrupted.

``apt-get install perl-doc; pip install torch tokenizers; python examples/little_llama.py folder``
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import doc_tables
import encoder_table
import measured
import numpy as np
import smollm2
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from apq_tvm.calibrate import calibrate
from apq_tvm.cli.console import Bars
from apq_tvm.errors import ApqError
from apq_tvm.evaluation.language import Language
from apq_tvm.evaluation.results import Results, run_key
from apq_tvm.evaluation.schemes import SchemeEvaluator
from apq_tvm.files import replacing
from apq_tvm.onnx_import import import_onnx

PODS = Path("/usr/share/perl")
"""Where Debian's ``perl-doc`` has the manual: ``VERSION/pod/*.pod``."""

CONFIG = smollm2.Config(
    layers=6, width=384, hidden=1024, vocabulary=4096, heads=6, kv_heads=2, rope_base=1e4,
    epsilon=1e-5,
)  # fmt: skip

WINDOW, BATCH = 256, 16
"""Tokens of a sequence to train on, and sequences of a step."""

STEPS, RATE = 1200, 2e-3
"""Of training, about three passes over the text; the rate falls to a tenth by a cosine."""

WARMING = 50
"""Steps in which the rate rises."""

SAVED = 100
"""Steps between two saves."""

SAMPLES, EVALUATED, TOKENS = 128, 18, 512
"""Windows that are calibrated on and that are evaluated, and their tokens."""

SCHEMES = (*encoder_table.SCHEMES, ("W4A8", "gptq"), ("W4zA8g128", "gptq"), ("W2A8g128", "gptq"))
"""Those of the encoders, with some more."""

FLOAT_LAYERS = {"lm_head|embed_tokens": "float"}


def prose(folder: Path = PODS) -> tuple[str, str]:
    """Paragraphs of the manual: those to train on, and those of every tenth page.

    Raises
    ------
    FileNotFoundError
        It is not installed.
    """
    pages = {path.name: path for path in sorted(folder.glob("*/pod/*.pod"))}
    if not pages:
        raise FileNotFoundError(f"{folder}: apt-get install perl-doc")
    halves: tuple[list[str], list[str]] = ([], [])
    for number, path in enumerate(pages.values()):
        text = path.read_text(encoding="utf-8", errors="replace")
        for part in re.split(r"\n\s*\n", text):
            plain = " ".join(part.split())
            if not part.startswith(("=", " ", "\t")) and len(plain) >= 60:
                halves[number % 10 == 9].append(plain)
    return "\n\n".join(halves[0]), "\n\n".join(halves[1])


def trained_tokenizer(text: str) -> Any:
    """Byte-level BPE of the text."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=CONFIG.vocabulary, show_progress=False)
    return tokenizer


def shapes(c: smollm2.Config) -> dict[str, tuple[int, ...]]:
    """Of all weights, by Hugging Face's names."""
    keys = c.kv_heads * c.head_width
    linear = {
        "q_proj": (c.width, c.width), "k_proj": (keys, c.width), "v_proj": (keys, c.width),
        "o_proj": (c.width, c.width), "gate_proj": (c.hidden, c.width),
        "up_proj": (c.hidden, c.width), "down_proj": (c.width, c.hidden),
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocabulary, c.width),
        "model.norm.weight": (c.width,),
    }
    for layer in range(c.layers):
        for name in smollm2.LAYER_WEIGHTS:
            shape = linear.get(name.rpartition(".")[2], (c.width,))
            found[f"model.layers.{layer}.{name}.weight"] = shape
    return found


class Llama(torch.nn.Module):
    """What `smollm2.build` writes, to be trained."""

    def __init__(self, config: smollm2.Config) -> None:
        super().__init__()
        self.c = config
        torch.manual_seed(0)
        self.names = list(shapes(config))
        deep = 0.02 / math.sqrt(2 * config.layers)  # of what is added to the residual stream
        made = []
        for name, shape in shapes(config).items():
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            value = torch.randn(shape) * (deep if small else 0.02)
            made.append(torch.nn.Parameter(value if len(shape) == 2 else torch.ones(shape)))
        self.values = torch.nn.ParameterList(made)

    def weights(self) -> dict[str, torch.Tensor]:
        """By Hugging Face's names."""
        return dict(zip(self.names, self.values, strict=True))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, vocabulary] of ids [B, S]."""
        c, w = self.c, self.weights()
        batch, length = ids.shape
        half = c.head_width // 2
        angle = torch.arange(length)[:, None] * c.rope_base ** (-torch.arange(half) / half)
        cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.rms_norm(x, (c.width,), w[name], c.epsilon)

        def heads(x: torch.Tensor, count: int) -> torch.Tensor:
            return x.reshape(batch, length, count, c.head_width).transpose(1, 2)

        def turned(x: torch.Tensor) -> torch.Tensor:
            other = torch.cat([-x[..., half:], x[..., :half]], -1)
            return x * cos.to(x.dtype) + other * sin.to(x.dtype)

        x = F.embedding(ids, w["model.embed_tokens.weight"])
        for layer in range(c.layers):
            at = f"model.layers.{layer}"
            y = norm(x, f"{at}.input_layernorm.weight")
            q, k, v = (F.linear(y, w[f"{at}.self_attn.{n}_proj.weight"]) for n in "qkv")
            q, k = turned(heads(q, c.heads)), turned(heads(k, c.kv_heads))
            k, v = (
                t.repeat_interleave(c.heads // c.kv_heads, 1) for t in (k, heads(v, c.kv_heads))
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y.transpose(1, 2).reshape(batch, length, c.width)
            x = x + F.linear(y, w[f"{at}.self_attn.o_proj.weight"])
            y = norm(x, f"{at}.post_attention_layernorm.weight")
            gate, up = (F.linear(y, w[f"{at}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, w[f"{at}.mlp.down_proj.weight"])
        return F.linear(norm(x, "model.norm.weight"), w["model.embed_tokens.weight"])


def train(ids: NDArray[np.int64], checkpoint: Path, steps: int = STEPS) -> Llama:
    """Train on a text's tokens; goes on from the checkpoint if there is one."""
    model = Llama(CONFIG)
    both = list(model.parameters())
    flat, gains = ([p for p in both if (p.ndim > 1) == many] for many in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": flat, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}],
        lr=RATE, betas=(0.9, 0.95),
    )  # fmt: skip
    first = 0
    if checkpoint.exists():
        kept = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        first = kept["step"]
    progress = Bars()
    with progress.stage("train", steps - first):
        for step, rows in zip(range(first, steps), batches(ids, first), strict=False):
            for group in optimizer.param_groups:
                falling = 0.55 + 0.45 * math.cos(math.pi * step / steps)
                group["lr"] = RATE * min((step + 1) / WARMING, falling)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.advance(f"loss {loss.item():.3f}")
            if (step + 1) % SAVED == 0 or step + 1 == steps:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                with replacing(checkpoint) as beside:
                    torch.save({**state, "step": step + 1}, beside)
    return model


def batches(ids: NDArray[np.int64], step: int) -> Iterator[torch.Tensor]:
    """Windows at places that the number of a step says."""
    while True:
        rng = np.random.default_rng(step)
        starts = rng.integers(0, len(ids) - WINDOW - 1, BATCH)
        yield torch.from_numpy(np.stack([ids[at : at + WINDOW + 1] for at in starts]))
        step += 1


def windows(ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """int64 [count, TOKENS], spread evenly over a text."""
    stride = len(ids) // count
    return np.stack([ids[i * stride : i * stride + TOKENS] for i in range(count)])


def prepare(folder: Path, steps: int) -> tuple[Path, Path, Path]:
    """The model, and windows to calibrate on and to evaluate."""
    model, data, apart = (
        folder / name for name in ("little.onnx", "calibration.npz", "evaluation.npz")
    )
    if not model.exists():
        text, other = prose()
        tokenizer = trained_tokenizer(text)
        ids, judged = (np.array(tokenizer.encode(t).ids, np.int64) for t in (text, other))
        print(f"{len(ids)} tokens to train on, {len(judged)} kept apart")
        np.savez(data, input_ids=windows(ids, SAMPLES))
        np.savez(apart, input_ids=windows(judged, EVALUATED))
        made = train(ids, folder / "training.pt", steps)
        weights = {name: w.detach().numpy() for name, w in made.weights().items()}
        with replacing(model) as beside:
            beside.write_bytes(smollm2.build(CONFIG, weights).SerializeToString())
    return model, data, apart


def measure(
    onnx: Path, data: Path, apart: Path, chosen: Sequence[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Rows of docs/measured/little.json: without a calibration, and with one."""
    model, statistics = import_onnx(onnx), onnx.with_suffix(".safetensors")
    calibrate(onnx, data, statistics, rows=1, force=True, reuse=True, progress=Bars())
    language = Language(tokens="input_ids", logits="logits", window=TOKENS, min_tokens=8192)
    key = run_key(model.sha256, apart, calibration=statistics, float_layers=FLOAT_LAYERS)
    kept = Results(onnx.with_suffix(".partial.json"), key)
    rows = []
    for calibration in (None, statistics):
        with SchemeEvaluator(
            model, apart, language=language, calibration=calibration, tensor_types=FLOAT_LAYERS,
            layers=False, progress=Bars(),
        ) as evaluator:  # fmt: skip
            for scheme, asked in chosen:
                method = asked if calibration else "none"
                result = kept.get(f"{scheme} {method}")
                if result is None:
                    result = evaluator.evaluate(scheme, asked if calibration else "rtn")
                    kept.put(f"{scheme} {method}", result)
                score = result["language"]
                rows.append({
                    "scheme": scheme, "method": method,
                    "float": float(f"{score['float_perplexity']:.5g}"),
                    "bits": round(result["linear_bits_per_weight"], 3),
                    "stored": round(result["linear_stored_bits_per_weight"], 3),
                    "ratio": float(f"{score['ratio']:.5g}"), "kl": float(f"{score['kl_mean']:.5g}"),
                    "same_top": float(f"{score['top1']:.5g}"),
                })  # fmt: skip
                print(scheme, method, f"{score['ratio']:.4f} {score['kl_mean']:.4f}", flush=True)
    return rows


def main() -> None:
    """Train the model and measure rows of docs/accuracy.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="gets the model and what belongs to it")
    parser.add_argument("--only", default="", help="schemes that hold this; other rows stay")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    chosen = [row for row in SCHEMES if options.only in row[0]]
    try:
        found = measure(*prepare(options.folder, options.steps), chosen)
    except (ApqError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    measured.store("little", found, merge_by=("scheme", "method"))
    doc_tables.render_all()


if __name__ == "__main__":
    main()
