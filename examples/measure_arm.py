"""Measures what ``docs/speed-arm.md`` shows: kernels for Arm, judged without Arm.

Needs ``make arm-tools``; takes about half an hour, and the figures do not depend on the machine's
load: ``python examples/measure_arm.py libggml-cpu-armv8.2_2.so libggml-cpu-armv8.6_1.so``. The
rival's libraries come with npm's @node-llama-cpp/linux-arm64. Layers have 4096 inputs; the figures
by format are of 512 outputs, which changes shares of the peak by a few thousandths. Rows are kept
in ``docs/measured/*.json``, and the tables are written anew.

``python examples/measure_arm.py layouts graviton3 graviton4 neoverse-n2`` measures instead what the
layouts of integer weights come to on devices, of 256 outputs, and keeps it in ``tuning_logs/``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

import doc_tables
import measured

from apq_tvm import tuning_logs
from apq_tvm.bench.arm.mca import VERSION
from apq_tvm.bench.arm.static import bench_static
from apq_tvm.bench.linear import LinearCase
from apq_tvm.cli.console import Bars
from apq_tvm.schedules.arm.layouts import INTERLEAVINGS
from apq_tvm.schedules.arm.layouts import ROWS as ROWS_OF
from apq_tvm.schedules.devices import find_profile

N, K = 512, 4096
TARGETS = ("graviton2", "graviton3", "graviton4", "cortex-a55")
DECODE_SCHEMES = (
    "W4A8g32", "W4A8g128", "W2A8g32", "W3A8g128", "W5A8g128", "W6A8g128", "W7A8g128", "W8A8", "nl4",
    "cb2", "cb3", "cb4", "cb3g64", "W2sA8", "W3sA8", "anyprec2-8@2", "anyprec2-8@3", "anyprec2-8@4",
    "anyprec2-8@5", "anyprec2-8@6", "anyprec2-8@7", "anyprec2-8@8", "bcq2g128", "bcq3g128", "W2*A8",
    "mixed24",
)  # fmt: skip
PREFILL_SCHEMES = ("W4A8g32", "W4A8tg32", "W4A8tg128", "W8A8", "nl4")
ROWS = (4, 8, 16, 128)
DECODED_SCHEMES = ("cb3", "cb4", "W2sA8", "W2*A8", "mixed24", "bcq2g128", "anyprec2-8@3")
MANY = 128
LAYOUT_SCHEMES = ("W2A8g32", "W3A8g32", "W4A8g32", "W4A8g128", "W8A8")
LAYOUT_N = 256


def by_case(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Our own rows by scheme and M."""
    return {(row["scheme"], row["m"]): row for row in rows if not row["object"]}


def figures(row: dict[str, Any], target: str) -> dict[str, Any]:
    """What is kept of every row."""
    return {
        "target": target,
        "macs_per_cycle": round(row["macs_per_cycle"], 1),
        "peak_share": round(row["peak_share"], 4),
        "peak_instruction": row["peak_instruction"],
    }


def shares(name: str, cases: Sequence[tuple[str, int]]) -> None:
    """MACs per cycle by scheme, M and device."""
    found = {}
    for target in TARGETS:
        rows = [LinearCase(N, K, m, scheme, threads=1) for scheme, m in cases]
        found[target] = by_case(bench_static(rows, target=target, progress=Bars()))
    kept = (
        {"scheme": scheme, "m": m, **figures(found[target][scheme, m], target)}
        for scheme, m in cases
        for target in TARGETS
    )
    measured.store(name, kept)


def rivals(libraries: Sequence[str]) -> None:
    """W4A8g32, 4096 x 4096, beside ggml's products of the same format."""
    kept: dict[tuple[str, int, str], dict[str, Any]] = {}  # libraries share products
    for target in TARGETS:
        # The first library is for cores without smmla.
        mine = libraries if "i8mm" in find_profile(target).features else libraries[:1]
        cases = [LinearCase(K, K, m, "W4A8g32", threads=1) for m in (1, MANY)]
        for row in bench_static(cases, target=target, against=mine, progress=Bars()):
            ratios = {
                key: round(row[key], 4) if row["object"] else None
                for key in ("instructions_ratio", "cycles_ratio")
            }
            kept[target, row["m"], row["kernel"]] = {
                "m": row["m"],
                "kernel": row["kernel"],
                "instructions": row["instructions"],
                **figures(row, target),
                **ratios,
            }
    measured.store("arm_rivals", kept.values())


def layouts(targets: Sequence[str]) -> None:
    """MACs per cycle of integers in every layout: the devices' tuning logs."""
    cases = [LinearCase(LAYOUT_N, K, m, s, threads=1) for s in LAYOUT_SCHEMES for m in ROWS_OF]
    for target in targets:
        found = {}
        for name in INTERLEAVINGS:
            found[name] = by_case(bench_static(cases, target=target, layout=name, progress=Bars()))
        rates = {
            scheme: {
                name: [round(found[name][scheme, m]["macs_per_cycle"], 1) for m in ROWS_OF]
                for name in INTERLEAVINGS
            }
            for scheme in LAYOUT_SCHEMES
        }
        keep(target, rates)


def keep(target: str, rates: dict[str, dict[str, list[float]]]) -> None:
    """Write a device's tuning log."""
    path = tuning_logs.FOLDER / target / "layouts.json"
    path.parent.mkdir(exist_ok=True)
    core, today = find_profile(target).target["mcpu"], date.today().isoformat()
    how = f"llvm-mca {VERSION}, its model of {core}, {today}"
    log = {"measured": how, "n": LAYOUT_N, "k": K, "m": ROWS_OF, "macs_per_cycle": rates}
    path.write_text(json.dumps(log, indent=1) + "\n")


def main(arguments: Sequence[str]) -> None:
    """Measure, keep the rows, and write the documents' tables."""
    if arguments[:1] == ["layouts"]:
        layouts(arguments[1:])
    else:
        shares("arm_decode", [(scheme, 1) for scheme in DECODE_SCHEMES])
        prefill = [(scheme, m) for scheme in PREFILL_SCHEMES for m in ROWS]
        prefill += [(scheme, MANY) for scheme in DECODED_SCHEMES]
        shares("arm_prefill", prefill)
        if arguments:
            rivals(arguments)
    doc_tables.render_all()


if __name__ == "__main__":
    main(sys.argv[1:])
