"""Why every layer got its kernel: the reasons of those that were turned down, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from apq_tvm.errors import BadInput
from apq_tvm.inspect import by_reason, rows_range, shorten
from apq_tvm.module import damaged, read_manifest
from apq_tvm.nearest import nearest
from apq_tvm.types import AnyPath

SCALED = {
    "int8": ", one scale for each head and token",
    "int4": ", a scale and a least for each group of a head's columns and token",
}
"""What is said of caches of codes."""


def explain(path: AnyPath, layer: str | None = None) -> dict[str, Any]:
    """List, for each layer, the kernels it got and the reasons why others were turned down.

    Parameters
    ----------
    path : str or path
        Folder of the compiled module.
    layer : str or None
        Regular expression that selects layers by name; None takes all.

    Returns
    -------
    dict
        ``module``, ``batch``, ``attention``, ``products`` (float ones by name, and why),
        ``target``, ``features`` and ``layers``: ``name``, ``scheme``, ``kernels``, ``rejected``
        and ``note`` of each; ``functions`` that the tuner's records decided: ``name``,
        ``decisions`` and ``source``. Where the library chooses between devices, ``variants`` too:
        ``target``, ``features`` and ``layers`` of each.

    Raises
    ------
    BadInput
        The folder is no compiled module or its manifest is damaged, the expression is invalid, or
        it selects nothing.
    """
    manifest = read_manifest(path)
    try:
        wanted = re.compile(layer or "")
    except re.error as error:
        raise BadInput(f"--layer {layer!r} is no regular expression: {error}") from error
    with damaged(path):
        report = _report(path, manifest, layer, wanted)
        explanation_lines(report)  # so that whatever lacks is said here
    return report


def _report(
    path: AnyPath, manifest: Mapping[str, Any], layer: str | None, wanted: re.Pattern[str]
) -> dict[str, Any]:
    """What `explain` returns; wrong types in a damaged manifest raise what they raise."""
    keep = (
        "name",
        "op",
        "n",
        "k",
        "scheme",
        "activations",
        "details",
        "layout",
        "kernels",
        "rejected",
        "note",
    )

    def chosen(part: Mapping[str, Any]) -> dict[str, Any]:
        layers = [entry for entry in part["layers"] if wanted.search(entry["name"])]
        told = [f for f in part.get("functions", []) if _source(f)] if not layer else []
        decided = [{key: f[key] for key in ("name", "decisions", "source")} for f in told]
        return {
            **({"functions": decided} if decided else {}),
            "target": part.get("target", ""),
            "features": part.get("features", []),
            "layers": [{key: entry[key] for key in keep if key in entry} for entry in layers],
        }

    kept = ("batch", "attention", "session", "stateless", "products")
    whole = {key: manifest[key] for key in kept if manifest.get(key)}
    if "batch" in whole:
        whole["batch"] = {**whole["batch"], "stages": manifest.get("graph", {}).get("stages", 0)}
    report = {"module": str(path), **whole, **chosen(manifest)}
    if layer and not report["layers"]:
        names = [entry["name"] for entry in manifest["layers"]]
        raise BadInput(
            f"no layer of {path} matches {layer!r}; nearest are "
            f"{', '.join(nearest(layer, names)) or 'none'}"
        )
    if "variants" in manifest:
        report["variants"] = [chosen(variant) for variant in manifest["variants"]]
    return report


def explanation_lines(report: Mapping[str, Any]) -> list[str]:
    """`explain` as text, layers with the same story told once."""
    if "batch" in report:
        told = ("batch", "attention", "session", "stateless", "products")
        rest = {key: value for key, value in report.items() if key not in told}
        told_lines = (
            _batch_lines(report["batch"]),
            _attention_lines(report),
            _session_lines(report),
            _product_lines(report),
        )
        lines = [line for part in told_lines for line in part]
        return [*lines, "", *explanation_lines(rest)]
    if "variants" in report:
        title = (
            f"target {report['target']}: the first of these that the machine has the features for"
        )
        return [title, *(line for v in report["variants"] for line in ("", *explanation_lines(v)))]
    stories: dict[tuple[str, ...], list[str]] = {}
    for entry in report["layers"]:
        stories.setdefault(_story(entry), []).append(f"{entry['name']}  {entry['n']}x{entry['k']}")
    lines = [f"target {report['target']}: {' '.join(report['features'])}"]
    for story, names in stories.items():
        lines += ["", *names, *(f"  {line}" for line in story)]
    return lines + _function_lines(report.get("functions", []))


def _function_lines(functions: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is no layer and was decided by records."""
    if not functions:
        return []
    made = [f"  {f['name']} ({_decided(f)}){_source(f)}" for f in functions]
    return ["", "functions decided by records", *made]


