"""What LLVM makes of the kernels for weights in runs of 8 k, on any machine: none spills a sum."""

from __future__ import annotations

import pytest
from arm_tools import assembly, count, inner_loop, scheduled

from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.paired import PAIRED_KERNELS
from apq_tvm.schedules.devices import find_profile

CASES = (
    # kernel, scheme, smmla of a unit, masks and shifts of its codes, shifts of its sums
    ("gemv_W4A8_smmla_r4k8m1", "W4A8g32", 8, 4, 1),
    ("gemv_W4A8_smmla_r4k8m2", "W4A8g32", 8, 4, 2),
    ("gemv_W4A8_smmla_r4k8m4", "W4A8g32", 16, 8, 0),
    ("gemv_W4A8_smmla_r4k8m8", "W4A8g32", 32, 8, 0),
    ("gemv_W2A8_smmla_r4k8m1", "W2A8g32", 8, 6, 3),
    ("gemv_W2A8_smmla_r4k8m8", "W2A8g32", 32, 12, 0),
    ("gemv_W8A8_smmla_r4k8m4", "W8A8g32", 16, 0, 0),
    ("gemv_W4A8_smmla_r8k8m1", "W4A8g32", 16, 8, 2),
)


@pytest.mark.parametrize("target", ("graviton3", "graviton4"))
@pytest.mark.parametrize(("name", "scheme", "products", "masks", "shifts"), CASES)
def test_instructions_of_a_unit(
    name: str, scheme: str, products: int, masks: int, shifts: int, target: str
) -> None:
    """One mask or shift for a vector of codes, shifts between parts of folded sums, two fmla."""
    kernel = next(kernel for kernel in PAIRED_KERNELS if kernel.name == name)
    block, rows = kernel.instruction.lanes, kernel.m_named
    profile = find_profile(target, layout=f"{block}x{kernel.run}")
    func = scheduled(kernel, LinearSpec(512, 512, parse_scheme(scheme)), profile)
    loop = inner_loop(assembly(func, profile), "smmla")
    loop = loop[: loop.rindex(".LBB" + loop.partition(":")[0])]  # up to its branch back
    units = count(loop, "smmla") // products
    assert units > 0 and count(loop, "smmla") == units * products
    assert count(loop, "and|ushr|sshr") == units * masks
    assert count(loop, "shl") == units * shifts
    assert count(loop, "fmla") == units * 2 * rows * block // 4
    assert count(loop, "scvtf|addp|zip1|zip2|str|stp") == 0
