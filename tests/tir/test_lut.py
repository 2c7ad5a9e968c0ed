"""Binary codes by tables of activation sums: tables, kernels, their error, decisions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from built import built
from lut_cases import Case, kernel_of, tables
from tvm.s_tir import TensorIntrin

from apq_tvm.errors import NotApplicable
from apq_tvm.formats import bcq
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Random
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.x86.lut import LUT_KERNELS
from apq_tvm.schedules.x86.profiles import PROFILES, linear_kernels
from apq_tvm.select import choose
from apq_tvm.tensorize.meaning.binary_codes import LutDot, LutUnit
from apq_tvm.tensorize.pairs.lut_dot import LutInstruction, lut_intrinsic
from apq_tvm.tensorize.x86.lut import INSTRUCTIONS

NAMES = ("vpermb", "pshufb", "permps512", "permps256")

SHAPES = ((1, 1), (31, 33), (32, 64), (65, 100), (77, 300), (100, 31))
"""(N, K) with edges of row blocks, halves of them, units and groups."""

KERNELS = {kernel.name: kernel for kernel in linear_kernels()}


def acts(instruction: str) -> int:
    return 8 if instruction in ("vpermb", "pshufb") else 32


@pytest.mark.few(3)
@pytest.mark.parametrize("bits,m_tile", ((1, 1), (2, 2), (3, 4), (5, 1), (8, 1)))
@pytest.mark.parametrize("instruction", NAMES)
def test_kernels(instruction: str, bits: int, m_tile: int) -> None:
    """Groups, tails of N and K, rows of x and epilogues take turns."""
    turn = bits + NAMES.index(instruction)
    n, k = SHAPES[turn % len(SHAPES)]
    scheme = bcq.scheme_of(bits, (32, -1, 128, 64, 256)[turn % 5], acts(instruction))
    bias, residual = bool(turn & 1), bool(turn & 2)
    spec = LinearSpec(n, k, scheme, bias, "relu" if bias else "", residual)
    case = Case(kernel_of(instruction, bits, m_tile), spec, seed=turn)
    for m in range(m_tile, 6):
        case.check(m)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("instruction", NAMES)
def test_random_decisions(instruction: str, seed: int) -> None:
    """On a layer large enough to run in parallel, with and without whole row blocks."""
    seed += NAMES.index(instruction)
    scheme = bcq.scheme_of(2, (64, -1)[seed & 1], acts(instruction))
    spec = LinearSpec((320, 331)[seed % 2], 256, scheme)
    kernel = kernel_of(instruction, 2, (1, 2, 4)[seed % 3])
    Case(kernel, spec, Random(seed), seed).check(4 + seed % 2)


@pytest.mark.parametrize(
    "instruction,k,group",
    (
        ("vpermb", 256, 64),
        ("pshufb", 100, 32),
        ("vpermb", 40, -1),
        ("pshufb", 7, -1),
        ("vpermb", 300, 256),
    ),
)
def test_integer_tables(instruction: str, k: int, group: int) -> None:
    spec = LinearSpec(8, k, bcq.scheme_of(2, group))
    case = Case(kernel_of(instruction, 2, 1), spec)
    x = np.random.default_rng(k).normal(size=(3, k)).astype(np.float32)
    x[1] *= 1e-30
    x[2, : k // 2] = 0
    x[2, 0] = 1e-38  # counts as zero where it is alone
    table, scales, sums = case.tabulate(x)
    assert case.rule == "x86_64_lut_tables"
    tiny = np.abs(x[2]).max() < 2.0**-100
    want_table, want_scales, want_sums = tables(x, case.layout.padded_k(k), case.span)
    want_scales[want_scales < 2.0**-100 / 127] = 0
    np.testing.assert_allclose(scales, want_scales, rtol=1e-6)
    np.testing.assert_allclose(sums, want_sums, rtol=1e-5, atol=1e-5 * np.abs(x).max())
    # Half a step at most, but for float32 rounding of values next to a half.
    used = np.repeat(want_scales > 0, case.span * 4, axis=1)
    off = np.abs(table.astype(np.int64) - want_table)
    assert not tiny and off[used].max() <= 1 and (off[used] > 0).mean() < 0.01
    assert (table[~used] == 128).all() and table.min() >= 1


@pytest.mark.parametrize("instruction,group", (("vpermb", 32), ("pshufb", 128), ("vpermb", -1)))
def test_error_of_integer_tables_is_bounded(instruction: str, group: int) -> None:
    """Against the decoded weights, with an outlier among the activations."""
    bits, n, k = 3, 48, 512
    case = Case(
        kernel_of(instruction, bits, 1),
        LinearSpec(n, k, bcq.scheme_of(bits, group)),
    )
    x = np.random.default_rng(0).normal(size=(4, k)).astype(np.float32)
    x[2, 17] = 300
    y, (_, scales, _) = case.run(x)
    width = k // case.tensor.scales.shape[1]
    alphas = case.tensor.scales[:, np.arange(scales.shape[1]) * case.span // width]  # [N, spans, q]
    sizes = np.abs(alphas.astype(np.float64)).sum(-1)[None]
    bound = (sizes * scales[:, None] * (case.span // 4) / 2).sum(-1)  # [M, N]
    exact = x.astype(np.float64) @ case.dense.T
    error = np.abs(y - exact)
    assert (error <= bound + 1e-5 * np.abs(exact).max()).all()
    # Rounding goes both ways: the mean is far below, near that of int8 activations.
    rows = [0, 1, 3]
    assert error[rows].mean() < 0.012 * np.sqrt((exact[rows] ** 2).mean())


@pytest.mark.parametrize("instruction", ("permps512", "permps256"))
def test_float_tables_are_exact(instruction: str) -> None:
    case = Case(kernel_of(instruction, 4, 1), LinearSpec(40, 300, bcq.scheme_of(4, 64, 32)))
    x = np.random.default_rng(0).normal(size=(3, 300)).astype(np.float32)
    exact = x.astype(np.float64) @ case.dense.T
    np.testing.assert_allclose(case.run(x)[0], exact, rtol=0, atol=2e-6 * np.abs(exact).max())


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("instruction", NAMES)
def test_not_finite_activations_do_not_hide(instruction: str, bad: float) -> None:
    spec = LinearSpec(33, 64, bcq.scheme_of(2, 32, acts(instruction)))
    case = Case(kernel_of(instruction, 2, 1), spec)
    x = np.ones((2, 64), np.float32)
    x[1, 40] = bad
    y, _ = case.run(x)
    assert np.isfinite(y[0]).all() and not np.isfinite(y[1]).any()


@pytest.mark.parametrize("bits", (1, 2, 4))
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
def test_instructions_do_what_the_loops_say(instruction: LutInstruction, bits: int) -> None:
    if not set(instruction.features) <= find_profile("host").features:
        pytest.skip(f"this CPU lacks one of {instruction.features}")
    m = 1 + bits % 2
    dot = LutDot(LutUnit(bits, instruction.rows), m, instruction.table_dtype)
    name = lut_intrinsic(instruction, bits, m)
    rng = np.random.default_rng(bits)
    table = rng.integers(0, 256, (m, 128) if m > 1 else (128,))
    operands = [
        rng.integers(0, 256, dot.unit.nbytes).astype(np.uint8),
        table.astype(dot.table_dtype),
    ]
    start = rng.integers(0, 60000, dot.acc_shape).astype(dot.acc_dtype)
    results = []
    for half in ("desc", "impl"):
        results.append(start.copy())
        built(getattr(TensorIntrin.get(name), half), find_profile("host"))(*operands, results[-1])
    np.testing.assert_array_equal(*results)  # sums of small integers are exact in float32 too


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_every_profile_has_a_kernel(profile: Any) -> None:
    """Table lookups from AVX2 on; else the generic kernel."""
    for act_bits in (8, 32):
        spec = LinearSpec(5, 40, bcq.scheme_of(3, 32, act_bits))
        fits = [k for k in linear_kernels() if k.family in ("", "bcq") and _fits(k, spec, profile)]
        assert fits and (fits[0].kind == "lut") == ("avx2" in profile.features)


def _fits(kernel: Any, spec: LinearSpec, profile: Any) -> bool:
    try:
        kernel.check(spec, profile)
    except NotApplicable:
        return False
    return kernel.bits in (None, spec.scheme.bits) and kernel.width == 0  # type: ignore[union-attr]


def test_kernels_say_why_they_decline() -> None:
    kernel = kernel_of("vpermb", 4, 1)
    znver4 = find_profile("znver4")
    tiles = [k.m_tile for k in LUT_KERNELS if (k.instruction.name, k.bits) == ("vpermb", 4)]
    assert tiles == [2, 1]  # 4 rows of 4 planes do not fit the registers
    with pytest.raises(NotApplicable, match="needs avx512vbmi and avx512vnni"):
        kernel.check(LinearSpec(8, 64, bcq.scheme_of(4)), find_profile("znver3"))
    with pytest.raises(NotApplicable, match="int8 tables, which bcq4A32 does not ask for"):
        kernel.check(LinearSpec(8, 64, bcq.scheme_of(4, act_bits=32)), znver4)
    assert not kernel.is_for(LinearSpec(8, 64, None))
    assert len({k.name for k in LUT_KERNELS}) == len(LUT_KERNELS)


def test_many_rows_with_float_tables_are_decoded() -> None:
    """Integer tables serve every M; float ones leave many rows to decoded panels."""
    for target in ("znver4", "skylake-avx512", "znver3"):
        for act_bits in (8, 32):
            spec = LinearSpec(64, 64, bcq.scheme_of(3, 32, act_bits))
            plan = choose(spec, linear_kernels(), find_profile(target), "layer")
            kinds = [KERNELS[choice.kernel].kind for choice in plan]
            assert kinds[-1] == ("lut" if act_bits == 8 else "gemm")
            assert set(kinds[:-1]) <= {"lut"}
            assert act_bits == 8 or plan[-1].m_min == 32
