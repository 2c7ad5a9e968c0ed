"""What LLVM makes of the any-precision kernels, on any machine."""

from __future__ import annotations

import re

import pytest
from built import built

from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.x86.anyprec import ANYPREC_KERNELS

ROWS = 8


def assembly(name: str, target: str) -> str:
    spec = LinearSpec(512, 512, parse_scheme("anyprec1-8sA8"), details=(("channels", 16),))
    kernel = next(k for k in ANYPREC_KERNELS if k.name == name)
    profile = find_profile(target)
    kernel.check(spec, profile)
    func = kernel.scheduled(kernel.choose(spec, profile, Defaults()))
    return built(func, profile).assembly


def count(source: str, mnemonic: str) -> int:
    return len(re.findall(rf"\b(?:{mnemonic})\b", source))


def inner_loop(source: str, mnemonic: str) -> str:
    """The labelled block with the most of an instruction."""
    return max(re.split(r"(?m)^\.LBB", source), key=lambda block: count(block, mnemonic))


@pytest.mark.parametrize("target", ("icelake-server", "znver4"))
@pytest.mark.parametrize("bits,merges", ((2, 2), (3, 6), (4, 8), (6, 18), (7, 16), (8, 24)))
def test_avx512_looks_up_in_registers(bits: int, merges: int, target: str) -> None:
    source = assembly(f"gemv_anyprec{bits}A8_vpermb_r8m1", target)
    loop = inner_loop(source, "vpdpbusd")
    assert count(loop, "vpdpbusd") in (ROWS, 2 * ROWS)  # LLVM may unroll two units
    lookups = {7: ROWS, 8: 2 * ROWS}.get(bits, 0)
    assert count(loop, "vperm[it]2b") == lookups
    assert count(loop, "vpermb") >= (0 if lookups else ROWS)
    # A merge by mask is one instruction.
    assert count(loop, "vpternlog[dq]") >= merges
    assert count(loop, "prefetcht0") >= bits


@pytest.mark.few(3)
@pytest.mark.parametrize("target", ("haswell", "znver3"))
@pytest.mark.parametrize("bits", (2, 3, 4, 5, 8))
def test_avx2_looks_up_in_registers(bits: int, target: str) -> None:
    source = assembly(f"gemv_anyprec{bits}A8_pshufb_r8m1", target)
    loop, tables = inner_loop(source, "vpmaddubsw"), max(1, 1 << bits >> 4)
    assert count(loop, "vpmaddubsw") == count(loop, "vpmaddwd") == 2 * ROWS
    assert count(loop, "vpshufb") >= 2 * ROWS * tables
    assert count(loop, "vpblendvb") == 2 * ROWS * (tables - 1)
    assert not re.search(r"%zmm|%k[0-7]", source)


def test_gemm_decodes_once_for_all_rows() -> None:
    """Tiles multiply looked up bytes: no lookup in the loop over K."""
    source = assembly("gemm_anyprec4A8_vpermb_r8m4", "znver4")
    loop = inner_loop(source, "vpdpbusd")
    assert count(loop, "vpdpbusd") >= 16 and count(loop, "vpermb|vpshufb") == 0
