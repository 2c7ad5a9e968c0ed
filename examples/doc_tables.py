"""The tables of README and ``docs/``, of what ``docs/measured/`` holds (`measured`).

A table stands between ``<!-- table: NAME -->`` and ``<!-- /table -->``; ``python
examples/measure.py --render`` writes it anew there, and a test compares. Here are those of speed;
`quality_tables` has those of quality.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import quality_tables
from measured import FOLDER, ROOT, Row, dates, machine_line, machine_name, read, table

DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RENDER = "python examples/measure.py --render"

LINEAR_RIVAL = "`MatMulNBits`, 4 bits, blocks of 128"
LAYOUT_NAMES = {"graviton3": "V1", "graviton4": "V2"}
"""Devices whose layouts are shown, by the core they have."""


def linear() -> str:
    """Single layers beside ONNX Runtime."""
    document = read("linear")
    rows = (
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
            f"{r['noise']:.0%}",
        )
        for r in document["rows"]
    )
    columns = ("NxK", "M", "threads", "ours µs", "of the limit", "error", "rival µs", "error",
               "saturates", "ratio", "noise")  # fmt: skip
    return f"{machine_line(document)}\n\n{table(columns, rows)}"


def decode() -> str:
    """One row of activations in every format."""
    document = read("decode")
    # In the order of the file; a rival that was added later has no figures in older rows.
    rivals = list(dict.fromkeys(name for row in document["rows"] for name in row["ratios"]))
    rows = (
        (
            f"`{r['scheme']}`",
            f"{r['bits_read']:.2f}",
            r["threads"],
            f"{r['us']:.0f}",
            f"{r['limit_share']:.0%} ({r['limit']})",
            f"{r['error']:.4f}",
            *(f"{r['ratios'][name]:.2f}" if name in r["ratios"] else "" for name in rivals),
            f"{r['noise']:.0%}",
        )
        for r in document["rows"]
    )
    columns = ("scheme", "bits read per weight", "threads", "µs", "of the limit", "error",
               *(f"to ORT {name}" for name in rivals), "noise")  # fmt: skip
    return f"{machine_line(document)}\n\n{table(columns, rows)}"


def repeats() -> str:
    """Ratios of decode over several runs."""
    document = read("repeats")
    columns = ("scheme", "beside", "threads", "weights", "runs", "least", "most", "measured")
    return f"{machine_name(document)}.\n\n" + table(
        columns,
        (
            (
                f"`{r['scheme']}`",
                r["beside"],
                r["threads"],
                "in huge pages" if r["huge_pages"] else "mapped",
                r["runs"] or "",
                f"{r['least']:.2f}",
                f"{r['most']:.2f}",
                r["date"],
            )
            for r in document["rows"]
        ),
    )


def lookups() -> str:
    """Times of LUT-GEMM over bits and groups."""
    document = read("lookups")
    rows = document["rows"]
    cells = (
        (
            f"`{r['scheme']}`",
            f"{r['bits_read']:.2f}",
            f"{r['us']:.0f}",
            f"{r['us'] / r['bits_read']:.0f}",
        )
        for r in rows
    )
    columns = ("scheme", "bits read per weight", "µs, 1 thread", "µs per bit")
    return f"{machine_name(document)}. Measured {dates(rows)}.\n\n{table(columns, cells)}"


def model() -> str:
    """The whole demo model beside ONNX Runtime."""
    document = read("model")
    rows = (
        (
            r["model"],
            r["shape"],
            r["threads"],
            f"`{r['scheme']}`",
            f"{r['us']:.0f}",
            f"{r['fp32_us']:.0f}",
            f"{r['int8_us']:.0f}",
            f"{r['openvino_us']:.0f}" if r["openvino_us"] else "",
            f"**{r['ratio']:.2f}**",
            f"{r['memory']:.2f}",
            f"{r['noise']:.0%}",
        )
        for r in document["rows"]
    )
    columns = ("MiniLM", "batch x seq", "threads", "scheme", "ours µs", "ORT fp32 µs",
               "ORT int8 µs", "OpenVINO µs", "ratio", "memory", "noise")  # fmt: skip
    return f"{machine_line(document)}\n\n{table(columns, rows)}"


HEADLINES: tuple[tuple[str, str, str, Row, Callable[[Row], float]], ...] = (
    ("one row of activations, `W4A8g32`, 4096x4096", LINEAR_RIVAL, "linear",
     {"shape": "4096x4096", "m": 1}, lambda r: r["ratio"]),
    ("128 rows, `W4A8g32`, 4096x4096", LINEAR_RIVAL, "linear",
     {"shape": "4096x4096", "m": 128}, lambda r: r["ratio"]),
    ("one row, `W2sA8`, 4096x4096", "`MatMulNBits`, 2 bits", "decode",
     {"scheme": "W2sA8"}, lambda r: r["ratios"]["W2"]),
    ("one row, `nl4`, 4096x4096", "`MatMulNBits`, 4 bits", "decode",
     {"scheme": "nl4"}, lambda r: r["ratios"]["W4"]),
    ("one row, `anyprec2-8sA8` at 3 of its bits", "`MatMulNBits`, 4 bits", "decode",
     {"scheme": "anyprec2-8sA8@3"}, lambda r: r["ratios"]["W4"]),
    ("one row, `anyprec2-8sA8` at 8 of its bits", "`MatMulNBits`, 8 bits", "decode",
     {"scheme": "anyprec2-8sA8@8"}, lambda r: r["ratios"]["W8"]),
    ("MiniLM-L3, 1x128 tokens, `W8A8`", "float32 and int8, and OpenVINO: the fastest", "model",
     {"model": "L3", "shape": "1x128", "scheme": "W8A8"}, lambda r: r["ratio"]),
    ("MiniLM-L3, 8x64 tokens, `W4A8g32`", "float32 and int8, and OpenVINO: the fastest", "model",
     {"model": "L3", "shape": "8x64", "scheme": "W4A8g32"}, lambda r: r["ratio"]),
)  # fmt: skip
"""What is computed, beside what of ONNX Runtime, and which rows of which file say how fast."""


def headlines() -> str:
    """The README's table: the rival's time over ours, on one and on two threads."""
    lines = []
    for what, rival, name, wanted, ratio in HEADLINES:
        document = read(name)
        found = {
            r["threads"]: r for r in document["rows"] if all(r[k] == v for k, v in wanted.items())
        }
        one, two = found[1], found[2]
        where = f"{document['machine']['processor']} ({document['machine']['target']})"
        lines.append((what, rival, f"{ratio(one):.2f}", f"{ratio(two):.2f}", where,
                      dates([one, two])))  # fmt: skip
    columns = ("ours", "beside ONNX Runtime's", "1 thread", "2 threads", "machine", "measured")
    return table(columns, lines)


def share(row: Row) -> str:
    """MACs per cycle and what that is of the peak."""
    return f"{row['macs_per_cycle']:.1f} ({row['peak_share']:.0%} {row['peak_instruction']})"


def arm_shares(name: str) -> str:
    """MACs per cycle by scheme, M and device."""
    rows = read(name)["rows"]
    targets = list(dict.fromkeys(row["target"] for row in rows))
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows:
        cells.setdefault((row["scheme"], row["m"]), {})[row["target"]] = share(row)
    lines = (
        (f"`{scheme}`", m, *(by_target.get(t, "") for t in targets))
        for (scheme, m), by_target in cells.items()
    )
    return f"Counted {dates(rows)}.\n\n{table(('scheme', 'M', *targets), lines)}"


def arm_rivals() -> str:
    """W4A8g32 beside ggml's products of the same format."""
    rows = read("arm_rivals")["rows"]
    lines = (
        (
            r["target"],
            r["m"],
            r["kernel"],
            r["instructions"],
            share(r),
            *(f"{r[key]:.2f}" if r[key] else "" for key in ("instructions_ratio", "cycles_ratio")),
        )
        for r in rows
    )
    columns = ("device", "M", "kernel", "instructions", "MACs/cycle", "ours over its", "in cycles")
    return f"Counted {dates(rows)}.\n\n{table(columns, lines)}"


