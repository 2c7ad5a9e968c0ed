"""Any-precision kernels whose activations have groups: every width, ragged K, what prepares x."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from built import aligned, built
from test_anyprec import (
    compiled,
    integer_weights,
    kernel_of,
    profile_for,
    random_tensor,
    same_halves,
)

from apq_tvm.formats import details
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.x86.anyprec import ANYPREC_KERNELS, APART_KERNELS, M_TILES, STRIDED_KERNELS
from apq_tvm.tensorize.meaning.planes import QUAD
from apq_tvm.tensorize.pairs.planes import PlanesInstruction
from apq_tvm.tensorize.x86.planes import INSTRUCTIONS
from apq_tvm.types import DeviceProfile, QuantizedTensor

Array = Any

RELATIVE_ERROR = 3e-6
"""Of float32 sums over some hundred columns, of offset weights on AVX-512, against the largest
output."""

CODES_ERROR = 1e-5
"""Of a code before it is rounded: float32 of x times the inverse of a scale."""

CASES = ((16, 576, 1, 32), (17, 384, 4, 128), (5, 96, 32, 64), (9, 80, 8, 16), (11, 40, 2, 256))
"""N, K, channels, group: K no multiple of the group, less than one, of whole units, half ones."""


def in_order(kernel: LinearKernel, spec: LinearSpec, codes: Array, scales: Array) -> Any:
    """Codes and scales in the order of K, where the kernel's are turned."""
    assert spec.scheme is not None
    quads, group = np.arange(scales.shape[1]), spec.scheme.act_group // QUAD
    if kernel in STRIDED_KERNELS.values():
        lanes = (64 if "vpermb" in kernel.name else 32) // 4
        for first in range(0, spec.k // QUAD // (lanes * group) * lanes * group, lanes * group):
            span = slice(first, first + lanes * group)
            quads[span] = first + np.arange(lanes * group).reshape(group, lanes).T.reshape(-1)
    codes = codes.reshape(len(codes), -1, QUAD)[:, quads].reshape(len(codes), -1)
    return codes, scales[:, quads]


def prepared(
    kernel: LinearKernel, spec: LinearSpec, profile: DeviceProfile, x: Array
) -> tuple[Array, Array, Array]:
    """(xq, xs, xsum) of the kernel's own preparation, against what the scheme says."""
    scheme = spec.scheme
    assert scheme is not None
    preparation = kernel.prepare(kernel.choose(spec, profile, Defaults()))
    assert preparation is not None
    func, _ = schedule_preparation(preparation, preparation.func, profile, Defaults())
    run = built(func, profile)
    group = scheme.act_group
    kp = -(-spec.k // max(32, group)) * max(32, group)
    m = len(x)
    codes, scales, sums = (
        np.full((m, width), 77, dtype)
        for width, dtype in ((kp, "int8"), (kp // QUAD, "float32"), (1, "float32"))
    )
    run(x, codes, scales, sums)
    given = codes, scales, sums
    codes, scales = in_order(kernel, spec, codes, scales)
    padded = np.zeros((m, kp), np.float32)
    padded[:, : spec.k] = x
    parts = padded.reshape(m, -1, group)
    most = 2 ** (scheme.act_bits - 1) - 1
    scale = np.abs(parts).max(2, keepdims=True) / np.float32(most)
    np.testing.assert_allclose(scales, np.repeat(scale[..., 0], group // QUAD, 1), rtol=1e-6)
    exact = np.divide(parts, scale, out=np.zeros_like(parts), where=scale > 0).reshape(m, kp)
    assert np.abs(codes - exact).max() <= 0.5 + CODES_ERROR * most
    meant = codes.astype(np.float64) * np.repeat(scales, QUAD, 1)
    np.testing.assert_allclose(sums[:, 0], meant.sum(1), atol=1e-5 * np.abs(meant).sum(1).max())
    return given


def check(
    kernel: LinearKernel, tensor: QuantizedTensor, rows: tuple[int, ...], epilogue: bool
) -> None:
    (n, k), profile = tensor.codes.shape, profile_for(kernel)
    activation = "relu" if epilogue else ""
    spec = LinearSpec(n, k, tensor.scheme, epilogue, activation, epilogue, details(tensor))
    run = compiled(kernel, spec, profile)
    packed = [aligned(a) for a in kernel.layout(spec, profile).pack(tensor).arrays.values()]
    weight, rng = integer_weights(tensor, kernel.width), np.random.default_rng(n + k)
    for m in rows:
        x = rng.normal(size=(m, k)).astype(np.float32)
        x[:, k // 3] *= 50  # one column that a whole token's scale would suffer from
        xq, xs, xsum = prepared(kernel, spec, profile, x)
        bias = rng.normal(size=n).astype(np.float32)
        residual = rng.normal(size=(m, n)).astype(np.float32)
        codes, scales = in_order(kernel, spec, xq, xs)
        meant = codes.astype(np.float64) * np.repeat(scales, QUAD, 1)
        want = meant[:, :k] @ weight.T
        largest = np.abs(want).max() + 1
        want = np.maximum(want + bias, 0) + residual if epilogue else want
        extra = [bias, residual] if epilogue else []
        y = tvm.runtime.tensor(np.full((m, n), np.nan, np.float32))
        operands = [tvm.runtime.tensor(a) for a in (xq, xs, xsum)]
        run(*operands, *packed, *map(tvm.runtime.tensor, extra), y)
        np.testing.assert_allclose(y.numpy(), want, rtol=0, atol=RELATIVE_ERROR * largest)


@pytest.mark.few(3)
@pytest.mark.parametrize("kernel", ANYPREC_KERNELS, ids=lambda k: k.name)
def test_every_width(kernel: LinearKernel) -> None:
    """Kernels share out the shapes, groups and bits of activations."""
    n, k, channels, group = CASES[(kernel.width + kernel.m_tile) % len(CASES)]
    if kernel in STRIDED_KERNELS.values():
        k, group = 1184, (16, 32)[kernel.width % 2]  # spans, stretches and half a one
    if kernel in APART_KERNELS.values():  # whole registers; runs and what is left of them
        k = 1152
    bits = 8 if kernel.width % 3 else 5
    tensor = random_tensor(n, k, f"anyprec1-8sA{bits}g{group}", channels, kernel.width)
    rows = tuple(m for m in (1, 3, 4, 17) if m >= kernel.m_tile)
    check(kernel, tensor, rows, epilogue=kernel.width % 2 == 1)


@pytest.mark.parametrize(("n", "k", "channels", "group"), CASES[::2])
@pytest.mark.parametrize("kind", ("gemv", "gemm"))
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
def test_every_shape(
    instruction: PlanesInstruction, kind: str, n: int, k: int, channels: int, group: int
) -> None:
    kernel = kernel_of(kind, 4, instruction.name)
    tensor = random_tensor(n, k, f"anyprec2-6sA8g{group}", channels)
    check(kernel, tensor, (max(kernel.m_tile, 3),), epilogue=True)


@pytest.mark.parametrize("k", (32, 64))
@pytest.mark.parametrize("group", (16, 32, 64))
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
def test_instructions_do_what_they_mean(instruction: PlanesInstruction, group: int, k: int) -> None:
    """At the extremes: centroids and activations of ±127; scales of powers of 2 keep sums exact."""
    if not set(instruction.features) <= find_profile("host").features:
        pytest.skip(f"this CPU has not {instruction.features}")
    rng, bits, tables = np.random.default_rng(group + k), 3, 4
    lanes, m = instruction.vector // 4, M_TILES[instruction][0]
    scales = np.repeat(2.0 ** rng.integers(-2, 3, (m, k // min(group, k))), min(group, k) // 4, 1)
    scales = scales.astype(np.float32)
    planes = rng.integers(0, 256, (bits, 1, k)).astype(np.uint8)
    table = (np.sign(rng.integers(-9, 9, (tables, 1 << bits))) * 127).astype(np.int8)
    x = (np.sign(rng.integers(-9, 9, (m, k))) * 127).astype(np.int8)
    dot = instruction.dot(instruction.step(bits, tables, k, group))
    start = rng.integers(-99, 99, (8, lanes)).astype(np.float32)
    same_halves(dot, [planes, table, x[0], scales[0]], start)
    w = (rng.integers(-127, 128, (2, k)) + instruction.offset).astype(np.uint8)
    rows = instruction.rows(instruction.step(1, 1, k, group), m, 2)
    same_halves(rows, [w, x, scales], rng.integers(-99, 99, (m, 2, lanes)).astype(np.float32))
