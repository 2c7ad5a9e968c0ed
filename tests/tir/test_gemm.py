"""Large-M kernels against their numpy reference, at the edges of every tile."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from conftest import cpu_features
from gemm_cases import FLOAT32_SUM, build, problem, relative_error

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import ACTIVATIONS, LinearSpec
from apq_tvm.schedules.decide import Defaults, Random
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.x86.gemm import GEMM_KERNELS
from apq_tvm.types import DeviceProfile, Scheme

PROFILE_OF = {"vpdpbusd512": "znver4", "vpdpbusd256": "znver4", "maddubs": "znver3"}
INSTRUCTION_IN_ASSEMBLY = {
    "vpdpbusd512": r"vpdpbusd\s.*zmm",
    "vpdpbusd256": r"vpdpbusd\s.*ymm",
    "maddubs": r"vpmaddubsw\s.*ymm",
}


def profile_of(kernel: LinearKernel) -> DeviceProfile:
    """A profile that the kernel is made for."""
    for instruction, name in PROFILE_OF.items():
        if instruction in kernel.name:
            return find_profile(name)
    return find_profile("znver4" if "r16" in kernel.name else "znver3")


def needs(kernel: LinearKernel) -> str:
    """What a machine must have to run the kernel."""
    if "vpdpbusd" in kernel.name:
        return "avx512vnni"
    return "avx512f" if "r16" in kernel.name else "fma"


def param(kernel: LinearKernel, *more: Any) -> Any:
    return pytest.param(kernel, *more, id="-".join([kernel.name, *map(str, more)]))


def base_scheme(kernel: LinearKernel) -> Scheme | None:
    """The scheme a kernel's name asks for, in groups of 32; None for float weights."""
    match = re.match(r"gemm_W(\d)A(\d+)_", kernel.name)
    return Scheme(int(match[1]), act_bits=int(match[2]), group_size=32) if match else None


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
    run, _ = build(kernel, spec, profile, decide)
    for m in ms:
        arrays, want = problem(kernel, spec, profile, m, extreme=extreme)
        run(*arrays)
        assert relative_error(arrays[-1], want) < FLOAT32_SUM, f"M={m}"


@pytest.mark.parametrize(
    ("kernel", "scheme"), [param(k, s) for k in GEMM_KERNELS for s in variants(k)]
)
def test_matches_the_reference_in_every_scheme(kernel: LinearKernel, scheme: Scheme | None) -> None:
    # N: whole panels, a part of one and a ragged vector. K: not a multiple of the unit.
    spec = LinearSpec(n=101, k=150, scheme=scheme, bias=True, activation="relu", residual=True)
    check(kernel, spec, (kernel.m_min, kernel.m_min + 1, 21))


@pytest.mark.parametrize("kernel", [param(k) for k in GEMM_KERNELS if "W5A" in k.name])
def test_plain_loops_mean_the_same_on_any_machine(kernel: LinearKernel) -> None:
    scheme = base_scheme(kernel)
    spec = LinearSpec(19, 70, scheme, bias=True)
    run, assembly = build(kernel, spec, profile_of(kernel), on=find_profile("x86-64"))
    assert "ymm" not in assembly
    arrays, want = problem(kernel, spec, profile_of(kernel), 9)
    run(*arrays)
    assert relative_error(arrays[-1], want) < FLOAT32_SUM


TYPICAL = [
    k for k in GEMM_KERNELS if re.match(r"gemm_(W4A8|W8A8_maddubs|W3A16|F32)", k.name) is not None
]


@pytest.mark.parametrize("kernel", [param(k) for k in TYPICAL])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 15, 16, 17, 47, 48, 49])
def test_edges_of_n(kernel: LinearKernel, n: int) -> None:
    check(kernel, LinearSpec(n, 64, base_scheme(kernel)), (kernel.m_min,))


@pytest.mark.parametrize("kernel", [param(k) for k in TYPICAL])
@pytest.mark.parametrize("k", [1, 31, 32, 33, 129, 511, 512, 513, 1300])
def test_edges_of_k(kernel: LinearKernel, k: int) -> None:
    check(kernel, LinearSpec(33, k, base_scheme(kernel)), (kernel.m_min + 1,))


