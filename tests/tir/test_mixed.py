"""Kernels of mixed24 against the format itself, on every instruction set of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from built import built
from mixed_cases import MixedCase

from apq_tvm.errors import NotApplicable
from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide, Defaults, Random
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.streams import M_TILES
from apq_tvm.schedules.x86.decoded import GENERIC_KERNELS
from apq_tvm.schedules.x86.mixed import MIXED_KERNELS
from apq_tvm.schedules.x86.profiles import PROFILES, linear_kernels
from apq_tvm.select import choose
from apq_tvm.types import DeviceProfile

SHAPES = ((64, 256), (70, 336), (33, 100), (17, 129), (5, 15))
SPELLINGS = ("mixed24", "mixed24o1", "mixed24r50", "mixed24o0", "mixed24r10o0.5")


def profile_for(kernel: LinearKernel) -> DeviceProfile:
    """A profile that has the kernel's instruction and vectors; skips if this machine has not."""
    host = find_profile("host")
    names = {"vpdpbusd512": "icelake-client", "vpdpbusd256": "alderlake", "maddubs": "x86-64-v3"}
    wanted = find_profile(names[kernel.instruction.name])
    if not wanted.features - {"vaes"} <= host.features:
        pytest.skip(f"{host.name} is no {wanted.name}")
    return wanted


