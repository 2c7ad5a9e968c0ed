"""What learning gains on sentence encoders: the table ``learning`` of docs/accuracy.md.

A row is a scheme and how its codes were chosen: a ``--method`` of compile, or ``LEARN+METHOD`` for
``calibrate --learn LEARN --method METHOD``. The data are those of `encoder_table`, whose folder
this shares; linear layers are quantized, embedding tables stay float. Rows are kept one by one in
docs/measured/learning.json.

``python examples/learning_table.py FOLDER L3 'W2*A8g128' gptq abq+gptq --text jargon.txt.gz``
"""

from __future__ import annotations

import argparse
import re
import resource
from pathlib import Path
from typing import Any

import demo
import demo_model
import encoder_table
import measured
import minilm_l6
import numpy as np
import sentences
import smollm2_text

from apq_tvm.calibrate import calibrate
from apq_tvm.cli.console import Bars
from apq_tvm.evaluation.schemes import SchemeEvaluator
from apq_tvm.learn import learn_codes
from apq_tvm.onnx_import import import_onnx

ROWS = 8
"""Sentences per step of learning."""


def encoder(name: str, folder: Path) -> encoder_table.Encoder:
    """MiniLM-L3, or L6 written to the folder."""
    if name == "L3":
        return encoder_table.Encoder("MiniLM-L3", demo_model.find(), demo.POOLED)
    exported = folder / "minilm_l6.onnx"
    if not exported.exists():
        minilm_l6.write(minilm_l6.find(), exported)
    return encoder_table.Encoder("MiniLM-L6", exported, "embedding")


def measure(
    model: encoder_table.Encoder, folder: Path, scheme: str, chosen: str, samples: int, epochs: int
) -> dict[str, Any]:
    """One row of the table."""
    data, inputs = folder / f"calibration{samples}.npz", folder / "sentences.npz"
    statistics = folder / f"{model.name}.{samples}.safetensors"
    calibrate(model.onnx, data, statistics, nsamples=samples, rows=ROWS, force=True, reuse=True,
              progress=Bars())  # fmt: skip
    imported = import_onnx(model.onnx)
    names = [node.name for node in imported.nodes if node.op == "apq.Embedding"]
    tables = {f"^{re.escape(name)}$": "float" for name in names}
    kind, _, method = chosen.rpartition("+")
    began = _seconds()
    steps, file = 0, statistics
    if kind:
        file = folder / f"{model.name}.{samples}.{scheme.replace('*', 'star')}.{chosen}"
        file.unlink(missing_ok=True)
        learn_codes(model.onnx, data, statistics, file, kind=kind, scheme=scheme, method=method,
                    tensor_types=tables, nsamples=samples, rows=ROWS, epochs=epochs,
                    progress=Bars())  # fmt: skip
        steps = epochs * len(encoder_table_split(samples))
    with SchemeEvaluator(imported, inputs, calibration=file, tensor_types=tables, layers=False,
                         progress=Bars()) as evaluator:  # fmt: skip
        result = evaluator.evaluate(scheme, "learned" if kind else method)
    return {
        "model": model.name,
        "scheme": scheme,
        "chosen": chosen,
        "samples": samples,
        "steps": steps,
        "bits_read": result["linear_bits_per_weight"],
        "relative_error": result["outputs"][model.output]["relative_error"],
        "cpu_seconds": round(_seconds() - began),
    }


def encoder_table_split(samples: int) -> list[int]:
    """Calls that are learned from."""
    from apq_tvm.quantizers.learn.learning_run import split

    return split(-(-samples // ROWS))[0]


def _seconds() -> float:
    """CPU time of this process: a busy machine does not lengthen it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure and keep every row that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="gets models and calibrations")
    parser.add_argument("model", choices=("L3", "L6"))
    parser.add_argument("scheme")
    parser.add_argument("chosen", nargs="+", help="METHOD or LEARN+METHOD")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=6, help="of learning")
    parser.add_argument("--text", type=Path, default=smollm2_text.TEXTS[0])
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "sentences.npz", **sentences.load()[1])
    data = folder / f"calibration{options.samples}.npz"
    if not data.exists():
        tokenizer = minilm_l6.find() / "tokenizer.json"
        np.savez(data, **encoder_table.calibration_sentences(tokenizer, options.text))
    model = encoder(options.model, folder)
    for chosen in options.chosen:
        row = measure(model, folder, options.scheme, chosen, options.samples, options.epochs)
        print(row, flush=True)
        measured.store("learning", [row], merge_by=("model", "scheme", "chosen", "samples"))


if __name__ == "__main__":
    main()
