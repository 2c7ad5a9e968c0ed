"""Products of whole tiles (AMX): against their reference where there is AMX, and refusals."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gemm_cases import FLOAT32_SUM, build, problem, relative_error

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Random
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.thresholds import rows_of
from apq_tvm.schedules.x86.amx import AMX_KERNELS, even_part
from apq_tvm.schedules.x86.profiles import tiles_given
from apq_tvm.select import choose
from apq_tvm.tensorize.meaning.tile import Tile
from apq_tvm.tensorize.meaning.tile_registers import CONFIG, Registers
from apq_tvm.types import Scheme

PROFILE = find_profile("sapphirerapids")

needs_amx = pytest.mark.skipif(not tiles_given(), reason="this CPU has no AMX, or Linux keeps it")


def param(kernel: LinearKernel) -> Any:
    return pytest.param(kernel, id=kernel.name)


def whole_row(kernel: LinearKernel, zero_points: bool = False) -> Scheme:
    assert kernel.bits is not None
    return Scheme(kernel.bits, zero_points, 8)


def check(kernel: LinearKernel, spec: LinearSpec, ms: Any, decide: Any = None, **more: Any) -> None:
    kernel.check(spec, PROFILE)
    run = build(kernel, spec, PROFILE, decide)
    for m in ms:
        arrays, want = problem(kernel, spec, PROFILE, m, **more)
        run(*arrays)
        assert relative_error(arrays[-1], want) < FLOAT32_SUM, f"M={m}"


@needs_amx
@pytest.mark.few(6)
@pytest.mark.parametrize("kernel", [param(k) for k in AMX_KERNELS])
def test_matches_the_reference(kernel: LinearKernel) -> None:
    """N: a ragged vector, and panels that share columns. Codes at their ends: no sum saturates."""
    m = kernel.m_tile
    zeros = kernel.bits in (3, 8)
    spec = LinearSpec(101, 150, whole_row(kernel, zeros), True, "relu", True)
    check(kernel, spec, (m, m + 1, 8 * m, 8 * m + 5))
    check(kernel, LinearSpec(32, 1024, whole_row(kernel, True)), (m,), extreme=True)


EDGES = ((1, 1), (16, 31), (17, 352), (33, 96), (48, 544), (64, 4608), (80, 8224))
"""N and K: one vector; steps of 32, 44, 48, 32 and 64 k; several blocks of K, and one too long."""


@needs_amx
@pytest.mark.few(2)
@pytest.mark.parametrize("kernel", [param(k) for k in AMX_KERNELS if k.bits in (4, 8)])
def test_edges(kernel: LinearKernel) -> None:
    for n, k in EDGES:
        check(kernel, LinearSpec(n, k, whole_row(kernel)), (kernel.m_tile + 3,))


@needs_amx
@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_decisions(seed: int) -> None:
    for kernel in AMX_KERNELS[-2:]:
        check(kernel, LinearSpec(77, 2560, whole_row(kernel), True), (70,), Random(seed))


@pytest.mark.parametrize("kernel", [param(k) for k in AMX_KERNELS if k.bits in (1, 8)])
def test_plain_loops_mean_the_same_on_any_machine(kernel: LinearKernel) -> None:
    spec = LinearSpec(19, 70, whole_row(kernel), True)
    run = build(kernel, spec, PROFILE, on=find_profile("x86-64"))
    assert "tdp" not in run.assembly
    arrays, want = problem(kernel, spec, PROFILE, kernel.m_tile + 1)
    run(*arrays)
    assert relative_error(arrays[-1], want) < FLOAT32_SUM


@pytest.mark.parametrize("kernel", [param(k) for k in AMX_KERNELS if k.bits == 8])
def test_shapes_are_set_and_given_back_around_the_products(kernel: LinearKernel) -> None:
    assembly = build(kernel, LinearSpec(96, 256, whole_row(kernel)), PROFILE).assembly
    found = re.findall(r"^\s+(ldtilecfg|tilezero|tdpbsud|tilestored|tilerelease)", assembly, re.M)
    kinds = list(dict.fromkeys(found))
    assert kinds == ["ldtilecfg", "tilezero", "tdpbsud", "tilestored", "tilerelease"]


def test_descriptions_of_registers() -> None:
    """Against the layout of the SDM, volume 1, 18.2: palette, bytes of a row, rows."""
    config = np.frombuffer(Registers(Tile(32, 2, 16, 96)).description, np.uint8)
    assert len(config) == CONFIG and config[0] == 1 and not config[1:16].any()
    widths, rows = config[16:32].view(np.uint16), config[48:56]
    assert widths.tolist() == [64, 64, 64, 64, 48, 48, 64, 64]
    assert rows.tolist() == [16, 16, 16, 16, 16, 16, 12, 12]
    assert not config[32:48].any() and not config[56:].any()


def test_parts_of_k_divide_it() -> None:
    assert even_part(4608, 4096) == 2304
    assert even_part(4096, 4096) == 4096
    assert even_part(32 * 149, 4096) == 32 * 149  # prime: nothing between a quarter and the whole


def test_declines_with_a_reason() -> None:
    kernel = AMX_KERNELS[-1]
    with pytest.raises(NotApplicable, match="one scale a row"):
        kernel.check(LinearSpec(64, 64, Scheme(8, act_bits=8, group_size=32)), PROFILE)
    with pytest.raises(NotApplicable, match="amx-int8, which icelake-server lacks"):
        kernel.check(LinearSpec(64, 64, whole_row(kernel)), find_profile("icelake-server"))
    assert not kernel.is_for(LinearSpec(64, 64, None))


def test_few_rows_stay_with_vectors() -> None:
    spec = LinearSpec(64, 64, Scheme(8, act_bits=8))
    chosen = choose(spec, linear_kernels(PROFILE), PROFILE, "layer")
    kernels = {kernel.name: kernel for kernel in linear_kernels(PROFILE)}
    found = [(c.m_min, kernels[c.kernel].instruction.name) for c in chosen]
    assert found[-2:] == [(16, "tdpbsud"), (32, "tdpbsud")]
    assert all(m < 16 and name != "tdpbsud" for m, name in found[:-2])
    assert rows_of(AMX_KERNELS[-1], spec, PROFILE) == (16, 31)
