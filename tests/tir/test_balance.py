"""``W2*`` kernels against float64: instructions, groups, tails, rows, decisions, assembly."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from balance_cases import Layer
from built import built
from tvm.s_tir import TensorIntrin

from apq_tvm.codegen.layouts import BalanceLayout, default_layout
from apq_tvm.errors import NotApplicable
from apq_tvm.formats import dequantize
from apq_tvm.formats.balance import balance_scheme
from apq_tvm.ops.linear.decode import decode_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.x86.balance import BALANCE_KERNELS
from apq_tvm.schedules.x86.profiles import PROFILES, linear_kernels
from apq_tvm.select import choose
from apq_tvm.tensorize.x86.balance import balance_intrinsic
from apq_tvm.tensorize.x86.balance_codes import INSTRUCTIONS, digits_intrinsic
from apq_tvm.types import DeviceProfile, QuantizedTensor, Scheme

GROUPS = (-1, 32, 64, 128)

K_TAILS = (31, 96, 100, 130, 300)


def profile_of(kernel: LinearKernel) -> DeviceProfile:
    host = find_profile("host")
    if kernel.instruction.name != "maddubs":
        return host
    wanted = find_profile("x86-64-v3")
    if not wanted.features <= host.features:
        pytest.skip(f"{host.name} has no AVX2")
    return wanted


def kernel_of(kind: str, instruction: str, m_tile: int = 0) -> LinearKernel:
    return next(
        kernel
        for kernel in BALANCE_KERNELS
        if (kernel.kind, kernel.instruction.name) == (kind, instruction)
        and m_tile in (0, kernel.m_tile)
    )


def layer_of(kernel: LinearKernel, spec: LinearSpec, decisions: Any = None) -> Layer:
    return Layer(kernel, spec, profile_of(kernel), decisions)


@pytest.mark.few(2)
@pytest.mark.parametrize("kernel", BALANCE_KERNELS, ids=lambda k: k.name)
def test_groups_and_tails(kernel: LinearKernel) -> None:
    """N through the edges of lanes and blocks, K of units and groups, M of tiles."""
    index = BALANCE_KERNELS.index(kernel)
    lanes = kernel.instruction.lanes // 3
    for i, group in enumerate((GROUPS[index % 4], GROUPS[(index + 1) % 4])):
        n = lanes * (3, 4, 5, 2)[(index + i) % 4] + (0, 1, -1)[(index + 2 * i) % 3]
        scheme = balance_scheme(8, group, per_token=bool(i))
        spec = LinearSpec(n, K_TAILS[(index + i) % len(K_TAILS)], scheme, bias=bool(i))
        layer = layer_of(kernel, spec)
        for m in (kernel.m_tile, kernel.m_tile + 1, 2 * kernel.m_tile + 1):
            layer.check(m)
        layer.check(kernel.m_tile, extreme=True)


@pytest.mark.parametrize("kind", ("gemv", "gemm"))
@pytest.mark.parametrize(("n", "activation"), ((48, "gelu"), (64, "silu"), (51, "relu")))
def test_epilogues(n: int, activation: str, kind: str) -> None:
    kernel = kernel_of(kind, "maddubs")
    spec = LinearSpec(n, 64, balance_scheme(8, 32), True, activation, True)
    layer_of(kernel, spec).check(kernel.m_tile + 1)


@pytest.mark.parametrize("instruction", ("vpermi2b", "maddubs"))
@pytest.mark.parametrize("decisions", [{"streams": 2}, {"streams": 1, "ahead": 0}])
def test_decisions_on_a_parallel_layer(instruction: str, decisions: Any) -> None:
    kernel = kernel_of("gemv", instruction, 1)
    layer_of(kernel, LinearSpec(280, 256, balance_scheme()), decisions).check(3)


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
def test_intrinsics_equal_their_plain_loops(instruction: Any) -> None:
    host = find_profile("host")
    if not all(host.features & set(names) for names in instruction.features):
        pytest.skip(f"this CPU has not all of {instruction.features}")
    rng = np.random.default_rng(0)
    lanes = instruction.lanes
    layout = BalanceLayout(lanes, 32)
    every = np.resize(np.arange(125), 32 * lanes).reshape(lanes, 32)
    codes = np.concatenate([every // 5**part % 5 for part in range(3)]).astype(np.uint8)
    tensor = QuantizedTensor(
        codes, np.ones((3 * lanes, 1), np.float16), None, balance_scheme(8, 32)
    )
    unit = layout.pack(tensor).arrays["codes"][0, 0]
    for name, operands, out in (
        (balance_intrinsic(instruction, 2), [rng.integers(-127, 128, (2, 32))], (2, 3, lanes)),
        (balance_intrinsic(instruction), [np.full(32, -127)], (3, lanes)),
        (digits_intrinsic(instruction), [], (3, 8, lanes, 4)),
    ):
        results = []
        for half in ("desc", "impl"):
            y = np.zeros(out, np.int32 if operands else np.uint8)
            run = built(getattr(TensorIntrin.get(name), half), host)
            run(unit, *(a.astype(np.int8) for a in operands), y)
            results.append(y)
        np.testing.assert_array_equal(results[1], results[0])
        assert results[0].any()


@pytest.mark.parametrize("lanes", (4, 8, 16))
def test_generic_kernel_reads_the_layout(lanes: int) -> None:
    rng = np.random.default_rng(3)
    scheme = balance_scheme(8, 32)
    weight = QuantizedTensor(
        rng.integers(0, 5, (29, 70), dtype=np.uint8),
        rng.uniform(0.5, 1, (29, 3)).astype(np.float16),
        None,
        scheme,
    )
    layout = default_layout(scheme, (), lanes)
    func = decode_linear(LinearSpec(29, 70, scheme), layout)
    x = rng.standard_normal((2, 70)).astype(np.float32)
    y = np.zeros((2, 29), np.float32)
    built(func, "llvm")(x, *layout.pack(weight).arrays.values(), y)
    np.testing.assert_allclose(y, x @ dequantize(weight).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
@pytest.mark.parametrize("act_bits", (4, 8, 32))
def test_every_profile_computes_it(profile: DeviceProfile, act_bits: int) -> None:
    spec = LinearSpec(40, 100, balance_scheme(act_bits, 64))
    by_name = {kernel.name: kernel for kernel in linear_kernels()}
    chosen = [by_name[choice.kernel] for choice in choose(spec, linear_kernels(), profile, "up")]
    fast = act_bits <= 8 and bool({"avx2", "avxvnni", "avx512vnni"} & profile.features)
    assert all(kernel.family == "balance" for kernel in chosen) == fast


def test_int32_overflow_and_other_formats_are_declined() -> None:
    kernel, profile = BALANCE_KERNELS[-1], find_profile("znver4")
    with pytest.raises(NotApplicable, match="use groups"):
        kernel.check(LinearSpec(8, 1 << 17, balance_scheme()), profile)
    assert not kernel.is_for(LinearSpec(8, 64, Scheme(2)))
    with pytest.raises(NotApplicable, match="integer activations"):
        kernel.check(LinearSpec(8, 64, balance_scheme(16)), profile)


@pytest.mark.parametrize(
    "instruction,target,counts",
    [
        ("vpermi2b", "znver4", {"vpermi2b|vpermt2b": 24, "vpdpbusd": 24}),
        ("vpdpbusd512", "cascadelake", {"vpmulhuw": 16, "vpdpbusd": 24}),
        ("maddubs", "znver3", {"vpmaddubsw": 40, "vpmulhuw": 16, "vpmaddwd": 14}),
    ],
)
def test_the_instructions_are_there(instruction: str, target: str, counts: dict[str, int]) -> None:
    kernel = kernel_of("gemv", instruction, 1)
    profile, spec = find_profile(target), LinearSpec(96, 256, balance_scheme(8, 128))
    kernel.check(spec, profile)
    func = kernel.scheduled(kernel.choose(spec, profile, Defaults()))
    source = built(func, profile).assembly
    for mnemonic, least in counts.items():
        assert len(re.findall(rf"\b(?:{mnemonic})\b", source)) >= least
