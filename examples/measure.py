"""Every figure of the README's "Measured" section, as Markdown on standard output.

Takes about ten minutes and wants a quiet machine: ``python examples/measure.py > measured.md``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import demo_model
import numpy as np
import onnxruntime
import sentences

import apq_tvm
from apq_tvm.bench.linear import LinearCase, bench_linear
from apq_tvm.bench.model import bench_model
from apq_tvm.bench.roofline import measure
from apq_tvm.console import Bars
from apq_tvm.evaluate import evaluate
from apq_tvm.inspect import inspect

THREADS = (1, 2)
LINEAR = (
    ("4096x4096", (4096, 4096), (1, 4, 128)),
    ("11008x4096", (11008, 4096), (1, 4, 128)),
)
LINEAR_SCHEMES = ("W4A8g32",)
DECODE_SCHEMES = (
    "W2A8g64", "W2A8g128", "W2sA8", "W2*A8", "bcq2g128", "cb2", "mixed24", "anyprec2-8@2",
    "anyprec2-8@3", "W3A8g128", "W3sA8", "bcq3g128", "cb3", "anyprec2-8@4", "W4A8g32", "W4A8g128",
    "bcq4g128", "cb4", "nl4", "nl4g128", "anyprec2-8@5", "anyprec2-8@6", "anyprec2-8@7",
    "anyprec2-8@8", "W8A8g128",
)  # fmt: skip
DECODE_RIVALS = {
    "W2": "ort-w2-b128",
    "W4": "ort-w4-b128",
    "W4 b32": "ort-w4-b32",
    "W8": "ort-w8-b128",
    "fp32": "ort-fp32",
}
MODEL_SCHEMES = ("W4A8g32", "W4zA8g32", "W8A8", "W8A8g32")
TIMED_SCHEMES = ("W4A8g32", "W8A8")
MODEL_SHAPES = ((1, 128), (8, 64))
TOKENS, POOLED = "onnx::Shape_422", "461"


def processor() -> str:
    """The processor's name and number of cores, from /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    target = inspect_host()
    return f"{names[0]} ({target}), {len(names)} cores"


def inspect_host() -> str:
    """What ``--target host`` means here."""
    from apq_tvm.listing import list_targets

    return str(list_targets()["host"])


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def machine() -> str:
    """One paragraph on the machine and its limits."""
    limits = [measure(threads) for threads in THREADS]
    read = ", ".join(f"{lim.read_gbs:.0f} GB/s on {lim.threads}" for lim in limits)
    macs = ", ".join(f"{lim.int8_gmacs:.0f} GMAC/s on {lim.threads}" for lim in limits)
    return (
        f"{processor()}; ONNX Runtime {onnxruntime.__version__}. Reads from DRAM {read} thread(s); "
        f"int8 arithmetic ({limits[0].int8_instruction}) {macs}."
    )


def linears(seconds: float) -> str:
    """The table of single layers."""
    cases = [
        LinearCase(n, k, m, scheme, threads)
        for _, (n, k), rows in LINEAR
        for scheme in LINEAR_SCHEMES
        for threads in THREADS
        for m in rows
    ]
    rows = bench_linear(cases, "onnxruntime", budget_s=seconds, progress=Bars())
    return table(
        (
            "NxK",
            "M",
            "threads",
            "ours µs",
            "of the limit",
            "error",
            "rival µs",
            "error",
            "saturates",
            "ratio",
            "noise",
        ),
        (
            (
                r["shape"],
                r["m"],
                r["threads"],
                f"{r['us']:.0f}",
                f"{r['limit_share']:.0%} ({r['limit']})",
                f"{r['error']:.4f}",
                f"{r['rival_us']:.0f}",
                f"{r['rival_error']:.4f}",
                "yes" if r["rival_saturates"] else "no",
                f"**{r['ratio']:.2f}**",
                f"{max(r['noise'], r['rival_noise']):.0%}",
            )
            for r in rows
        ),
    )


def decode(seconds: float, schemes: Sequence[str]) -> str:
    """The table of one row of activations in every format, beside ORT at 2, 4, 8 and 32 bits."""
    # Schemes that differ only in the bits chosen at run time come together: one module serves them.
    cases = [
        LinearCase(4096, 4096, 1, scheme, threads)
        for name in dict.fromkeys(scheme.partition("@")[0] for scheme in schemes)
        for scheme in (s for s in schemes if s.partition("@")[0] == name)
        for threads in THREADS
    ]
    rivals = list(DECODE_RIVALS.values())
    rows = bench_linear(cases, ",".join(rivals), budget_s=seconds, progress=Bars())
    lines = []
    for at in range(0, len(rows), len(rivals)):
        first, ratios = rows[at], [f"{r['ratio']:.2f}" for r in rows[at : at + len(rivals)]]
        lines.append(
            (
                f"`{first['scheme']}`",
                f"{8 * first['nbytes'] / 4096**2:.2f}",
                first["threads"],
                f"{first['us']:.0f}",
                f"{first['limit_share']:.0%} ({first['limit']})",
                f"{first['error']:.4f}",
                *ratios,
                f"{first['noise']:.0%}",
            )
        )
    against = (f"to ORT {name}" for name in DECODE_RIVALS)
    return table(
        ("scheme", "bits read per weight", "threads", "µs", "of the limit", "error", *against,
         "noise"),
        lines,
    )  # fmt: skip


