"""Large-M kernels on Arm under qemu against float64: bit widths, groups, tails, instructions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_tools import ArmCase, emulated, needs_qemu, scheduled
from linear_cases import quantized_activations

from apq_tvm.errors import BuildError, NotApplicable
from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.gemm import (
    MANY_ROWS,
    PAIRED_GEMM_KERNELS,
    SOME_ROWS,
    prepare_rows,
)
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.tensorize.exprs import MAGIC

Array = Any

TARGETS = {"smmla": "graviton3", "sdot": "graviton2", "smull": "cortex-a72"}


def factors_of(values: Array, together: int) -> Array:
    """[M, G] in the lanes that rows have: [B, G, 4]."""
    m, groups = values.shape
    padded = np.zeros((-(-m // together) * together, groups), values.dtype)
    padded[:m] = values
    lanes = padded.reshape(-1, together, groups).transpose(0, 2, 1)  # [B, G, R]
    return np.ascontiguousarray(np.repeat(lanes, 4 // together, axis=2))


def codes_of(codes: Array, together: int) -> Array:
    """[M, K] interleaved: [B, K R / 16, R, 16 / R]."""
    m, k = codes.shape
    padded = np.zeros((-(-m // together) * together, k), codes.dtype)
    padded[:m] = codes
    run = 16 // together
    rows = padded.reshape(-1, together, k // run, run)
    return np.ascontiguousarray(rows.transpose(0, 2, 1, 3))


class GemmCase(ArmCase):
    """Activations are those that the kernel's preparation would give."""

    together = 4

    def activations(self, x: Array) -> tuple[list[Array], Array]:
        (codes, *factors), values = super().activations(x)
        kept = [factors_of(f, self.together) for f in factors]
        return [codes_of(codes, self.together), *kept], values


def kernel_of(name: str) -> LinearKernel:
    kernels = (*MANY_ROWS, *SOME_ROWS, *PAIRED_GEMM_KERNELS)
    return next(kernel for kernel in kernels if kernel.name == name)


def case_of(kernel: LinearKernel, spec: LinearSpec) -> GemmCase:
    case = GemmCase(spec, kernel.layout(spec, find_profile(TARGETS[kernel.instruction.name])))
    case.together = 2 if kernel.instruction.name == "smmla" else 4
    return case


def check(
    name: str, spec: LinearSpec, rows: tuple[int, ...], folder: Path, cpu: str = "max"
) -> None:
    kernel = kernel_of(name)
    target = TARGETS[kernel.instruction.name]
    layout = f"{kernel.instruction.lanes}x{kernel.run or 4}"
    case_of(kernel, spec).check_under_qemu(kernel, target, rows, folder, cpu, layout)


SCHEMES = (
    ("gemm_W1A8_smmla_r4m8", "W1A8g32"),
    ("gemm_W2A8_smmla_r4m4", "W2zA8tg64"),
    ("gemm_W3A8_smmla_r4m8", "W3A8g16"),
    ("gemm_W4A8_smmla_r4m8", "W4A8tg32"),
    ("gemm_W5A8_smmla_r4m8", "W5zA8g16"),
    ("gemm_W6A8_smmla_r4m4", "W6A8"),
    ("gemm_W7A8_smmla_r4m8", "W7zA8g32"),
    ("gemm_W8A8_smmla_r4m8", "W8zA8g64"),
    ("gemm_W8A8_smmla_r4m4", "W8zA8"),
    ("gemm_W1A8_sdot_r4m4", "W1zA8tg32"),
    ("gemm_W4A8_sdot_r4m4", "W4A8g32"),
    ("gemm_W8A8_sdot_r4m4", "W8zA8tg32"),
    ("gemm_W3A8_smull_r4m4", "W3A8tg64"),
    ("gemm_W8A8_smull_r4m4", "W8A8g32"),
)


@pytest.mark.few(5)
@needs_qemu
@pytest.mark.parametrize(("name", "scheme"), SCHEMES)
def test_matches_float64_at_edges(name: str, scheme: str, tmp_path: Path) -> None:
    # N: whole panels, a part of one and a ragged vector. K: no multiple of the unit. M: odd, even.
    kernel = kernel_of(name)
    spec = LinearSpec(29, 150, parse_scheme(scheme), bias=True, activation="relu", residual=True)
    check(name, spec, (kernel.m_tile, kernel.m_tile + 1, 19), tmp_path)