def arm_layouts() -> str:
    """MACs per cycle of integers in every layout, from the devices' tuning logs."""
    logs = {
        core: json.loads((ROOT / "tuning_logs" / device / "layouts.json").read_text())
        for device, core in LAYOUT_NAMES.items()
    }
    first = next(iter(logs.values()))
    lines = (
        (
            f"`{scheme}`",
            layout,
            *(f for log in logs.values() for f in log["macs_per_cycle"][scheme][layout]),
        )
        for scheme, by_layout in first["macs_per_cycle"].items()
        for layout in by_layout
    )
    columns = (f"{core} M={m}" for core, log in logs.items() for m in log["m"])
    return table(("scheme", "layout", *columns), lines)


def models(name: str = "models") -> str:
    """Models that people have: what became of each."""
    document = read(name)

    def outcome(row: Row) -> str:
        return str(row.get("refused") or row.get("failed") or "compiles").replace("|", "/")[:160]

    cells = (
        (
            r["model"],
            f"`{r['scheme']}`",
            outcome(r),
            *(
                (
                    r["seconds"],
                    r["peak_mb"],
                    f"{r['error']:.1e}",
                    f"{r['cosine']:.5f}",
                    r["us"],
                    r["rival_us"],
                    f"**{r['rival_us'] / r['us']:.2f}**",
                )
                if r["compiled"]
                else ("",) * 7
            ),
        )
        for r in document["rows"]
    )
    columns = ("model", "scheme", "outcome", "s", "MB", "error", "cosine", "ours µs", "ORT fp32 µs",
               "ratio")  # fmt: skip
    dated = dates(document["rows"])
    return f"{machine_name(document)}. Measured {dated}.\n\n{table(columns, cells)}"