def _batch_lines(batch: Mapping[str, Any]) -> list[str]:
    """Whether large runs are cut into parts."""
    if not batch["dimension"]:
        return [f"every run takes all its images at once: {batch['note']}"]
    entries = f"entries of '{batch['dimension']}'"
    stages = batch.get("stages", 0)
    several = f", each of {stages} stages its own number" if stages > 1 else ""
    return [
        f"a run too large for the caches takes few {entries} at a time{several};",
        f"on several threads each takes {entries} of its own",
    ]


def _session_lines(report: Mapping[str, Any]) -> list[str]:
    """Whether a decoder keeps its caches; nothing of other models."""
    if report.get("stateless"):
        return [f"no sessions: {report['stateless']}"]
    if not report.get("session"):
        return []
    info = report["session"]
    kind = f"{len(info['caches'])} caches of {info['cache']}{SCALED.get(info['cache'], '')}"
    return [f"sessions keep {kind}, which grow in place"]


def _product_lines(report: Mapping[str, Any]) -> list[str]:
    """Products and convolutions that are no layers, those of one reason together."""
    reasons: dict[str, list[str]] = {}
    for name, reason in report.get("products", {}).items():
        reasons.setdefault(reason, []).append(name)
    return [
        line
        for reason, names in reasons.items()
        for line in (f"float: {reason}", *(f"  {name}" for name in names))
    ]


def _attention_lines(report: Mapping[str, Any]) -> list[str]:
    """How much of it is kernels of its own, and why the rest is not."""
    if not report.get("attention"):
        return []
    attention = report["attention"]
    apart = [f"  not {name}: {reason}" for name, reason in attention["apart"].items()]
    plain = "as floats, where a device multiplies no bytes"
    scores = [plain if how == "float" else f"by {how}" for how in attention.get("scores", ())]
    keys = f"; int8 keys are multiplied {' or '.join(scores)}" if scores else ""
    return [f"attention: {attention['kernels']} as one kernel each{keys}", *apart]


def _decided(kernel: Mapping[str, Any]) -> str:
    """What its schedule decided, as text: ``"streams=4, ahead=0"``."""
    decisions = kernel.get("decisions", {})
    return ", ".join(f"{name}={answer}" for name, answer in decisions.items()) or "default"


def _source(kernel: Mapping[str, Any]) -> str:
    """The record of the tuner that decided, as text; nothing of defaults."""
    source = kernel.get("source", "default")
    return "" if source == "default" else f"; {source}"


def _story(entry: Mapping[str, Any]) -> tuple[str, ...]:
    got = [f"{rows_range(k)}: {k['kernel']} ({_decided(k)}){_source(k)}" for k in entry["kernels"]]
    why = [
        f"not {shorten(names)}: {reason}" for reason, names in by_reason(entry["rejected"]).items()
    ]
    note = [f"note: {entry['note']}"] if entry.get("note") else []
    acts = f", activations {entry['activations']}" if entry.get("activations") else ""
    return (f"{entry['scheme']} in layout {entry['layout']}{acts}", *got, *why, *note)