@needs_qemu
@pytest.mark.parametrize(
    "scheme", ("W4A8g32", "W4zA8tg64", "W2zA8g32", "W3A8tg32", "W8A8", "W8zA8")
)
def test_runs_of_eight(scheme: str, tmp_path: Path) -> None:
    """Weights in 4x8, which a panel takes without zips."""
    spec = LinearSpec(29, 150, parse_scheme(scheme), bias=True, residual=True)
    check(f"gemm_W{scheme[1]}A8_smmla_r4k8m8", spec, (25, 26), tmp_path)


@needs_qemu
@pytest.mark.parametrize(
    ("n", "scheme"),
    [(29, "W4A8g32"), (36, "W4zA8tg64"), (40, "W2zA8g32"), (27, "W8A8"), (20, "W8zA8")],
)
def test_halves_of_eight_rows(n: int, scheme: str, tmp_path: Path) -> None:
    """Weights in 8x8: a panel's blocks of 4 rows are halves of theirs."""
    spec = LinearSpec(n, 150, parse_scheme(scheme), bias=True, residual=True)
    check(f"gemm_W{scheme[1]}A8_smmla_r8k8m8", spec, (25, 26), tmp_path)


@needs_qemu
@pytest.mark.parametrize("scheme", ("W4A8tg32", "W4A8g32", "W4A8"))
def test_several_k_blocks_and_tasks(scheme: str, tmp_path: Path) -> None:
    spec = LinearSpec(13, 2080, parse_scheme(scheme))
    check("gemm_W4A8_smmla_r4m8", spec, (130,), tmp_path)


@needs_qemu
@pytest.mark.parametrize(
    ("name", "scheme"),
    (
        ("gemm_W8A8_smmla_r4m8", "W8zA8g128"),
        ("gemm_W8A8_smmla_r4m4", "W8zA8g256"),
        ("gemm_W4A8_smmla_r4m8", "W4A8tg256"),
        ("gemm_W7A8_sdot_r4m4", "W7zA8tg128"),
        ("gemm_W8A8_smull_r4m4", "W8A8tg256"),
        ("gemm_W5A8_smull_r4m4", "W5zA8g128"),
    ),
)
def test_largest_sums_are_exact(name: str, scheme: str, tmp_path: Path) -> None:
    """All products at their largest, where int16 sums or the float's 2^22 would give way."""
    parsed, kernel = parse_scheme(scheme), kernel_of(name)
    spec = LinearSpec(8, 512, parsed)
    profile = find_profile(TARGETS[kernel.instruction.name], layout="4x4")
    case, layout = case_of(kernel, spec), kernel.layout(spec, profile)
    program = emulated(scheduled(kernel, spec, profile), profile, tmp_path)
    width = parsed.group_size
    for code in (0, (1 << parsed.bits) - 1):
        tensor = _constant(spec, code)
        x = np.where(np.arange(8)[:, None] % 2, np.float32(-3), np.float32(3))
        operands, values = case.activations(np.broadcast_to(x, (8, 512)).copy())
        y = np.full((8, 8), np.nan, np.float32)
        program(*operands, *layout.pack(tensor).arrays.values(), y)
        zero = 0.0 if tensor.zeros is None else tensor.zeros[:, :1].astype(np.float64)
        middle = 0.0 if tensor.zeros is not None else float(1 << (parsed.bits - 1))
        weight = (tensor.codes - zero - middle) * tensor.scales.astype(np.float64)[:, :1]
        np.testing.assert_allclose(y, values @ weight.T, rtol=1e-6)
        assert width * 127 * 255 >= 1 << 21, "a group that says nothing"


def _constant(spec: LinearSpec, code: int) -> Any:
    from apq_tvm.types import QuantizedTensor

    scheme = spec.scheme
    assert scheme is not None
    groups = spec.k // scheme.group_size
    codes = np.full((spec.n, spec.k), code, np.uint8)
    scales = np.full((spec.n, groups), 0.5, np.float16)
    other = 0 if code else (1 << scheme.bits) - 1
    zeros = np.full((spec.n, groups), other, np.uint8) if scheme.zero_points else None
    return QuantizedTensor(codes, scales, zeros, scheme)


