"""Makes ONNX files of torchvision's and transformers' models, with small random weights.

``python examples/export_models.py FOLDER [--only TEXT]`` writes ``torchvision/``, ``transformers/``
and ``optimum/NAME.onnx``, and inputs that make sense as ``.npz`` beside each, for
``examples/measure_models.py --exports FOLDER``. torch's two exporters both try their models.

It needs, beside the project's torch, in a folder that ``PYTHONPATH`` names: ``pip install --no-deps
--target FOLDER torchvision==0.28.0 transformers==4.57.1 huggingface_hub==0.36.0 tokenizers==0.22.1
optimum==2.0.0 optimum-onnx==0.1.0 onnxscript onnx_ir regex requests urllib3 idna certifi
charset_normalizer pyyaml tqdm filelock packaging``.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

# PyPI's torchvision has its own operators for CUDA's torch alone; the models need none.
OPERATORS = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

Inputs = dict[str, torch.Tensor]
Axes = dict[str, dict[int, str]]


@dataclass(frozen=True)
class Export:
    """One model.

    Parameters
    ----------
    name : str
    make : callable
        The module, in inference mode.
    inputs : callable
        Tensors by name, in the order of the module's arguments.
    axes : mapping
        Names of the dimensions that stay symbolic, by input or output and position.
    outputs : tuple of str
    exporters : tuple of str
        ``"script"`` (TorchScript) and ``"dynamo"``.
    opset : int
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    axes: Axes
    outputs: tuple[str, ...] = ("output",)
    exporters: tuple[str, ...] = ("script", "dynamo")
    opset: int = 17

    def write(self, folder: Path, exporter: str) -> Path:
        """Export and keep the inputs beside it."""
        torch.manual_seed(0)
        model, inputs = self.make().eval(), self.inputs()
        path = folder / f"{self.name}{'' if exporter == 'script' else '_dynamo'}.onnx"
        common = {"input_names": list(inputs), "output_names": list(self.outputs)}
        with torch.no_grad():
            if exporter == "script":
                torch.onnx.export(
                    model, tuple(inputs.values()), path, dynamo=False, opset_version=self.opset,
                    dynamic_axes=self.axes, **common,
                )  # fmt: skip
            else:
                dims = {
                    name: torch.export.Dim.AUTO
                    for axes in self.axes.values()
                    for name in axes.values()
                }
                shapes = tuple(
                    {axis: dims[name] for axis, name in self.axes.get(key, {}).items()}
                    for key in inputs
                )
                torch.onnx.export(
                    model, tuple(inputs.values()), path, dynamo=True, dynamic_shapes=shapes,
                    external_data=False, **common,
                )  # fmt: skip
        np.savez(path.with_suffix(".npz"), **{k: v.numpy() for k, v in inputs.items()})
        return path


def pictures(count: int = 2, size: int = 224) -> Callable[[], Inputs]:
    """Smooth patches, normalised as ImageNet's."""

    def make() -> Inputs:
        import zoo

        draw = zoo.picture(*zoo.IMAGENET)
        made = draw(np.random.default_rng(0), (count, 3, size, size))
        return {"input": torch.tensor(made, dtype=torch.float32)}

    return make


def sane(model: nn.Module) -> nn.Module:
    """Norms as training leaves them, with random weights: no layer dies out."""
    generator = torch.Generator().manual_seed(1)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d | nn.BatchNorm1d):
            part.weight.data = 0.6 + 0.8 * torch.rand(part.weight.shape, generator=generator)
            part.bias.data = 0.2 * torch.randn(part.bias.shape, generator=generator)
            part.track_running_stats = True
    return model


def settled(make: Callable[[], nn.Module], size: int = 224) -> Callable[[], nn.Module]:
    """The model after its norms saw some images, which is what keeps random depths alive."""

    def build() -> nn.Module:
        model = sane(make()).train()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            if isinstance(part, nn.BatchNorm2d):
                part.momentum = None
        with torch.no_grad():
            for _ in range(2):
                model(pictures(4, size)()["input"] + 0.05 * torch.randn(4, 3, size, size))
        return model.eval()

    return build


