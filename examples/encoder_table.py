"""The schemes of SmolLM2's table in docs/accuracy.md on two sentence encoders, fp32 to begin with.

It shows which of SmolLM2's gaps are that model's own, whose weights come from a 4-bit file. Kept is
the relative error of sentence embeddings against float32 on ``sentences.json``, mean pooled, for
paraphrase-MiniLM-L3 and all-MiniLM-L6: without calibration, and calibrated on sentences of a Debian
text (`smollm2_text`). Linear layers are quantized, embedding tables stay float. It runs in torch
without compiling. Finished schemes are kept in the folder: the same command goes on where it was
interrupted.

``python examples/encoder_table.py folder --text jargon.txt.gz``
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo
import demo_model
import doc_tables
import measured
import minilm_l6
import numpy as np
import quality_tables
import sentences
import smollm2_text

from apq_tvm.calibrate import calibrate
from apq_tvm.cli.console import Bars
from apq_tvm.errors import ApqError
from apq_tvm.evaluation.results import Results, run_key
from apq_tvm.evaluation.schemes import SchemeEvaluator
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers.exactly import exactly

SCHEMES = (
    ("W8A8g32", "gptq"), ("W8A32", "gptq"), ("W8A8", "gptq"), ("W8A8", "smoothquant+gptq"),
    *((f"anyprec3-8@{bits}", "gptq") for bits in range(3, 9)),
    *((f"anyprec{bits}-{bits}@{bits}", "gptq") for bits in (3, 4, 6)),
    *((scheme, "gptq") for scheme in (
        "W6A8g64", "nl4", "cb4", "cb4g64", "W4A8g32", "W4zA8g32", "W4A8g128", "cb3", "cb3g64",
        "bcq3g128", "W3sA8", "W3A8g128", "W3A8", "mixed24", "cb2", "bcq2g128", "W2sA8",
        "W2*A8g128", "W2A8g32",
    )),
)  # fmt: skip
"""Scheme, and the method its codes are chosen by where there is a calibration: error feedback for
every family."""

SAMPLES, TOKENS = 256, 48
"""Sentences that are calibrated on, and the most tokens of one."""


@dataclass(frozen=True)
class Encoder:
    """A model, and which output is the sentence's embedding."""

    name: str
    onnx: Path
    output: str


def calibration_sentences(tokenizer: Path, *texts: Path, count: int = SAMPLES) -> dict[str, Any]:
    """Sentences of the first halves of texts as inputs, spread evenly.

    Returns
    -------
    dict
        ``input_ids`` and ``attention_mask``, int64 [count, TOKENS].
    """
    found: list[str] = []
    for prose in map(smollm2_text.read_prose, texts):
        found += re.split(r"(?<=[.!?])\s+", prose[: len(prose) // 2])
    found = [sentence for sentence in found if len(sentence) >= 40]
    if len(found) < count:
        raise ValueError(f"{count} sentences were asked for, the texts have {len(found)}")
    return tokenized(tokenizer, [found[i * len(found) // count] for i in range(count)])


def tokenized(tokenizer: Path, chosen: Sequence[str], tokens: int = TOKENS) -> dict[str, Any]:
    """Sentences as inputs, of at most so many tokens each."""
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(tokenizer))
    reader.enable_truncation(tokens)
    reader.enable_padding(length=tokens)
    rows = reader.encode_batch(chosen)
    return {
        "input_ids": np.array([row.ids for row in rows], np.int64),
        "attention_mask": np.array([row.attention_mask for row in rows], np.int64),
    }


Row = tuple[str, str]
"""Scheme and method."""


def measure(
    encoder: Encoder, chosen: Sequence[Row], folder: Path, inputs: Path, data: Path
) -> dict[Row, dict[str, Any]]:
    """``bits`` and the error by row: ``none`` without, ``calibrated`` with a calibration."""
    model = import_onnx(encoder.onnx)
    statistics = folder / f"{encoder.name}.safetensors"
    calibrate(
        encoder.onnx, data, statistics, nsamples=SAMPLES, rows=32, force=True, reuse=True,
        progress=Bars(),
    )  # fmt: skip
    tables = {exactly(n.name): "float" for n in model.nodes if n.op == "apq.Embedding"}
    key = run_key(model.sha256, inputs, calibration=statistics)
    kept = Results(folder / f"{encoder.name}.partial.json", key)
    table: dict[Row, dict[str, Any]] = {row: {} for row in chosen}
    for column, file in (("none", None), ("calibrated", statistics)):
        with SchemeEvaluator(
            model, inputs, calibration=file, tensor_types=tables, layers=False, progress=Bars()
        ) as evaluator:
            for scheme, asked in chosen:
                method = asked if file else "rtn"
                name = f"{scheme} {method} {column}"
                result = kept.get(name)
                if result is None:
                    result = evaluator.evaluate(scheme, method)
                    kept.put(name, result)
                error = result["outputs"][encoder.output]["relative_error"]
                table[scheme, asked] |= {
                    "bits": result["linear_bits_per_weight"],
                    "stored": result["linear_stored_bits_per_weight"],
                    column: error,
                }
    return table


def rows(chosen: Sequence[Row], tables: Mapping[str, Mapping[Row, Any]]) -> list[dict[str, Any]]:
    """What docs/measured/encoders.json keeps."""
    first = next(iter(tables.values()))
    return [
        {
            "scheme": scheme,
            "method": method,
            "bits": round(first[scheme, method]["bits"], 3),
            "stored": round(first[scheme, method]["stored"], 3),
            "errors": {
                name: {c: float(f"{table[scheme, method][c]:.4g}") for c in quality_tables.COLUMNS}
                for name, table in tables.items()
            },
        }
        for scheme, method in chosen
    ]


def main() -> None:
    """Measure rows of docs/accuracy.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="gets models and calibrations")
    parser.add_argument("--text", type=Path, default=smollm2_text.TEXTS[0])
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--only", default="", help="schemes that hold this; other rows stay")
    options = parser.parse_args()
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    source, exported = minilm_l6.find(), folder / "minilm_l6.onnx"
    if not exported.exists():
        minilm_l6.write(source, exported)
    inputs, data = folder / "sentences.npz", folder / "calibration.npz"
    np.savez(inputs, **sentences.load()[1])
    np.savez(data, **calibration_sentences(source / "tokenizer.json", options.text))
    encoders = (
        Encoder("MiniLM-L3", demo_model.find(), demo.POOLED),
        Encoder("MiniLM-L6", exported, "embedding"),
    )
    chosen = [pair for pair in SCHEMES if options.only in pair[0]]
    try:
        tables = {e.name: measure(e, chosen, folder, inputs, data) for e in encoders}
    except ApqError as error:
        sys.exit(f"error: {error}")
    measured.store("encoders", rows(chosen, tables), merge_by=("scheme", "method"))
    doc_tables.render_all()


if __name__ == "__main__":
    main()
