"""What a compiled module consists of: layers, kernels, bytes, bits per weight, functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apq_tvm.module import read_manifest


def inspect(path: Path) -> dict[str, Any]:
    """Describe the compiled module in folder `path` without running any of its code.

    Parameters
    ----------
    path : Path

    Returns
    -------
    dict
        The manifest, with ``path``, ``bits_per_weight`` of all layers together, ``package_bytes``
        and ``files`` (name → bytes) added.

    Raises
    ------
    BadInput
        The folder is no compiled module.
    """
    manifest = read_manifest(path)
    files = {
        str(f.relative_to(path)): f.stat().st_size
        for f in sorted(path.rglob("*"))
        if f.is_file() and "__pycache__" not in f.parts
    }
    return {
        **manifest,
        "path": str(path),
        "bits_per_weight": bits_per_weight(manifest["layers"]),
        "package_bytes": sum(files.values()),
        "files": files,
    }


def bits_per_weight(layers: Sequence[Mapping[str, Any]]) -> float:
    """Bits per weight of all layers together, scales and zero points included."""
    weights = sum(layer["n"] * layer["k"] for layer in layers)
    nbytes = sum(layer["bytes"] for layer in layers)
    return round(8 * nbytes / weights, 4) if weights else 0.0


def rows_range(kernel: Mapping[str, Any]) -> str:
    """The range of M of one kernel as text: ``"1"``, ``"2..15"``, ``"16.."``."""
    low, high = kernel["m_min"], kernel["m_max"]
    if low == high:
        return f"M={low}"
    return f"M={low}.." if high < 0 else f"M={low}..{high}"


def kernels_text(layer: Mapping[str, Any]) -> str:
    """Every kernel of a layer with its range of M, one per line."""
    return "\n".join(f"{rows_range(k)}: {k['kernel']}" for k in layer["kernels"])


def layer_rows(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of the table of layers; the columns are `LAYER_COLUMNS`."""
    return [
        (
            layer["name"],
            layer["op"].removeprefix("apq."),
            f"{layer['n']}x{layer['k']}",
            layer["scheme"],
            f"{layer['bits_per_weight']:.2f}",
            f"{layer['bytes'] / 1e3:.0f}",
            layer["layout"],
            kernels_text(layer),
        )
        for layer in layers
    ]


LAYER_COLUMNS = ("layer", "op", "NxK", "scheme", "bits/w", "kB", "layout", "kernels")


def rejections(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int]]:
    """Every kernel that was turned down and why, with the number of layers it concerns."""
    count: Counter[tuple[str, str]] = Counter()
    for layer in layers:
        count.update({(r["kernel"], r["reason"]) for r in layer["rejected"]})
    return [(kernel, reason, layers_) for (kernel, reason), layers_ in count.most_common()]


def schedule_rows(functions: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Functions other than quantized layers, each with the rule that scheduled it."""
    return sorted((f["name"], f["schedule"]) for f in functions)
