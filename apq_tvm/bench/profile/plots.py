"""A profile's plots: time beside its limit, and arithmetic against bytes under the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apq_tvm.bench.profile.table import longest, shortened
from apq_tvm.report.plots import COLOURS, draw

BARS = 20
"""Kernels that are drawn; the table has all."""


def bar_plot(document: Mapping[str, Any]) -> dict[str, str]:
    """Time of the longest kernels, their limits on top; base64 PNG by ``light`` and ``dark``."""
    rows = longest(document["kernels"], BARS)[::-1]
    names = [shortened(row["name"]) for row in rows]

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        places = range(len(rows))
        axes.barh(places, [row["us"] for row in rows], color=COLOURS[0], label="measured")
        if document["limits"]:
            limits = [row["limit_us"] for row in rows]
            axes.barh(places, limits, height=0.35, color=COLOURS[1], label="limit")
        axes.set_yticks(places, names, fontsize=7)
        axes.set_xlabel("µs of a run")
        axes.legend(loc="lower right")

    return draw(paint, 1.2 + 0.24 * len(rows))


def roofline_plot(document: Mapping[str, Any]) -> dict[str, str] | None:
    """Multiply-adds per second against those per byte; None where nothing multiplies.

    Areas are shares of the run.
    """
    rows = [row for row in document["kernels"] if row["macs"] and row["bytes"]]
    if not rows or not document["limits"]:
        return None
    at = [row["macs"] / row["bytes"] for row in rows]

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        limits, ends = document["limits"], (min(at) / 2, max(at) * 2)
        top = limits["int8_gmacs"]
        for index, level in enumerate(document["levels"], 2):
            roof = [min(x * level["gbs"], top) for x in (*ends, top / level["gbs"])]
            line = sorted(zip((*ends, top / level["gbs"]), roof, strict=True))
            axes.plot(*zip(*line, strict=True), color=COLOURS[index], linewidth=1,
                      label=f"{level['name']} {level['gbs']:.0f} GB/s")  # fmt: skip
        for name, rate in (("int8", top), ("float", limits["fp32_gmacs"])):
            axes.axhline(rate, color=COLOURS[7], linewidth=1, linestyle="--")
            axes.annotate(name, (ends[0], rate), fontsize=7, va="bottom")
        axes.scatter(at, [row["gmacs"] for row in rows], color=COLOURS[0], alpha=0.7,
                     s=[20 + 800 * row["share"] for row in rows])  # fmt: skip
        for x, row in zip(at, rows, strict=True):
            if row["share"] > 0.02:
                axes.annotate(shortened(row["name"], 40), (x, row["gmacs"]), fontsize=6,
                              xytext=(4, 4), textcoords="offset points")  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("multiply-adds per byte of its tensors")
        axes.set_ylabel("1e9 multiply-adds per second")
        axes.legend(loc="lower right")

    return draw(paint, 4.6)
