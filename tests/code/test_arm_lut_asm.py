"""Tables of activation sums on Arm: the instructions of their loops."""

from __future__ import annotations

import pytest
import tvm
from arm_tools import assembly, count, inner_loop, scheduled
from test_arm_lut import kernel_of

from apq_tvm.formats import bcq
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rules import schedule_preparation


@pytest.mark.parametrize(("bits", "target"), ((2, "graviton3"), (4, "cortex-a55")))
def test_eight_operations_per_vector_of_keys(bits: int, target: str) -> None:
    """and, ushr, two tbl, four uaddw: nothing spilled, nothing converted one by one."""
    profile = find_profile(target)
    spec = LinearSpec(1024, 512, bcq.scheme_of(bits, 128))
    source = assembly(scheduled(kernel_of(bits, 1), spec, profile), profile)
    loop = inner_loop(source, "tbl").split("\tb.ne")[0]
    found = count(loop, "tbl")
    assert found and found % (8 * bits) == 0
    assert count(loop, "uaddw2?") == 2 * found and count(loop, "ushr|and") == found
    assert "[sp" not in loop
    assert count(source, "scvtf") == 0


def test_tables_are_rounded_without_conversions() -> None:
    profile = find_profile("graviton2")
    spec = LinearSpec(64, 512, bcq.scheme_of(2, 128))
    preparation = kernel_of(2, 1).prepare(kernel_of(2, 1).choose(spec, profile, Defaults()))
    assert preparation is not None
    func, rule = schedule_preparation(preparation, preparation.func, profile, Defaults())
    source = assembly(func, profile)
    assert rule == "aarch64_lut_tables" and isinstance(func, tvm.tirx.PrimFunc)
    assert count(source, "fcvt[a-z]+|frint[a-z]|fminnm") == 0
