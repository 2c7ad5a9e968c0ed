"""``python FOLDER/run.py``: run the modules of this folder and compare what they find."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def main(folder: Path) -> int:
    """Every module in turn; 1 if one is wrong or fails."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--repeat", type=int, default=3, help="runs: results may not change")
    options = parser.parse_args()
    sys.path.insert(0, str(folder))
    begun, right, bad = time.monotonic(), 0, list[str]()
    places = sorted(path.parent for path in folder.glob("*/case.json"))
    for done, place in enumerate(places):
        if time.monotonic() - begun > options.seconds:
            bad.append(f"{len(places) - done} modules were not run: no time is left")
            break
        described = json.loads((place / "case.json").read_text())
        try:
            wrong = _wrong(place, described, options.repeat)
        except Exception as error:
            bad.append(f"{place.name}: {type(error).__name__}: {error}")
            continue
        right += len(described) - len(wrong)
        bad += [f"{place.name}: {name}: {why}" for name, why in wrong.items()]
    print(f"{right} cases right, {len(bad)} lines of what is not")
    print(*bad, sep="\n")
    return 1 if bad else 0


def _wrong(place: Path, described: list[dict[str, Any]], repeat: int) -> dict[str, str]:
    """Cases that a module computes otherwise, and how."""
    module = importlib.import_module(place.name)
    with np.load(place / "case.npz") as file:
        arrays = dict(file)
    feeds = {name[3:]: value for name, value in arrays.items() if name.startswith("in:")}
    wrong, first = dict[str, str](), dict[str, Any]()
    for turn in range(repeat):
        found = module.run(feeds)
        for case in described:
            for name, rtol, atol in case["outputs"]:
                have, want = found[name], arrays[f"out:{name}"]
                if turn and not np.array_equal(have, first[name], equal_nan=have.dtype.kind == "f"):
                    wrong.setdefault(case["case"], f"{name} changes from run to run")
                why = _difference(have, want, rtol, atol)
                if why:
                    wrong.setdefault(case["case"], f"{name}: {why}")
        first = {name: np.array(value) for name, value in found.items()}
    return wrong


def _difference(have: Any, want: Any, rtol: float, atol: float) -> str:
    if (have.dtype, have.shape) != (want.dtype, want.shape):
        return f"{have.dtype}{list(have.shape)}, not {want.dtype}{list(want.shape)}"
    try:
        np.testing.assert_allclose(have, want, rtol=rtol, atol=atol)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent))