@needs_qemu
def test_running_sums_with_unequal_scales(tmp_path: Path) -> None:
    """Scales from 2^-10 to 1 side by side: the error stays that of the largest."""
    spec = LinearSpec(8, 1024, parse_scheme("W4A8tg32"))
    kernel = kernel_of("gemm_W4A8_smmla_r4m8")
    profile = find_profile("graviton3", layout="4x4")
    layout = kernel.layout(spec, profile)
    case = case_of(kernel, spec)
    tensor = _constant(spec, 15)
    tensor.scales[:, ::2] = np.float16(2.0**-10)
    x = np.abs(np.random.default_rng(1).standard_normal((8, 1024))).astype(np.float32)
    operands, values = case.activations(x)
    y = np.full((8, 8), np.nan, np.float32)
    emulated(scheduled(kernel, spec, profile), profile, tmp_path)(
        *operands, *layout.pack(tensor).arrays.values(), y
    )
    weight = (tensor.codes - 8.0) * np.repeat(tensor.scales.astype(np.float64), 32, axis=1)
    np.testing.assert_allclose(y, values @ weight.T, rtol=4e-6)


@needs_qemu
@pytest.mark.parametrize("scheme", ("W4A8g32", "W4zA8tg16", "W4A8", "W4A5g64", "W2A1"))
@pytest.mark.parametrize(("m", "together"), ((4, 2), (7, 2), (6, 4)))
def test_interleaved_activations(scheme: str, m: int, together: int, tmp_path: Path) -> None:
    spec, profile = LinearSpec(8, 150, parse_scheme(scheme)), find_profile("graviton3")
    rows = prepare_rows(spec, together)
    func, _ = schedule_preparation(rows, rows.func, profile, Defaults())
    assert spec.scheme is not None
    layout = kernel_of(f"gemm_W{spec.scheme.bits}A8_smmla_r4m4").layout(spec, profile)
    x = np.random.default_rng(0).standard_normal((m, 150)).astype(np.float32)
    codes, scales, sums = quantized_activations(x, layout, spec.scheme)
    want = [codes_of(codes, together), factors_of(scales, together), factors_of(sums, together)]
    got = [np.full_like(array, 77) for array in want]
    emulated(func, profile, tmp_path)(x, *got)
    if spec.scheme.act_bits == 8:
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[2], want[2])
        np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    else:  # the reference is for 8 bits
        assert np.abs(got[0]).max() == max(1, (1 << (spec.scheme.act_bits - 1)) - 1)
        assert got[2].sum() == 4 // together * got[0].astype(np.int64).sum()
    missing = -m % together
    if missing:
        assert not got[0][-1, :, -missing:].any()
        assert not got[1][-1, :, -missing * 4 // together :].any()


@needs_qemu
def test_smmla_fails_where_the_core_lacks_it(tmp_path: Path) -> None:
    spec = LinearSpec(8, 64, parse_scheme("W4A8g32"))
    with pytest.raises(BuildError):
        check("gemm_W4A8_smmla_r4m4", spec, (4,), tmp_path, cpu="neoverse-n1")
    check("gemm_W4A8_sdot_r4m4", spec, (8,), tmp_path, cpu="neoverse-n1")


@pytest.mark.parametrize("kernel", (*MANY_ROWS, *SOME_ROWS), ids=lambda k: k.name)
def test_declines_with_a_reason(kernel: LinearKernel) -> None:
    bits = kernel.bits
    assert not kernel.is_for(LinearSpec(64, 64, None))
    with pytest.raises(NotApplicable, match="integer activations"):
        kernel.check(LinearSpec(64, 64, parse_scheme(f"W{bits}A16")), find_profile("graviton3"))
    if kernel.instruction.features:
        with pytest.raises(NotApplicable, match="cortex-a72"):
            spec = LinearSpec(64, 64, parse_scheme(f"W{bits}A8"))
            kernel.check(spec, find_profile("cortex-a72"))


def test_magic_is_the_float_whose_unit_is_one() -> None:
    bits = int(np.float32(MAGIC).view(np.int32))
    for value in (-(1 << 22) + 1, -1, 0, 1, (1 << 22) - 1):
        assert np.int32(bits + value).view(np.float32) - np.float32(MAGIC) == value
