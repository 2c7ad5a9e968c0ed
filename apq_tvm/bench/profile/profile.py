"""One run of a module, kernel by kernel, beside what this machine can do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from apq_tvm.bench.caches import Level, measure_levels
from apq_tvm.bench.clib import Runner
from apq_tvm.bench.model import one_call
from apq_tvm.bench.profile.costs import costs
from apq_tvm.bench.profile.layers import Layers
from apq_tvm.bench.profile.rows import call_rows, slow, summed
from apq_tvm.bench.profile.runs import Bound, Runs, measure_runs, open_runner
from apq_tvm.bench.roofline import Limits, evict, measure
from apq_tvm.errors import BadInput, BadTarget, BuildError
from apq_tvm.module import damaged, load_module, ports, read_manifest
from apq_tvm.progress import Progress, Silent
from apq_tvm.types import AnyPath, Array, TensorSpec


def bench_profile(
    module: AnyPath,
    *,
    batch: int = 1,
    seq: int = 128,
    dims: Mapping[str, int] | None = None,
    inputs: AnyPath | None = None,
    threads: int | None = None,
    bits: int | None = None,
    cold: bool = False,
    budget_s: float = 4.0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time every kernel call of a module's run.

    Parameters
    ----------
    module : str or path
        Folder of a module compiled for a processor.
    batch, seq : int
        Sizes of symbolic dimensions by their names (`apq_tvm.bench.model.resolve_dims`).
    dims : mapping of str to int, optional
        Sizes of others.
    inputs : str or path, optional
        npz of inputs instead of made-up ones; the first call in it is run.
    threads : int, optional
        Default is what the module starts with: all physical cores.
    bits : int, optional
        Of layers whose bits are chosen at run time.
    cold : bool
        Empty the caches before every run; else runs follow one another.
    budget_s : float
        Seconds for all runs.
    progress : Progress, optional

    Returns
    -------
    dict
        ``module, target, dims, threads, bits, cold, rounds, run_us, noise``; ``calls``,
        ``kernels`` and ``layers`` (`apq_tvm.bench.profile.rows`); ``kernels_us + between_us +
        rest_us`` is ``run_us``; ``limits`` and ``levels`` of the machine, or None, nothing and
        ``why_no_limits``; ``slow``.

    Raises
    ------
    BadInput
        Anything given does not fit.
    BadTarget
        The module is a GPU's.
    BuildError
        The module's library does not load.
    """
    progress, folder = progress or Silent(), Path(module)
    manifest = read_manifest(folder)
    sizes, call = one_call(input_specs(folder, manifest), batch, seq, dims, inputs)
    count = threads or load_module(folder).num_threads()
    with progress.stage("profile", 3):
        progress.advance("limits of this machine")
        machine(count)  # the better of before and after counts
        progress.advance("runs")
        runner = open_runner(folder, manifest, count)
        if bits is not None:
            runner.set_precision(bits)
        bound = try_inputs(runner, manifest, call, made_up=inputs is None)
        before = partial(evict, count) if cold else None
        runs = measure_runs(bound, before=before, budget_s=budget_s)
        progress.advance("limits again")
        limits, levels, why_not = machine(count)
        layers = Layers(manifest, folder / manifest["weights"]["file"])
        rows = call_rows(costs(runs.calls, layers, levels, cold), runs.call_us.tolist(), limits,
                         levels)  # fmt: skip
    return {
        "module": str(folder),
        "target": manifest["target"],
        "dims": sizes or {name: list(array.shape) for name, array in call.items()},
        **{"threads": count, "bits": bits, "cold": cold},
        **summary(rows, runs),
        **{"limits": vars(limits) if limits else None, "why_no_limits": why_not},
        "levels": [described(level) for level in levels if limits],
    }


def input_specs(folder: Path, manifest: Mapping[str, Any]) -> list[TensorSpec]:
    """What a processor's module takes.

    Raises
    ------
    BadTarget
        It is a GPU's.
    """
    with damaged(folder):
        if manifest["library"].get("gpu"):
            raise BadTarget(f"{folder} is for a GPU; NVIDIA's nsys and ncu time its kernels")
    return ports(folder, manifest)


def described(level: Level) -> dict[str, Any]:
    """A level as JSON; memory has no size."""
    nbytes = None if math.isinf(level.nbytes) else level.nbytes
    return {"name": level.name, "bytes": nbytes, "gbs": level.gbs}


def try_inputs(
    runner: Runner, manifest: Mapping[str, Any], call: Mapping[str, Array], made_up: bool
) -> Bound:
    """Run the module once, so that refused inputs are reported before anything is timed."""
    try:
        bound = Bound(runner, manifest, call)
        bound.run()
    except BadInput as error:
        hint = "; made-up inputs do not fit this model, give --inputs" if made_up else ""
        raise BadInput(f"{error}{hint}") from error
    return bound


def summary(rows: list[dict[str, Any]], runs: Runs) -> dict[str, Any]:
    """What runs come to: times that sum to ``run_us``, and rows by call, kernel and layer."""
    kernels, kernels_us = summed(rows, "kernel", runs.run_us), float(runs.call_us.sum())
    return {
        "rounds": runs.rounds,
        "run_us": runs.run_us,
        "noise": runs.noise,
        "kernels_us": kernels_us,
        "between_us": runs.between_us,
        "rest_us": runs.run_us - kernels_us - runs.between_us,
        "calls": rows,
        "kernels": kernels,
        "layers": summed(rows, "layer", runs.run_us),
        "slow": slow(kernels, runs.run_us),
    }


SETTLED = 1.02
"""Measuring the machine again gains less than this: nothing disturbed it."""

ATTEMPTS = 5


def machine(threads: int) -> tuple[Limits | None, tuple[Level, ...], str]:
    """Limits of this machine; None, memory alone and the reason where they cannot be measured."""
    try:
        limits = measure(threads)
        for _ in range(ATTEMPTS):
            before, limits = limits, measure(threads)
            gains = (limits.read_gbs / before.read_gbs, limits.int8_gmacs / before.int8_gmacs)
            if max(gains) < SETTLED:
                break
    except BuildError as error:
        return None, (Level("DRAM", math.inf, math.inf),), str(error)
    return limits, measure_levels(limits), ""
