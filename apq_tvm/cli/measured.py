"""What ``compile`` says of its module: remarks on layers, and how close it is to float."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apq_tvm.cli.console import Bars, say
from apq_tvm.errors import BadInput

SHOWN = 4
"""Layers of one remark that are named; ``explain`` names all."""


def check_measurable(inputs: Path, target: str, triple: str) -> None:
    """Say before the work that nothing can be measured after it.

    Raises
    ------
    BadInput
        There are no inputs, or the module will not run here.
    MissingPackage
        onnxruntime is not installed.
    """
    from apq_tvm.extras import require
    from apq_tvm.schedules.devices import find_profile

    require("onnxruntime")
    if not inputs.is_file():
        raise BadInput(f"--inputs {inputs}: no such file; arrays by input name are needed, as npz")
    profile, host = find_profile(target, triple), find_profile("host")
    others = profile.variants or (profile,)
    if all(p.host_arch != host.host_arch or not p.features <= host.features for p in others):
        raise BadInput(
            f"--inputs measures on this machine, {host.name}, which cannot run code for {target}; "
            "run apq-tvm eval where it can"
        )


def measure(module: Path, model: Path, inputs: Path, layers: Sequence[Mapping[str, Any]]) -> Any:
    """What `apq_tvm.evaluate.evaluate` gives, with the language scores of a model with a head."""
    from apq_tvm.evaluate import evaluate
    from apq_tvm.evaluation.language import Language

    language = Language() if _has_head(layers) else None
    return evaluate(module, model, inputs, language=language, progress=Bars())


def _has_head(layers: Sequence[Mapping[str, Any]]) -> bool:
    from apq_tvm.quantizers.vocabulary import LEAST_ROWS

    rows: dict[str, set[int]] = {"apq.Embedding": set(), "apq.Linear": set()}
    for layer in layers:
        if layer["op"] in rows:
            rows[layer["op"]].add(layer["n"])
    return any(n >= LEAST_ROWS for n in rows["apq.Embedding"] & rows["apq.Linear"])


def measured_line(measured: Mapping[str, Any]) -> str:
    """One line on it."""
    score = measured["language"]
    if score:
        return (
            f"KL to float {score['kl_mean']:.5f} (at most {score['kl_max']:.4f}), perplexity "
            f"{score['perplexity']:.4f} (float {score['float_perplexity']:.4f}), same top token "
            f"{score['top1']:.1%}, over {score['tokens']} tokens of {measured['inputs']}"
        )
    parts = [
        f"{name} cosine {result['cosine_mean']:.6f}"
        if "cosine_mean" in result
        else f"{name} equal {result['equal']:.2%}"
        for name, result in measured["outputs"].items()
    ]
    return f"to float: {', '.join(parts)}, over {measured['inputs']}"


def say_remarks(layers: Sequence[Mapping[str, Any]], codes: Path | None) -> None:
    """What was decided without being asked, and which layers have no codes in a file of codes."""
    from apq_tvm.inspect import code_sources
    from apq_tvm.quantizers.vocabulary import NOTE

    stories: dict[str, list[str]] = {}
    for layer in layers:
        note = layer["note"]
        if NOTE in note:
            stories.setdefault(NOTE, []).append(layer["name"])
        if (at := note.find("no codes in ")) >= 0:
            text = note[at:].removesuffix(f"; {NOTE}")
            stories.setdefault(f"{text}; it is {layer['scheme']}", []).append(layer["name"])
    if codes is not None:
        kept = code_sources(layers).get(f"codes of {codes.name}", 0)
        say(f"{kept} of {len(layers)} layers and tables have the codes of {codes.name}")
    for note, names in stories.items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        say(f"{', '.join(names[:SHOWN])}{more}: {note}")
