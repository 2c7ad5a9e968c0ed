"""Small encoders of text and language models by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from .one import Axes, Export, Inputs, Plain


def words(rows: int = 2, length: int = 7, count: int = 99) -> Inputs:
    """Ids and their mask; the last row is shorter."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[-1, length - 2 :] = 0
    return {"input_ids": torch.randint(3, count, (rows, length)), "attention_mask": mask}


def caches(
    layers: int, kinds: tuple[str, ...], rows: int, heads: int, past: int, size: int
) -> Inputs:
    """Keys and values of earlier positions."""
    return {
        f"past_key_values.{layer}.{kind}": 0.5 * torch.randn(rows, heads, past, size)
        for layer in range(layers)
        for kind in kinds
    }


_TEXT: Axes = {
    "input_ids": {0: "batch", 1: "sequence"},
    "attention_mask": {0: "batch", 1: "sequence"},
    "decoder_input_ids": {0: "batch", 1: "target"},
}


def encoders() -> Iterator[Export]:
    """Small encoders of text."""
    import transformers as t

    common = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    wide = {
        **common,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
    }
    configs = {
        "distilbert": t.DistilBertConfig(
            vocab_size=99, dim=64, n_layers=2, n_heads=4, hidden_dim=128
        ),
        "deberta_v2": t.DebertaV2Config(
            **wide, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16,
            norm_rel_ebd="layer_norm", share_att_key=True, max_relative_positions=-1,
        ),
        "bert": t.BertConfig(**wide),
        "roberta": t.RobertaConfig(**wide),
        "electra": t.ElectraConfig(**wide, embedding_size=32),
        "mpnet": t.MPNetConfig(**wide),
        "albert": t.AlbertConfig(**wide, embedding_size=32),
        "modernbert": t.ModernBertConfig(
            **wide, global_attn_every_n_layers=2, local_attention=4, pad_token_id=0, cls_token_id=1,
            sep_token_id=2, bos_token_id=1, eos_token_id=2,
        ),
        "t5_encoder": t.T5Config(
            vocab_size=99, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
            feed_forward_proj="gated-gelu",
        ),
    }  # fmt: skip
    for name, config in configs.items():
        build = t.T5EncoderModel if name == "t5_encoder" else t.AutoModel.from_config
        yield Export(
            name,
            lambda build=build, config=config: Plain(
                build(config), lambda m, i, a: m(input_ids=i, attention_mask=a)[0]
            ),
            words,
            {**_TEXT, "output": {0: "batch", 1: "sequence"}},
        )


def _cached(layers: int, kinds: tuple[str, ...], past: str) -> Axes:
    """Axes of caches that go in (`past` names their length) and come out."""
    return {
        f"{side}.{layer}.{kind}": {
            0: "batch",
            2: past if side == "past_key_values" else f"{past} + 1",
        }
        for side in ("past_key_values", "present")
        for layer in range(layers)
        for kind in kinds
    }


def grouped(tensors: tuple[torch.Tensor, ...], count: int) -> tuple[tuple[torch.Tensor, ...], ...]:
    """`count` tensors a layer."""
    return tuple(tensors[i : i + count] for i in range(0, len(tensors), count))


def flat(cache: Any) -> tuple[torch.Tensor, ...]:
    """All keys and values of a cache, layer by layer."""
    legacy = cache.to_legacy_cache() if hasattr(cache, "to_legacy_cache") else cache
    return tuple(tensor for layer in legacy for tensor in layer)


def decoders() -> Iterator[Export]:
    """Language models with caches: a first step without any and one that goes on."""
    import transformers as t
    from transformers.cache_utils import DynamicCache

    llama = {
        "vocab_size": 99, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "attn_implementation": "eager", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    configs = {
        "gpt2": (t.GPT2Config(vocab_size=99, n_embd=64, n_layer=2, n_head=4, n_positions=64), 4),
        "llama": (t.LlamaConfig(**llama), 2),
        "qwen3": (t.Qwen3Config(**llama, head_dim=16), 2),
        "gemma2": (t.Gemma2Config(
            **llama, head_dim=16, query_pre_attn_scalar=16, sliding_window=4
        ), 2),
        "phi3": (t.Phi3Config(**llama), 2),
        "opt": (t.OPTConfig(
            vocab_size=99, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, word_embed_proj_dim=64,
        ), 4),
        "bloom": (t.BloomConfig(vocab_size=99, hidden_size=64, n_layer=2, n_head=4), 4),
        "gpt_neox": (t.GPTNeoXConfig(
            vocab_size=99, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64,
        ), 4),
    }  # fmt: skip
    kinds = ("key", "value")
    axes = {**_TEXT, "logits": {0: "batch", 1: "sequence"}}
    present = tuple(f"present.{layer}.{kind}" for layer in range(2) for kind in kinds)
    for name, (config, heads) in configs.items():
        make = partial(t.AutoModelForCausalLM.from_config, config, attn_implementation="eager")

        def first(m: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
            out = m(input_ids=ids, attention_mask=mask, use_cache=True)
            return (out.logits, *flat(out.past_key_values))

        def later(m: Any, ids: torch.Tensor, mask: torch.Tensor, *past: torch.Tensor) -> Any:
            cache = DynamicCache.from_legacy_cache(grouped(past, 2))
            out = m(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            return (out.logits, *flat(out.past_key_values))

        outputs = ("logits", *present)
        yield Export(
            f"{name}_decoder",
            lambda make=make, first=first: Plain(make(), first),
            lambda: words(length=6),
            {**axes, **{k: v for k, v in _cached(2, kinds, "past").items() if "present" in k}},
            outputs,
            ("script",),
        )
        yield Export(
            f"{name}_with_past",
            lambda make=make, later=later: Plain(make(), later),
            lambda heads=heads: {
                "input_ids": torch.randint(3, 99, (2, 3)),
                "attention_mask": torch.ones(2, 8, dtype=torch.int64),
                **caches(2, kinds, 2, heads, 5, 16),
            },
            {
                **axes,
                "attention_mask": {0: "batch", 1: "past + sequence"},
                **_cached(2, kinds, "past"),
            },
            outputs,
        )
