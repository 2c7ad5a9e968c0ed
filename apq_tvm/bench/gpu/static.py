"""Linear kernels for GPUs without one: machine code, what is resident, what limits it.

A layer is compiled as the pipeline would, its kernel for M rows disassembled
(`apq_tvm.bench.gpu.sass`), and four times computed, of which the longest is what the kernel takes
at least: memory at its bandwidth; memory at what is in flight, by Little's law; instructions at
four warps a cycle and multiprocessor; products at the tensor cores' rate. What it asks of memory is
counted as it runs on the simulated GPU (`apq_tvm.bench.gpu.counts`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from apq_tvm.bench.gpu.counts import UNCOUNTED, CountedLayer, why_not
from apq_tvm.bench.gpu.layer import GpuLayer
from apq_tvm.bench.gpu.native import is_native, written
from apq_tvm.bench.gpu.sass import WEIGHT_LOAD_BYTES, Kernel, disassemble, find_tool
from apq_tvm.bench.linear import LinearCase
from apq_tvm.errors import BadTarget
from apq_tvm.progress import Progress, Silent
from apq_tvm.types import AnyPath, DeviceProfile, GpuFacts

WARP = 32


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
        multiprocessor has asked for and not used, `bytes_wanted` what its share of the bandwidth is
        in `GpuFacts.latency_ns`. `ideal_bytes` are read and written once: weights, x and y. `limit`
        is the largest of `times_us`. `native`: whether the matrix products that the kernel is
        written with are instructions of this GPU, None if it has none (`apq_tvm.bench.gpu.native`).

        From `dram_bytes` on figures are of one launch for a layer `simulated` (NxK) of
        `simulated_m` rows of x, the real ones or fewer: bytes of the sectors of 32 bytes that it
        reads or writes, each once, beside its weights, its share of quantized x and y; sectors that
        its warps' instructions touch, beside what their bytes would fill; accesses of shared
        memory, beside those without conflicts of banks. `preparation` has the same of what
        quantizes x. All None where `apq_tvm.bench.gpu.counts.why_not` says why.

    Raises
    ------
    BadTarget
        No GPU, or several.
    ApqError
        A scheme is unknown, or a compiler or a disassembler is missing.
    """
    from apq_tvm.codegen.cuda.compilers import find_compiler

    profile, progress = find_gpu(target), progress or Silent()
    assert profile.gpu is not None
    for tool in ("nvdisasm", "cuobjdump"):
        find_tool(tool)  # before minutes of work
    folder = Path(keep) if keep is not None else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with progress.stage("static", len(cases)):
        for (n, k, scheme, _), group in groupby(cases, key=lambda c: c.compiled):
            layer = GpuLayer(n, k, scheme, profile)
            compiler, sm = find_compiler(profile.gpu), profile.gpu.sm
            ptx = compiler.ptx(layer.code, sm).decode()
            judged = StaticLayer(layer, compiler.image(layer.code, sm), ptx)
            with tempfile.TemporaryDirectory(prefix="apq-counted-") as work:
                counted = None if why_not() else CountedLayer(n, k, scheme, profile, Path(work))
                for case in group:
                    progress.advance(f"{case.shape} {case.scheme} M={case.m}")
                    asked = counted.row(case.m, case.bits) if counted else UNCOUNTED
                    rows.append({**judged.row(case, folder), **asked})
    return rows


def find_gpu(target: str) -> DeviceProfile:
    """The profile of one GPU.

    Raises
    ------
    BadTarget
        No GPU, or several.
    """
    from apq_tvm.schedules.devices import find_profile

    profile = find_profile(target)
    if profile.gpu is None or profile.gpu.images:
        raise BadTarget(f"{target} is no GPU; name one of apq-tvm targets")
    return profile


