"""The report's plots, drawn twice: for light and for dark pages."""

from __future__ import annotations

import base64
import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Axes = Any  # matplotlib is imported inside functions
Results = Sequence[Mapping[str, Any]]

INK = {"light": "#1b1f24", "dark": "#d7dde4"}
GRID = {"light": "#d5dae0", "dark": "#3b434c"}
COLOURS = (
    "#3b82c4", "#d9792b", "#3f9d5a", "#c44e52", "#8a6bbf", "#9a7b4f", "#c76ba9", "#7f8c8d",
    "#a8a031", "#2ba5b5",
)  # fmt: skip
MARKERS = "osD^vPX<>*"
SMALLEST = 1e-9
"""Errors of 0 are drawn here on logarithmic axes."""

SMALLEST_EXCESS = 1e-4
"""And perplexities that are no worse than the float model's here."""


def label(result: Mapping[str, Any]) -> str:
    """Name of a scheme in the report."""
    method = result["method"]
    return str(result["scheme"]) + ("" if method == "rtn" else f":{method}")


def draw(paint: Callable[[Any], None], height: float) -> dict[str, str]:
    """Run `paint(figure)` for both kinds of pages; base64 PNG by ``light`` and ``dark``."""
    import matplotlib
    from matplotlib.figure import Figure

    pictures = {}
    for mode, ink in INK.items():
        colours = dict.fromkeys(
            ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), ink
        )
        style = {
            **colours,
            "grid.color": GRID[mode],
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.facecolor": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "legend.labelcolor": ink,
            "font.size": 9,
        }
        with matplotlib.rc_context(style):
            figure = Figure(figsize=(9.5, height), facecolor="none", layout="constrained")
            paint(figure)
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=130, transparent=True)
        pictures[mode] = base64.b64encode(buffer.getvalue()).decode("ascii")
    return pictures


def layer_plot(results: Results) -> dict[str, str] | None:
    """Errors by layer, one line a scheme; None where no layer was measured."""
    names = list(dict.fromkeys(row["name"] for r in results for row in r["layers"]))
    if not names:
        return None
    place = {name: i for i, name in enumerate(names, 1)}
    kinds = (("output_error", "output error"), ("weight_error", "weight error"))

    def paint(figure: Any) -> None:
        for axes, (kind, title) in zip(figure.subplots(2, 1, sharex=True), kinds, strict=True):
            for index, result in enumerate(results):
                rows = [row for row in result["layers"] if row[kind] is not None]
                axes.plot(
                    [place[row["name"]] for row in rows],
                    [max(row[kind], SMALLEST) for row in rows],
                    marker=MARKERS[index // len(COLOURS) % len(MARKERS)],
                    markersize=3,
                    linewidth=0.9,
                    color=COLOURS[index % len(COLOURS)],
                    label=label(result),
                )
            axes.set_yscale("log")
            axes.set_ylabel(f"relative {title}")
        figure.axes[0].legend(loc="center left", bbox_to_anchor=(1, 0.5))
        figure.axes[1].set_xlabel("layer, by its number in the tables below")
        figure.axes[1].xaxis.get_major_locator().set_params(integer=True)

    return draw(paint, 6.0)


def quality_plot(results: Results) -> dict[str, str]:
    """Quality against bits per weight."""
    panels = [_distance] if results[0]["language"] is None else [_perplexity, _divergence]

    def paint(figure: Any) -> None:
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(all_axes, panels, strict=True):
            points = defaultdict(list)
            for result in results:
                value, title = panel(result)
                family = (result["scheme"].partition("@")[0], result["method"])
                points[family].append((result["linear_bits_per_weight"], value, label(result)))
                axes.set_ylabel(title)
            _points(axes, points)
            axes.set_yscale("log")
            axes.set_xlabel("bits per weight of linear layers, tables and scales included")

    return draw(paint, 4.6)


def time_plot(timings: Mapping[str, Any]) -> dict[str, str]:
    """Time of compiled modules against bits."""

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        points = defaultdict(list)
        for row in timings["rows"]:
            points[row["module"]].append((row["bits"], row["us"], row["name"]))
        _points(axes, points)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("bits per weight, or the width chosen at run time")
        axes.set_ylabel("µs per call, warm")

    return draw(paint, 4.2)


def _points(axes: Axes, points: Mapping[Any, list[tuple[float, float, str]]]) -> None:
    """One marker each with its name; those of one key are joined by a line."""
    for index, group in enumerate(points.values()):
        ordered = sorted(group)
        xs, ys, names = zip(*ordered, strict=True)
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(xs, ys, color=colour, marker=MARKERS[index // len(COLOURS) % len(MARKERS)],
                  linewidth=1, markersize=5)  # fmt: skip
        place = (5, 4) if index % 2 else (5, -9)  # neighbours overlap less
        for x, y, name in zip(xs, ys, names, strict=True):
            axes.annotate(
                name, (x, y), xytext=place, textcoords="offset points", fontsize=7, color=colour
            )


def _perplexity(result: Mapping[str, Any]) -> tuple[float, str]:
    excess = max(result["language"]["ratio"] - 1, SMALLEST_EXCESS)
    return excess, "perplexity above the float model's, relative"


def _divergence(result: Mapping[str, Any]) -> tuple[float, str]:
    return max(result["language"]["kl_mean"], SMALLEST), "mean KL to the float model (nats)"


def _distance(result: Mapping[str, Any]) -> tuple[float, str]:
    outputs = result["outputs"].values()
    cosines = [output["cosine_mean"] for output in outputs if "cosine_mean" in output]
    if not cosines:  # labels alone
        equal = [output["equal"] for output in outputs]
        return max(1 - sum(equal) / len(equal), SMALLEST), "share that differs, mean over outputs"
    return max(1 - sum(cosines) / len(cosines), SMALLEST), "1 - cosine, mean over float outputs"
