"""Linear kernels for GPUs without one: machine code, what is resident, what limits it.

A layer is compiled as the pipeline would, its kernel for M rows disassembled
(`apq_tvm.bench.gpu_sass`), and four times computed, of which the longest is what the kernel takes
at least: memory at its bandwidth; memory at what is in flight, by Little's law; instructions at
four warps a cycle and multiprocessor; products at the tensor cores' rate. What it asks of memory is
counted as it runs on the simulated GPU (`apq_tvm.bench.gpu_counts`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import groupby
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.bench.gpu_counts import UNCOUNTED, CountedLayer, sized, why_not
from apq_tvm.bench.gpu_native import is_native, written
from apq_tvm.bench.gpu_sass import WEIGHT_LOAD_BYTES, Kernel, disassemble, find_tool
from apq_tvm.bench.linear import LinearCase, write_model
from apq_tvm.errors import BadTarget
from apq_tvm.progress import Progress, Silent
from apq_tvm.types import AnyPath, DeviceProfile, GpuFacts, KernelChoice

LATENCY_NS = 800.0
"""From asking memory to having it, under load: what must be in flight follows from it."""

WARP = 32

_LAUNCH = ("blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z")


def bench_gpu_static(
    cases: Sequence[LinearCase],
    *,
    target: str,
    keep: AnyPath | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Judge the kernels of layers for a GPU that is not here.

    Parameters
    ----------
    cases : sequence of LinearCase
        Threads and cold do not matter.
    target : str
        A GPU.
    keep : str or path, optional
        Folder for the machine code, one file per kernel and M.
    progress : Progress, optional

    Returns
    -------
    list of dict
        One per case: ``shape, m, scheme, kernel, native, instructions_per_weight,
        loop_instructions, pipes, registers, spills, shared_bytes, warps_per_sm, bytes_in_flight,
        bytes_wanted, ideal_bytes, limit, static_us, times_us, simulated, simulated_m, dram_bytes,
        ideal_dram_bytes, sectors, ideal_sectors, shared_waves, ideal_waves, preparation, target``.

        `instructions_per_weight` are a lane's of the innermost loop over each weight that it
        reads there, `pipes` the same by what executes them; of the whole kernel where it has no
        loop (`loop_instructions` 0), None where it has no such loads (the generic kernels).
        `spills` are bytes of a thread in local memory.
        `warps_per_sm` is what is resident: by registers, shared memory and threads, or fewer where
        the launch has not so many blocks. `bytes_in_flight` are those of weights that a
        multiprocessor has asked for and not used, `bytes_wanted` what `LATENCY_NS` of its share of
        the bandwidth is. `ideal_bytes` are read and written once: weights, x and y. `limit` is the
        largest of `times_us`. `native`: whether the matrix products that the kernel is written with
        are instructions of this GPU, None if it has none (`apq_tvm.bench.gpu_native`).

        From `dram_bytes` on figures are of one launch for a layer `simulated` (NxK) of
        `simulated_m` rows of x, the real ones or fewer: bytes of the sectors of 32 bytes that it
        reads or writes, each once, beside its weights, its share of quantized x and y; sectors that
        its warps' instructions touch, beside what their bytes would fill; accesses of shared
        memory, beside those without conflicts of banks. `preparation` has the same of what
        quantizes x. All None where `apq_tvm.bench.gpu_counts.why_not` says why.

    Raises
    ------
    BadTarget
        No GPU, or several.
    ApqError
        A scheme is unknown, or a compiler or a disassembler is missing.
    """
    from apq_tvm.schedules.devices import find_profile

    profile, progress = find_profile(target), progress or Silent()
    if profile.gpu is None or profile.gpu.images:
        raise BadTarget(f"{target} is no GPU; name one of apq-tvm targets")
    for tool in ("nvdisasm", "cuobjdump"):
        find_tool(tool)  # before minutes of work
    folder = Path(keep) if keep is not None else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with progress.stage("static", len(cases)):
        for (n, k, scheme, _), group in groupby(cases, key=lambda c: c.compiled):
            layer = _Layer(n, k, scheme, profile)
            with tempfile.TemporaryDirectory(prefix="apq-counted-") as work:
                counted = None if why_not() else CountedLayer(n, k, scheme, profile, Path(work))
                for case in group:
                    progress.advance(f"{case.shape} {case.scheme} M={case.m}")
                    asked = counted.row(case.m, case.bits) if counted else UNCOUNTED
                    rows.append({**layer.row(case, folder), **asked, "target": profile.name})
    return rows


