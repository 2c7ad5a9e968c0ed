"""The HTML page: one file, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from apq_tvm.report.plots import label, layer_plot, quality_plot, time_plot

TEMPLATE = Path(__file__).with_name("page.html")


def page(document: Mapping[str, Any]) -> str:
    """The page of a report.

    Parameters
    ----------
    document : mapping
        What `apq_tvm.report.make_report` returns.
    """
    schemes = document["schemes"]
    sections = [
        section("Schemes", overview_note(document), overview_table(schemes)),
        section("Quality against bits", "", picture(quality_plot(schemes), "quality and bits")),
    ]
    plot = layer_plot(schemes)
    if plot:
        sections.append(
            section(
                "Error by layer",
                "‖W - Ŵ‖ / ‖W‖, and the same of the layer's output where it gets the float model's "
                "activations. Both tables have one row a layer.",
                picture(plot, "error by layer"),
                details("Output errors", layer_table(schemes, "output_error")),
                details("Weight errors", layer_table(schemes, "weight_error")),
                details("Bits per weight", layer_table(schemes, "bits_per_weight")),
            )
        )
    if document["products"]:
        note = (
            "Products and convolutions with constants that are no layers, and are computed in "
            "float by any scheme."
        )
        rows = document["products"].items()
        sections.append(section("Float products", note, table(("product", "why"), rows, text=2)))
    if document["timings"]:
        timings = document["timings"]
        shapes = ", ".join(f"{name} {shape}" for name, shape in timings["shapes"].items())
        sections.append(
            section(
                "Time against bits",
                f"{timings['threads']} threads, {shapes}; modules take turns in one process, "
                "minima. Warm: calls follow one another, weights lie in whatever cache holds them. "
                "Noise is how far the median lies above the minimum.",
                picture(time_plot(timings), "time and bits"),
                time_table(timings["rows"]),
            )
        )
    if document["failed"]:
        rows = document["failed"].items()
        sections.append(section("Left out", "", table(("scheme", "reason"), rows, text=2)))
    title = f"{Path(document['model']).name}: accuracy of {len(schemes)} schemes"
    return whole(title, sections, document["version"])


def whole(title: str, sections: Sequence[str], version: str) -> str:
    """The page of some sections."""
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title), sections="\n".join(sections), version=escape(version)
    )


def overview_note(document: Mapping[str, Any]) -> str:
    """One paragraph on what was compared."""
    parts = [
        f"Model {document['model']} (SHA-256 {document['sha256'][:16]}…), inputs "
        f"{document['inputs']}",
        f"calibration {document['calibration']}" if document["calibration"] else "no calibration",
    ]
    score = document["schemes"][0]["language"]
    if score:
        parts.append(
            f"{score['tokens']} predicted tokens, float perplexity {score['float_perplexity']:.4f},"
            " KL in nats"
        )
    parts.append(
        "bits per weight count all that is stored, float weights, scales and tables included; "
        "weights are decoded and activations rounded as the scheme says, in torch; errors of "
        "layers are means over linear layers",
    )
    return escape("; ".join(parts) + ".")


def overview_table(schemes: Sequence[Mapping[str, Any]]) -> str:
    """One row a scheme."""
    # Of integers the share that is equal: a cosine between ids means nothing.
    outputs = {
        name: "equal" if "equal" in result else "cosine_mean"
        for s in schemes
        for name, result in s["outputs"].items()
    }
    scored = schemes[0]["language"] is not None
    columns = ["scheme", "bits per weight", "in linear layers", "in embeddings", "weight error",
               "output error"]  # fmt: skip
    if scored:
        columns += ["perplexity", "of float", "KL mean", "KL max", "same top token"]
    columns += [
        f"{'equal in' if figure == 'equal' else 'cosine of'} {name}"
        for name, figure in outputs.items()
    ]
    columns += ["quantize s", "evaluate s"]
    return table(columns, (_overview_row(s, outputs, scored) for s in schemes))


def _overview_row(s: Mapping[str, Any], outputs: Mapping[str, str], scored: bool) -> list[str]:
    linear, embedding = s["linear_bits_per_weight"], s["embedding_bits_per_weight"]
    row = [
        label(s),
        f"{s['bits_per_weight']:.3f}",
        f"{linear:.3f}" if linear else "float",
        f"{embedding:.3f}" if embedding else "float",
        _number(s["weight_error"]),
        _number(s["output_error"]),
    ]
    if scored:
        score = s["language"]
        row += [
            f"{score['perplexity']:.3f}" if score["perplexity"] < 1e6 else
            f"{score['perplexity']:.3g}",
            f"{score['ratio']:.4f}" if score["ratio"] < 1e3 else f"{score['ratio']:.3g}",
            f"{score['kl_mean']:.5f}",
            f"{score['kl_max']:.4f}",
            f"{score['top1']:.2%}",
        ]  # fmt: skip
    row += [f"{s['outputs'][name][figure]:.6f}" for name, figure in outputs.items()]
    return [*row, f"{s['seconds']['quantize']:.1f}", f"{s['seconds']['evaluate']:.1f}"]


def layer_table(schemes: Sequence[Mapping[str, Any]], kind: str) -> str:
    """One row a layer, one column a scheme."""
    names: dict[str, str] = {}
    for s in schemes:
        for layer in s["layers"]:
            names.setdefault(layer["name"], "x".join(map(str, layer["shape"])))
    found = [{layer["name"]: layer[kind] for layer in s["layers"]} for s in schemes]
    rows = (
        [name, str(index), shape, *(_number(values.get(name)) for values in found)]
        for index, (name, shape) in enumerate(names.items(), 1)
    )
    return table(["layer", "number", "N x K", *map(label, schemes)], rows)


def time_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row a module and width."""
    columns = ("module", "schemes", "bits", "µs", "noise")
    cells = (
        (r["name"], r["scheme"], f"{r['bits']:.3g}", f"{r['us']:.1f}", f"{r['noise']:.0%}")
        for r in rows
    )
    return table(columns, cells, text=2)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> str:
    """A table; the first `text` columns hold text, the others numbers."""

    def cell(tag: str, index: int, value: str) -> str:
        kind = "" if index < text else ' class="n"'
        return f"<{tag}{kind}>{escape(str(value))}</{tag}>"

    def line(tag: str, values: Sequence[str]) -> str:
        return "<tr>" + "".join(cell(tag, i, v) for i, v in enumerate(values)) + "</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return (
        f'<div class="scroll"><table><thead>{line("th", columns)}</thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def picture(modes: Mapping[str, str], text: str) -> str:
    """A plot that follows the page's colours."""
    start = "data:image/png;base64,"
    return (
        f'<picture><source media="(prefers-color-scheme: dark) and (not print)" '
        f'srcset="{start}{modes["dark"]}">'
        f'<img alt="{escape(text)}; the figures are in the tables" '
        f'src="{start}{modes["light"]}"></picture>'
    )


def details(title: str, body: str) -> str:
    """A part that is folded away at first."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def section(title: str, note: str, *body: str) -> str:
    """A heading, a paragraph of escaped text and what follows."""
    paragraph = f"<p>{note}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{paragraph}{''.join(body)}</section>"