@pytest.mark.parametrize("kernel", [param(k) for k in TYPICAL])
def test_edges_of_m(kernel: LinearKernel) -> None:
    rows = range(kernel.m_min, kernel.m_min + 9)
    check(kernel, LinearSpec(48, 96, base_scheme(kernel), bias=True), (*rows, 127, 128, 129, 300))


EPILOGUES = r"gemm_(W4A8_vpdpbusd512_r16|W4A8_maddubs_r8|W3A16_fma_r8|F32_fma_r8m4)$"


@pytest.mark.parametrize("kernel", [param(k) for k in GEMM_KERNELS if re.match(EPILOGUES, k.name)])
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a])
def test_epilogues(kernel: LinearKernel, activation: str) -> None:
    spec = LinearSpec(50, 64, base_scheme(kernel), True, activation, True)
    check(kernel, spec, (kernel.m_min,))


@pytest.mark.parametrize(
    ("kernel", "zero_points", "group"),
    [
        param(k, zero_points, group)
        for k in GEMM_KERNELS
        if "A8_" in k.name
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
@pytest.mark.parametrize("seed", range(10))
def test_random_decisions(kernel: LinearKernel, seed: int) -> None:
    spec = LinearSpec(77, 640, base_scheme(kernel), bias=True)
    check(kernel, spec, (kernel.m_min, 70), Random(seed))


@pytest.mark.parametrize("kernel", [param(k) for k in GEMM_KERNELS if "A8_" in k.name])
def test_inner_loop_is_the_instruction(kernel: LinearKernel) -> None:
    spec = LinearSpec(96, 256, base_scheme(kernel))
    _, assembly = build(kernel, spec, profile_of(kernel))
    wanted = next(text for name, text in INSTRUCTION_IN_ASSEMBLY.items() if name in kernel.name)
    assert len(re.findall(wanted, assembly)) >= 32
    assert "vpdpbusd" not in assembly or "vpdpbusd" in kernel.name


def test_avx_vnni_without_avx512_builds() -> None:
    (kernel,) = (k for k in GEMM_KERNELS if k.name.startswith("gemm_W4A8_vpdpbusd256"))
    spec = LinearSpec(96, 256, base_scheme(kernel))
    _, assembly = build(kernel, spec, find_profile("alderlake"))
    assert re.search(r"\{vex\}\s+vpdpbusd\s.*ymm", assembly)
    assert "zmm" not in assembly


@pytest.mark.parametrize("kernel", [param(k) for k in GEMM_KERNELS])
def test_declines_with_a_reason(kernel: LinearKernel) -> None:
    scheme = base_scheme(kernel)
    other = None if scheme else Scheme(4)
    with pytest.raises(NotApplicable, match=r"float32|W4"):
        kernel.check(LinearSpec(64, 64, other), find_profile("znver4"))
    with pytest.raises(NotApplicable, match="x86-64-v2"):
        kernel.check(LinearSpec(64, 64, scheme), find_profile("x86-64-v2"))


def test_declines_sums_that_overflow_int32() -> None:
    (kernel,) = (k for k in GEMM_KERNELS if k.name.startswith("gemm_W8A8_vpdpbusd512"))
    with pytest.raises(NotApplicable, match="K=70000"):
        kernel.check(LinearSpec(64, 70000, Scheme(8)), find_profile("znver4"))
    kernel.check(LinearSpec(64, 70000, Scheme(8, group_size=64)), find_profile("znver4"))


def test_decisions_are_recorded() -> None:
    (kernel,) = (k for k in GEMM_KERNELS if k.name.startswith("gemm_W4A8_vpdpbusd512"))
    decide = Defaults()
    spec = LinearSpec(64, 64, Scheme(4, group_size=32))
    kernel.func(kernel.choose(spec, find_profile("znver4"), decide))
    assert set(decide.taken) == {"tile", "k_block", "k_step", "m_tiles", "prefetch"}


def test_every_element_is_written() -> None:
    (kernel,) = (k for k in GEMM_KERNELS if k.name == "gemm_F32_fma_r8m4")
    if "fma" not in cpu_features():
        pytest.skip("this CPU has no fma")
    profile = find_profile("znver3")
    spec = LinearSpec(29, 40, None)
    run, _ = build(kernel, spec, profile)
    arrays, _ = problem(kernel, spec, profile, 9)
    run(*arrays)
    assert np.isfinite(arrays[-1]).all()
