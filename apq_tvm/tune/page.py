"""A page that shows how the search of every task went."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from apq_tvm.extras import require
from apq_tvm.files import replacing
from apq_tvm.tune.session import Finding, Settings
from apq_tvm.types import AnyPath

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } td, th { padding: .2em .8em .2em 0; text-align: left; }
td.n { text-align: right; } section { margin-top: 2em; } svg { max-width: 100%; height: auto; }
"""


def write_page(path: AnyPath, findings: Sequence[Finding], settings: Settings) -> None:
    """Write one HTML file with a table of tasks and a curve for each.

    Parameters
    ----------
    path : str or path
    findings : sequence of Finding
    settings : Settings

    Raises
    ------
    MissingPackage
        matplotlib is not installed.
    """
    require("matplotlib")
    rows = "".join(map(_row, findings))
    curves = "".join(map(_section, findings))
    text = (
        f"<!doctype html><meta charset=utf-8><title>apq-tvm tune</title><style>{_STYLE}</style>"
        f"<h1>apq-tvm tune</h1><p>{settings.threads} threads; records: "
        f"{escape(str(settings.log))}</p>"
        "<table><tr><th>task<th>M<th>trials<th>ratio<th>95 % sure<th>decisions, or why none</tr>"
        f"{rows}</table>{curves}"
    )
    with replacing(Path(path)) as part:
        part.write_text(text, encoding="utf-8")


def _row(finding: Finding) -> str:
    task, record = finding.planned.task, finding.record
    interval = f"{record.interval[0]:.3f} to {record.interval[1]:.3f}" if record else ""
    words = ", ".join(f"{n}={v}" for n, v in record.decisions.items()) if record else finding.why
    ratio = f"{record.ratio:.3f}" if record else "1"
    cells = f"<td>{escape(task.name)}<td class=n>{task.m}<td class=n>{len(finding.trials)}"
    return f"<tr>{cells}<td class=n>{ratio}<td>{interval}<td>{escape(words)}</tr>"


def _section(finding: Finding) -> str:
    if not finding.trials:
        return ""
    task = finding.planned.task
    return f"<section><h2>{escape(task.name)}, M={task.m}</h2>{_curve(finding)}</section>"


def _curve(finding: Finding) -> str:
    """Ratios of the trials in order, and the best so far, as SVG."""
    from matplotlib.figure import Figure

    ratios = [trial.ratio for trial in finding.trials]
    best, so_far = 1.0, []
    for ratio in ratios:
        best = max(best, ratio)
        so_far.append(best)
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes: Any = figure.subplots()
    numbers = range(1, len(ratios) + 1)
    axes.plot(numbers, ratios, ".", markersize=4, color="0.6", label="a trial")
    axes.step(numbers, so_far, where="post", color="C0", label="best so far")
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.set_xlabel("trial")
    axes.set_ylabel("default's time / its")
    axes.set_ylim(bottom=0, top=max(1.2, 1.1 * best))
    axes.legend(loc="lower right", fontsize="small")
    made = io.StringIO()
    figure.savefig(made, format="svg", metadata={"Date": None})
    text = made.getvalue()
    return text[text.index("<svg") :]