def models(folder: Path, seconds: float) -> tuple[str, str]:
    """The tables of accuracy and of speed of the demo model."""
    onnx = demo_model.find()
    _, inputs = sentences.load()
    npz = folder / "sentences.npz"
    np.savez(npz, **inputs)
    accuracy, speed = [], []
    for scheme in MODEL_SCHEMES:
        module = folder / f"minilm_{scheme}"
        apq_tvm.compile(onnx, output=module, scheme=scheme, progress=Bars())
        report = inspect(module)
        outputs = evaluate(module, onnx, npz)["outputs"]
        accuracy.append(
            (
                f"`{scheme}`",
                f"{report['quantized_bits_per_weight']:.2f}",
                f"{report['package_bytes'] / 1e6:.1f} MB",
                f"{report['package_bytes'] / onnx.stat().st_size:.1%}",
                f"{outputs[POOLED]['cosine_mean']:.5f}",
                f"{outputs[TOKENS]['cosine_mean']:.5f}",
            )
        )
    for batch, seq in MODEL_SHAPES:
        for scheme in TIMED_SCHEMES:
            for threads in THREADS:
                result = bench_model(
                    folder / f"minilm_{scheme}",
                    onnx,
                    batch=batch,
                    seq=seq,
                    threads=threads,
                    budget_s=seconds,
                    progress=Bars(),
                )
                noise = max(result["noise"], *result["rival_noise"].values())
                speed.append(
                    (
                        f"{batch}x{seq}",
                        threads,
                        f"`{scheme}`",
                        f"{result['us']:.0f}",
                        *(f"{us:.0f}" for us in result["rivals"].values()),
                        f"**{result['ratio']:.2f}**",
                        f"{result['memory']['overhead']:.2f}",
                        f"{noise:.0%}",
                    )
                )
    columns = ("scheme", "bits per weight", "package", "of the ONNX file", "cosine of sentences",
               "cosine of tokens")  # fmt: skip
    timed = ("batch x seq", "threads", "scheme", "ours µs", "ORT fp32 µs", "ORT int8 µs", "ratio",
             "memory", "noise")  # fmt: skip
    return table(columns, accuracy), table(timed, speed)


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="per comparison")
    parser.add_argument("--only", choices=("decode",), help="print one table alone")
    parser.add_argument("--schemes", default=",".join(DECODE_SCHEMES), help="of the decode table")
    options = parser.parse_args()
    if options.only == "decode":
        print(f"{machine()}\n\n{decode(options.seconds, options.schemes.split(','))}")
        return
    layers = linears(options.seconds)
    print(f"## Measured\n\n{machine()}")
    print(
        "\nOurs and ONNX Runtime take turns in one process; minima of many rounds; `noise` is how "
        "far the median lies above the minimum. `ratio` is the rival's time over ours.\n\n"
        "One linear layer, weights out of cache, `W4A8g32` beside MatMulNBits W4 block 128 "
        "accuracy_level 4 (`apq-tvm bench linear`). Errors are mean, relative to the result's root "
        "mean square, against the exact product with the same codes; `saturates`: whether ONNX "
        "Runtime's int8 sums overflow on this machine at the extremes.\n"
    )
    print(layers)
    print(
        "\nOne row of activations, 4096x4096, weights out of cache, every format: the ratios are "
        "the times of MatMulNBits with 2, 4 and 8 bits in blocks of 128 (`b32`: of 32; "
        "accuracy_level 4) and of MatMul in float32 over ours, in one process (`python "
        "examples/measure.py --only decode`).\n"
    )
    print(decode(options.seconds, options.schemes.split(",")))
    with tempfile.TemporaryDirectory(prefix="apq-measure-") as folder:
        accuracy, speed = models(Path(folder), options.seconds)
    print(
        "\nparaphrase-MiniLM-L3-v2 on the sentences of `examples/sentences.json`, mean cosine to "
        f"float32 (`apq-tvm eval`):\n\n{accuracy}"
    )
    print(
        "\nThe whole model; `ratio` is to the faster of ONNX Runtime's float32 and its own dynamic "
        "int8 quantization; `memory` is the working memory of a run over what is alive at once "
        f"(`apq-tvm bench model`):\n\n{speed}"
    )


if __name__ == "__main__":
    main()
