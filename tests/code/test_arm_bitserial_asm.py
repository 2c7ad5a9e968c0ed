"""Bit-serial kernels on Arm: the instructions of their inner loop."""

from __future__ import annotations

import pytest
from arm_tools import assembly, count, inner_loop, scheduled

from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.bitserial import ARM_BITSERIAL_KERNELS
from apq_tvm.schedules.devices import find_profile
from apq_tvm.types import Scheme


@pytest.mark.parametrize(("p", "ands"), ((1, 0), (2, 1)))
def test_three_operations_per_vector(p: int, ands: int) -> None:
    profile = find_profile("graviton2")
    spec = LinearSpec(256, 1024, Scheme(1, False, p))
    kernel = next(k for k in ARM_BITSERIAL_KERNELS if k.name == "bitserial_W1_cntudot_r4m1")
    source = assembly(scheduled(kernel, spec, profile), profile)
    loop = inner_loop(source, "cnt").split("\tb.ne")[0]
    found = count(loop, "cnt")
    assert found and count(loop, "udot") == found and count(loop, "and") == ands * found
    assert count(loop, "eor") <= 2 * found and "[sp" not in loop
