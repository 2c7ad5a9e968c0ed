"""``mixed24`` on Arm: results under qemu, with and without dot products, and assembly."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from arm_tools import emulated, needs_qemu, scheduled
from mixed_cases import MixedCase

from apq_tvm.errors import NotApplicable
from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.mixed import ARM_MIXED_KERNELS
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.select import choose

CASES = (
    ("sdot", 1, "mixed24", 64, 256, "graviton2", (1, 3)),
    ("sdot", 4, "mixed24r50", 33, 100, "graviton3", (4, 5)),
    ("sdot", 2, "mixed24o1", 17, 129, "cortex-a55", (2,)),
    ("smlal", 1, "mixed24r10o0.5", 70, 336, "cortex-a53", (1,)),
    ("smlal", 2, "mixed24o0", 5, 15, "cortex-a72", (3,)),
)


def kernel_of(instruction: str, m_tile: int) -> LinearKernel:
    wanted = (instruction, m_tile)
    (found,) = (k for k in ARM_MIXED_KERNELS if (k.instruction.name, k.m_tile) == wanted)
    return found


@pytest.mark.few(3)
@needs_qemu
@pytest.mark.parametrize(("instruction", "m_tile", "text", "n", "k", "target", "rows"), CASES)
def test_kernels(
    instruction: str,
    m_tile: int,
    text: str,
    n: int,
    k: int,
    target: str,
    rows: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """Both layouts, outliers, tails of N and K, tiles that overlap."""
    profile = find_profile(target)
    cpu = target if target in ("cortex-a53", "cortex-a72") else "max"
    built = partial(emulated, folder=tmp_path, cpu=cpu)
    epilogue = (True, "gelu", True) if m_tile == 2 else (False, "", False)
    spec = LinearSpec(n, k, parse_scheme(text), *epilogue)
    kernel = kernel_of(instruction, m_tile)
    case = MixedCase(kernel, spec, profile, m_tile, built)
    program = built(scheduled(kernel, spec, profile), profile)
    for m in rows:
        case.check(program, m)


@needs_qemu
@pytest.mark.parametrize("instruction", ("sdot", "smlal"))
def test_extreme_codes_do_not_overflow(instruction: str, tmp_path: Path) -> None:
    """Codes, sub-scales and activations at their largest: int16 sums and floats' units hold."""
    profile = find_profile("graviton2")
    built = partial(emulated, folder=tmp_path)
    spec = LinearSpec(8, 64, parse_scheme("mixed24o0"))
    kernel = kernel_of(instruction, 1)
    case = MixedCase(kernel, spec, profile, 0, built)
    arrays = case.largest()
    program = built(scheduled(kernel, spec, profile), profile)
    for sign in (1, -1):
        y = np.zeros((1, 8), np.float32)
        program(*case.prepared(np.full((1, 64), sign * 127, np.float32)), *arrays.values(), y)
        np.testing.assert_allclose(y, sign * 127 * 16 * (3 * (30 + 22 + 22) + 15), rtol=1e-6)


def test_every_core_gets_its_own_kernel() -> None:
    spec = LinearSpec(32, 64, parse_scheme("mixed24"))
    for target, instruction in (("graviton2", "sdot"), ("cortex-a72", "smlal")):
        profile = find_profile(target)
        plan = choose(spec, linear_kernels(profile), profile, "layer")
        few = [kernel_of(instruction, m).name for m in (1, 2, 4)]
        many = ["gemm_mixed24A8_sdot_r4m4"] if target == "graviton2" else []
        assert [c.kernel for c in plan] == few + many
    with pytest.raises(NotApplicable, match="needs dotprod"):
        kernel_of("sdot", 1).check(spec, find_profile("cortex-a72"))
