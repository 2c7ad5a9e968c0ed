"""Distance to the float model against bits, on SmolLM2: ``docs/quality.svg``.

Every point is a row of ``docs/measured/language.json``, by the Kullback-Leibler divergence of its
predictions; on the line, the Pareto front, are those that nothing of as few bits beats. It needs
matplotlib (the extra ``report``).

``python examples/quality_plot.py``
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import measured

from apq_tvm.extras import require
from apq_tvm.formats import parse_scheme

SEVERAL = "several"
"""Families of a row whose layers have schemes of their own."""

OUTPUT = measured.ROOT / "docs" / "quality.svg"

MOST = 1.5
"""Rows further from the float model are not drawn."""

LEARNED = re.compile("tuned|qat|blocks|abq")


def front(rows: Sequence[measured.Row]) -> list[measured.Row]:
    """Rows that none of as few bits beats, by bits."""
    found: list[measured.Row] = []
    for row in sorted(rows, key=lambda r: (r["bits"], r["kl"])):
        if not found or row["kl"] < found[-1]["kl"]:
            found.append(row)
    return found


def family(row: measured.Row) -> str:
    """What a row's weights are, as ``apq-tvm formats`` names it; `SEVERAL` by a budget."""
    if ":" in row["scheme"]:
        return SEVERAL
    scheme = parse_scheme(row["scheme"].partition("@")[0])
    assert scheme is not None
    return scheme.family


def main() -> None:
    """Draw it."""
    require("matplotlib")
    import matplotlib
    from matplotlib.figure import Figure

    # The same rows draw the same bytes, and text stays text.
    matplotlib.rcParams.update({"svg.hashsalt": "apq-tvm", "svg.fonttype": "none"})
    rows = [row for row in measured.read("language")["rows"] if row["kl"] <= MOST]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    best = front(rows)
    axes.plot([r["bits"] for r in best], [r["kl"] for r in best], color="0.6", label="front")
    for at, name in enumerate(sorted({family(row) for row in rows})):
        for learned, marker in ((False, "o"), (True, "*")):
            some = [r for r in rows if family(r) == name and learned == is_learned(r)]
            if some:
                axes.scatter(
                    [r["bits"] for r in some],
                    [r["kl"] for r in some],
                    marker=marker,
                    s=70 if learned else 22,
                    color=f"C{at}",
                    label=f"{name}{', learned' if learned else ''}",
                )
    for row in best:
        axes.annotate(
            row["scheme"].partition(":")[0], (row["bits"], row["kl"]), xytext=(4, 4),
            textcoords="offset points", fontsize=7,
        )  # fmt: skip
    axes.set(yscale="log", xlabel="bits per weight", ylabel="KL to float, nats per token",
             title="SmolLM2-135M-Instruct")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(OUTPUT, metadata={"Date": None})


def is_learned(row: measured.Row) -> bool:
    """Whether its arrays or codes were trained."""
    return LEARNED.search(row["calibration"]) is not None


if __name__ == "__main__":
    main()
