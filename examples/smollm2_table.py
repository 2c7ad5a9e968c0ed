"""Every scheme on SmolLM2-135M: true bits per weight, perplexity, KL to the float model.

As in the papers the linear layers of the blocks are quantized; head and embedding stay float. It
runs in torch without compiling, about half a minute a scheme on two cores. Finished schemes are
kept beside the output: the same command goes on where it was interrupted. A scheme that does not
exist or fails is reported and left out.

``python examples/smollm2_table.py smollm2.onnx table.md --texts jargon.txt.gz reference.txt.gz``
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import doc_tables
import measured
import numpy as np
import smollm2
import smollm2_text

from apq_tvm.cli.console import Bars
from apq_tvm.errors import ApqError
from apq_tvm.evaluation.language import Language
from apq_tvm.evaluation.results import Results, run_key, write_text
from apq_tvm.evaluation.schemes import SchemeEvaluator
from apq_tvm.onnx_import import import_onnx

FLOAT_LAYERS = {"lm_head|embed_tokens": "float"}

SCHEMES = (
    "W8A8", "W8A8g32", "W6A8", "W5A8g128",
    "W4A8", "W4A8g32", "W4A8g64", "W4A8g128", "W4zA8g64", "W4zA8g128",
    "W3A8", "W3A8g32", "W3A8g64", "W3A8g128", "W3zA8g64", "W3zA8g128",
    "W2A8", "W2A8g32", "W2A8g64", "W2A8g128", "W2zA8g32", "W2zA8g64", "W2zA8g128",
    "W8A32", "W4A32g128", "W3A32g128", "W2A32g128",
    *(f"anyprec3-8@{bits}" for bits in range(3, 9)), "anyprec2-8@2",
    "anyprec3-3@3", "anyprec4-4@4",
    "mixed24", "W2*A8g128", "W2*A8", "bcq2g128", "bcq3g128", "bcq4g128",
    "cb2", "cb3", "cb4", "nl4", "W2s", "W3s",
)  # fmt: skip
"""Rounded without calibration. ``SCHEME:METHOD`` chooses codes by another method, with
--calibration; ``SCHEME:learned`` takes what ``apq-tvm calibrate --learn`` left in that file."""

MEASURES = {"perplexity": "perplexity", "ratio": "ratio", "kl": "kl_mean", "same_top": "top1"}
"""Of a row in docs/measured/language.json, by their names in a score."""

CALIBRATED = ("W3A8:gptq", "W3A8g128:gptq", "W4A8g128:gptq", "W4A8g128:awq", "W8A8:smoothquant",
              "mixed24:gptq")  # fmt: skip


def row_text(result: Mapping[str, Any]) -> list[str]:
    """Cells of one scheme."""
    score, method = result["language"], result["method"]
    return [
        f"`{result['scheme']}`" + (f" {method}" if method != "rtn" else ""),
        f"{result['linear_bits_per_weight']:.3f}",
        f"{score['perplexity']:.2f}" if score["perplexity"] < 1e5 else f"{score['perplexity']:.1e}",
        f"{score['ratio']:.4f}" if score["ratio"] < 100 else f"{score['ratio']:.3g}",
        f"{score['kl_mean']:.4f}",
        f"{score['top1']:.1%}",
    ]


def markdown(results: Iterable[Mapping[str, Any]]) -> str:
    """The table, by bits per weight of linear layers."""
    columns = ["scheme", "bits per weight", "perplexity", "of float", "KL", "same top token"]
    rows = sorted(
        results, key=lambda r: (-r["linear_bits_per_weight"], r["language"]["perplexity"])
    )
    lines = [columns, ["---", *["---:"] * 5], *(row_text(r) for r in rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    if not rows:
        return table
    score = rows[0]["language"]
    return (
        f"SmolLM2-135M-Instruct, {score['tokens']} tokens; float: perplexity "
        f"{score['float_perplexity']:.2f}. KL in nats per token.\n\n{table}"
    )


def record(
    results: Iterable[Mapping[str, Any]], calibration: str, windows: int, named: str | None
) -> None:
    """Keep rows for docs/accuracy.md."""
    rows = []
    for result in results:
        score = result["language"]
        found = {key: score[name] for key, name in MEASURES.items()}
        rows.append({
            "scheme": named or result["scheme"], "calibration": calibration, "windows": windows,
            "bits": round(result["linear_bits_per_weight"], 3),
            "stored": round(result["linear_stored_bits_per_weight"], 3),
            **{key: float(f"{value:.5g}") for key, value in found.items()},
        })  # fmt: skip
    measured.store("language", rows, merge_by=("scheme", "calibration", "windows"))
    doc_tables.render_all()


def run(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Results in the order asked for, and what failed."""
    tokens = options.output.with_suffix(".npz")
    ids = smollm2_text.evaluation(smollm2.read_tokenizer(options.gguf or smollm2.find()),
                                  options.texts)  # fmt: skip
    np.savez(tokens, input_ids=ids)
    model = import_onnx(options.model)
    language = Language(tokens="input_ids", logits="logits", window=smollm2_text.WINDOW,
                        min_tokens=8192)  # fmt: skip
    more = {"calibration": options.calibration} if options.calibration else {}
    key = run_key(model.sha256, tokens, float_layers=FLOAT_LAYERS, **more)
    kept = Results(options.output.with_suffix(".partial.json"), key)
    schemes = options.schemes or [*SCHEMES, *(CALIBRATED if options.calibration else ())]
    done: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    with SchemeEvaluator(
        model, tokens, language=language, calibration=options.calibration,
        tensor_types=FLOAT_LAYERS, layers=False, progress=Bars(),
    ) as evaluator:  # fmt: skip
        for name in schemes:
            result = None if options.again else kept.get(name)
            if result is None:
                scheme, _, method = name.partition(":")
                try:
                    result = evaluator.evaluate(scheme, method or "rtn")
                except ApqError as error:
                    failed[name] = str(error)
                    print(f"{name}: {error}", file=sys.stderr)
                    continue
                kept.put(name, result)
            done.append(dict(result))
            print(" ".join(row_text(result)), file=sys.stderr)
    return done, failed


def main() -> None:
    """Write the table as Markdown and, beside it, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="of examples/smollm2.py")
    parser.add_argument("output", type=Path, help="Markdown file")
    parser.add_argument("--schemes", nargs="+", help="instead of all")
    parser.add_argument("--texts", type=Path, nargs=2, default=smollm2_text.TEXTS)
    parser.add_argument("--gguf", type=Path, help="for its tokenizer; default: installed package")
    parser.add_argument("--calibration", type=Path, help="file of apq-tvm calibrate")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--again", action="store_true", help="measure finished schemes anew")
    parser.add_argument(
        "--record", metavar="CALIBRATION", help="keep rows for docs/accuracy.md, of this name there"
    )
    parser.add_argument("--windows", type=int, default=128, help="that it was calibrated on")
    parser.add_argument("--named", help="what the rows call the scheme, where a budget chose many")
    options = parser.parse_args()
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    try:
        done, failed = run(options)
    except ApqError as error:
        sys.exit(f"error: {error}")
    text = markdown(done)
    document = {"schemes": done, "failed": failed}
    write_text(options.output, text + "\n")
    write_text(options.output.with_suffix(".json"), json.dumps(document, indent=1))
    print(text)
    if options.record:
        record(done, options.record, options.windows if options.calibration else 0, options.named)


if __name__ == "__main__":
    main()