def conv(name: str) -> str:
    """Convolution nets beside ONNX Runtime, on one machine."""
    document = read(name)
    rivals = ("fp32", "QUInt8", "QInt8")
    rival_too = all("rivals_cosine" in r for r in document["rows"])
    cells = (
        (
            r["model"],
            r["target"],
            r["batch"],
            r["threads"],
            f"{r['us'] / 1e3:.2f}",
            *(f"{r['rivals_us'][name] / 1e3:.2f}" for name in rivals),
            f"**{r['ratio']:.2f}**",
            f"{r['cosine']:.4f}",
            *([f"{r['rivals_cosine']['QUInt8']:.4f}"] if rival_too else []),
        )
        for r in document["rows"]
    )
    columns = ("model", "code for", "batch", "threads", "ours ms", "ORT fp32", "QDQ u8", "QDQ s8",
               "ratio", "cosine", *(["of QDQ u8"] if rival_too else []))  # fmt: skip
    dated = dates(document["rows"])
    return f"{machine_name(document)}. Measured {dated}.\n\n{table(columns, cells)}"


def threads() -> str:
    """Runs on one thread and two, alone and beside a busy process, before and since a change."""
    document = read("threads")
    cells = (
        (r["run"], r["beside"], *(f"{us / 1e3:.2f}" for us in (*r["before_us"], *r["us"])))
        for r in document["rows"]
    )
    columns = ("run", "beside", "1 thread, libgomp", "2, libgomp", "1, ours", "2, ours")
    dated = dates(document["rows"])
    return f"{machine_name(document)}; ms. Measured {dated}.\n\n{table(columns, cells)}"