class StaticLayer:
    """A layer's kernels: how each is launched, and its machine code.

    Parameters
    ----------
    layer : GpuLayer
    image : bytes
        Of its code, by NVIDIA's compiler.
    ptx : str
        The same; without it nothing is said of what is native.

    Raises
    ------
    BuildError
        The disassembler is missing, or does not know the image.
    """

    def __init__(self, layer: GpuLayer, image: bytes, ptx: str = "") -> None:
        assert layer.profile.gpu is not None
        self._layer, self._profile, self._gpu = layer, layer.profile, layer.profile.gpu
        self._n, self._k = layer.n, layer.k
        self._kernels, self._products = disassemble(image), written(ptx)

    def row(self, case: LinearCase, keep: Path | None = None) -> dict[str, Any]:
        """What `bench_gpu_static` gives for a case; machine code goes to the folder `keep`."""
        choice = self._layer.choice(case.m, case.bits)
        _, (launch, *_) = self._layer.launches(case.m, case.bits)
        grid, threads = prod(launch.extents[:3]), prod(launch.extents[3:6])
        kernel = self._kernels[launch.kernel]
        if keep is not None:
            file = keep / f"{choice.kernel}_{case.shape}_{case.scheme}_m{case.m}.sass"
            file.write_text(kernel.text)
        loads, facts = kernel.loop.weight_loads, CAPABILITIES[self._gpu.sm]
        weights = loads * WEIGHT_LOAD_BYTES * 8 / self._layer.stored_bits
        resident = _resident(kernel, threads, grid, self._profile, facts)
        flying = kernel.loop.loads_in_flight * WEIGHT_LOAD_BYTES * WARP * resident
        pipes = {p: c / weights for p, c in kernel.loop.pipes.items()} if loads else {}
        ideal = ideal_bytes(self._layer, case)
        times = self._times(ideal, flying, pipes, launch.extents[1])
        limit = max(times, key=lambda name: times[name])
        return {
            "shape": case.shape,
            "m": case.m,
            "scheme": case.scheme,
            "kernel": choice.kernel,
            "native": is_native(self._products.get(kernel.name, frozenset()), kernel.text),
            "instructions_per_weight": sum(pipes.values()) if loads else None,
            "loop_instructions": len(kernel.loop.instructions) if kernel.loop.repeats else 0,
            "pipes": pipes,
            "registers": kernel.registers,
            "spills": kernel.local_bytes,
            "shared_bytes": kernel.shared_bytes,
            "warps_per_sm": resident,
            "bytes_in_flight": flying if loads else None,
            "bytes_wanted": self._gpu.bandwidth * self._gpu.latency_ns / self._profile.cores,
            "ideal_bytes": ideal,
            "times_us": times,
            "limit": limit,
            "static_us": times[limit],
            "target": self._profile.name,
        }

    def _times(
        self,
        ideal: float,
        flying: float,
        pipes: Mapping[str, float],
        passes: int,
    ) -> dict[str, float]:
        """Microseconds, each if nothing else took any; `passes` are those over the weights."""
        gpu, cores = self._gpu, self._profile.cores
        cycles = cores * gpu.clock_mhz  # of all multiprocessors in a microsecond
        times = {"bandwidth": ideal / gpu.bandwidth / 1e3}
        if not pipes:
            return times
        weights = self._n * self._k * passes / WARP  # of a lane
        times["latency"] = ideal * gpu.latency_ns / (flying * cores) / 1e3
        times["instructions"] = weights * sum(pipes.values()) / (ISSUE * cycles)
        if rate := self._profile.macs_per_cycle.get("imma"):
            products = PRODUCT if self._gpu.sm >= 80 else PRODUCT // 4
            times["tensor"] = weights * pipes["tensor"] * products / (rate * cycles)
        return times


ISSUE = 4
"""Instructions of warps that a multiprocessor begins in a cycle: one of each of its four parts."""

PRODUCT = 16 * 8 * 32
"""Products of int8 of an ``mma``; of bits, eight times as many count for as long. (On compute
capability 7.5 it is four of a quarter.)"""

CAPABILITIES: Mapping[int, Mapping[str, int]] = {
    75: {"blocks": 16, "reserved": 0},
    80: {"blocks": 32, "reserved": 1024},
    86: {"blocks": 16, "reserved": 1024},
    87: {"blocks": 16, "reserved": 1024},
    89: {"blocks": 24, "reserved": 1024},
    90: {"blocks": 32, "reserved": 1024},
    110: {"blocks": 24, "reserved": 1024},
    120: {"blocks": 24, "reserved": 1024},
}
"""Of a multiprocessor: blocks it holds at most, and bytes of shared memory that a block takes
beside its own (CUDA C++ Programming Guide 13.0, "Compute Capabilities")."""


def ideal_bytes(layer: GpuLayer, case: LinearCase) -> float:
    """Bytes that are read and written once: weights, x and y."""
    return layer.nbytes(case.bits) + 4 * case.m * (layer.k + layer.n)


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
