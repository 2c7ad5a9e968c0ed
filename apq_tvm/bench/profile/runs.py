"""Runs of a module with and without the recording of its calls, in turns; minima of many."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.bench.clib import Library, Runner, Tensors, aligned, aligned_empty
from apq_tvm.bench.profile.recorded import CallRecord, Recorder
from apq_tvm.errors import BadInput
from apq_tvm.types import Array

MAX_RANK = 64

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Runs:
    """What many runs took, in microseconds.

    Parameters
    ----------
    calls : list of CallRecord
        Of the last run.
    call_us : float64 [calls]
        The least of every call.
    between_us : float
        The least of what a run spends outside its calls.
    run_us : float
        The least of a whole run that records nothing.
    noise : float
        Median over least of those, less 1.
    rounds : int
    """

    calls: list[CallRecord]
    call_us: Times
    between_us: float
    run_us: float
    noise: float
    rounds: int


def open_runner(folder: Path, manifest: Mapping[str, Any], threads: int) -> Runner:
    """A module's library on its weights.

    Raises
    ------
    BadInput
        It refuses this machine or its weights.
    BuildError
        It does not load.
    """
    return Library(folder).open(folder / manifest["weights"]["file"], threads)


class Bound:
    """A module's library with its inputs and outputs in place.

    Parameters
    ----------
    runner : Runner
    manifest : mapping
        Of the module.
    call : mapping of str to ndarray
        Inputs by name.

    Raises
    ------
    BadInput
        The module refuses the inputs.
    """

    def __init__(
        self, runner: Runner, manifest: Mapping[str, Any], call: Mapping[str, Array]
    ) -> None:
        self.runner = runner
        inputs = Tensors([aligned(call[port["name"]]) for port in manifest["inputs"]])
        ports = manifest["outputs"]
        self.outputs = {port["name"]: self._output(inputs, i, port) for i, port in enumerate(ports)}
        self.run = runner.bind(inputs, Tensors(list(self.outputs.values())))

    def _output(self, inputs: Tensors, index: int, port: Mapping[str, Any]) -> Array:
        """Room for an output; of one whose shape depends on data the run takes no notice."""
        shape = (ctypes.c_int64 * MAX_RANK)()
        library = self.runner.library
        library.check(library.function("output_shape")(self.runner.context, inputs.c, index, shape))
        dims = tuple(max(int(d), 0) for d in shape[: len(port["shape"])])
        return aligned_empty(dims, np.dtype(port["dtype"]).type)


def measure_runs(
    bound: Bound,
    *,
    before: Callable[[], None] | None = None,
    budget_s: float = 4.0,
    min_rounds: int = 5,
    max_rounds: int = 2000,
) -> Runs:
    """Run a module again and again.

    Parameters
    ----------
    bound : Bound
    before : callable, optional
        Called before every run, such as `apq_tvm.bench.roofline.evict`.
    budget_s : float
        Seconds for all runs; `min_rounds` are done in any case.
    min_rounds, max_rounds : int

    Returns
    -------
    Runs

    Raises
    ------
    BadInput
        Runs on the same inputs made different calls.
    """
    recorder, quiet = Recorder(bound.runner), before or (lambda: None)
    plain: list[float] = []
    least: Times | None = None
    between, started = float("inf"), time.perf_counter()
    bound.run()
    while len(plain) < max_rounds:
        if len(plain) >= min_rounds and time.perf_counter() - started > budget_s:
            break
        recorder.record(False)
        quiet()
        plain.append(_once(bound.run) / 1e3)
        recorder.record(True)
        quiet()
        whole = _once(bound.run) / 1e3
        took = recorder.times() / 1e3
        if least is not None and len(least) != len(took):
            raise BadInput("runs on the same inputs make different numbers of calls")
        if plain[1:]:  # the first recorded run allocates
            between = min(between, whole - float(took.sum()))
        least = took if least is None else np.minimum(least, took)
    assert least is not None
    noise = median(plain) / min(plain) - 1
    return Runs(recorder.calls(), least, between, min(plain), noise, len(plain))


def _once(run: Callable[[], None]) -> int:
    """Nanoseconds of one run."""
    start = time.perf_counter_ns()
    run()
    return time.perf_counter_ns() - start
