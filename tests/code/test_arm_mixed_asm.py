"""``mixed24`` on Arm: the instructions of its inner loop."""

from __future__ import annotations

import pytest
from arm_tools import assembly, count, inner_loop, scheduled
from test_arm_mixed import kernel_of

from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile


@pytest.mark.parametrize("target", ("graviton3", "cortex-a55"))
def test_inner_loop(target: str) -> None:
    """A word row: 32 products of 4x4, nothing spilled, no conversion, no vector cut in half."""
    profile = find_profile(target)
    spec = LinearSpec(256, 1024, parse_scheme("mixed24o0"))
    source = assembly(scheduled(kernel_of("sdot", 1), spec, profile), profile)
    loop = inner_loop(source, "sdot").split("\tb.ne")[0]
    assert count(loop, "sdot") == 32
    assert count(loop, "scvtf|fcvtl2?|ext|xtn2?") == 0 and "[sp" not in loop
