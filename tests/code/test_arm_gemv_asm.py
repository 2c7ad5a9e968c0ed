"""What LLVM makes of the kernels with folded activations: few instructions, none spilled."""

from __future__ import annotations

import re

import pytest
from arm_tools import assembly, count, scheduled

from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.gemv import SDOT_KERNELS
from apq_tvm.schedules.devices import find_profile
from apq_tvm.types import Scheme

TARGETS = ("graviton2", "graviton3", "graviton4")

SPILLS = {("graviton2", 2): 2}
"""(target, M tile) -> vectors on the stack that are put up with; 0 for all others."""


def loop(bits: int, m_tile: int, target: str, scheme: Scheme) -> str:
    """The loop over chunks: the innermost one with products."""
    kernel = next(k for k in SDOT_KERNELS if (k.bits, k.m_tile) == (bits, m_tile))
    profile = find_profile(target, layout="4x4")
    source = assembly(scheduled(kernel, LinearSpec(512, 512, scheme), profile), profile)
    loops = []
    for branch in re.finditer(r"\n\s+(?:b\.\w+|cbn?z\s+\w+,|tbn?z\s+\w+, #\w+,)\s+(\S+)", source):
        label = source.find(f"\n{branch[1]}:")
        if 0 <= label < branch.start() and "sdot" in source[label : branch.start()]:
            loops.append(source[label : branch.start()])
    return min(loops, key=len)


def spills(source: str) -> int:
    return len(re.findall(r"\b(?:str|stp|ldr|ldp|ldur|stur)\s+[qd]\d.*\[sp", source))


@pytest.mark.parametrize("m_tile", (1, 2, 4))
@pytest.mark.parametrize(
    "bits,target",
    [(b, t) for b in range(1, 9) for t in TARGETS if b in (2, 4) or t == "graviton3"],
)
def test_no_vector_is_spilled(bits: int, target: str, m_tile: int) -> None:
    body = loop(bits, m_tile, target, Scheme(bits, group_size=32))
    assert count(body, "sdot") % (8 * m_tile) == 0
    assert spills(body) <= SPILLS.get((target, m_tile), 0)
    assert count(body, "scvtf|fsub|addv|addp") == 0, "sums become floats by one fmla"


@pytest.mark.parametrize("target", (*TARGETS, "cortex-a55"))
@pytest.mark.parametrize("bits", (2, 4, 8))
def test_instructions_of_a_unit(bits: int, target: str) -> None:
    """Masks for all parts but the topmost, one shift between parts, two fmla (module docstring)."""
    body = loop(bits, 1, target, Scheme(bits, group_size=32))
    units = count(body, "sdot") // 8
    parts = 8 // bits
    assert units * 8 == count(body, "sdot") and units >= 4
    assert count(body, "and") == units * bits * (parts - 1)
    shifts = count(body, "shl|mla")
    assert shifts == units * (parts - 1)
    assert count(body, "fmla") == 2 * units and count(body, "fcvtl2?") == units
    assert count(body, "ushr|eor|movi") <= (8 if target == "cortex-a55" else 0)


def test_loads() -> None:
    """Two vectors at once are loaded neither on Neoverse V2 nor on Cortex-A55."""
    scheme = Scheme(4, group_size=32)
    pairs = {
        target: len(re.findall(r"\bldp\s+q", loop(4, 1, target, scheme)))
        for target in ("graviton4", "cortex-a55")
    }
    assert pairs == {"graviton4": 0, "cortex-a55": 0}


@pytest.mark.parametrize(("bits", "most"), [(3, 11), (5, 14), (6, 12), (7, 14)])
@pytest.mark.parametrize("target", ("graviton2", "graviton4"))
def test_whole_codes_are_masked(target: str, bits: int, most: int) -> None:
    """Of eight vectors most take a mask, the split ones one shift that inserts for each byte."""
    body = loop(bits, 1, target, Scheme(bits, group_size=128))
    units = count(body, "sdot") // 8
    assert units % 4 == 0 and count(body, "and|sli|ushr|orr|bsl|bif|bit|eor") <= units * most
    assert spills(body) <= 10
