"""NVIDIA GPUs: their profiles and their linear kernels.

Sources of the figures:

- CUDA C++ Programming Guide 13.0, "Compute Capabilities", tables of technical specifications per
  compute capability: shared memory, registers and threads of a multiprocessor
- NVIDIA architecture whitepapers: Turing (WP-09183-001), Ampere GA102, A100 Tensor Core GPU, Ada
  GPU Architecture, H100 Tensor Core GPU, RTX Blackwell: multiprocessors, boost clock, L2, memory
- product pages and data sheets where a part is not in those: GeForce RTX 4070 Laptop, H200, Jetson
  modules (Orin Nano, AGX Orin, AGX Thor)
- CUDA release notes, "CUDA Driver Version Compatibility": 12.x runs from driver 525 on, compute
  capability 12.0 from 570, 13.x from 580
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from apq_tvm.schedules.cuda.native import native
from apq_tvm.types import DeviceProfile, GpuFacts

if TYPE_CHECKING:
    from apq_tvm.schedules.linear.kernel import LinearKernel

_KB, _MB = 1024, 1024 * 1024
_GUIDE = "https://docs.nvidia.com/cuda/cuda-c-programming-guide, Compute Capabilities"
_PAPER = "https://www.nvidia.com, {} whitepaper"
_PAGE = "https://www.nvidia.com, {}"

_SHARED_KB = {75: 64, 80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 110: 228, 120: 100}
_THREADS = {75: 1024, 80: 2048, 86: 1536, 87: 1536, 89: 1536, 90: 2048, 110: 2048, 120: 1536}
"""Of a multiprocessor, by compute capability."""

_MEASURED = "h200"
"""Whose figures the others borrow."""

_INT8 = {75: 1024, 80: 2048, 86: 1024, 87: 2048, 89: 1024, 90: 4096, 120: 1024}
"""Multiply-adds of int8 tensors of a multiprocessor and cycle: a part's INT8 rate in its whitepaper
over its multiprocessors and boost clock; Thor's names none without sparsity."""

_X86, _ARM = "x86_64-linux-gnu", "aarch64-linux-gnu"


def _profile(
    name: str,
    sm: int,
    multiprocessors: int,
    clock_mhz: int,
    bandwidth: float,
    l2_mb: float,
    source: str,
    host: str = _X86,
    images: tuple[int, ...] = (),
) -> DeviceProfile:
    shared = _SHARED_KB[sm] * _KB
    driver = 580 if sm == 110 else 570 if sm == 120 else 525
    return DeviceProfile(
        name=name,
        target={
            "kind": "cuda",
            "arch": f"sm_{sm}",
            "max_shared_memory_per_block": shared - (0 if sm == 75 else _KB),
            "host": {"kind": "llvm", "mtriple": host},
        },
        features=frozenset((f"sm_{sm}", *native(sm))),
        vector_bytes=16,
        vector_registers=65536,
        cores=multiprocessors,
        l1_bytes=shared,
        l2_bytes=int(l2_mb * _MB),
        sources=(source, _GUIDE),
        macs_per_cycle={"imma": _INT8[sm]} if sm in _INT8 else {},
        measured_as=() if name == _MEASURED else (_MEASURED,),
        gpu=GpuFacts(sm, clock_mhz, bandwidth, shared, _THREADS[sm], driver, images),
    )


PROFILES: tuple[DeviceProfile, ...] = (
    _profile("rtx-2080", 75, 46, 1710, 448.0, 4, _PAPER.format("Turing")),
    _profile("rtx-3070", 86, 46, 1725, 448.0, 4, _PAPER.format("Ampere GA102")),
    _profile("rtx-3090", 86, 82, 1695, 936.0, 6, _PAPER.format("Ampere GA102")),
    _profile("rtx-4070-laptop", 89, 36, 2175, 256.0, 32, _PAGE.format("GeForce RTX 4070 Laptop")),
    _profile("rtx-4080", 89, 76, 2505, 716.8, 64, _PAPER.format("Ada")),
    _profile("rtx-4090", 89, 128, 2520, 1008.0, 72, _PAPER.format("Ada")),
    _profile("rtx-5090", 120, 170, 2407, 1792.0, 96, _PAPER.format("RTX Blackwell")),
    _profile("jetson-orin-nano", 87, 8, 1020, 102.0, 2, _PAGE.format("Jetson Orin Nano"), _ARM),
    _profile("jetson-agx-orin", 87, 16, 1300, 204.8, 4, _PAGE.format("Jetson AGX Orin"), _ARM),
    _profile("jetson-agx-thor", 110, 20, 1575, 273.0, 32, _PAGE.format("Jetson AGX Thor"), _ARM),
    _profile("a100", 80, 108, 1410, 2039.0, 40, _PAPER.format("A100")),
    _profile("h100", 90, 132, 1830, 3352.0, 50, _PAPER.format("H100")),
    _profile("h200", 90, 132, 1830, 4800.0, 50, _PAGE.format("H200")),
    # Images for all that CUDA 12 knows, PTX for what comes after; figures are those of the least.
    _profile(
        "cuda-auto",
        75,
        46,
        1710,
        448.0,
        4,
        _PAPER.format("Turing"),
        images=(75, 80, 86, 89, 90, 120),
    ),
)


def rules() -> Mapping[str, Callable[..., Any]]:
    """Schedules by ``apq.op``: none, all functions have `schedule_any`'s."""
    return {}


def schedule_any() -> Callable[..., Any]:
    """``(func, profile, decide)`` → the scheduled PrimFunc and what it is."""
    from apq_tvm.schedules.cuda.graph import schedule_graph

    return schedule_graph


def linear_kernels() -> tuple[LinearKernel, ...]:
    """Every kernel for linear layers on GPUs, in order of preference."""
    from apq_tvm.schedules.cuda.bmma import BIT_KERNELS
    from apq_tvm.schedules.cuda.generic import DENSE_KERNELS, GENERIC_KERNELS
    from apq_tvm.schedules.cuda.mma import MMA_KERNELS

    return (*BIT_KERNELS, *MMA_KERNELS, *DENSE_KERNELS, *GENERIC_KERNELS)
