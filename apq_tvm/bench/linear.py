"""One quantized linear layer, compiled by the real pipeline, beside ONNX Runtime's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.bench.clib import Library, Runner, Tensors, aligned, aligned_empty
from apq_tvm.bench.rivals import Rival, RivalLayer, parse_against, relative_error, saturates
from apq_tvm.bench.roofline import measure
from apq_tvm.bench.timing import Candidate, Timing, cold_copies, interleave
from apq_tvm.errors import BadTarget
from apq_tvm.extras import require
from apq_tvm.formats import dequantize, nbytes_at, parse_at
from apq_tvm.progress import Progress, Silent
from apq_tvm.schedules.devices import find_profile

MODULE_NAME = "apq_bench_linear"


@dataclass(frozen=True)
class LinearCase:
    """One line of the benchmark.

    Parameters
    ----------
    n, k : int
        Output and input channels.
    m : int
        Rows of activations.
    scheme : str
        ``anyprec3-8@4`` is the scheme before the ``@``, run with four bits.
    threads : int
    cold : bool
        Weights out of cache.
    """

    n: int
    k: int
    m: int
    scheme: str
    threads: int
    cold: bool = True

    @property
    def bits(self) -> int:
        """The width chosen at run time, 0 for none."""
        return parse_at(self.scheme)[1]

    @property
    def compiled(self) -> tuple[int, int, str, bool]:
        """What the layer is compiled from; cases that differ only in bits share it."""
        return self.n, self.k, self.scheme.partition("@")[0], self.cold

    @property
    def shape(self) -> str:
        """``NxK``."""
        return f"{self.n}x{self.k}"


class OurLayer:
    """The layer as a compiled module with as many handles as a cold run needs.

    Parameters
    ----------
    folder : Path
        Where model, module and weight copies are written.
    weight : float32 [N, K]
    scheme, target : str
    cold : bool
    """

    def __init__(
        self, folder: Path, weight: NDArray[np.float32], scheme: str, target: str, cold: bool
    ) -> None:
        from apq_tvm import pipeline

        model = folder / "linear.onnx"
        write_model(model, weight)
        plan = pipeline.plan(model, target=target, scheme=scheme, search=False)
        self._float = weight
        self._tensor = next(iter(plan.quantized.tensors.values()), None)
        module = pipeline.build(plan, folder / MODULE_NAME)
        (layer,) = module.manifest["layers"]
        self.kernels: list[dict[str, Any]] = layer["kernels"]
        library = Library(module.path)
        (weights,) = module.path.glob("*.safetensors")
        self._runners: list[Runner] = []
        for i in range(cold_copies(self.nbytes(0)) if cold else 1):
            copy = folder / f"{i}.safetensors"
            shutil.copyfile(weights, copy)
            self._runners.append(library.open(copy, threads=1))

    def nbytes(self, bits: int) -> int:
        """Weight bytes that a run reads with so many bits; 0 is all."""
        return nbytes_at(self._tensor, bits) if self._tensor else self._float.nbytes

    def weight(self, bits: int) -> NDArray[np.float64]:
        """What the codes mean, float64 [N, K]."""
        decoded = dequantize(self._tensor, bits) if self._tensor else self._float
        return decoded.astype(np.float64)

    def candidate(
        self, x: NDArray[np.float32], threads: int, bits: int
    ) -> tuple[Candidate, NDArray[Any]]:
        """Return what is timed for activations `x`, float32 [M, K], and where its result lands."""
        y = aligned_empty((len(x), len(self._float)), np.float32)
        inputs, outputs = Tensors([aligned(x)]), Tensors([y])
        for runner in self._runners:
            runner.set_num_threads(threads)
            if bits:
                runner.set_precision(bits)
        calls = [runner.bind(inputs, outputs) for runner in self._runners]

        def run(repeats: int) -> None:
            for _ in range(repeats):
                for call in calls:
                    call()

        return Candidate(run, len(calls)), y

    def kernel_for(self, m: int, bits: int) -> str:
        """The kernel that serves `m` rows."""
        widest = max(kernel["bits"] for kernel in self.kernels)
        for kernel in self.kernels:
            if kernel["bits"] != (bits or widest):
                continue
            if kernel["m_min"] <= m and (kernel["m_max"] < 0 or m <= kernel["m_max"]):
                return str(kernel["kernel"])
        return ""


def write_model(path: Path, weight: NDArray[np.float32]) -> None:
    """Write an ONNX model of one MatMul: ``x`` float32 [m, K] to ``y`` [m, N]."""
    import onnx
    from onnx import helper, numpy_helper

    n, k = weight.shape
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="linear")],
        "linear",
        [tensor("x", onnx.TensorProto.FLOAT, ["m", k])],
        [tensor("y", onnx.TensorProto.FLOAT, ["m", n])],
        [numpy_helper.from_array(np.ascontiguousarray(weight.T), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())


def bench_linear(
    cases: Sequence[LinearCase],
    against: str,
    *,
    target: str = "host",
    budget_s: float = 4.0,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Time layers beside rivals.

    Parameters
    ----------
    cases : sequence of LinearCase
    against : str
        Rivals (`apq_tvm.bench.rivals.parse_against`).
    target : str
        Device to compile for.
    budget_s : float
        Seconds per case.
    progress : Progress or None
        Told of every case.

    Returns
    -------
    list of dict
        One per case and rival: ``shape, m, threads, scheme, cold, nbytes, us, gmacs, kernel,
        limit_share, limit, error, error_max, noise, rival, rival_us, rival_error,
        rival_error_max, rival_saturates, rival_noise, ratio``. `ratio` is the rival's time
        over ours; errors are relative to the root mean square of the exact product with the
        codes' own weights; `limit_share` is the least time that memory bandwidth and arithmetic
        allow over ours.

    Raises
    ------
    ApqError
        A scheme, target or rival is unknown, or onnxruntime or a compiler is missing.
    """
    require("onnxruntime")  # all but this is there, and only rivals, built last, would miss it
    progress = progress or Silent()
    arch = find_profile(target).arch
    if arch != os.uname().machine:
        raise BadTarget(
            f"{target} is {arch}, and this machine is {os.uname().machine}: layers are timed where "
            "they run; count what they cost there with: apq-tvm bench static"
        )
    for case in cases:
        parse_against(against, _bits(case.scheme))  # before minutes of work
    rows = []
    layers = {c.compiled for c in cases}
    with progress.stage("bench", len(cases) + len(layers)):
        for (n, k, scheme, cold), group in groupby(cases, key=lambda c: c.compiled):
            weight = np.random.default_rng(n + k).standard_normal((n, k)).astype(np.float32)
            with tempfile.TemporaryDirectory(prefix="apq-bench-") as folder:
                progress.advance(f"compile {n}x{k} {scheme}")
                ours = OurLayer(Path(folder), weight, scheme, target, cold)
                built: dict[tuple[str, int], RivalLayer] = {}
                for case in group:
                    words = f"{case.shape} {case.scheme} M={case.m} {case.threads} threads"
                    progress.advance(words)
                    rivals = parse_against(against, _bits(case.scheme))
                    for rival in rivals:
                        key = (rival.name, case.threads)
                        if key not in built:
                            built[key] = RivalLayer(rival, weight, case.threads, cold)
                    beside = [(r, built[r.name, case.threads]) for r in rivals]
                    rows += list(_rows(case, ours, beside, budget_s))
    return rows