class _Layer:
    """A layer's kernels: how each is launched, and its machine code."""

    def __init__(self, n: int, k: int, scheme: str, profile: DeviceProfile) -> None:
        import tvm

        from apq_tvm import formats, pipeline
        from apq_tvm.codegen.cuda.compilers import find_compiler
        from apq_tvm.codegen.cuda.split import split

        assert profile.gpu is not None
        self._n, self._k, self._profile, self._gpu = n, k, profile, profile.gpu
        with tempfile.TemporaryDirectory(prefix="apq-static-") as name:
            model = Path(name) / "linear.onnx"
            weight = np.random.default_rng(n + k).standard_normal((n, k)).astype(np.float32)
            write_model(model, weight)
            chosen = pipeline.plan(model, target=profile.name, scheme=scheme, search=False)
            made = pipeline.scheduled(chosen)
            (self._choices,) = chosen.choices.values()
            linears = made.lowered.linears
            self._functions = {f.kernel.name: made.mod[name] for name, f in linears.items()}
            self._names = {f.kernel.name: name for name, f in linears.items()}
            target = tvm.target.Target(dict(profile.target))
            _, code = split(made.mod, list(linears), target, Path(name))
        compiler = find_compiler(profile.gpu)
        self._kernels = disassemble(compiler.image(code, profile.gpu.sm))
        self._products = written(compiler.ptx(code, profile.gpu.sm).decode())
        tensors = chosen.quantized.tensors.values()
        self._bits = {t.scheme.bits for t in tensors}.pop() if tensors else 32
        self._bytes = sum(map(formats.nbytes, tensors)) or 4 * n * k

    def row(self, case: LinearCase, keep: Path | None) -> dict[str, Any]:
        choice = self._choice(case)
        func = self._functions[choice.kernel]
        grid, threads = _launch(func, case.m)
        kernel = self._kernel(choice)
        if keep is not None:
            file = keep / f"{choice.kernel}_{case.shape}_{case.scheme}_m{case.m}.sass"
            file.write_text(kernel.text)
        loads, facts = kernel.loop.weight_loads, CAPABILITIES[self._gpu.sm]
        weights = loads * WEIGHT_LOAD_BYTES * 8 / self._bits
        resident = _resident(kernel, threads, grid, self._profile, facts)
        flying = kernel.loop.loads_in_flight * WEIGHT_LOAD_BYTES * WARP * resident
        each = len(kernel.loop.instructions) / weights if loads else None
        ideal = self._bytes + 4 * case.m * (self._k + self._n)
        times = self._times(case, ideal, flying, each, facts)
        limit = max(times, key=lambda name: times[name])
        return {
            "shape": case.shape,
            "m": case.m,
            "scheme": case.scheme,
            "kernel": choice.kernel,
            "native": is_native(self._products[kernel.name], kernel.text),
            "instructions_per_weight": each,
            "loop_instructions": len(kernel.loop.instructions) if kernel.loop.repeats else 0,
            "pipes": {p: c / weights for p, c in kernel.loop.pipes.items()} if loads else {},
            "registers": kernel.registers,
            "spills": kernel.local_bytes,
            "shared_bytes": kernel.shared_bytes,
            "warps_per_sm": resident,
            "bytes_in_flight": flying if loads else None,
            "bytes_wanted": self._gpu.bandwidth * LATENCY_NS / self._profile.cores,
            "ideal_bytes": ideal,
            "times_us": times,
            "limit": limit,
            "static_us": times[limit],
        }

    def _choice(self, case: LinearCase) -> KernelChoice:
        mine = [c for c in self._choices if c.width == case.bits]
        return next(c for c in mine if c.m_min <= case.m and not 0 <= c.m_max < case.m)

    def _kernel(self, choice: KernelChoice) -> Kernel:
        from apq_tvm.codegen.graph.c_text import identifier

        name = identifier(self._names[choice.kernel])
        return next(k for n, k in self._kernels.items() if n.startswith(f"{name}_kernel"))

    def _times(
        self,
        case: LinearCase,
        ideal: float,
        flying: float,
        each: float | None,
        facts: Mapping[str, int],
    ) -> dict[str, float]:
        """Microseconds, each if nothing else took any."""
        gpu, cores = self._gpu, self._profile.cores
        cycles = cores * gpu.clock_mhz  # of all multiprocessors in a microsecond
        times = {"bandwidth": ideal / gpu.bandwidth / 1e3}
        if each is None:
            return times
        tiles = -(-case.m // TILE_ROWS)
        rows = self._n * self._k * tiles
        times["latency"] = ideal * LATENCY_NS / (flying * cores) / 1e3
        times["instructions"] = rows * each / WARP / (ISSUE * cycles)
        if facts["int8"]:
            times["tensor"] = rows * TILE_ROWS / (facts["int8"] * cycles)
        return times


ISSUE = 4
"""Instructions of warps that a multiprocessor begins in a cycle: one of each of its four parts."""

TILE_ROWS = 8
"""Rows of x of an ``mma``, used or not."""

CAPABILITIES: Mapping[int, Mapping[str, int]] = {
    75: {"blocks": 16, "reserved": 0, "int8": 1024},
    80: {"blocks": 32, "reserved": 1024, "int8": 2048},
    86: {"blocks": 16, "reserved": 1024, "int8": 1024},
    87: {"blocks": 16, "reserved": 1024, "int8": 2048},
    89: {"blocks": 24, "reserved": 1024, "int8": 1024},
    90: {"blocks": 32, "reserved": 1024, "int8": 4096},
    110: {"blocks": 24, "reserved": 1024, "int8": 0},
    120: {"blocks": 24, "reserved": 1024, "int8": 1024},
}
"""Of a multiprocessor: blocks it holds at most, and bytes of shared memory that a block takes
beside its own (CUDA C++ Programming Guide 13.0, "Compute Capabilities"); products of int8 tensors
in a cycle, from the INT8 rate of a part's whitepaper over its multiprocessors and boost clock, 0
where there is none."""


def _launch(func: Any, m: int) -> tuple[int, int]:
    """Blocks of a launch for `m` rows, and threads of a block."""
    from tvm import tirx

    from apq_tvm.schedules.graph.exprs import collect

    extents: dict[str, int] = {}
    for loop in collect(func.body, tirx.For):
        if loop.kind == tirx.ForKind.THREAD_BINDING:
            extents[str(loop.thread_binding.thread_tag)] = sized(loop.extent, m)
    sizes = [extents.get(tag, 1) for tag in _LAUNCH]
    return reduce(mul, sizes[:3]), reduce(mul, sizes[3:])


def _resident(
    kernel: Kernel, threads: int, grid: int, profile: DeviceProfile, facts: Mapping[str, int]
) -> float:
    """Warps that a multiprocessor holds, on average where the launch has few blocks."""
    gpu: GpuFacts | None = profile.gpu
    assert gpu is not None
    warps = -(-threads // WARP)
    each = -(-max(kernel.registers, 1) * WARP // 256) * 256  # registers come by 256 of a warp
    by_registers = profile.vector_registers // each // 4 * 4 // warps
    by_shared = gpu.shared_bytes // (kernel.shared_bytes + facts["reserved"] or 1)
    blocks = min(by_registers, by_shared, gpu.threads // (warps * WARP), facts["blocks"])
    return min(blocks, grid / profile.cores) * warps
