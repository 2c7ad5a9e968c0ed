"""What LLVM makes of large-M kernels for Arm, on any machine: no stack, no conversions inside."""

from __future__ import annotations

import re

import pytest
from arm_tools import assembly, count, inner_loop, scheduled

from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.gemm import MANY_ROWS, PAIRED_GEMM_KERNELS, SOME_ROWS
from apq_tvm.schedules.devices import find_profile

CASES = (
    ("graviton3", "gemm_W4A8_smmla_r4k8m8", "W4A8g32", 48),
    ("graviton4", "gemm_W8A8_smmla_r4k8m8", "W8A8", 64),
    ("graviton3", "gemm_W4A8_smmla_r4m8", "W4A8g32", 48),
    ("graviton3", "gemm_W4A8_smmla_r4m8", "W4A8tg32", 48),
    ("graviton3", "gemm_W8A8_smmla_r4m8", "W8A8", 64),
    ("graviton4", "gemm_W4A8_smmla_r4m8", "W4A8g32", 48),
    ("graviton4", "gemm_W4A8_smmla_r4m8", "W4A8tg128", 192),
    ("graviton2", "gemm_W4A8_sdot_r4m4", "W4A8g32", 64),
)


@pytest.mark.few(4)
@pytest.mark.parametrize(("target", "name", "scheme", "dots"), CASES)
def test_sums_stay_in_registers(target: str, name: str, scheme: str, dots: int) -> None:
    kernels = (*MANY_ROWS, *SOME_ROWS, *PAIRED_GEMM_KERNELS)
    kernel = next(k for k in kernels if k.name == name)
    profile = find_profile(target, layout=f"4x{kernel.run or 4}")
    source = assembly(
        scheduled(kernel, LinearSpec(96, 2048, parse_scheme(scheme)), profile), profile
    )
    mnemonic = kernel.instruction.name
    block = inner_loop(source, mnemonic)
    label = ".LBB" + block.partition(":")[0]
    loop = block[: block.rindex(label)]  # up to its branch back
    assert count(loop, mnemonic) % dots == 0 and count(loop, mnemonic) > 0
    assert count(loop, "scvtf|fcvtl") == 0
    stores = re.findall(r"\bst[rpu]+\s+q\d+.*", loop)
    assert not stores, "a sum left its register"
