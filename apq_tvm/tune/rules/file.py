"""Writing rules of a device beside those it has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apq_tvm.errors import BadLog, OutputFailed
from apq_tvm.files import replacing
from apq_tvm.schedules.linear import rules

if TYPE_CHECKING:
    from apq_tvm.schedules.linear.kernel import LinearKernel

Words = dict[str, Any]
"""A rule as its file has it."""


def where_of(kernel: LinearKernel, others: Sequence[LinearKernel]) -> Words:
    """What a rule says so that it is for one of a device's kernels and no other."""
    words: Words = {
        "kind": kernel.kind, "instruction": kernel.instruction.name,
        "m_tile": kernel.m_tile, "weights": kernel.weights,
    }  # fmt: skip
    alike = [each for each in others if each is not kernel and _fits(words, each)]
    for name in ("act_bits", "width", "run", "m_named", "bits"):
        if any(getattr(each, name) != getattr(kernel, name) for each in alike):
            words[name] = getattr(kernel, name)
    return words


def _fits(words: Words, kernel: LinearKernel) -> bool:
    return rules.Rule(where={name: (value,) for name, value in words.items()}).fits(kernel)


def add_rules(
    path: Path, kind: rules.Kind[Any], found: Sequence[Words], measured: str
) -> list[Words]:
    """Put rules before those of a file; they take the place of older ones for the same kernels.

    Parameters
    ----------
    path : Path
        Made where there is none.
    kind : Kind
        Of the rules.
    found : sequence of dict
    measured : str
        Where and how, if the file is new.

    Returns
    -------
    list of dict
        All that the file has.

    Raises
    ------
    BadLog
        The file is no such file.
    OutputFailed
        It cannot be written.
    """
    log: Words = {"measured": measured, "rules": []}
    if path.is_file():
        try:
            log = json.loads(path.read_text())
            kind.parse(log)
        except ValueError as error:
            raise BadLog(f"{path}: {error}; mend it or take the file away") from error
    places = [kind.where(words) for words in found]
    log["rules"] = [*found, *(old for old in log["rules"] if kind.where(old) not in places)]
    kind.parse(log)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(_text(log))
    except OSError as error:
        raise OutputFailed(f"{path}: {error.strerror or error}; name another --log") from error
    return list(log["rules"])


def _text(log: Words) -> str:
    """A rule a line, and its figures in a line of their own, for git."""
    lines = []
    for words in log["rules"]:
        says = json.dumps({n: v for n, v in words.items() if n != "why"}, ensure_ascii=False)
        why = json.dumps(words.get("why", ""), ensure_ascii=False)
        lines.append(f'  {says[:-1]},\n   "why": {why}}}')
    measured = json.dumps(log["measured"], ensure_ascii=False)
    return f'{{\n "measured": {measured},\n "rules": [\n' + ",\n".join(lines) + "\n ]\n}\n"
