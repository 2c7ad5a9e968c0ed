"""The documents' tables of quality (`doc_tables`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from measured import dates, read, table

COLUMNS = ("none", "calibrated")
"""Of an encoder: codes chosen without a calibration, and with one."""


def accuracy() -> str:
    """The demo model's results against float32."""
    rows = read("accuracy")["rows"]
    cells = (
        (
            f"`{r['scheme']}`",
            f"{r['bits_per_weight']:.2f}",
            f"{r['package_mb']:.1f} MB",
            f"{r['share_of_onnx']:.1%}",
            f"{r['cosine_sentences']:.5f}",
            f"{r['cosine_tokens']:.5f}",
        )
        for r in rows
    )
    columns = ("scheme", "bits per weight", "package", "of the ONNX file", "cosine of sentences",
               "cosine of tokens")  # fmt: skip
    return f"Measured {dates(rows)}.\n\n{table(columns, cells)}"


def images() -> str:
    """Image classifiers against their float models."""
    rows = read("images")["rows"]
    cells = (
        (
            r["model"],
            f"`{r['scheme']}`",
            f"`{r['method']}`" if r.get("method") else "",
            f"{r['cosine_mean']:.4f}",
            f"{r['cosine_min']:.4f}",
            f"{r['same_top']:.0%} of {r['images']}",
        )
        for r in rows
    )
    columns = ("network", "scheme", "calibrated", "cosine, mean", "least", "same top-1")
    return f"Measured {dates(rows)}.\n\n{table(columns, cells)}"


def learning() -> str:
    """What learning gains on small models, all of one budget."""
    rows = sorted(read("learning")["rows"], key=lambda r: (r["model"], r["scheme"]))
    cells = (
        (
            r["model"],
            f"`{r['scheme']}`",
            f"`{r['chosen']}`",
            r["texts"],
            r["samples"],
            r["steps"] or "",
            f"{r['bits_read']:.2f}",
            f"{r['relative_error']:.2%}",
            r["cpu_seconds"] or "",
        )
        for r in rows
    )
    columns = ("model", "scheme", "codes by", "texts", "samples", "steps", "bits per weight",
               "relative error", "CPU seconds")  # fmt: skip
    return f"Measured {dates(rows)}.\n\n{table(columns, cells)}"


def language() -> str:
    """Schemes on SmolLM2, by bits per weight."""
    rows = sorted(read("language")["rows"], key=lambda r: (-r["bits"], r["perplexity"]))
    cells = (
        (
            f"`{r['scheme']}`",
            r["calibration"],
            r["windows"] or "",
            f"{r['bits']:.2f}",
            _stored(r),
            f"{r['perplexity']:.2f}" if r["perplexity"] < 1e4 else f"{r['perplexity']:.1e}",
            f"{r['ratio']:.3f}" if r["ratio"] < 100 else f"{r['ratio']:.3g}",
            f"{r['kl']:.3f}",
            f"{r['same_top']:.0%}",
        )
        for r in rows
    )
    columns = ("scheme", "calibration", "windows", "bits per weight", "stored", "perplexity",
               "of float", "KL", "same top token")  # fmt: skip
    return f"Measured {dates(rows)}.\n\n{table(columns, cells)}"


def little() -> str:
    """Schemes on a language model that never was quantized, by bits per weight."""
    rows = read("little")["rows"]
    plain = {r["scheme"]: r for r in rows if r["method"] == "none"}
    chosen = sorted((r for r in rows if r["method"] != "none"), key=lambda r: (-r["bits"], r["kl"]))
    cells = (
        (
            f"`{r['scheme']}`",
            r["method"],
            f"{r['bits']:.2f}",
            _stored(r),
            f"{plain[r['scheme']]['ratio']:.3f}",
            f"{r['ratio']:.3f}",
            f"{plain[r['scheme']]['kl']:.4f}",
            f"{r['kl']:.4f}",
            f"{r['same_top']:.1%}",
        )
        for r in chosen
    )
    columns = ("scheme", "method", "bits per weight", "stored", "of float", "calibrated", "KL",
               "calibrated", "same top token")  # fmt: skip
    return f"Measured {dates(rows)}.\n\n{table(columns, cells)}"


def _stored(row: Mapping[str, Any]) -> str:
    """Bits a weight that a model of several widths stores, where that is more than is read."""
    stored = row.get("stored", row["bits"])
    return f"{stored:.2f}" if stored != row["bits"] else ""


def encoders() -> str:
    """Schemes on sentence encoders."""
    rows = read("encoders")["rows"]
    names = list(rows[0]["errors"])
    cells = (
        (
            f"`{r['scheme']}`",
            r["method"],
            f"{r['bits']:.2f}",
            _stored(r),
            *(f"{r['errors'][name][column]:.2%}" for name in names for column in COLUMNS),
        )
        for r in rows
    )
    columns = ("scheme", "method", "bits per weight", "stored",
               *(title for name in names for title in (name, "calibrated")))  # fmt: skip
    return f"Measured {dates(rows)}.\n\n{table(columns, cells)}"
