"""Arm kernels with folded activations under qemu: the same numbers as float64, and how accurate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_tools import emulated, needs_qemu, rounding
from linear_cases import ACTIVATIONS, RELATIVE_ERROR, dequantized, quantized_weight

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.few_rows.folded import chunk_units, fold_of
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.gemv import SDOT_KERNELS
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.tensorize.meaning.spans.fold import Fold
from apq_tvm.types import QuantizedTensor, Scheme

Array = Any


def kernel_of(bits: int, m_tile: int) -> LinearKernel:
    return next(k for k in SDOT_KERNELS if (k.bits, k.m_tile) == (bits, m_tile))


class Layer:
    """One layer compiled for a target: preparation and kernel."""

    def __init__(self, spec: LinearSpec, m_tile: int, target: str, folder: Path) -> None:
        assert spec.scheme is not None
        profile, decide = find_profile(target, layout="4x4"), Defaults()
        kernel = kernel_of(spec.scheme.bits, m_tile)
        kernel.check(spec, profile)
        choice = kernel.choose(spec, profile, decide)
        preparation = kernel.prepare(choice)
        assert preparation is not None
        prepare, name = schedule_preparation(preparation, preparation.func, profile, decide)
        assert name == "aarch64_fold_activations"
        self.spec, self.layout = spec, kernel.layout(spec, profile)
        self.copies = int(choice["copies"])
        self._kernel = emulated(kernel.scheduled(choice), profile, folder)
        self._prepare = emulated(prepare, profile, folder)

    @property
    def fold(self) -> Fold:
        return fold_of(self.layout)

    def prepared(self, x: Array) -> tuple[Array, Array, Array]:
        m, k = x.shape
        padded = self.layout.padded_k(k)
        chunks = padded // 32 // chunk_units(self.layout, k)
        xq = np.zeros((m, padded), np.int8)
        starts = np.zeros((m, chunks, self.copies, 8), np.float32)
        factors = np.zeros((m, chunks, self.fold.factors), np.float32)
        self._prepare(x, xq, starts, factors)
        return xq, starts, factors

    def activations(self, xq: Array, factors: Array) -> tuple[Array, Array]:
        """What prepared activations stand for, float64 [M, K], and their scales."""
        m, k = len(xq), self.spec.k
        parts = xq.reshape(m, -1, self.fold.parts, 32 // self.fold.parts).astype(np.float64)
        for part in reversed(range(self.fold.parts - 1)):
            parts[:, :, part] += parts[:, :, part + 1] * 2.0**-self.fold.width
        scales = factors[:, :, 0].astype(np.float64) * 2.0**self.fold.shift
        values = parts.reshape(m, scales.shape[1], -1) * scales[..., None]
        return values.reshape(m, -1)[:, :k], scales

    def run(self, x: Array, weight: QuantizedTensor, *extra: Array) -> Array:
        packed = self.layout.pack(weight).arrays.values()
        y = np.full((len(x), self.spec.n), np.nan, np.float32)
        self._kernel(*self.prepared(x), *packed, *extra, y)
        return y


CASES = (
    # scheme, N, K, M tile, rows of x, target
    (Scheme(4, group_size=32), 35, 100, 1, (1, 2), "graviton2"),
    (Scheme(4, group_size=64), 16, 128, 4, (4, 5), "graviton3"),
    (Scheme(4, True, group_size=32), 12, 64, 2, (3,), "graviton4"),
    (Scheme(4, True, 8, True, group_size=128), 20, 250, 1, (1,), "cortex-a55"),
    (Scheme(4, group_size=256), 8, 300, 1, (1,), "graviton3"),
    (Scheme(2, group_size=32), 33, 95, 1, (2,), "cortex-a55"),
    (Scheme(8, group_size=32), 9, 64, 1, (1,), "graviton3"),
    (Scheme(8, True), 12, 33, 4, (4,), "cortex-a76"),
    (Scheme(1, group_size=32), 16, 64, 1, (1,), "graviton2"),
    (Scheme(3, group_size=32), 16, 70, 2, (2,), "armv8.2-dotprod"),
    (Scheme(6, group_size=128), 8, 128, 1, (1,), "armv8.6-i8mm"),
    (Scheme(7, True), 8, 32, 1, (1,), "cortex-a78"),
    # written assembly: one, two and three chunks more than the first; an iteration takes two of W4
    (Scheme(4, group_size=32), 16, 64, 1, (2,), "cortex-a55"),
    (Scheme(4, group_size=32), 32, 90, 1, (1,), "cortex-a55"),
    (Scheme(4, group_size=32), 16, 256, 1, (1,), "cortex-a55"),
    (Scheme(2, group_size=32), 32, 96, 1, (1,), "cortex-a55"),
    (Scheme(4, group_size=64), 16, 180, 1, (2,), "cortex-a55"),
    (Scheme(4, group_size=128), 32, 256, 1, (1,), "cortex-a55"),
    (Scheme(4, group_size=128), 16, 512, 1, (1,), "cortex-a55"),
    (Scheme(5, True, group_size=64), 20, 200, 1, (1,), "graviton2"),
    (Scheme(5, group_size=128), 8, 256, 4, (5,), "graviton3"),
)


MAKE_TEST = (0, 1, 2, 3, 5, 6, 8, 9, 13, 17, 19)
"""Cases of every code width's way to be read, and of assembly written and not."""


