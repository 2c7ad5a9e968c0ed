"""What runs in a process of its own: cases through the importer, or through a compiled module."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tests.node_cases.cases import Case, join, load, own

Outcome = tuple[str, str]
"""``passes``, ``refused``, ``wrong``, ``error``, and why."""

DRAWN = ("Bernoulli", "RandomUniformLike")
"""Operators of cases whose stored results are one draw of many: zeros and ones."""


def serve(
    pipe: Connection, folder: Path, names: Sequence[str], stage: str, seconds: int, target: str
) -> None:
    """Judge cases for a target and send the outcome of each; one group is one module.

    SIGPROF ends the process where an answer takes more seconds of CPU; SIGUSR1 lets it write where
    its threads are.
    """
    stacks = (folder / f"{os.getpid()}.stacks").open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    cases = [load(folder, name) for name in names]
    if stage == "compile":
        compile_c_once(folder)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        for name, outcome in compiled(cases, target, folder):
            pipe.send((name, outcome))
    else:
        for case in cases:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            outcome = read(case, target) if stage == "graph" else imported(case)
            pipe.send((case.name, outcome))
    pipe.close()


def compile_c_once(folder: Path) -> None:
    """Keep objects of C sources on disk, for all processes; without optimization, for speed.

    Images for the simulated GPU without it too: a kernel runs for less time than g++ would take.
    """
    from apq_tvm.codegen.build import library
    from apq_tvm.codegen.cuda import simulator
    from apq_tvm.codegen.package.folder import COMMON

    plain, image = library.run, simulator.run

    def run(command: Sequence[str]) -> str:
        if "-c" not in command:
            return plain(command)
        source, output = Path(command[-3]), Path(command[-1])
        folders = (source.parent, COMMON)
        headers = [path for folder in folders for path in sorted(folder.glob("*.h"))]
        images = sorted(source.parent.glob("*.image"))
        parts = [path.read_bytes() for path in (source, *headers, *images)]
        stored = folder / f"{hashlib.sha256(b''.join(parts)).hexdigest()}.o"
        if not stored.exists():
            plain([word.replace("-O2", "-O0") for word in command])
            written = folder / f"{stored.name}.{os.getpid()}"
            written.write_bytes(output.read_bytes())
            written.rename(stored)
        output.write_bytes(stored.read_bytes())
        return ""

    library.run = run
    simulator.run = lambda command: image([word.replace("-O1", "-O0") for word in command])


def imported(case: Case) -> Outcome:
    """Whether the importer takes it."""

    def work(path: Path) -> None:
        from apq_tvm.onnx_import import import_onnx

        import_onnx(path)

    return _tried(case, "import", work)


def read(case: Case, target: str) -> Outcome:
    """Whether every stage takes it, of the last its first step: what is left is to build."""

    def work(path: Path) -> None:
        from apq_tvm import pipeline
        from apq_tvm.codegen import emit

        stopwatch = pipeline._Stopwatch()
        chosen = pipeline.plan(path, scheme="float", target=target, stopwatch=stopwatch)
        plans = chosen.variants or (chosen,)
        for number, plan in enumerate(plans):
            emit.read(pipeline.scheduled(plan, stopwatch=stopwatch), number, len(plans))

    return _tried(case, "graph", work)


def _tried(case: Case, stage: str, work: Callable[[Path], None]) -> Outcome:
    from apq_tvm.errors import ApqError

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(case.model)
        try:
            work(path)
        except ApqError as error:
            return "refused", _line(error)
        except Exception as error:
            return "error", f"{stage}: {type(error).__name__}: {_line(error)}"
    return "passes", ""


def compiled(cases: Sequence[Case], target: str, driver: Path) -> list[tuple[str, Outcome]]:
    """Every case of one module; all have the same outcome where it cannot be compiled or run."""
    import apq_tvm
    from apq_tvm.errors import ApqError
    from apq_tvm.module import load_module
    from apq_tvm.schedules.devices import find_profile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(join(cases).SerializeToString())
        stage = "compile"
        try:
            images = simulated(driver) if find_profile(target).gpu else None
            output = Path(folder) / "compiled"
            apq_tvm.compile(path, output, target=target, scheme="float", images=images)
            stage = "run"
            module = load_module(Path(folder) / "compiled")
            feeds = {
                own(i, k): np.asarray(v) for i, c in enumerate(cases) for k, v in c.feeds.items()
            }
            got = module.run(feeds)
        except ApqError as error:
            return [(case.name, ("refused", _line(error))) for case in cases]
        except Exception as error:
            ours = any(kind.__name__ == "ModuleError" for kind in type(error).__mro__)
            text = f"{stage}: {type(error).__name__}: {_line(error)}"
            return [(case.name, ("refused" if ours else "error", text)) for case in cases]
        return [
            (c.name, compared(c, {n: got[own(i, n)] for n in c.wanted}))
            for i, c in enumerate(cases)
        ]


def simulated(driver: Path) -> Any:
    """What makes images for our own driver, which this process then has (`Judge`)."""
    import ctypes

    from apq_tvm.codegen.cuda.simulator import DRIVER, Simulator

    ctypes.CDLL(str(driver / DRIVER), mode=ctypes.RTLD_GLOBAL)
    return Simulator()


def compared(case: Case, got: dict[str, Any]) -> Outcome:
    """The comparison of onnx's own runner: type, shape, values; of draws, which there are."""
    drawn = any(node.op_type in DRAWN for node in case.proto.graph.node)
    for name, value in case.wanted.items():
        want = np.asarray(value)
        have = got[name]
        if want.dtype != have.dtype or want.shape != have.shape:
            return "wrong", (
                f"{name} is {have.dtype}{list(have.shape)}, not {want.dtype}{list(want.shape)}"
            )
        if drawn:
            if not np.isin(have, want).all():
                return "wrong", f"{name}: {have} has other values than {want}"
            continue
        wide = [a.astype(np.float32) if a.dtype.kind == "V" else a for a in (have, want)]
        rtol, atol = tolerance(case, want)
        try:
            np.testing.assert_allclose(*wide, rtol=rtol, atol=atol)
        except AssertionError as error:
            return "wrong", f"{name}: {_line(error)}"
    return "passes", ""


def tolerance(case: Case, want: Any) -> tuple[float, float]:
    """The case's own; more for what onnx rounds otherwise.

    Half precision is computed in float32 here, and rounded at every step there; of transforms onnx
    gives 0 where float32 gives what its roundings leave.
    """
    steps = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
    if any(node.op_type in ("DFT", "STFT") for node in case.proto.graph.node):
        steps["float32"] = 2.0**-22
    step = steps.get(want.dtype.name)
    if step is None:
        return case.rtol, case.atol
    wide = np.abs(want.astype(np.float32))
    largest = float(wide[np.isfinite(wide)].max(initial=0))
    return max(case.rtol, 2 * step), max(case.atol, step * largest)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
