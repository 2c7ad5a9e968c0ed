"""What LLVM makes of the linear kernels, on any machine: the instructions meant, none that hurt."""

from __future__ import annotations

import re

import pytest
from built import built

from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.x86.gemm import GEMM_KERNELS
from apq_tvm.schedules.x86.gemv import GEMV_KERNELS
from apq_tvm.types import Scheme

SPILLS = {
    ("ymm", 1): 12,
    ("ymm", 2): 8,
    ("ymm", 4): 20,
    ("zmm", 1): 0,
    ("zmm", 2): 0,
    ("zmm", 4): 0,
}
"""(registers, rows of x) -> vectors stored to the stack in the inner loop. The most are of W8 by
vpmaddubsw, which needs the sign of every code beside its magnitude."""

TARGETS = (
    ("maddubs", "haswell", "ymm"),
    ("maddubs", "znver3", "ymm"),
    ("vpdpbusd256", "alderlake", "ymm"),
    ("vpdpbusd512", "icelake-server", "zmm"),
    ("vpdpbusd512", "znver4", "zmm"),
)


def assembly(kernel: LinearKernel, target: str, scheme: Scheme, n: int = 512) -> str:
    spec, profile = LinearSpec(n, 512, scheme), find_profile(target)
    kernel.check(spec, profile)
    func = kernel.scheduled(kernel.choose(spec, profile, Defaults()))
    return built(func, profile).assembly


def find(name: str) -> LinearKernel:
    return next(k for k in (*GEMV_KERNELS, *GEMM_KERNELS) if k.name == name)


def count(source: str, mnemonic: str, register: str = "") -> int:
    return len(re.findall(rf"\b(?:{mnemonic})\b.*{register}", source))


@pytest.mark.parametrize("m_tile", (1, 2, 4))
@pytest.mark.parametrize("instruction,target,register", TARGETS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_integer_kernels(
    bits: int, instruction: str, target: str, register: str, m_tile: int
) -> None:
    rows = 16 if register == "zmm" else 8
    kernel = find(f"gemv_W{bits}A8_{instruction}_r{rows}m{m_tile}")
    source = assembly(kernel, target, Scheme(bits, group_size=32))
    mnemonic = instruction.rstrip("0123456789") if "dp" in instruction else "vpmaddubsw"
    # Eight vectors of a unit, for every row of x.
    assert count(source, mnemonic, register) >= 8 * m_tile
    assert not re.search(r"\bv?phadd", source), "a horizontal sum"
    assert count(source, "vcvtph2ps") > 0 and count(source, r"vfmadd\w+ps") > 0
    if instruction == "maddubs":
        assert count(source, "vpmaddwd") > 0
        assert (count(source, "vpsignb") > 0) == (bits == 8)
    stack = rf"vmov[a-z]+\s+%{register}\d+, -?\d*\(%[re](?:sp|bp)\)"
    assert len(re.findall(stack, inner_loop(source))) <= SPILLS[register, m_tile]


def inner_loop(source: str, mnemonic: str = "vpmaddubsw|vpdpbusd") -> str:
    """The labelled block with the most dot instructions."""
    return max(re.split(r"(?m)^\.LBB", source), key=lambda b: count(b, mnemonic))


def vectors_on_stack(loop: str) -> list[str]:
    """Lines that spill a vector; bounds may lie there."""
    return re.findall(r"(?m)^.*(?:\(%[re][sb]p\).*%ymm|%ymm.*\(%[re][sb]p\)).*$", loop)


@pytest.mark.parametrize("target", ("haswell", "znver3"))
@pytest.mark.parametrize("n", (512, 16, 24))
def test_products_of_words_stay_in_registers(n: int, target: str) -> None:
    source = assembly(find("gemm_W8A8_maddwd_r8"), target, Scheme(8), n)
    assert "vpshufb" in source, "codes are widened by one instruction for eight rows of weights"
    loop = inner_loop(source, "vpmaddwd")
    assert count(loop, "vpmaddwd") == count(loop, "vpaddd") >= 8
    assert not vectors_on_stack(loop)


@pytest.mark.parametrize("target", ("haswell", "znver3"))
@pytest.mark.parametrize("n", (512, 16, 24))
def test_products_that_are_widened_stay_in_registers(n: int, target: str) -> None:
    loop = inner_loop(assembly(find("gemm_W7A8_maddubs_r8"), target, Scheme(7), n))
    assert count(loop, "vpmaddubsw") == count(loop, "vpmaddwd") == count(loop, "vpaddd") >= 8
    assert not vectors_on_stack(loop)


def test_decode_prefetches_ahead() -> None:
    source = assembly(find("gemv_W4A8_maddubs_r8m1"), "znver3", Scheme(4, group_size=32))
    assert count(source, "prefetcht0") == 4, "two lines of a unit for each of two streams"
    assert "prefetcht0\t4096(" in source


@pytest.mark.parametrize("rows,target", ((16, "znver4"), (8, "haswell")))
@pytest.mark.parametrize("bits", (1, 3, 4, 8))
def test_float_kernels(bits: int, rows: int, target: str) -> None:
    source = assembly(find(f"gemv_W{bits}A16_fma_r{rows}m1"), target, Scheme(bits, act_bits=16))
    assert count(source, r"vfmadd\w+ps", "zmm" if rows == 16 else "ymm") >= 32
    assert count(source, r"vfmadd\w+ss") == 0


def test_baseline_has_no_avx() -> None:
    scheme = Scheme(4, act_bits=16, group_size=32)
    source = assembly(find("gemv_W4A16_fma_r4m1"), "x86-64", scheme)
    assert "mulps" in source and not re.search(r"\bv(mul|fmadd)\w*ps", source)
