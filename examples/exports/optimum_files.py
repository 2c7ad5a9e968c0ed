"""What optimum exports, one file or several each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


def optimum_models() -> Iterator[tuple[str, Callable[[], nn.Module], str]]:
    """Name, model and task."""
    import transformers as t

    text, speech = "text2text-generation-with-past", "automatic-speech-recognition-with-past"
    words, causal_task = "text-classification", "text-generation-with-past"
    sizes = {
        "vocab_size": 99, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    causal = {**sizes, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    t5 = t.T5Config(
        vocab_size=99, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    whisper = t.WhisperConfig(
        vocab_size=99, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, num_mel_bins=80,
        max_target_positions=32,
    )  # fmt: skip
    gpt2 = t.GPT2Config(vocab_size=99, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    distilbert = t.DistilBertConfig(vocab_size=99, dim=64, n_layers=2, n_heads=4, hidden_dim=128)
    deberta = t.DebertaV2Config(
        **sizes, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16,
        norm_rel_ebd="layer_norm", share_att_key=True, max_relative_positions=-1,
    )  # fmt: skip
    for name, kind, config, task in (
        ("gpt2", t.GPT2LMHeadModel, gpt2, causal_task),
        ("llama", t.LlamaForCausalLM, t.LlamaConfig(**causal), causal_task),
        ("qwen3", t.Qwen3ForCausalLM, t.Qwen3Config(**causal, head_dim=16), causal_task),
        ("gemma", t.GemmaForCausalLM, t.GemmaConfig(**causal, head_dim=16), causal_task),
        ("t5", t.T5ForConditionalGeneration, t5, text),
        ("whisper", t.WhisperForConditionalGeneration, whisper, speech),
        ("distilbert", t.DistilBertForSequenceClassification, distilbert, words),
        ("deberta_v2", t.DebertaV2ForSequenceClassification, deberta, words),
    ):
        yield name, partial(kind, config), task


SIZES = {
    "batch_size": 2, "sequence_length": 3, "past_sequence_length": 5, "feature_size": 80,
    "encoder_sequence_length": 7, "past_decoder_sequence_length": 5,
    "encoder_sequence_length_out": 7,
}  # fmt: skip


def plausible(path: Path, cached: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs of a file of optimum's, whose dimensions are named by sums of `SIZES`."""
    import onnx

    rng, made = np.random.default_rng(0), {}
    sizes = {**SIZES, "decoder_sequence_length": 1 if cached else 4}
    for given in onnx.load(path, load_external_data=False).graph.input:
        dims = given.type.tensor_type.shape.dim
        shape = [
            d.dim_value or sum(sizes[name.strip()] for name in d.dim_param.split("+")) for d in dims
        ]
        kind = onnx.helper.tensor_dtype_to_np_dtype(given.type.tensor_type.elem_type)
        if "position_ids" in given.name:
            value = np.broadcast_to(np.arange(5, 5 + shape[1]), shape)
        elif "mask" in given.name or kind.kind == "b":
            value = np.ones(shape)
        else:
            value = (
                rng.integers(3, 99, shape) if kind == np.int64 else 0.5 * rng.standard_normal(shape)
            )
        made[given.name] = value.astype(kind)
    return made


def export_optimum(folder: Path, only: str) -> None:
    """``optimum/NAME_PART.onnx`` of `optimum_models`."""
    from optimum.exporters.onnx import onnx_export_from_model

    (folder / "optimum").mkdir(parents=True, exist_ok=True)
    for name, make, task in optimum_models():
        if only not in f"optimum {name}":
            continue
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as place:
            onnx_export_from_model(make().eval(), Path(place), task=task, do_validation=False)
            for file in Path(place).glob("*.onnx"):
                stem = name if file.stem == "model" else f"{name}_{file.stem}"
                path = folder / "optimum" / f"{stem}.onnx"
                path.write_bytes(file.read_bytes())
                cached = "past" in stem or "merged" in stem
                np.savez(path.with_suffix(".npz"), **plausible(path, cached))
                print(path, flush=True)
