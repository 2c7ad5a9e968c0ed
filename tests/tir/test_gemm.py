"""Large-M kernels against their numpy reference, at the edges of every tile."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gemm_cases import FLOAT32_SUM, build, problem, relative_error

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import ACTIVATIONS, LinearSpec
from apq_tvm.schedules.decide import Defaults, Random
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.x86.gemm import GEMM_KERNELS
from apq_tvm.types import DeviceProfile, Scheme
from tests.conftest import cpu_features

INSTRUCTION_IN_ASSEMBLY = {
    "vpdpbusd512": r"vpdpbusd\s.*zmm",
    "vpdpbusd256": r"vpdpbusd\s.*ymm",
    "maddubs": r"vpmaddubsw\s.*ymm",
    "maddwd": r"vpmaddwd\s.*ymm",
}


def profile_of(kernel: LinearKernel) -> DeviceProfile:
    """A profile that the kernel is made for."""
    small = find_profile("znver3")
    return find_profile("znver4") if kernel.instruction.lacks(small.features) else small


def needs(kernel: LinearKernel) -> str:
    """What a machine must have to run the kernel, as its profile builds it."""
    return kernel.instruction.features[0].split("|")[-1]


def find(name: str) -> LinearKernel:
    return next(kernel for kernel in GEMM_KERNELS if kernel.name == name)


def param(kernel: LinearKernel, *more: Any) -> Any:
    return pytest.param(kernel, *more, id="-".join([kernel.name, *map(str, more)]))


def base_scheme(kernel: LinearKernel) -> Scheme | None:
    """The scheme a kernel is for, in groups of 32; None for float weights."""
    return kernel.bits and Scheme(kernel.bits, act_bits=kernel.act_bits, group_size=32)


def variants(kernel: LinearKernel) -> list[Scheme | None]:
    scheme = base_scheme(kernel)
    if scheme is None:
        return [None]
    bits, act = scheme.bits, scheme.act_bits
    found = [
        scheme,
        Scheme(bits, True, act, False, 16),
        Scheme(bits, False, act),
        Scheme(bits, True, act),
    ]
    return [*found, Scheme(bits, True, act, True, 64)] if act == 8 else found


def check(
    kernel: LinearKernel,
    spec: LinearSpec,
    ms: tuple[int, ...],
    decide: Any = None,
    extreme: bool = False,
) -> None:
    if needs(kernel) not in cpu_features():
        pytest.skip(f"this CPU has no {needs(kernel)}")
    profile = profile_of(kernel)
    kernel.check(spec, profile)
    run = build(kernel, spec, profile, decide)
    for m in ms:
        arrays, want = problem(kernel, spec, profile, m, extreme=extreme)
        run(*arrays)
        assert relative_error(arrays[-1], want) < FLOAT32_SUM, f"M={m}"


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("kernel", "scheme"), [param(k, s) for k in GEMM_KERNELS for s in variants(k)]
)
def test_matches_the_reference_in_every_scheme(kernel: LinearKernel, scheme: Scheme | None) -> None:
    # N: whole panels, a part of one and a ragged vector. K: not a multiple of the unit.
    spec = LinearSpec(n=101, k=150, scheme=scheme, bias=True, activation="relu", residual=True)
    check(kernel, spec, (kernel.m_tile, kernel.m_tile + 1, 21))


@pytest.mark.parametrize("kernel", [param(k) for k in GEMM_KERNELS if k.bits == 5])
def test_plain_loops_mean_the_same_on_any_machine(kernel: LinearKernel) -> None:
    scheme = base_scheme(kernel)
    spec = LinearSpec(19, 70, scheme, bias=True)
    run = build(kernel, spec, profile_of(kernel), on=find_profile("x86-64"))
    assert "ymm" not in run.assembly
    arrays, want = problem(kernel, spec, profile_of(kernel), 9)
    run(*arrays)
    assert relative_error(arrays[-1], want) < FLOAT32_SUM


TYPICAL = [
    k
    for k in GEMM_KERNELS
    if (k.bits, k.act_bits) in ((4, 8), (3, 16), (None, 0)) or k.name == "gemm_W8A8_maddwd_r8"
]


@pytest.mark.few(5)
@pytest.mark.parametrize("kernel", [param(k) for k in TYPICAL])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 15, 16, 17, 47, 48, 49])
def test_edges_of_n(kernel: LinearKernel, n: int) -> None:
    check(kernel, LinearSpec(n, 64, base_scheme(kernel)), (kernel.m_tile,))


@pytest.mark.few(5)
@pytest.mark.parametrize("kernel", [param(k) for k in TYPICAL])
@pytest.mark.parametrize("k", [1, 31, 32, 33, 129, 511, 512, 513, 1300])
def test_edges_of_k(kernel: LinearKernel, k: int) -> None:
    check(kernel, LinearSpec(33, k, base_scheme(kernel)), (kernel.m_tile + 1,))


@pytest.mark.few(4)
@pytest.mark.parametrize("kernel", [param(k) for k in TYPICAL])
def test_edges_of_m(kernel: LinearKernel) -> None:
    rows = range(kernel.m_tile, kernel.m_tile + 9)
    check(kernel, LinearSpec(48, 96, base_scheme(kernel), bias=True), (*rows, 127, 128, 129, 300))


EPILOGUES = (
    "gemm_W4A8_vpdpbusd512_r16",
    "gemm_W4A8_maddubs_r8",
    "gemm_W3A16_fma_r8",
    "gemm_F32_fma_r8m4",
)


@pytest.mark.few(3)
@pytest.mark.parametrize("kernel", [param(find(name)) for name in EPILOGUES])
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a])
def test_epilogues(kernel: LinearKernel, activation: str) -> None:
    spec = LinearSpec(50, 64, base_scheme(kernel), True, activation, True)
    check(kernel, spec, (kernel.m_tile,))


@pytest.mark.parametrize(
    ("kernel", "zero_points", "group"),
    [
        param(k, zero_points, group)
        for k in GEMM_KERNELS
        if k.act_bits == 8
        for zero_points in (False, True)
        for group in (32, -1)
    ],
)
def test_extreme_codes_do_not_saturate(kernel: LinearKernel, zero_points: bool, group: int) -> None:
    scheme = base_scheme(kernel)
    assert scheme is not None
    scheme = Scheme(scheme.bits, zero_points, 8, group == -1, group)
    check(kernel, LinearSpec(32, 1024, scheme), (8,), extreme=True)


@pytest.mark.parametrize("kernel", [param(k) for k in TYPICAL])
@pytest.mark.parametrize("seed", range(4))
def test_random_decisions(kernel: LinearKernel, seed: int) -> None:
    spec = LinearSpec(77, 640, base_scheme(kernel), bias=True)
    check(kernel, spec, (kernel.m_tile, 70), Random(seed))


@pytest.mark.parametrize("kernel", [param(k) for k in GEMM_KERNELS if k.act_bits == 8])
def test_inner_loop_is_the_instruction(kernel: LinearKernel) -> None:
    spec = LinearSpec(96, 256, base_scheme(kernel))
    assembly = build(kernel, spec, profile_of(kernel)).assembly
    name = kernel.instruction.name
    least = 8 if name == "maddwd" else 32  # its loop over pairs of k is left to LLVM
    assert len(re.findall(INSTRUCTION_IN_ASSEMBLY[name], assembly)) >= least
    assert "vpdpbusd" not in assembly or name.startswith("vpdpbusd")


def test_avx_vnni_without_avx512_builds() -> None:
    kernel = find("gemm_W4A8_vpdpbusd256_r8")
    spec = LinearSpec(96, 256, base_scheme(kernel))
    assembly = build(kernel, spec, find_profile("alderlake")).assembly
    assert re.search(r"\{vex\}\s+vpdpbusd\s.*ymm", assembly)
    assert "zmm" not in assembly


@pytest.mark.parametrize("kernel", [param(k) for k in GEMM_KERNELS])
def test_declines_with_a_reason(kernel: LinearKernel) -> None:
    scheme = base_scheme(kernel)
    if scheme is not None:
        assert not kernel.is_for(LinearSpec(64, 64, None))
    else:
        with pytest.raises(NotApplicable, match="float32"):
            kernel.check(LinearSpec(64, 64, Scheme(4)), find_profile("znver4"))
    with pytest.raises(NotApplicable, match="x86-64-v2"):
        kernel.check(LinearSpec(64, 64, scheme), find_profile("x86-64-v2"))


def test_the_largest_sums_are_exact() -> None:
    kernel = find("gemm_W8A8_maddwd_r8")
    check(kernel, LinearSpec(32, 33152, Scheme(8)), (7,), extreme=True)


def test_declines_sums_that_overflow_int32() -> None:
    kernel = find("gemm_W8A8_vpdpbusd512_r16")
    with pytest.raises(NotApplicable, match="K=70000"):
        kernel.check(LinearSpec(64, 70000, Scheme(8)), find_profile("znver4"))
    kernel.check(LinearSpec(64, 70000, Scheme(8, group_size=64)), find_profile("znver4"))


def test_decisions_are_recorded() -> None:
    spec = LinearSpec(64, 64, Scheme(4, group_size=32))
    chosen = find("gemm_W4A8_vpdpbusd512_r16").choose(spec, find_profile("znver4"), Defaults())
    assert set(chosen.decisions) == {"tile", "k_block", "k_step", "m_tiles", "prefetch"}


def test_every_element_is_written() -> None:
    kernel = find("gemm_F32_fma_r8m4")
    if "fma" not in cpu_features():
        pytest.skip("this CPU has no fma")
    profile = find_profile("znver3")
    spec = LinearSpec(29, 40, None)
    run = build(kernel, spec, profile)
    arrays, _ = problem(kernel, spec, profile, 9)
    run(*arrays)
    assert np.isfinite(arrays[-1]).all()


@pytest.mark.parametrize("kernel", [param(k) for k in TYPICAL if k.act_bits == 8])
def test_steps_that_do_not_divide_k(kernel: LinearKernel) -> None:
    """Rows of one scale, K = 352 in blocks of 192: a tuner may ask for steps of 64."""

    def longest(name: str, choices: Any) -> Any:
        return choices[-1] if name == "k_step" else choices[0]

    check(kernel, LinearSpec(33, 352, Scheme(kernel.bits)), (kernel.m_tile + 1,), longest)
