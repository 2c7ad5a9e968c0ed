"""8-bit codes of which no two neighbours exceed 152 together, by ``vpmaddubsw``: exact."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gemm_cases import FLOAT32_SUM, build, dequantized, relative_error
from linear_cases import ACTIVATIONS

from apq_tvm.errors import NotApplicable
from apq_tvm.formats import details
from apq_tvm.formats.integer import PAIR_INPUT, PAIR_MOST, PAIR_SUM, row_sums
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Random
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.x86.pairs import PAIR_GEMM, PAIR_KERNELS
from apq_tvm.types import QuantizedTensor, Scheme
from tests.conftest import cpu_features

ZEN3, W8A8 = find_profile("znver3"), Scheme(8, act_bits=8)


def tensor_of(n: int, k: int, rng: np.random.Generator) -> QuantizedTensor:
    """Random pairs, the largest that there are among them."""
    sizes = rng.integers(0, 129, (n, k + k % 2))
    left = np.minimum(PAIR_MOST - sizes[:, 0::2], 127)
    sizes[:, 1::2] = np.minimum(sizes[:, 1::2], left)
    sizes[::3, 1::2] = left[::3]
    signs = np.where(rng.random((n, 1)) < 0.3, 1, rng.choice([-1, 1], sizes.shape))
    codes = np.minimum(sizes * signs, 127)[:, :k] + 128
    scales = (rng.random((n, 1)) * 0.01 + 0.001).astype(np.float16)
    return QuantizedTensor(codes.astype(np.uint8), scales, None, W8A8)


def check(
    n: int,
    k: int,
    ms: tuple[int, ...],
    activation: str = "",
    decide: Any = None,
    kernel: LinearKernel = PAIR_GEMM,
) -> None:
    if "avx2" not in cpu_features():
        pytest.skip("this CPU has no avx2")
    rng = np.random.default_rng(n + k)
    tensor = tensor_of(n, k, rng)
    more = bool(activation)
    spec = LinearSpec(n, k, W8A8, more, activation, more, details(tensor), asymmetric=True)
    kernel.check(spec, ZEN3)
    run = build(kernel, spec, ZEN3, decide)
    layout = kernel.layout(spec, ZEN3)
    for m in ms:
        codes = rng.integers(1, PAIR_INPUT + 1, (m, layout.padded_k(k)), dtype=np.uint8)
        codes[::2] = PAIR_INPUT
        xs = rng.standard_normal((m, 2)).astype(np.float32)
        x = codes[:, :k] * xs[:, :1].astype(np.float64) + xs[:, 1:]
        want = x @ dequantized(tensor).T
        arrays = [codes.view(np.int8), xs, *layout.pack(tensor).arrays.values()]
        arrays.append(row_sums(tensor))
        if more:
            bias = rng.standard_normal(n).astype(np.float32)
            residual = rng.standard_normal((m, n)).astype(np.float32)
            want = ACTIVATIONS[activation](want + bias) + residual
            arrays += [bias, residual]
        arrays.append(np.full((m, n), np.nan, np.float32))
        run(*arrays)
        assert relative_error(arrays[-1], want) < FLOAT32_SUM, f"M={m}"


@pytest.mark.parametrize("kernel", PAIR_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (7, 31), (8, 32), (17, 33), (48, 129), (101, 150), (33, 1300)]
)
def test_edges(n: int, k: int, kernel: LinearKernel) -> None:
    least = kernel.m_tile
    check(n, k, (least, least + 1, 21), kernel=kernel)


def test_edges_of_m_with_all_that_follows() -> None:
    check(50, 96, (*range(5, 14), 127, 330), "relu")


@pytest.mark.parametrize("kernel", PAIR_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("seed", range(4))
def test_random_decisions(seed: int, kernel: LinearKernel) -> None:
    check(77, 640, (kernel.m_tile, 70), "gelu", Random(seed), kernel)


@pytest.mark.parametrize("kernel", PAIR_KERNELS, ids=lambda kernel: kernel.name)
def test_inner_loop_is_the_instruction(kernel: LinearKernel) -> None:
    spec = LinearSpec(96, 256, W8A8, details=((PAIR_SUM, PAIR_MOST),), asymmetric=True)
    assembly = build(kernel, spec, ZEN3).assembly
    assert len(re.findall(r"vpmaddubsw\s.*ymm", assembly)) >= 8
    assert "psign" not in assembly


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (LinearSpec(8, 64, W8A8, asymmetric=True), "more than 152 together"),
        (LinearSpec(8, 64, W8A8, details=((PAIR_SUM, PAIR_MOST),)), "one scale a row"),
        (LinearSpec(8, 64, Scheme(8, True, 8), asymmetric=True), "one scale a row"),
    ],
)
def test_declines_with_a_reason(spec: LinearSpec, why: str) -> None:
    with pytest.raises(NotApplicable, match=why):
        PAIR_GEMM.check(spec, ZEN3)


def test_vnni_is_faster() -> None:
    spec = LinearSpec(8, 64, W8A8, details=((PAIR_SUM, PAIR_MOST),), asymmetric=True)
    for kernel in PAIR_KERNELS:
        with pytest.raises(NotApplicable, match="vpdpbusd"):
            kernel.check(spec, find_profile("znver4"))