def compiled(kernel: LinearKernel, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
    kernel.check(spec, profile)
    return built(kernel.scheduled(kernel.choose(spec, profile, decide)), profile)


def kernel_of(instruction: str, m_tile: int) -> LinearKernel:
    (found,) = (
        kernel
        for kernel in MIXED_KERNELS
        if (kernel.instruction.name, kernel.m_tile) == (instruction, m_tile)
    )
    return found


def by_name(kernel: LinearKernel) -> str:
    return kernel.name


@pytest.mark.few(3)
@pytest.mark.parametrize("kernel", MIXED_KERNELS, ids=by_name)
def test_shapes_and_formats(kernel: LinearKernel) -> None:
    """The M tiles of one instruction share out the formats; N, K and M go through their edges."""
    profile, first = profile_for(kernel), M_TILES.index(kernel.m_tile)
    for i in range(first, len(SPELLINGS), 2):
        n, k = SHAPES[(i + first) % len(SHAPES)]
        spec = LinearSpec(n, k, parse_scheme(SPELLINGS[i]), bias=bool(i & 1))
        case = MixedCase(kernel, spec, profile, seed=i)
        function = compiled(kernel, spec, profile, Defaults())
        for m in range(kernel.m_tile, 6):
            case.check(function, m)


@pytest.mark.parametrize("activation,residual", [("gelu", True), ("silu", False)])
def test_epilogues(activation: str, residual: bool) -> None:
    kernel = kernel_of("maddubs", 1)
    profile = profile_for(kernel)
    spec = LinearSpec(45, 64, parse_scheme("mixed24o1"), True, activation, residual)
    MixedCase(kernel, spec, profile).check(compiled(kernel, spec, profile, Defaults()), 2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("instruction,m_tile", [("maddubs", 1), ("maddubs", 2), ("vpdpbusd512", 1)])
def test_random_decisions(instruction: str, m_tile: int, seed: int) -> None:
    """On a layer large enough to run in parallel, with a ragged last stream."""
    kernel = kernel_of(instruction, m_tile)
    profile = profile_for(kernel)
    spec = LinearSpec(280, 256, parse_scheme(("mixed24", "mixed24r50")[seed & 1]))
    function = compiled(kernel, spec, profile, Random(seed))
    MixedCase(kernel, spec, profile, seed).check(function, m_tile + seed)


def test_fewer_activation_bits() -> None:
    kernel = kernel_of("maddubs", 1)
    profile = profile_for(kernel)
    spec = LinearSpec(24, 80, parse_scheme("mixed24A4"))
    MixedCase(kernel, spec, profile).check(compiled(kernel, spec, profile, Defaults()), 2)


def test_extreme_codes_do_not_saturate() -> None:
    """All codes and sub-scales at their largest, all activations at 127: the int16 sums hold."""
    kernel = kernel_of("maddubs", 1)
    profile = profile_for(kernel)
    spec = LinearSpec(8, 64, parse_scheme("mixed24o0"))
    case = MixedCase(kernel, spec, profile)
    arrays = case.largest()
    x = np.full((1, 64), 127, np.float32)
    y = np.zeros((1, 8), np.float32)
    function = compiled(kernel, spec, profile, Defaults())
    function(*case.prepared(x), *arrays.values(), y)
    wanted = 127 * 16 * (3 * (30 + 22 + 22) + 15)
    np.testing.assert_allclose(y, wanted, rtol=1e-6)


@pytest.mark.parametrize("value", (np.nan, np.inf))
@pytest.mark.parametrize("column", (3, 70))
def test_activations_that_are_not_finite_show(value: float, column: int) -> None:
    kernel = kernel_of("maddubs", 1)
    profile = profile_for(kernel)
    spec = LinearSpec(24, 72, parse_scheme("mixed24o0"))
    case = MixedCase(kernel, spec, profile)
    x = np.ones((2, 72), np.float32)
    x[1, column] = value
    y = np.zeros((2, 24), np.float32)
    function = compiled(kernel, spec, profile, Defaults())
    function(*case.prepared(x), *case.arrays.values(), y)
    assert np.isfinite(y[0]).all() and not np.isfinite(y[1]).any()


def test_zero_activations_give_the_bias() -> None:
    kernel = kernel_of("maddubs", 1)
    profile = profile_for(kernel)
    spec = LinearSpec(24, 72, parse_scheme("mixed24"), bias=True)
    case = MixedCase(kernel, spec, profile)
    y = np.zeros((1, 24), np.float32)
    operands = case.prepared(np.zeros((1, 72), np.float32))
    function = compiled(kernel, spec, profile, Defaults())
    function(*operands, *case.arrays.values(), case.bias, y)
    np.testing.assert_array_equal(y[0], case.bias)


@pytest.mark.parametrize("text", ("mixed24o1A32", "mixed24r50A32"))
def test_generic_kernel_adds_outliers(text: str) -> None:
    profile = find_profile("x86-64")
    spec = LinearSpec(21, 100, parse_scheme(text), bias=True)
    rounded = LinearSpec(21, 100, parse_scheme(text[:-3]), bias=True)
    case = MixedCase(MIXED_KERNELS[-1], rounded, profile)
    function = compiled(GENERIC_KERNELS[0], spec, profile, Defaults())
    x = case.rng.standard_normal((3, 100)).astype(np.float32)
    y = np.full((3, 21), np.nan, np.float32)
    weights = case.arrays.values()
    function(x, *weights, case.bias, y)
    want = x.astype(np.float64) @ (case.dense + case.sparse).T + case.bias
    np.testing.assert_allclose(y, want, rtol=0, atol=3e-6 * (np.abs(want).max() + 1))


def test_refusals_have_reasons() -> None:
    kernel = kernel_of("vpdpbusd512", 1)
    assert not any(kernel.is_for(LinearSpec(8, 64, parse_scheme(s))) for s in ("W4A8", "float"))
    wide, narrow = find_profile("znver4"), find_profile("znver3")
    for spec, profile, reason in (
        (LinearSpec(8, 64, parse_scheme("mixed24A32")), wide, "2 to 8 bits"),
        (LinearSpec(8, 64, parse_scheme("mixed24")), narrow, "avx512vnni"),
        (LinearSpec(8, 1 << 22, parse_scheme("mixed24")), wide, "int32"),
    ):
        with pytest.raises(NotApplicable, match=reason):
            kernel.check(spec, profile)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_devices_with_avx2_get_no_slow_kernel(profile: DeviceProfile) -> None:
    spec = LinearSpec(32, 64, parse_scheme("mixed24"))
    by_name = {kernel.name: kernel for kernel in linear_kernels()}
    chosen = [by_name[c.kernel] for c in choose(spec, linear_kernels(), profile, "layer7")]
    if "avx2" in profile.features:
        assert [(k.kind, k.family, k.m_tile) for k in chosen] == [
            ("gemv", "mixed", m) for m in (1, 2, 4)
        ]
    else:
        assert chosen == [GENERIC_KERNELS[0]]


def test_every_kernel_is_listed_and_some_profile_has_it() -> None:
    listed = {kernel.name for kernel in linear_kernels()}
    spec = LinearSpec(32, 64, parse_scheme("mixed24"))
    for kernel in MIXED_KERNELS:
        assert kernel.name in listed
        assert any(_applies(kernel, spec, profile) for profile in PROFILES)


def _applies(kernel: LinearKernel, spec: LinearSpec, profile: DeviceProfile) -> bool:
    try:
        kernel.check(spec, profile)
    except NotApplicable:
        return False
    return True
