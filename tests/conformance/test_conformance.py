"""Every kernel of a device computes what the format of its weights means.

One check for all kernels that `linear_kernels` lists, whatever their family and instruction: rows
past the last tile, rows of weights past the last block, a tail of K, bias, activation and residual,
activations as its own preparation makes them. A runner says how a function is run: LLVM's code on
this machine, or under qemu. Tests of families are closer (exact sums, extremes); this one is theirs
who write a kernel or a runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_tools import emulated, needs_qemu
from built import built
from linear_cases import ACTIVATIONS

from apq_tvm.bench.arm.layer import outputs
from apq_tvm.codegen.layouts import Details
from apq_tvm.errors import NotApplicable
from apq_tvm.formats import dequantize, details
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.schedules.graph.rewrites.lets import spill_lets
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.schedules.linear.kernel import Choice, LinearKernel
from apq_tvm.types import DeviceProfile, QuantizedTensor, Scheme
from tests.golden.cases import schemes

Array = Any
Run = Callable[..., None]

TARGETS = ("host", "x86-64-v3", "graviton3", "graviton2", "cortex-a72", "cortex-a55")
"""A kernel is run for the first of them that has its instruction and does not decline it."""

SHAPES = ((51, 160), (51, 512))
"""N and K: the first that a kernel takes."""

A8_ERROR, FLOAT_ERROR = 0.03, 1e-5
"""Root mean square against that of the result; of int8 activations, more for fewer bits."""


@cache
def quantized(scheme: Scheme, n: int, k: int) -> tuple[QuantizedTensor, Details]:
    w = np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)
    tensor = quantize_tensor(w, scheme, search=False)
    return tensor, details(tensor)


def first_choice(kernel: LinearKernel, target: str) -> Choice:
    """A layer that the kernel is for, of the first scheme and shape that it takes."""
    reasons = []
    for profile in profiles(kernel, target):
        for scheme in schemes():
            if not kernel.is_for(LinearSpec(*SHAPES[0], scheme)):
                continue
            for n, k in SHAPES:
                sizes = quantized(scheme, n, k)[1] if scheme else ()
                spec = LinearSpec(n, k, scheme, True, "silu", True, sizes)
                try:
                    kernel.check(spec, profile)
                except NotApplicable as reason:
                    reasons.append(f"{profile.name}: {scheme}: {reason}")
                    continue
                return kernel.choose(spec, profile, Defaults())
    assert reasons, f"{kernel.name}: no scheme is of its family, bits and width"
    pytest.skip(reasons[0])


def profiles(kernel: LinearKernel, target: str) -> Iterator[DeviceProfile]:
    """The target and those after it that have the kernel, also with weights as it wants them."""
    for name in TARGETS[TARGETS.index(target) :] if target in TARGETS else (target,):
        profile = find_profile(name)
        if kernel in linear_kernels(profile) and not kernel.instruction.lacks(profile.features):
            yield profile
            if kernel.run:
                yield find_profile(name, layout=f"{kernel.instruction.lanes}x{kernel.run}")


def runner(profile: DeviceProfile, folder: Path) -> Callable[[Any], Run]:
    """How functions for a device are run here; skips where they cannot be."""
    if profile.arch == "aarch64":
        return lambda func: emulated(func, profile, folder)
    if not profile.features <= find_profile("host").features:
        pytest.skip(f"this machine is no {profile.name}")
    return lambda func: built(func, profile)


def prepared(choice: Choice, kernel: LinearKernel, x: Array, packed: Any, run: Any) -> list[Array]:
    """What the kernel reads in the place of x."""
    preparation = kernel.prepare(choice)
    if preparation is None:
        return [x]
    weights = [packed[name] for name in preparation.weights]
    func, _ = schedule_preparation(preparation, preparation.func, choice.profile, Defaults())
    found = outputs(preparation.func, 1 + len(weights), len(x))
    run(spill_lets(func))(x, *weights, *found)
    return found


def cases() -> Iterator[Any]:
    """Every kernel once; on plain x86-64, whose vectors are others, again all that it has."""
    seen: set[str] = set()
    for target in (*TARGETS, "x86-64"):
        profile = find_profile(target)
        marks = [needs_qemu] if profile.arch == "aarch64" else []
        if target == "x86-64":
            seen = set()
        for kernel in linear_kernels(profile):
            if kernel.name not in seen and not kernel.instruction.lacks(profile.features):
                seen.add(kernel.name)
                yield pytest.param(target, kernel, marks=marks, id=f"{target}-{kernel.name}")


@pytest.mark.parametrize(("target", "kernel"), list(cases()))
def test_kernel_means_its_format(target: str, kernel: LinearKernel, tmp_path: Path) -> None:
    choice = first_choice(kernel, target)
    profile = choice.profile
    run = runner(profile, tmp_path)
    spec, scheme = choice.spec, choice.spec.scheme
    rng = np.random.default_rng(1)
    layout = kernel.layout(spec, profile)
    if scheme is None:
        dense = rng.standard_normal((spec.n, spec.k)).astype(np.float32)
        packed, limit = layout.pack(dense).arrays, FLOAT_ERROR
    else:
        tensor, _ = quantized(scheme, spec.n, spec.k)
        dense, packed = dequantize(tensor, kernel.width), layout.pack(tensor).arrays
        steps = 2 ** (scheme.act_bits - 1) - 1 if scheme.integer_acts else 0
        limit = A8_ERROR * 127 / max(steps, 0.5) if scheme.integer_acts else FLOAT_ERROR
    call = run(spill_lets(kernel.scheduled(choice)))
    for m in (kernel.m_tile, 2 * kernel.m_tile + 3):
        x = rng.standard_normal((m, spec.k)).astype(np.float32)
        bias = rng.standard_normal(spec.n).astype(np.float32)
        residual = rng.standard_normal((m, spec.n)).astype(np.float32)
        y = np.full((m, spec.n), np.nan, np.float32)
        operands = prepared(choice, kernel, x, packed, run)
        call(*operands, *packed.values(), bias, residual, y)
        product = x.astype(np.float64) @ dense.T.astype(np.float64)
        wanted = ACTIVATIONS[spec.activation](product + bias) + residual
        error = np.sqrt(np.mean((y - wanted) ** 2) / np.mean(product**2))
        assert error < limit, f"{scheme}, {m} rows: {error}"
