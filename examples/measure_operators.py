"""Times single operators beside ONNX Runtime, on one thread: where a kernel falls off a cliff.

    python examples/measure_operators.py build/operators.jsonl [--symbolic] [--only Conv]

Every case of `operators.py` is a model of one node, in float and, where it has weights, in W8A8;
with ``--symbolic`` sizes are unknown until a run. Slowest beside ONNX Runtime come first; what is
refused, or differs from its results, is said too. Rows are appended to a file, whose cases are not
measured again. Turning an image, which a net does once, is part of each figure of a convolution.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from operators import Case, cases

import apq_tvm
from apq_tvm.bench.timing import interleave, repeated
from apq_tvm.errors import ApqError
from apq_tvm.evaluation.runners import open_session
from apq_tvm.module import load_module

BUDGET_S = 0.5


def measured(case: Case, scheme: str, symbolic: bool, folder: Path) -> dict[str, Any]:
    """Microseconds of both and the largest difference, relative to the largest value."""
    path = folder / "one.onnx"
    onnx.save(case.model(symbolic), path)
    session, feeds = open_session(path, 1), case.feeds(np.random.default_rng(1))
    try:
        apq_tvm.compile(path, folder / "module", scheme=scheme)
    except ApqError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    module = load_module(folder / "module")
    module.set_num_threads(1)
    pairs = list(zip(module.run(feeds).values(), session.run(None, feeds), strict=True))
    errors = [_difference(mine, theirs) for mine, theirs in pairs]

    runs = {
        "ours": repeated(lambda: module.run(feeds)),
        "rival": repeated(lambda: session.run(None, feeds)),
    }
    times = interleave(runs, budget_s=BUDGET_S)
    us = {name: round(timing.us, 1) for name, timing in times.items()}
    noise = round(times["ours"].noise, 2)
    ratio = round(us["rival"] / us["ours"], 2)
    return {"ratio": ratio, **us, "noise": noise, "error": max(errors)}


def _difference(ours: Any, rival: Any) -> float:
    """The largest, relative to the largest value; infinite where one alone has no value."""
    found, wanted = np.asarray(ours, np.float64), np.asarray(rival, np.float64)
    if found.shape != wanted.shape or (np.isnan(found) != np.isnan(wanted)).any():
        return float("inf")
    apart = np.nan_to_num(np.abs(found - wanted)).max(initial=0)
    return float(apart / np.nan_to_num(np.abs(wanted)).max(initial=1e-9))


def told(row: dict[str, Any]) -> str:
    """A line of what was found."""
    case = f"{row['scheme']:5}  {row['case']}"
    if "refused" in row:
        return f"refused  {case}: {row['refused']}"
    times = f"{row['ours']:10.1f} {row['rival']:10.1f} us"
    return f"{row['ratio']:6.2f} {times}  {row['error']:.0e}  {case}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="file of rows, a JSON object a line")
    parser.add_argument("--symbolic", action="store_true", help="sizes that only a run knows")
    parser.add_argument("--only", default="", help="part of cases' names")
    given = parser.parse_args()
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    given.rows.touch()
    rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    known = {(row["case"], row["scheme"], row["symbolic"]) for row in rows}
    for case in cases():
        for scheme in ("float", "W8A8") if case.linear else ("float",):
            key = (case.name, scheme, given.symbolic)
            if given.only not in case.name or key in known:
                continue
            with tempfile.TemporaryDirectory(prefix="apq-operator-") as folder:
                row = measured(case, scheme, given.symbolic, Path(folder))
            row = {**dict(zip(("case", "scheme", "symbolic"), key, strict=True)), **row}
            rows.append(row)
            with given.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    wanted = [r for r in rows if given.only in r["case"] and r["symbolic"] == given.symbolic]
    for row in sorted(wanted, key=lambda row: row.get("ratio", 0.0)):
        print(told(row))


if __name__ == "__main__":
    main()
