"""A profile as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from apq_tvm import __version__
from apq_tvm.bench.profile.plots import bar_plot, roofline_plot
from apq_tvm.bench.profile.table import (
    COLUMNS,
    heading,
    machine_line,
    slow_lines,
    table_rows,
)
from apq_tvm.report.page import details, picture, section, table, whole


def profile_page(document: Mapping[str, Any]) -> str:
    """The page of what `apq_tvm.bench.profile.profile.bench_profile` gives."""
    slow, *named = slow_lines(document["slow"])
    listed = "".join(f"<li>{escape(line.strip())}</li>" for line in named)
    sections = [
        section(
            "Kernels",
            escape(f"{heading(document)}. {machine_line(document)}."),
            picture(bar_plot(document), "time of kernels and their limits"),
            f"<p>{escape(slow)}</p><ul>{listed}</ul>",
            table(("kernel", *COLUMNS), table_rows(document, "kernel")),
        )
    ]
    roofline = roofline_plot(document)
    if roofline:
        note = "Areas are shares of the run; lines are what this machine reads and multiplies."
        sections.append(section("Roofline", note, picture(roofline, "roofline")))
    layers = table(("layer", *COLUMNS), table_rows(document, "layer"))
    sections.append(section("Layers", "", details("Every layer", layers)))
    title = f"{Path(document['module']).name} on {document['target']}: where a run's time goes"
    return whole(title, sections, __version__)
