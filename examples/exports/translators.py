"""Encoders with decoders by transformers: T5, Whisper, Marian, BART."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from .one import Axes, Export, Inputs, Plain
from .text import caches, flat, grouped

KINDS = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
PRESENT = tuple(f"present.{layer}.{kind}" for layer in range(2) for kind in KINDS)
AXES: Axes = {
    "input_ids": {0: "batch", 1: "sequence"},
    "encoder_hidden_states": {0: "batch", 1: "source"},
    "encoder_attention_mask": {0: "batch", 1: "source"},
    "logits": {0: "batch", 1: "sequence"},
    **{
        f"{side}.{layer}.{kind}": {0: "batch", 2: "source" if "encoder" in kind else length}
        for side, length in (("past_key_values", "past"), ("present", "past + sequence"))
        for layer in range(2)
        for kind in KINDS
    },
}


def configurations() -> dict[str, tuple[Any, Any]]:
    """Class and configuration of each, by name."""
    import transformers as t

    bart = {
        "vocab_size": 99, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }  # fmt: skip
    whisper = t.WhisperConfig(
        **bart, num_mel_bins=16, max_source_positions=50, max_target_positions=32,
        suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    return {
        "whisper": (t.WhisperForConditionalGeneration, whisper),
        "t5": (t.T5ForConditionalGeneration, t.T5Config(
            vocab_size=99, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        )),
        "marian": (t.MarianMTModel, t.MarianConfig(**bart, max_position_embeddings=64)),
        "bart": (t.BartForConditionalGeneration, t.BartConfig(**bart, max_position_embeddings=64)),
    }  # fmt: skip


def first(model: Any, ids: torch.Tensor, hidden: torch.Tensor, *mask: torch.Tensor) -> Any:
    """The step without a cache."""
    words = {"attention_mask": mask[0]} if mask else {}
    out = model(decoder_input_ids=ids, encoder_outputs=(hidden,), use_cache=True, **words)
    return (out.logits, *flat(out.past_key_values))


def later(model: Any, ids: torch.Tensor, hidden: torch.Tensor, *rest: torch.Tensor) -> Any:
    """A step that goes on; a mask comes before the caches."""
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    words = {"attention_mask": rest[0]} if len(rest) % 2 else {}
    past = grouped(rest[len(rest) % 2 :], 4)
    cache = EncoderDecoderCache(
        DynamicCache.from_legacy_cache(tuple(layer[:2] for layer in past)),
        DynamicCache.from_legacy_cache(tuple(layer[2:] for layer in past)),
    )
    out = model(
        decoder_input_ids=ids, encoder_outputs=(hidden,), past_key_values=cache, use_cache=True,
        **words,
    )  # fmt: skip
    return (out.logits, *flat(out.past_key_values))


def given(masked: bool, length: int = 4) -> Inputs:
    """Ids, what the encoder said, and its mask; the last row is shorter."""
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[-1, 5:] = 0
    masks = {"encoder_attention_mask": mask} if masked else {}
    return {
        "input_ids": torch.randint(3, 99, (2, length)),
        "encoder_hidden_states": torch.randn(2, 7, 64),
        **masks,
    }


def after(masked: bool) -> Inputs:
    """One more word, and caches of 5 words and of the 7 the encoder read."""
    own = caches(2, KINDS[:2], 2, 4, 5, 16) | caches(2, KINDS[2:], 2, 4, 7, 16)
    names = [f"past_key_values.{layer}.{kind}" for layer in range(2) for kind in KINDS]
    return given(masked, length=1) | {name: own[name] for name in names}


def translators() -> Iterator[Export]:
    """Encoders and decoders, each with and without a cache."""
    import transformers as t

    known = configurations()
    yield Export(
        "whisper_encoder",
        lambda: Plain(t.WhisperModel(known["whisper"][1]).encoder, lambda m, x: m(x)[0]),
        lambda: {"input_features": torch.randn(2, 16, 100)},
        {"input_features": {0: "batch"}, "output": {0: "batch"}},
    )
    for name, (kind, config) in known.items():
        make = partial(kind._from_config, config, attn_implementation="eager")
        for step, call, inputs in (("decoder", first, given), ("with_past", later, after)):
            yield Export(
                f"{name}_{step}",
                lambda make=make, call=call: Plain(make(), call),
                partial(inputs, name != "whisper"),
                AXES,
                ("logits", *PRESENT),
                ("script",),
            )
