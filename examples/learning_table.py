"""What learning gains: the table ``learning`` of docs/accuracy.md.

A row is a scheme and how its codes were chosen: a ``--method`` of compile, or ``LEARN+METHOD`` for
``calibrate --learn LEARN --method METHOD``. Models are two sentence encoders, with the sentences of
`encoder_table`, and the first blocks of SmolLM2, with windows of both texts: what is judged there
is the residual stream behind them. Linear layers are quantized, embedding tables stay float. For a
scheme may stand ``BITS:CANDIDATE,...``: one for every layer, as ``--target-bpw`` chooses them. Rows
are kept one by one in docs/measured/learning.json.

``python examples/learning_table.py FOLDER L3 'W2*A8g128' gptq abq+gptq --texts jargon.txt.gz ...``
``python examples/learning_table.py FOLDER L6 4.5:cb2,cb3,cb4,W5A8g64,W6A8g64 gptq --samples 3840``
``... qat+gptq --samples 8192 --reviews vaderSentiment-3.3.2.tar.gz`` (`reviews`)
"""

from __future__ import annotations

import argparse
import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import demo
import demo_model
import encoder_table
import measured
import minilm_l6
import numpy as np
import onnx
import reviews
import sentences
import smollm2
import smollm2_text

from apq_tvm.calibrate import calibrate
from apq_tvm.cli.console import Bars
from apq_tvm.evaluation.schemes import SchemeEvaluator
from apq_tvm.learn import learn_codes
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers.budget import choose_schemes
from apq_tvm.quantizers.exactly import exactly
from apq_tvm.quantizers.inputs.calibration_file import load
from apq_tvm.quantizers.learn.learning_run import split

BLOCKS = 3
"""Of SmolLM2."""

WINDOWS, WINDOW = (6, 2), 256
"""Judged windows of each text, and their tokens."""

REVIEW_TOKENS = 24
"""Where sentences of `reviews` are cut; those that are judged have 23 at the most."""

STATISTICS = 8192
"""Samples that statistics are taken of, at most; learning sees all."""


@dataclass(frozen=True)
class Subject:
    """A model, the data it is calibrated on and judged by, and rows of a step."""

    name: str
    onnx: Path
    output: str
    data: Path
    inputs: Path
    rows: int
    texts: str = "Debian"


def encoder(
    name: str, folder: Path, texts: Sequence[Path], samples: int, source: Path | None
) -> Subject:
    """MiniLM-L3, or L6 written to the folder; many sentences are of both texts, or of `reviews`."""
    inputs, few = folder / "sentences.npz", samples <= encoder_table.SAMPLES
    np.savez(inputs, **sentences.load()[1])
    texts_of = "Debian" if source is None else "reviews"
    count = max(samples, encoder_table.SAMPLES)
    data = folder / f"{texts_of}.{count}.npz"
    if not data.exists():
        tokenizer = minilm_l6.find() / "tokenizer.json"
        if source is not None:
            chosen = reviews.read(source)[:count]
            found = encoder_table.tokenized(tokenizer, chosen, REVIEW_TOKENS)
        else:
            given = (texts[0],) if few else texts
            found = encoder_table.calibration_sentences(tokenizer, *given, count=count)
        np.savez(data, **found)
    given_as: dict[str, Any] = {
        "data": data,
        "inputs": inputs,
        "rows": 8 if few else 32,
        "texts": texts_of,
    }
    if name == "L3":
        return Subject("MiniLM-L3", demo_model.find(), demo.POOLED, **given_as)
    exported = folder / "minilm_l6.onnx"
    if not exported.exists():
        minilm_l6.write(minilm_l6.find(), exported)
    return Subject("MiniLM-L6", exported, "embedding", **given_as)


