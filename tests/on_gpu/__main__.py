"""``python -m tests.on_gpu FOLDER``: what a machine with a GPU, and nothing of ours, can check.

Modules of ONNX's node cases that pass on the simulated GPU, with their inputs and results, and
``run.py``, which needs numpy and a driver there: ``python FOLDER/run.py``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import apq_tvm
from apq_tvm.errors import ApqError
from tests.node_cases.cases import Case, collect, join, own
from tests.node_cases.forms import judged
from tests.node_cases.lists import passing
from tests.node_cases.worker import tolerance

GROUP = 32
"""Cases of a module."""

LISTED = "rtx-3090"
"""Whose list says what passes: no operator knows one GPU of another."""


def main() -> None:
    """Compile, and write what is to be found."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_gpu", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th module, from the i-th")
    parser.add_argument("text", nargs="*", help="of names; all by default")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("run.py"), options.folder / "run.py")
    part, parts = map(int, options.part.split("/"))
    for number, group in enumerate(_groups(options.text)):
        if number % parts == part:
            _write(group, options.folder, f"cases{number}", options.target)


def _groups(texts: Sequence[str]) -> list[list[Case]]:
    """Cases of one opset each; those without types that numpy has not."""
    known = set(passing(LISTED))
    cases = [
        case
        for case in judged(list(collect()), LISTED)
        if case.name in known and all(map(_plain, (*case.feeds.values(), *case.wanted.values())))
    ]
    if texts:
        cases = [case for case in cases if any(text in case.name for text in texts)]
    groups = []
    for _, same in groupby(sorted(cases, key=lambda c: (c.key, c.name)), key=lambda c: c.key):
        mine = list(same)
        groups += [mine[at : at + GROUP] for at in range(0, len(mine), GROUP)]
    return groups


def _plain(value: Any) -> bool:
    return np.asarray(value).dtype.kind in "biuf"


def _write(cases: list[Case], folder: Path, name: str, target: str) -> None:
    """One module, or its halves where it cannot be made."""
    model = folder / f"{name}.onnx"
    model.write_bytes(join(cases).SerializeToString())
    try:
        onnx.load(model)
        apq_tvm.compile(model, folder / name, target=target, scheme="float", force=True)
    except ApqError as error:
        print(f"{name}: {len(cases)} cases: {error}", file=sys.stderr, flush=True)
        if len(cases) > 1:
            half = len(cases) // 2
            _write(cases[:half], folder, f"{name}a", target)
            _write(cases[half:], folder, f"{name}b", target)
        return
    finally:
        model.unlink()
    for path in (folder / name).glob("*.a"):
        path.unlink()
    arrays, described = {}, []
    for number, case in enumerate(cases):
        arrays |= {f"in:{own(number, key)}": np.asarray(v) for key, v in case.feeds.items()}
        outputs = []
        for key, value in case.wanted.items():
            want = np.asarray(value)
            arrays[f"out:{own(number, key)}"] = want
            outputs.append([own(number, key), *tolerance(case, want)])
        described.append({"case": case.name, "outputs": outputs})
    np.savez_compressed(folder / name / "case.npz", **arrays)
    (folder / name / "case.json").write_text(json.dumps(described))
    print(name, len(cases), flush=True)


if __name__ == "__main__":
    main()
