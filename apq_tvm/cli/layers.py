"""What ``apq-tvm bench linear --device`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from apq_tvm.cli.console import Bars, print_json, print_table

if TYPE_CHECKING:
    from apq_tvm.bench.linear import LinearCase


def layers_on_devices(
    cases: Sequence[LinearCase], device: str, target: str, seconds: float, json: bool
) -> None:
    """Do what ``bench linear --device`` asks for, and show it."""
    from apq_tvm.tune.devices.module_bench import bench_layers

    rows = bench_layers(cases, device, target=target, seconds=seconds, progress=Bars())
    if json:
        print_json(rows)
        return
    columns = ("NxK", "M", "threads", "scheme", "device", "us", "GMAC/s", "noise", "error")
    print_table(
        f"{target}; weights {'out of' if cases[0].cold else 'in'} cache; minima; error: mean, "
        "relative to the result's root mean square",
        columns,
        (
            (
                row["shape"],
                str(row["m"]),
                str(row["threads"]),
                row["scheme"],
                row["device"],
                *(
                    ("emulated", "", "")
                    if row["us"] is None
                    else (f"{row['us']:.1f}", f"{row['gmacs']:.1f}", f"{row['noise']:.0%}")
                ),
                f"{row['error']:.4f}",
            )
            for row in rows
        ),
        right=tuple(c for c in columns if c not in ("NxK", "scheme", "device")),
    )
