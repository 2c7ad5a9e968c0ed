"""What a compiled module consists of: layers, kernels, bytes, bits per weight, functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from apq_tvm.errors import BadInput
from apq_tvm.module import damaged, read_manifest
from apq_tvm.types import AnyPath


def inspect(path: AnyPath) -> dict[str, Any]:
    """Describe the compiled module in folder `path` without running any of its code.

    Parameters
    ----------
    path : str or path

    Returns
    -------
    dict
        The manifest, with ``path``, ``bits_per_weight`` of all weights that are stored,
        ``quantized_bits_per_weight`` of those in codes (0 if none), ``package_bytes`` and ``files``
        (name → bytes) added.

    Raises
    ------
    BadInput
        The folder is no compiled module.
    """
    path = Path(path)
    manifest = read_manifest(path)
    files = {
        str(f.relative_to(path)): f.stat().st_size
        for f in sorted(path.rglob("*"))
        if f.is_file() and "__pycache__" not in f.parts
    }
    with damaged(path):
        bits = stored_bits(manifest)
    return {
        **manifest,
        "path": str(path),
        **bits,
        "package_bytes": sum(files.values()),
        "files": files,
    }


def stored_bits(manifest: Mapping[str, Any]) -> dict[str, float]:
    """``bits_per_weight`` of everything that is stored, float weights included, and
    ``quantized_bits_per_weight``, of what is in codes; scales and zero points count in both.

    Raises
    ------
    BadInput
        The manifest does not say; earlier versions of apq_tvm counted layers only.
    """
    stored = manifest.get("stored")
    if stored is None:
        raise BadInput(
            "the module is from an earlier version of apq-tvm, which did not count float weights; "
            "compile it again"
        )

    def bits(part: str) -> float:
        weights = stored[f"{part}weights"]
        return round(8 * stored[f"{part}bytes"] / weights, 4) if weights else 0.0

    return {"bits_per_weight": bits(""), "quantized_bits_per_weight": bits("quantized_")}


def bits_line(report: Mapping[str, Any]) -> str:
    """What `stored_bits` found, as text."""
    quantized = report["quantized_bits_per_weight"]
    rest = f"{quantized} in quantized layers" if quantized else "no layer is quantized"
    return f"{report['bits_per_weight']} bits per weight ({rest})"


def code_sources(layers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Whose codes layers have kept (``"codes of the file"``: the ONNX file's own), counted."""
    notes = (layer.get("note", "") for layer in layers)
    return dict(Counter(n.partition(" (")[0] for n in notes if n.startswith("codes of ")))


def rows_range(kernel: Mapping[str, Any]) -> str:
    """What one kernel is for, as text: ``"M=1"``, ``"M=2..15"``, ``"3 bits M=16.."``."""
    low, high = kernel["m_min"], kernel["m_max"]
    bits = f"{kernel['bits']} bits " if kernel.get("bits") else ""
    if low == high:
        return f"{bits}M={low}"
    return f"{bits}M={low}.." if high < 0 else f"{bits}M={low}..{high}"


def kernel_sets(layers: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], str]:
    """Name every distinct choice of kernels by a letter: ``("M=1: gemv", ...)`` → ``"A"``.

    Many layers get the same kernels; the table of layers shows the letter.
    """
    sets: dict[tuple[str, ...], str] = {}
    for layer in layers:
        sets.setdefault(kernels_of(layer), _letter(len(sets)))
    return sets


def kernels_of(layer: Mapping[str, Any]) -> tuple[str, ...]:
    """Every kernel of a layer with its range of M, and whether a record of the tuner decided."""
    return tuple(f"{rows_range(k)}: {k['kernel']}{_recorded(k)}" for k in layer["kernels"])


def _recorded(kernel: Mapping[str, Any]) -> str:
    """``" (record, 1.08 times the default)"``, the shape it is of where that is another's."""
    source = kernel.get("source", "default")
    if source == "default":
        return ""
    what, _, found = source.partition(": ")
    return f" ({what}, {found.partition(' (')[0].partition(',')[0]})"


def _letter(number: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    head, tail = divmod(number, 26)
    return (_letter(head - 1) if head else "") + chr(ord("A") + tail)


def layer_rows(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of the table of layers; the columns are `LAYER_COLUMNS`."""
    sets = kernel_sets(layers)
    return [
        (
            layer["name"],
            layer["op"].removeprefix("apq."),
            f"{layer['n']}x{layer['k']}",
            " ".join([layer["scheme"], *(f"{k}={v}" for k, v in layer.get("details", {}).items())]),
            f"{layer['bits_per_weight']:.2f}",
            f"{layer['bytes'] / 1e3:.0f}",
            layer["layout"],
            sets[kernels_of(layer)],
        )
        for layer in layers
    ]


LAYER_COLUMNS = ("layer", "op", "NxK", "scheme", "bits/w", "kB", "layout", "kernels")


def kernel_rows(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Rows of the table of kernels: the letter in `layer_rows`, and one kernel of it."""
    return [(name, kernel) for kernels, name in kernel_sets(layers).items() for kernel in kernels]


def devices(
    report: Mapping[str, Any],
) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
    """The devices a library is for, the most preferred first, each with its layers."""
    variants = report.get("variants") or [report]
    return [(variant["target"], variant["layers"]) for variant in variants]


def by_reason(rejected: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """Kernels that were turned down, by reason; reasons that concern the fewest come first."""
    reasons: dict[str, list[str]] = {}
    for entry in rejected:
        names = reasons.setdefault(entry["reason"], [])
        if entry["kernel"] not in names:
            names.append(entry["kernel"])
    return dict(sorted(reasons.items(), key=lambda item: len(item[1])))


def shorten(names: Sequence[str], shown: int = 2) -> str:
    """A list of names as text, e.g. ``"a, b and 7 more"``."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def schedule_rows(functions: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Functions other than quantized layers, each with the rule that scheduled it."""
    return sorted((f["name"], f["schedule"]) for f in functions)
