"""The README's tables of Arm kernels, as Markdown on standard output.

Needs ``make arm-tools``; takes about half an hour, and the figures do not depend on the machine's
load: ``python examples/measure_arm.py libggml-cpu-armv8.2_2.so libggml-cpu-armv8.6_1.so``. The
rival's libraries come with npm's @node-llama-cpp/linux-arm64. Layers have 4096 inputs; the figures
by format are of 512 outputs, which changes shares of the peak by a few thousandths.

``python examples/measure_arm.py layouts graviton3 graviton4 neoverse-n2`` prints instead what the
layouts of integer weights come to on devices, of 256 outputs, and keeps it in ``tuning_logs/``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from apq_tvm import tuning_logs
from apq_tvm.bench.linear import LinearCase
from apq_tvm.bench.static import bench_static
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


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_case(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Our own rows by scheme and M."""
    return {(row["scheme"], row["m"]): row for row in rows if not row["object"]}


def share(row: dict[str, Any]) -> str:
    """MACs per cycle and what that is of the peak."""
    return f"{row['macs_per_cycle']:.1f} ({row['peak_share']:.0%} {row['peak_instruction']})"


def shares(cases: Sequence[tuple[str, int]]) -> str:
    """MACs per cycle by scheme, M and device."""
    found = {}
    for target in TARGETS:
        rows = [LinearCase(N, K, m, scheme, threads=1) for scheme, m in cases]
        found[target] = by_case(bench_static(rows, target=target, progress=Bars()))
    return table(
        ("scheme", "M", *TARGETS),
        (
            (f"`{scheme}`", str(m), *(share(found[target][scheme, m]) for target in TARGETS))
            for scheme, m in cases
        ),
    )


def rivals(libraries: Sequence[str]) -> str:
    """W4A8g32, 4096 x 4096, beside ggml's products of the same format."""
    lines = []
    for target in TARGETS:
        # The first library is for cores without smmla.
        mine = libraries if "i8mm" in find_profile(target).features else libraries[:1]
        cases = [LinearCase(K, K, m, "W4A8g32", threads=1) for m in (1, MANY)]
        for row in bench_static(cases, target=target, against=mine, progress=Bars()):
            case = (target, str(row["m"]), row["kernel"], str(row["instructions"]), share(row))
            if row["object"]:
                ratios = (f"{row['instructions_ratio']:.2f}", f"{row['cycles_ratio']:.2f}")
            else:
                ratios = ("", "")
            lines.append((*case, *ratios))
    columns = ("device", "M", "kernel", "instructions", "MACs/cycle", "ours over its", "in cycles")
    return table(columns, dict.fromkeys(lines))  # libraries share products


def layouts(targets: Sequence[str]) -> str:
    """MACs per cycle of integers in every layout, which become the devices' tuning logs."""
    cases = [LinearCase(LAYOUT_N, K, m, s, threads=1) for s in LAYOUT_SCHEMES for m in ROWS_OF]
    lines = []
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
        for scheme, by_name in rates.items():
            lines += [(target, f"`{scheme}`", n, *map(str, of)) for n, of in by_name.items()]
    return table(("device", "scheme", "layout", *(f"M={m}" for m in ROWS_OF)), lines)


def keep(target: str, rates: dict[str, dict[str, list[float]]]) -> None:
    """Write a device's tuning log."""
    path = tuning_logs.FOLDER / target / "layouts.json"
    path.parent.mkdir(exist_ok=True)
    log = {"n": LAYOUT_N, "k": K, "m": ROWS_OF, "macs_per_cycle": rates}
    path.write_text(json.dumps(log, indent=1) + "\n")


def main(libraries: Sequence[str]) -> None:
    """Print every table."""
    if libraries[:1] == ["layouts"]:
        print(layouts(libraries[1:]))
        return
    print(shares([(scheme, 1) for scheme in DECODE_SCHEMES]), end="\n\n")
    prefill = [(scheme, m) for scheme in PREFILL_SCHEMES for m in ROWS]
    prefill += [(scheme, MANY) for scheme in DECODED_SCHEMES]
    print(shares(prefill), end="\n\n")
    if libraries:
        print(rivals(libraries))


if __name__ == "__main__":
    main(sys.argv[1:])
