"""`make demo`: compile a real sentence encoder to 4 and 8 bits, import it, measure it.

Prints size, accuracy against ONNX Runtime's float32 result on the sentences in
``sentences.json``, whether paraphrases still find each other, and speed beside ONNX Runtime.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_model
import numpy as np
import sentences

import apq_tvm
from apq_tvm.bench.model import bench_model
from apq_tvm.cli.console import Bars, megabytes, print_table
from apq_tvm.evaluate import evaluate
from apq_tvm.extras import require
from apq_tvm.inspect import bits_line, inspect

POOLED = "461"
"""The sentence embedding, [batch, 384], among the model's outputs."""

SHAPES = ((1, 128), (8, 64))
"""Batch and sequence lengths that are timed."""


@dataclass(frozen=True)
class Variant:
    """One way to compile the model; `name` is that of the Python package."""

    name: str
    scheme: str
    search: bool = True


VARIANTS = (
    Variant("minilm_w4", "W4A8g32"),
    Variant("minilm_w4_rounded", "W4A8g32", search=False),
    Variant("minilm_w8", "W8A8"),
)


def compile_all(onnx: Path, folder: Path) -> None:
    """Compile every variant and say how large it became and how long that took."""
    for variant in VARIANTS:
        started = time.perf_counter()
        apq_tvm.compile(
            onnx,
            output=folder / variant.name,
            scheme=variant.scheme,
            search=variant.search,
            force=True,
            progress=Bars(),
        )
        report = inspect(folder / variant.name)
        print(
            f"{variant.name}: {variant.scheme}, {time.perf_counter() - started:.1f} s, "
            f"{megabytes(report['package_bytes'])}, "
            f"{report['package_bytes'] / onnx.stat().st_size:.1%} of the ONNX file, "
            f"{bits_line(report)}"
        )


def accuracy(onnx: Path, folder: Path) -> bool:
    """Compare with the float model and rank paraphrases; True if every variant ranks them first."""
    _, inputs = sentences.load()
    npz = folder / "sentences.npz"
    np.savez(npz, **inputs)
    sys.path.insert(0, str(folder))
    rows, all_first = [], True
    means: dict[str, float] = {}
    for variant in VARIANTS:
        module: Any = importlib.import_module(variant.name)
        embeddings = module.run(**inputs)[POOLED]
        first = sentences.ranked_first(embeddings)
        all_first &= bool(first.all())
        result = evaluate(folder / variant.name, onnx, npz)["outputs"][POOLED]
        means[variant.name] = result["cosine_mean"]
        rows.append(
            (
                variant.name,
                f"{result['cosine_mean']:.5f}",
                f"{result['cosine_min']:.5f}",
                f"{result['max_abs_error']:.3f}",
                f"{int(first.sum())} of {len(first)}",
            )
        )
    columns = ("module", "cosine mean", "cosine min", "max abs error", "paraphrase ranked first")
    print_table("sentence embeddings against float32", columns, rows, right=columns[1:])
    margin = means["minilm_w4"] - means["minilm_w4_rounded"]
    print(f"searched scales gain {margin:+.5f} mean cosine over plain rounding at 4 bits\n")
    return all_first


def speed(onnx: Path, folder: Path, seconds: float) -> None:
    """Time every variant beside ONNX Runtime's float and int8 models."""
    rows = []
    for batch, seq in SHAPES:
        for variant in VARIANTS:
            if not variant.search:  # the same code as with searched scales
                continue
            report = bench_model(
                folder / variant.name, onnx, batch=batch, seq=seq, budget_s=seconds, progress=Bars()
            )
            theirs = (f"{us:.0f}" for us in report["rivals"].values())
            rows.append(
                (
                    f"{batch}x{seq}",
                    variant.name,
                    report["threads"],
                    f"{report['us']:.0f}",
                    *theirs,
                    f"{report['ratio']:.2f}",
                )
            )
    columns = ("batch x seq", "module", "threads", "us", "ORT fp32 us", "ORT int8 us", "ratio")
    title = "whole model; minima, interleaved; ratio to the faster of ONNX Runtime's"
    print_table(title, columns, rows, right=columns[2:])


def main() -> None:
    """Run the demo; fail if a compiled model no longer finds every paraphrase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/demo"), help="folder to write")
    parser.add_argument("--seconds", type=float, default=6.0, help="per speed measurement")
    options = parser.parse_args()
    require("onnxruntime")
    onnx = demo_model.find()
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"{onnx.name}: {megabytes(onnx.stat().st_size)}")
    compile_all(onnx, options.output)
    ranked = accuracy(onnx, options.output)
    speed(onnx, options.output, options.seconds)
    print(f"the compiled packages are in {options.output}; for example:")
    print(f"  cd {options.output} && python -c 'import minilm_w4; print(minilm_w4.inputs)'")
    if not ranked:
        sys.exit("error: a compiled model ranks an unrelated sentence before a paraphrase")


if __name__ == "__main__":
    main()
