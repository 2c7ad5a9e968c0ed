"""What LLVM makes of lookups in tables of activation sums, on any machine."""

from __future__ import annotations

import re

import pytest
from built import built

from apq_tvm.formats import bcq
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.x86.lut import LUT_KERNELS

LOOKUPS = (
    ("pshufb", "znver3", "vpshufb", "ymm", 8),
    ("vpermb", "znver4", "vpermb", "zmm", 2),
    ("permps512", "skylake-avx512", "vperm(?:ps|d)", "zmm", 8),
    ("permps256", "haswell", "vperm(?:ps|d)", "ymm", 16),
)
"""(lookup, target, instruction, registers, lookups per plane, unit and stream)."""


@pytest.mark.parametrize("bits", (1, 3))
@pytest.mark.parametrize("name,target,mnemonic,register,lookups", LOOKUPS)
def test_lookups(
    name: str, target: str, mnemonic: str, register: str, lookups: int, bits: int
) -> None:
    wanted = (name, bits, 1)
    kernel = next(k for k in LUT_KERNELS if (k.instruction.name, k.bits, k.m_tile) == wanted)
    profile = find_profile(target)
    spec = LinearSpec(1024, 512, bcq.scheme_of(bits, 128, kernel.act_bits))
    kernel.check(spec, profile)
    func = kernel.scheduled(kernel.choose(spec, profile, Defaults()))
    loop = max(
        re.split(r"(?m)^\.LBB", built(func, profile).assembly),
        key=lambda block: len(re.findall(mnemonic, block)),
    )
    # One or two streams of one unit, times the units that LLVM takes at once.
    found = len(re.findall(rf"\b{mnemonic}\b.*{register}", loop))
    assert found and found % (bits * lookups) == 0
    assert not re.search(r"\bvp?gather|\bv?phadd|\bvpextr", loop)
    if mnemonic == "vpermb":
        assert len(re.findall(r"\bvpdpbusd\b.*zmm", loop)) == found
        assert len(re.findall(r"\bvpternlog", loop)) == found