def first_blocks(folder: Path, texts: Sequence[Path]) -> Subject:
    """The first `BLOCKS` of SmolLM2; a step is one window."""
    path, output = folder / "blocks.onnx", f"model.layers.{BLOCKS - 1}.mlp.residual.out"
    source = smollm2.find()
    if not path.exists():
        config, weights = smollm2.read_gguf(source)
        whole = smollm2.build(replace(config, layers=BLOCKS), weights)
        shape = ["batch", "sequence", config.width]
        whole.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info(output, 1, shape))
        onnx.save(whole, path)  # the head is read by nobody then, and left out
    files = folder / "tokens.npz", folder / "windows.npz"
    tokenizer = smollm2.read_tokenizer(source)
    cut = slice(smollm2_text.WINDOW - WINDOW, None)
    np.savez(files[0], input_ids=smollm2_text.calibration(tokenizer, texts)[:, cut])
    np.savez(files[1], input_ids=smollm2_text.evaluation(tokenizer, texts, WINDOWS)[:, cut])
    return Subject(f"SmolLM2, first {BLOCKS} blocks", path, output, *files, 1)


def measure(
    model: Subject, folder: Path, scheme: str, chosen: str, samples: int, epochs: int
) -> dict[str, Any]:
    """One row of the table."""
    name = re.sub(r"\W+", "_", model.name)
    few = min(samples, STATISTICS)
    statistics = folder / f"{name}.{model.texts}.{few}.safetensors"
    calibrate(model.onnx, model.data, statistics, nsamples=few, rows=model.rows, force=True,
              reuse=True, progress=Bars())  # fmt: skip
    imported = import_onnx(model.onnx)
    names = [node.name for node in imported.nodes if node.op == "apq.Embedding"]
    types = {exactly(name): "float" for name in names}
    target, _, listed = scheme.rpartition(":")
    candidates = listed.split(",")
    if target:
        layers = {n.name: n.inputs[1] for n in imported.nodes if n.op == "apq.Linear"}
        known = load(statistics, imported).calibration
        plan = choose_schemes(imported, layers, candidates, float(target), known, Bars())
        types |= plan.tensor_types()
    base = candidates[0]
    kind, _, method = chosen.rpartition("+")
    began = _seconds()
    steps, file = 0, statistics
    if kind:
        words = re.sub(r"[:,]", "_", scheme.replace("*", "star"))
        file = statistics.with_name(f"{name}.{words}.{chosen}.safetensors")
        learn_codes(model.onnx, model.data, statistics, file, kind=kind, scheme=base,
                    method=method, tensor_types=types, nsamples=samples, rows=model.rows,
                    epochs=epochs, progress=Bars())  # fmt: skip
        steps = epochs * len(split(-(-samples // model.rows))[0])
    with SchemeEvaluator(
        imported, model.inputs, calibration=file, tensor_types=types, layers=False, progress=Bars()
    ) as evaluator:
        result = evaluator.evaluate(base, "learned" if kind else method)
    return {
        "model": model.name,
        "scheme": scheme,
        "chosen": chosen,
        "texts": model.texts,
        "samples": samples,
        "steps": steps,
        "bits_read": result["linear_bits_per_weight"],
        "relative_error": result["outputs"][model.output]["relative_error"],
        "cpu_seconds": round(_seconds() - began),
    }


def _seconds() -> float:
    """CPU time of this process: a busy machine does not lengthen it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure and keep every row that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="gets models and calibrations")
    parser.add_argument("model", choices=("L3", "L6", "smollm2"))
    parser.add_argument("scheme")
    parser.add_argument("chosen", nargs="+", help="METHOD or LEARN+METHOD")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=6, help="of learning")
    parser.add_argument("--texts", type=Path, nargs=2, default=smollm2_text.TEXTS)
    parser.add_argument("--reviews", type=Path, help="source of vaderSentiment, for its sentences")
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.model == "smollm2":
        model = first_blocks(folder, options.texts)
    else:
        model = encoder(options.model, folder, options.texts, options.samples, options.reviews)
    for chosen in options.chosen:
        row = measure(model, folder, options.scheme, chosen, options.samples, options.epochs)
        print(row, flush=True)
        measured.store(
            "learning", [row], merge_by=("model", "scheme", "chosen", "texts", "samples")
        )


if __name__ == "__main__":
    main()
