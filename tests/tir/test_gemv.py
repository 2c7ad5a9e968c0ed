"""Linear kernels for few rows of x against float64: formats, tails, rows, epilogues, decisions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tvm
from linear_cases import ACTIVATIONS, Case, aligned, build, profile_for

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import ACTIVATIONS as EPILOGUES
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Defaults, Random
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.plain import PLAIN_KERNELS
from apq_tvm.schedules.linear.streams import M_TILES
from apq_tvm.schedules.x86.gemv import GEMV_KERNELS
from apq_tvm.schedules.x86.profiles import PROFILES, linear_kernels, recognise
from apq_tvm.types import QuantizedTensor, Scheme

FORMATS = tuple(itertools.product((16, 32, 64, -1), (False, True)))
"""(group size, zero points)"""

ROW_TAILS, K_TAILS = (-1, 0, 1), (31, 32, 33, 100, 127, 128, 129)

W4 = [k for k in GEMV_KERNELS if k.bits == 4]


def by_name(kernel: LinearKernel) -> str:
    return kernel.name


@pytest.mark.few(3)
@pytest.mark.parametrize("kernel", GEMV_KERNELS, ids=by_name)
def test_formats_and_tails(kernel: LinearKernel) -> None:
    """The M tiles of one instruction share out the formats; N, K and M go through their edges."""
    profile, bits, lanes = profile_for(kernel), bits_of(kernel), kernel.instruction.lanes
    first = M_TILES.index(kernel.m_tile)
    for i in range(first, len(FORMATS), len(M_TILES)):
        group, zeros = FORMATS[i]
        scheme = Scheme(bits, zeros, kernel.act_bits, group_size=group)
        n = lanes * (i % 3 + 1) + ROW_TAILS[(i + bits) % 3]
        spec = LinearSpec(n, K_TAILS[(i + bits) % len(K_TAILS)], scheme, bias=bool(i & 1))
        case = Case(spec, kernel.layout(spec, profile), seed=i)
        compiled = build(kernel, spec, profile, Defaults())
        for m in (kernel.m_tile, kernel.m_tile + 1, 2 * kernel.m_tile + 1):
            case.check(compiled, m)


def bits_of(kernel: LinearKernel) -> int:
    assert kernel.bits is not None
    return kernel.bits


@pytest.mark.parametrize("kernel", [k for k in W4 if k.act_bits == 8], ids=by_name)
def test_per_token_activations(kernel: LinearKernel) -> None:
    spec = LinearSpec(35, 96, Scheme(4, False, 8, per_token=True, group_size=32))
    profile = profile_for(kernel)
    compiled = build(kernel, spec, profile, Defaults())
    Case(spec, kernel.layout(spec, profile)).check(compiled, kernel.m_tile + 2)


@pytest.mark.parametrize("n", (48, 45))
@pytest.mark.parametrize("bias,residual", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("activation", EPILOGUES)
def test_epilogues(activation: str, bias: bool, residual: bool, n: int) -> None:
    kernel = next(k for k in GEMV_KERNELS if k.name == "gemv_W4A8_maddubs_r8m1")
    profile = profile_for(kernel)
    spec = LinearSpec(n, 64, Scheme(4, group_size=32), bias, activation, residual)
    compiled = build(kernel, spec, profile, Defaults())
    Case(spec, kernel.layout(spec, profile)).check(compiled, 2)


def test_every_epilogue_has_a_reference() -> None:
    assert set(EPILOGUES) == set(ACTIVATIONS)


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kernel", W4, ids=by_name)
def test_random_decisions(kernel: LinearKernel, seed: int) -> None:
    """On a layer large enough to run in parallel."""
    group = (32, 128, -1)[seed % 3]
    spec = LinearSpec(280, 256, Scheme(4, bool(seed & 1), kernel.act_bits, group_size=group))
    profile = profile_for(kernel)
    compiled = build(kernel, spec, profile, Random(seed))
    Case(spec, kernel.layout(spec, profile), seed).check(compiled, kernel.m_tile + seed % 3)


@pytest.mark.parametrize("high", (False, True))
@pytest.mark.parametrize(
    "kernel", [k for k in GEMV_KERNELS if (k.act_bits, k.m_tile) == (8, 1)], ids=by_name
)
def test_integers_are_exact_at_the_extremes(kernel: LinearKernel, high: bool) -> None:
    """Largest codes times ±127, scales 1: every sum is an integer that float32 holds exactly."""
    bits, k = bits_of(kernel), 256
    scheme = Scheme(bits, zero_points=True, group_size=-1)
    spec = LinearSpec(17, k, scheme)
    profile = profile_for(kernel)
    compiled = build(kernel, spec, profile, Defaults())
    code = (1 << bits) - 1 if high else 0
    codes = np.full((17, k), code, np.uint8)
    codes[8:] = np.resize([code, (1 << bits) - 1 - code], k)
    zeros = np.full((17, 1), (1 << bits) - 1 - code, np.uint8)
    weight = QuantizedTensor(codes, np.ones((17, 1), np.float16), zeros, scheme)
    layout: Any = kernel.layout(spec, profile)
    packed = [aligned(a) for a in layout.pack(weight).arrays.values()]
    for xq in (np.full((1, k), 127), np.full((1, k), -127), np.resize([127, -127], (1, k))):
        operands = xq.astype(np.int8), np.ones((1, 1), np.float32), xq.sum(-1, keepdims=True)
        want = xq.astype(np.int64) @ (codes.astype(np.int64) - zeros).T
        y = tvm.runtime.tensor(np.empty((1, 17), np.float32))
        tensors = [tvm.runtime.tensor(a.astype(a.dtype.name.replace("64", "32"))) for a in operands]
        compiled(*tensors, *packed, y)
        np.testing.assert_array_equal(y.numpy(), want)


@pytest.mark.parametrize("group,zeros", FORMATS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_plain_integer_fallback(bits: int, group: int, zeros: bool) -> None:
    kernel, profile = PLAIN_KERNELS[0], find_profile("x86-64")
    spec = LinearSpec(9, 33, Scheme(bits, zeros, group_size=group), True, "relu", True)
    case = Case(spec, kernel.layout(spec, profile))
    case.check(build(kernel, spec, profile, Defaults()), 3)


@pytest.mark.parametrize("n", (7, 8, 9))
def test_plain_float_fallback(n: int) -> None:
    kernel, profile = PLAIN_KERNELS[1], find_profile("x86-64")
    spec = LinearSpec(n, 33, None, True, "gelu", True)
    case = Case(spec, kernel.layout(spec, profile))
    case.check(build(kernel, spec, profile, Defaults()), 3)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
@pytest.mark.parametrize("act_bits", (8, 16, 32))
@pytest.mark.parametrize("bits", range(1, 9))
def test_some_kernel_takes_every_scheme_on_every_profile(
    bits: int, act_bits: int, profile: Any
) -> None:
    for group, zeros in FORMATS:
        spec = LinearSpec(5, 40, Scheme(bits, zeros, act_bits, group_size=group))
        assert any(
            k.m_tile == 1 and k.is_for(spec) and applies(k, spec, profile) for k in linear_kernels()
        )


def applies(kernel: LinearKernel, spec: LinearSpec, profile: Any) -> bool:
    try:
        kernel.check(spec, profile)
    except NotApplicable:
        return False
    return True


def test_int32_overflow_is_declined_with_the_remedy() -> None:
    spec = LinearSpec(8, 1 << 17, Scheme(8))
    for kernel in (k for k in linear_kernels() if k.act_bits == 8 and k.family == "int"):
        with pytest.raises(NotApplicable):
            kernel.check(spec, find_profile("znver4"))
    kernel = next(k for k in GEMV_KERNELS if k.name == "gemv_W8A8_vpdpbusd512_r16m4")
    with pytest.raises(NotApplicable, match="use groups"):
        kernel.check(spec, find_profile("znver4"))


def test_names_are_unique_and_profiles_complete() -> None:
    names = [k.name for k in linear_kernels()]
    assert len(names) == len(set(names))
    for profile in PROFILES:
        assert profile.sources and profile.target["mcpu"] == profile.name
        tvm.target.Target(dict(profile.target))


def cpuinfo(maker: str, flags: str) -> str:
    one = f"vendor_id : {maker}\nphysical id : 0\ncore id : {{}}\nflags : {flags}\n"
    return "\n".join(f"processor : {i}\n" + one.format(i // 2) for i in range(4))


V3 = "sse4_1 ssse3 popcnt avx avx2 bmi1 bmi2 f16c fma"


@pytest.mark.parametrize(
    "maker,flags,name",
    (
        ("AuthenticAMD", V3 + " clwb", "znver2"),
        ("AuthenticAMD", V3 + " clwb vaes", "znver3"),
        ("GenuineIntel", V3, "haswell"),
        ("GenuineIntel", V3 + " avx_vnni vaes", "alderlake"),
        (
            "GenuineIntel",
            V3 + " avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni",
            "cascadelake",
        ),
        ("Unheard", V3, "x86-64-v3"),
        ("Unheard", "sse4_1 ssse3 popcnt", "x86-64-v2"),
        ("Unheard", "", "x86-64"),
    ),
)
def test_host_is_recognised(maker: str, flags: str, name: str) -> None:
    profile = recognise(cpuinfo(maker, flags))
    assert (profile.name, profile.cores) == (name, 2)
