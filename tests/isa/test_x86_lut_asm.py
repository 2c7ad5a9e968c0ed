"""What LLVM makes of lookups in tables of activation sums, on any machine."""

from __future__ import annotations

import re

import pytest
import tvm

from apq_tvm.formats import bcq
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.x86.lut import LUT_KERNELS

LOOKUPS = (
    ("lut_bcq{}A8_pshufb_r32m1", "znver3", "vpshufb", "ymm", 8),
    ("lut_bcq{}A8_vpermb_r16m1", "znver4", "vpermb", "zmm", 2),
    ("lut_bcq{}A32_permps512_r16m1", "skylake-avx512", "vperm(?:ps|d)", "zmm", 8),
    ("lut_bcq{}A32_permps256_r8m1", "haswell", "vperm(?:ps|d)", "ymm", 16),
)
"""(kernel, target, instruction, registers, lookups per plane, unit and stream)."""


@pytest.mark.parametrize("bits", (1, 3))
@pytest.mark.parametrize("name,target,mnemonic,register,lookups", LOOKUPS)
def test_lookups(
    name: str, target: str, mnemonic: str, register: str, lookups: int, bits: int
) -> None:
    kernel = next(k for k in LUT_KERNELS if k.name == name.format(bits))
    acts, profile = 8 if "A8" in name else 32, find_profile(target)
    spec = LinearSpec(1024, 512, bcq.scheme_of(bits, 128, acts))
    kernel.check(spec, profile)
    sch = tvm.s_tir.Schedule(kernel.func(kernel.choose(spec, profile, Defaults())))
    kernel.schedule(sch, kernel.choose(spec, profile, Defaults()))
    built = tvm.tirx.build(sch.mod, target=tvm.target.Target(dict(profile.target)))
    loop = max(
        re.split(r"(?m)^\.LBB", str(built.inspect_source("asm"))),
        key=lambda block: len(re.findall(mnemonic, block)),
    )
    # One or two streams of one unit, times the units that LLVM takes at once.
    found = len(re.findall(rf"\b{mnemonic}\b.*{register}", loop))
    assert found and found % (bits * lookups) == 0
    assert not re.search(r"\bvp?gather|\bv?phadd|\bvpextr", loop)
    if mnemonic == "vpermb":
        assert len(re.findall(r"\bvpdpbusd\b.*zmm", loop)) == found
        assert len(re.findall(r"\bvpternlog", loop)) == found