def vision() -> Iterator[Export]:
    """Classifiers by torchvision."""
    import torchvision.models as zoo_of_torch

    names = (
        "resnet18", "resnet50", "mobilenet_v3_small", "efficientnet_b0", "densenet121",
        "shufflenet_v2_x0_5", "convnext_tiny", "swin_t", "vit_b_16", "squeezenet1_1", "mnasnet0_5",
        "regnet_y_400mf", "inception_v3", "googlenet", "maxvit_t", "swin_v2_t", "vgg11_bn",
        "alexnet",
    )  # fmt: skip
    for name in names:
        build = getattr(zoo_of_torch, name)
        more = (
            {"init_weights": True, "aux_logits": False}
            if name in ("googlenet", "inception_v3")
            else {}
        )
        make = settled(lambda build=build, more=more: build(weights=None, **more))
        yield Export(name, make, pictures(), {"input": {0: "batch"}, "output": {0: "batch"}})


class Plain(nn.Module):
    """A transformers model as a function of tensors that gives tensors."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.call(self.model, *tensors)


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


def _grouped(tensors: tuple[torch.Tensor, ...], count: int) -> tuple[tuple[torch.Tensor, ...], ...]:
    return tuple(tensors[i : i + count] for i in range(0, len(tensors), count))


def _flat(cache: Any) -> tuple[torch.Tensor, ...]:
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
            return (out.logits, *_flat(out.past_key_values))

        def later(m: Any, ids: torch.Tensor, mask: torch.Tensor, *past: torch.Tensor) -> Any:
            cache = DynamicCache.from_legacy_cache(_grouped(past, 2))
            out = m(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            return (out.logits, *_flat(out.past_key_values))

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
            ("script",),
        )


def translators() -> Iterator[Export]:
    """Encoders and decoders: T5, Whisper, Marian, BART."""
    import transformers as t
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

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
    yield Export(
        "whisper_encoder",
        lambda: Plain(t.WhisperModel(whisper).encoder, lambda m, x: m(x)[0]),
        lambda: {"input_features": torch.randn(2, 16, 100)},
        {"input_features": {0: "batch"}, "output": {0: "batch"}},
    )
    models = {
        "whisper": (t.WhisperForConditionalGeneration, whisper),
        "t5": (t.T5ForConditionalGeneration, t.T5Config(
            vocab_size=99, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        )),
        "marian": (t.MarianMTModel, t.MarianConfig(**bart, max_position_embeddings=64)),
        "bart": (t.BartForConditionalGeneration, t.BartConfig(**bart, max_position_embeddings=64)),
    }  # fmt: skip
    kinds = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
    present = tuple(f"present.{layer}.{kind}" for layer in range(2) for kind in kinds)
    axes: Axes = {
        "input_ids": {0: "batch", 1: "sequence"},
        "encoder_hidden_states": {0: "batch", 1: "source"},
        "encoder_attention_mask": {0: "batch", 1: "source"},
        "logits": {0: "batch", 1: "sequence"},
        **{
            f"{side}.{layer}.{kind}": {0: "batch", 2: "source" if "encoder" in kind else length}
            for side, length in (("past_key_values", "past"), ("present", "past + sequence"))
            for layer in range(2)
            for kind in kinds
        },
    }
    for name, (kind, config) in models.items():

        def first(m: Any, ids: torch.Tensor, hidden: torch.Tensor, *mask: torch.Tensor) -> Any:
            words = {"attention_mask": mask[0]} if mask else {}
            out = m(
                decoder_input_ids=ids, encoder_outputs=(hidden,), use_cache=True, **words
            )  # fmt: skip
            return (out.logits, *_flat(out.past_key_values))

        def later(m: Any, ids: torch.Tensor, hidden: torch.Tensor, *rest: torch.Tensor) -> Any:
            words = {"attention_mask": rest[0]} if len(rest) % 2 else {}
            past = _grouped(rest[len(rest) % 2 :], 4)
            cache = EncoderDecoderCache(
                DynamicCache.from_legacy_cache(tuple(layer[:2] for layer in past)),
                DynamicCache.from_legacy_cache(tuple(layer[2:] for layer in past)),
            )
            out = m(
                decoder_input_ids=ids, encoder_outputs=(hidden,), past_key_values=cache,
                use_cache=True, **words,
            )  # fmt: skip
            return (out.logits, *_flat(out.past_key_values))

        def given(name: str = name, length: int = 4) -> Inputs:
            mask = torch.ones(2, 7, dtype=torch.int64)
            mask[-1, 5:] = 0
            masks = {} if name == "whisper" else {"encoder_attention_mask": mask}
            return {
                "input_ids": torch.randint(3, 99, (2, length)),
                "encoder_hidden_states": torch.randn(2, 7, 64),
                **masks,
            }

        def after(given: Any = given) -> Inputs:
            past = caches(2, kinds, 2, 4, 5, 16)
            past = {
                k: v.repeat(1, 1, 2, 1)[:, :, :7] if "encoder" in k else v for k, v in past.items()
            }
            return {**given(length=1), **past}

        make = partial(kind._from_config, config, attn_implementation="eager")
        for step, call, inputs in (("decoder", first, given), ("with_past", later, after)):
            yield Export(
                f"{name}_{step}",
                lambda make=make, call=call: Plain(make(), call),
                inputs,
                axes,
                ("logits", *present),
                ("script",),
            )


def optimum_models() -> Iterator[tuple[str, Callable[[], nn.Module], str]]:
    """Name, model and task of what optimum exports, one file or several each."""
    import transformers as t

    text, speech = "text2text-generation-with-past", "automatic-speech-recognition-with-past"
    sizes = {
        "vocab_size": 99, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    causal = {**sizes, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    yield (
        "gpt2",
        lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=99, n_embd=64, n_layer=2, n_head=4, n_positions=64)
        ),
        "text-generation-with-past",
    )
    for name, kind, config in (
        ("llama", t.LlamaForCausalLM, t.LlamaConfig(**causal)),
        ("qwen3", t.Qwen3ForCausalLM, t.Qwen3Config(**causal, head_dim=16)),
        ("gemma", t.GemmaForCausalLM, t.GemmaConfig(**causal, head_dim=16)),
    ):
        yield name, lambda kind=kind, config=config: kind(config), "text-generation-with-past"
    yield (
        "t5",
        lambda: t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=99,
                d_model=64,
                d_kv=16,
                d_ff=128,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
            )
        ),
        text,
    )
    yield (
        "whisper",
        lambda: t.WhisperForConditionalGeneration(
            t.WhisperConfig(
                vocab_size=99,
                d_model=64,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=128,
                decoder_ffn_dim=128,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
                num_mel_bins=80,
                max_target_positions=32,
            )
        ),
        speech,
    )
    yield (
        "distilbert",
        lambda: t.DistilBertForSequenceClassification(
            t.DistilBertConfig(vocab_size=99, dim=64, n_layers=2, n_heads=4, hidden_dim=128)
        ),
        "text-classification",
    )


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
    import tempfile

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--exporter", default="")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for place, group in GROUPS:
        if arguments.only.partition(" ")[0] not in (*dict(GROUPS), "optimum", ""):
            parser.error("--only begins with torchvision, transformers or optimum")
        if not place.startswith(arguments.only.partition(" ")[0]):
            continue
        folder = arguments.folder / place
        folder.mkdir(parents=True, exist_ok=True)
        for export in group():
            if arguments.only not in f"{place} {export.name}":
                continue
            for exporter in export.exporters:
                if arguments.exporter not in exporter:
                    continue
                try:
                    print(export.write(folder, exporter), flush=True)
                except Exception:
                    # What an exporter cannot do is its own affair; the others go on.
                    last = traceback.format_exc().strip().splitlines()[-1]
                    print(f"{export.name} {exporter}: {last[:300]}", file=sys.stderr, flush=True)
    if arguments.only.startswith("optimum") or not arguments.only:
        export_optimum(arguments.folder, arguments.only)


GROUPS = (
    ("torchvision", vision),
    ("transformers", encoders),
    ("transformers", decoders),
    ("transformers", translators),
)

if __name__ == "__main__":
    main()
