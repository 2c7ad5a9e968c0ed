"""Compiles models that people have and compares them with ONNX Runtime: ``docs/models.md``.

``python examples/measure_models.py`` downloads the packages (500 MB) into ``build/models``, takes
about half an hour and keeps the rows in ``docs/measured/models.json``. ``--only TEXT`` measures the
models whose names contain it; rows of others stay. ``--exports FOLDER`` adds what
``examples/export_models.py`` wrote there, whose rows are in ``exports.json``. Each is compiled in a
process of its own, which may end as it likes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import doc_tables
import measure
import measured
import numpy as np
import zoo

CACHE = measured.ROOT / "build" / "models"
SCHEMES = ("float", "W8A8")
LIMIT_S = 300


def compiled(model: zoo.Model | zoo.Exported, scheme: str, folder: Path) -> dict[str, Any]:
    """Compile in this process; seconds, and its peak of memory."""
    import apq_tvm

    began = time.monotonic()
    apq_tvm.compile(model.path(CACHE), folder, scheme=scheme, dims=model.fixed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {"seconds": round(time.monotonic() - began, 1), "peak_mb": peak}


def compared(model: zoo.Model | zoo.Exported, path: Path, folder: Path) -> dict[str, Any]:
    """Worst output: largest difference relative to the largest value, and cosine; both times."""
    from apq_tvm.bench.timing import interleave, repeated
    from apq_tvm.evaluation.runners import open_session, specs_of
    from apq_tvm.module import load_module

    session, module = open_session(path, 1), load_module(folder)
    inputs = model.inputs(specs_of(session))
    module.set_num_threads(1)
    mine, errors, cosines = module.run(inputs), [], []
    for out, value in zip(session.get_outputs(), session.run(None, inputs), strict=True):
        wanted, got = (np.asarray(v, np.float64).ravel() for v in (value, mine[out.name]))
        if wanted.shape != got.shape or not np.isfinite(got[np.isfinite(wanted)]).all():
            raise ValueError(f"output {out.name}: {mine[out.name].shape} is not {value.shape}")
        errors.append(
            float(np.abs(wanted - got).max(initial=0) / (np.abs(wanted).max(initial=1e-9)))
        )
        norms = np.linalg.norm(wanted) * np.linalg.norm(got)
        cosines.append(float(wanted @ got / norms) if norms else float(not (wanted - got).any()))

    times = interleave(
        {
            "ours": repeated(lambda: module.run(inputs)),
            "rival": repeated(lambda: session.run(None, inputs)),
        }
    )
    return {
        "error": max(errors),
        "cosine": min(cosines),
        "us": round(times["ours"].us),
        "rival_us": round(times["rival"].us),
        "noise": round(times["ours"].noise, 2),
    }


def worker(model: zoo.Model | zoo.Exported, scheme: str, folder: Path) -> None:
    """One model and scheme; a row of figures, or what refused it, as the last line."""
    from apq_tvm.errors import ApqError

    path = model.path(CACHE)
    try:
        row = {"compiled": True, **compiled(model, scheme, folder / "module")}
        row |= compared(model, path, folder / "module")
    except ApqError as error:
        row = {"compiled": False, "refused": f"{type(error).__name__}: {error}"}
    print(json.dumps(row))


def outcome(name: str, scheme: str, exports: list[str], limit_s: int) -> dict[str, Any]:
    """The worker's row; how it ended, if it gave none."""
    with tempfile.TemporaryDirectory(prefix="apq-models-") as folder:
        words = [sys.executable, __file__, *exports, "--worker", name, scheme, folder]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"compiled": False, "failed": f"took longer than {limit_s} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return {"compiled": False, "failed": f"ended with {done.returncode}: {last[:200]}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of models' names")
    parser.add_argument("--exports", type=Path, help="folder of exported models")
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="seconds for each, timing too")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = zoo.models(arguments.exports)
    if arguments.worker:
        name, scheme, folder = arguments.worker
        worker(next(m for m in models if m.name == name), scheme, Path(folder))
        return
    exports = ["--exports", str(arguments.exports)] if arguments.exports else []
    for model in models:
        if arguments.only not in model.name:
            continue
        model.path(CACHE)
        for scheme in SCHEMES:
            ended = outcome(model.name, scheme, exports, arguments.limit)
            row = {"model": model.name, "scheme": scheme, **ended}
            print(json.dumps(row), flush=True)
            table = "exports" if isinstance(model, zoo.Exported) else "models"
            measured.store(table, [row], measure.place(), merge_by=("model", "scheme"))
    doc_tables.render_all()


if __name__ == "__main__":
    main()
