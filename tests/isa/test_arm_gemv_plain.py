"""smull and float kernels for few rows of x on Arm under qemu, and their instructions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_tools import ArmCase, assembly, count, needs_qemu, scheduled
from built import built
from tvm.s_tir import TensorIntrin

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.gemv_plain import GEMV_KERNELS
from apq_tvm.schedules.devices import find_profile
from apq_tvm.tensorize.arm.dot import SMULL_SUMS, smull_intrinsic, smull_meaning
from apq_tvm.types import Scheme

CASES = (
    # kernel, scheme, N, K, target
    ("gemv_W4A8_smull_r4m1", Scheme(4, group_size=32), 9, 100, "cortex-a53"),
    ("gemv_W4A8_smull_r4m4", Scheme(4, True, group_size=16), 12, 64, "cortex-a72"),
    ("gemv_W8A8_smull_r4m2", Scheme(8, True), 8, 70, "cortex-a72"),
    ("gemv_W6A8_smull_r4m1", Scheme(6, False, 8, True, group_size=32), 8, 64, "armv8-a"),
    ("gemv_W1A8_smull_r4m1", Scheme(1, group_size=64), 8, 64, "cortex-a53"),
    ("gemv_W3A16_fma_r4m1", Scheme(3, True, 16, group_size=32), 9, 70, "graviton2"),
    ("gemv_W4A16_fma_r4m4", Scheme(4, False, 32, group_size=64), 8, 64, "cortex-a53"),
)


def find(name: str) -> Any:
    return next(k for k in GEMV_KERNELS if k.name == name)


@pytest.mark.few(3)
@needs_qemu
@pytest.mark.parametrize("case", range(len(CASES)))
def test_formats(case: int, tmp_path: Path) -> None:
    name, scheme, n, k, target = CASES[case]
    kernel, spec = find(name), LinearSpec(n, k, scheme, bias=bool(case % 2))
    cpu = target if target in ("cortex-a53", "cortex-a72") else "max"
    checked = ArmCase(spec, kernel.layout(spec, find_profile(target)), case)
    checked.check_under_qemu(kernel, target, (kernel.m_tile, kernel.m_tile + 1), tmp_path, cpu)


@pytest.mark.parametrize("bits", range(1, 9))
def test_smull_is_used(bits: int) -> None:
    profile, spec = find_profile("cortex-a72"), LinearSpec(64, 64, Scheme(bits, group_size=32))
    source = assembly(scheduled(find(f"gemv_W{bits}A8_smull_r4m1"), spec, profile), profile)
    assert count(source, "smull2?|smlal2?") >= 16, "8 vectors of 16 codes"
    assert count(source, "smlal2?") >= 16 - 16 // SMULL_SUMS[bits]
    assert count(source, "addp") > 0 and count(source, "sdot") == 0


def test_int16_never_overflows() -> None:
    for bits, sums in SMULL_SUMS.items():
        largest = (1 << bits) - 1 if bits < 8 else 128
        assert sums * largest * 127 <= 32767
        assert sums == 8 or 2 * sums * largest * 127 > 32767


@pytest.mark.parametrize("group", (16, 32))
@pytest.mark.parametrize("bits", range(1, 9))
def test_meaning(bits: int, group: int) -> None:
    """The plain loops are the product of codes (8 bits: less 128), on this machine."""
    layout = InterleavedLayout(bits, 4, group, inverted=True)
    unit = layout.unit
    name = smull_intrinsic(smull_meaning(unit))
    rng = np.random.default_rng(bits)
    packed = rng.integers(0, 256, (1, 1, unit.nbytes), dtype=np.uint8)
    codes = layout._unpack_codes(packed).astype(int) - (128 if bits == 8 else 0)
    x = rng.integers(-127, 128, 32, dtype=np.int8)
    out = np.zeros((2, 4) if group == 16 else (4,), np.int32)
    built(TensorIntrin.get(name).desc, find_profile("host"))(packed.reshape(-1), x, out)
    parts = (codes * x).reshape(4, -1, group).sum(-1).T
    np.testing.assert_array_equal(out, parts if group == 16 else parts[0])
