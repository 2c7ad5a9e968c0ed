"""Quantization of activations on Arm: no conversions, nothing spilled."""

from __future__ import annotations

import pytest
from arm_tools import assembly, count
from test_arm_quantize import quantize

from apq_tvm.schedules.devices import find_profile


@pytest.mark.parametrize("target", ("graviton2", "cortex-a72"))
def test_no_conversions_and_nothing_spilled(target: str) -> None:
    source = assembly(quantize(4096, 32, 32, target), find_profile(target))
    assert count(source, "fcvt[a-z]+|frint[a-z]|scvtf") == 0
    assert count(source, "uzp1") and count(source, "sdot" if target == "graviton2" else "sadalp")
    parts = [part.split("\tb.ne")[0] for part in source.split("\n.LBB")]
    loops = [part for part in parts if count(part, "fabs|uzp1") > 4]
    assert loops and not any("[sp" in part for part in loops)
