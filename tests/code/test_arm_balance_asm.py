"""``W2*`` on Arm: the instructions of its inner loop."""

from __future__ import annotations

import pytest
from arm_tools import assembly, count, inner_loop, scheduled
from test_arm_balance import kernel_of

from apq_tvm.formats.balance import balance_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile


@pytest.mark.parametrize("target", ("graviton3", "cortex-a55"))
def test_inner_loop(target: str) -> None:
    """A unit: 24 dot products; two umull, uzp2 and tbl per code vector, and nothing spilled."""
    profile = find_profile(target)
    spec = LinearSpec(240, 1024, balance_scheme(8, 128))
    source = assembly(scheduled(kernel_of("sdot", 1), spec, profile), profile)
    loop = inner_loop(source, "sdot").split("\tb.ne")[0]
    found = count(loop, "sdot")
    assert found and found % 24 == 0
    assert count(loop, "umull2?") == 2 * found // 3 and count(loop, "tbl") == found // 3
    assert count(loop, "uzp2") == found // 3 and count(loop, "sri") == found // 4
    assert "[sp" not in loop