def _bits(scheme: str) -> int:
    """Bits of a scheme string, 32 for ``float``."""
    parsed, bits = parse_at(scheme)
    return bits or (parsed.bits if parsed else 32)


def _rows(
    case: LinearCase, ours: OurLayer, rivals: list[tuple[Rival, RivalLayer]], budget_s: float
) -> Iterator[dict[str, Any]]:
    """Time one case and describe it beside each rival."""
    x = np.random.default_rng(case.m).standard_normal((case.m, case.k)).astype(np.float32)
    mine, y = ours.candidate(x, case.threads, case.bits)
    candidates = {"ours": mine, **{b.name: b.candidate(x) for _, b in rivals}}
    timings = interleave(candidates, budget_s=budget_s)
    mean, largest = relative_error(y, x, ours.weight(case.bits))
    for rival, built in rivals:
        rival_mean, rival_largest = relative_error(built.output(x), x, built.layer.weight)
        theirs = timings[built.name]
        yield {
            **_our_side(case, ours, timings["ours"]),
            "error": mean,
            "error_max": largest,
            "rival": built.name,
            "rival_us": theirs.us,
            "rival_error": rival_mean,
            "rival_error_max": rival_largest,
            "rival_saturates": saturates(rival),
            "rival_noise": theirs.noise,
            "ratio": theirs.us / timings["ours"].us,
        }


def _our_side(case: LinearCase, ours: OurLayer, timing: Timing) -> dict[str, Any]:
    """The part of a row that does not depend on the rival."""
    macs = case.m * case.n * case.k
    scheme, bits = parse_at(case.scheme)
    share, limit = measure(case.threads).share(
        timing.us,
        ours.nbytes(bits) if case.cold else 0,
        macs,
        integer=scheme is not None and scheme.integer_acts,
    )
    return {
        "shape": case.shape,
        "m": case.m,
        "threads": case.threads,
        "scheme": case.scheme,
        "cold": case.cold,
        "nbytes": ours.nbytes(bits),
        "us": timing.us,
        "gmacs": macs / timing.us / 1e3,
        "kernel": ours.kernel_for(case.m, bits),
        "limit_share": share,
        "limit": limit,
        "noise": timing.noise,
    }