def generate() -> str:
    """SmolLM2's prompts and tokens beside llama.cpp and ONNX Runtime, tokens per second."""
    document = read("generate")
    pairs = (
        ("smollm2_w4", "llama.cpp smollm2-q4_0.gguf"),
        ("smollm2_w8", "llama.cpp smollm2-q8_0.gguf"),
        ("smollm2_w4", "onnxruntime smollm2_ort.onnx"),
    )
    speeds = {
        (r["what"], r["length"], r["threads"], r["name"]): r["tokens_s"] for r in document["rows"]
    }

    def cells(key: tuple[Any, ...]) -> Iterable[str]:
        for mine, theirs in pairs:
            ours, rival = speeds[*key, mine], speeds[*key, theirs]
            yield from (f"{ours:.0f}", f"{rival:.0f}", f"**{ours / rival:.2f}**")

    keys = dict.fromkeys(key[:3] for key in speeds)
    columns = ("", "tokens", "threads", "`W4A8g32`", "llama.cpp Q4_0", "ratio", "`W8A8g32`",
               "llama.cpp Q8_0", "ratio", "`W4A8g32`", "ORT 4 bits", "ratio")  # fmt: skip
    dated = dates(document["rows"])
    body = table(columns, ((*key, *cells(key)) for key in keys))
    return f"{machine_name(document)}; tokens/s. Measured {dated}.\n\n{body}"


def gpu(few: bool = False) -> str:
    """Layers on a GPU beside cuBLAS; for the README a few."""
    found = read("gpu")
    lines = [
        f"Of an {found['machine']['processor']}, which reads"
        f" {found['machine']['rates']['read_gbs'] / 1000:.2f} TB/s; {found['machine']['rival']}.",
        "",
        "| NxK | scheme | M | kernel | us | product us | share of reads | cuBLAS us | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(found["rows"], key=lambda r: (_size(r["shape"]), r["scheme"], r["m"])):
        if few and (row["shape"], row["scheme"], row["m"]) not in GPU_HEADLINES:
            continue
        lines.append(
            f"| {row['shape']} | `{row['scheme']}` | {row['m']} | `{row['kernel']}` "
            f"| {row['us']:.1f} | {row['product_us']:.1f} | {row['share']:.0%} "
            f"| {row['rival_us']:.1f} | {row['rival_us'] / row['us']:.2f} |"
        )
    return "\n".join(lines)


GPU_HEADLINES = frozenset(
    ("14336x4096", scheme, m)
    for scheme, m in (
        *((scheme, 1) for scheme in ("W8A8", "W4A8g128", "W2A8")),
        ("W4A8g128", 128),
    )
)
"""Shape, scheme and rows of x."""


def _size(shape: str) -> int:
    n, k = map(int, shape.split("x"))
    return n * k


TABLES: Mapping[str, Callable[[], str]] = {
    "headlines": headlines,
    "linear": linear,
    "decode": decode,
    "repeats": repeats,
    "lookups": lookups,
    "model": model,
    "threads": threads,
    "generate": generate,
    "models": models,
    "exports": lambda: models("exports"),
    **{path.stem: partial(conv, path.stem) for path in sorted(FOLDER.glob("conv_*.json"))},
    "accuracy": quality_tables.accuracy,
    "images": quality_tables.images,
    "learning": quality_tables.learning,
    "language": quality_tables.language,
    "little": quality_tables.little,
    "encoders": quality_tables.encoders,
    "arm_decode": lambda: arm_shares("arm_decode"),
    "arm_prefill": lambda: arm_shares("arm_prefill"),
    "arm_layouts": arm_layouts,
    "arm_rivals": arm_rivals,
    "gpu": gpu,
    "gpu_headlines": partial(gpu, True),
}


def render(text: str) -> str:
    """A document with every table in it written anew.

    Raises
    ------
    KeyError
        It names a table that does not exist.
    """
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- /table -->)",
        lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}",
        text,
        flags=re.DOTALL,
    )


def render_all() -> None:
    """Write the tables of all documents anew."""
    for path in DOCUMENTS:
        before = path.read_text(encoding="utf-8")
        after = render(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: tables written")