@pytest.mark.few(4)
@needs_qemu
@pytest.mark.parametrize(
    "case",
    [
        i if i in MAKE_TEST else pytest.param(i, marks=pytest.mark.all_cases)
        for i in range(len(CASES))
    ],
)
def test_formats_and_tails(case: int, tmp_path: Path) -> None:
    scheme, n, k, m_tile, rows, target = CASES[case]
    rng = np.random.default_rng(case)
    layer = Layer(LinearSpec(n, k, scheme), m_tile, target, tmp_path)
    weight = quantized_weight(n, k, scheme, rng)
    weight.scales[::3] *= -1
    for m in rows:
        x = rng.normal(size=(m, k)).astype(np.float32)
        x[0, :5] *= 30
        xq, _, factors = layer.prepared(x)
        values, scales = layer.activations(xq, factors)
        assert np.abs(xq.astype(int)).max() == 127
        want = values @ dequantized(weight).T
        bound = rounding(layer.fold, weight, scales) + RELATIVE_ERROR * (1 + np.abs(want).max())
        assert (np.abs(layer.run(x, weight) - want) <= bound).all()
        # every activation is rounded once: within half a step of what it was
        per_step = np.repeat(scales, -(-xq.shape[1] // scales.shape[1]), axis=1)[:, :k]
        assert (np.abs(values - x) <= 0.5001 * per_step).all()


@needs_qemu
def test_epilogue(tmp_path: Path) -> None:
    spec = LinearSpec(18, 64, Scheme(4, group_size=32), True, "gelu_tanh", True)
    rng = np.random.default_rng(1)
    layer = Layer(spec, 1, "graviton3", tmp_path)
    weight = quantized_weight(18, 64, spec.scheme, rng)  # type: ignore[arg-type]
    x, residual = (rng.normal(size=(3, c)).astype(np.float32) for c in (64, 18))
    bias = rng.normal(size=18).astype(np.float32)
    xq, _, factors = layer.prepared(x)
    values, scales = layer.activations(xq, factors)
    want = ACTIVATIONS["gelu_tanh"](values @ dequantized(weight).T + bias) + residual
    # gelu is no steeper than 1.13
    bound = 1.13 * rounding(layer.fold, weight, scales) + 1e-5
    assert (np.abs(layer.run(x, weight, bias, residual) - want) <= bound).all()


@needs_qemu
def test_zeros_infinities_and_extremes(tmp_path: Path) -> None:
    scheme = Scheme(4, group_size=32)
    layer = Layer(LinearSpec(8, 64, scheme), 1, "graviton2", tmp_path)
    codes = np.zeros((8, 64), np.uint8)
    codes[4:] = 15
    weight = QuantizedTensor(codes, np.full((8, 2), 6e-8, np.float16), None, scheme)
    x = np.zeros((7, 64), np.float32)
    x[1], x[2], x[3, ::2], x[3, 1::2] = 1e30, -1e-20, 5.0, -5.0
    x[4, 3], x[5, 40], x[6, 33] = np.nan, np.inf, 1e-31
    y = layer.run(x, weight)
    assert (y[0] == 0).all() and (y[6] == 0).all()
    assert not np.isfinite(y[4:6]).any()
    values, scales = layer.activations(*(layer.prepared(x[1:4])[i] for i in (0, 2)))
    want = values @ dequantized(weight).T
    largest = np.abs(want).max(1, keepdims=True)
    bound = rounding(layer.fold, weight, scales) + RELATIVE_ERROR * largest
    assert (np.abs(y[1:4] - want) <= bound).all()


def test_what_it_declines() -> None:
    kernel = kernel_of(4, 1)
    with pytest.raises(NotApplicable, match="dotprod"):
        kernel.check(LinearSpec(8, 64, Scheme(4, group_size=32)), find_profile("cortex-a72"))
    with pytest.raises(NotApplicable, match="8 bits"):
        scheme = Scheme(4, act_bits=4, group_size=32)
        kernel.check(LinearSpec(8, 64, scheme), find_profile("graviton2"))
    with pytest.raises(NotApplicable, match="32 codes"):
        kernel.check(LinearSpec(8, 64, Scheme(4, group_size=16)), find_profile("graviton2"))
