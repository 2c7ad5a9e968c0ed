"""Weights in runs of 8 k (4x8, 8x8) under qemu: the kernels that store no panel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_tools import emulated, needs_qemu, rounding
from linear_cases import ACTIVATIONS, RELATIVE_ERROR, dequantized, quantized_weight

from apq_tvm.bench.arm.layer import outputs
from apq_tvm.errors import NotApplicable
from apq_tvm.formats import parse_scheme
from apq_tvm.ops.activations.paired import activation_bytes
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.paired import PAIRED_KERNELS
from apq_tvm.schedules.decide import Recorded
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.tensorize.meaning.spans.fold import Fold
from apq_tvm.types import QuantizedTensor

Array = Any

I8MM = "armv8.6-i8mm"


class Layer:
    """One layer compiled for 4x8 or 8x8: preparation and kernel."""

    def __init__(
        self, name: str, spec: LinearSpec, folder: Path, choices: dict[str, object]
    ) -> None:
        kernel = next(kernel for kernel in PAIRED_KERNELS if kernel.name == name)
        layout = f"{kernel.instruction.lanes}x{kernel.run}"
        profile, decide = find_profile(I8MM, layout=layout), Recorded(choices)
        kernel.check(spec, profile)
        choice = kernel.choose(spec, profile, decide)
        preparation = kernel.prepare(choice)
        assert preparation is not None
        self.spec, self.layout, self._func = spec, kernel.layout(spec, profile), preparation.func
        self.m_tile = kernel.m_named
        raw = self.layout.unit
        assert raw.run == 8
        self.fold = Fold(raw, self.layout.zero_points, bool(choice.decisions.get("unfolded")))
        self._kernel = emulated(kernel.scheduled(choice), profile, folder)
        scheduled, _ = schedule_preparation(preparation, preparation.func, profile, decide)
        self._prepare = emulated(scheduled, profile, folder)

    def run(self, x: Array, weight: QuantizedTensor, *extra: Array) -> tuple[Array, Array, Array]:
        """The result, what the prepared activations stand for, and their scales by chunk."""
        prepared = outputs(self._func, 1, len(x))
        for array in prepared:
            array.view(np.uint8)[...] = 0x7F  # what is not written shows
        self._prepare(x, *prepared)
        y = np.full((len(x), self.spec.n), np.nan, np.float32)
        self._kernel(*prepared, *self.layout.pack(weight).arrays.values(), *extra, y)
        return y, *self._meaning(prepared[0], prepared[2], len(x))

    def _meaning(self, xq: Array, factors: Array, m: int) -> tuple[Array, Array]:
        padded = self.layout.padded_k(self.spec.k)
        if self.m_tile == 1:
            assert xq.shape == (m, activation_bytes(padded, 1))
            both = xq[:, : 2 * padded].reshape(m, -1, 2, 8)
            assert not both[:, :, 0].any() and not xq[:, 2 * padded :].any()
            rows, scales = both[:, :, 1].reshape(m, padded), factors[:, :, 0]
        else:
            order = [min(row - row % 2, m - 2) + row % 2 for row in range(2 * len(xq))]
            pairs = xq.reshape(len(xq), -1, 2, 8).transpose(0, 2, 1, 3)
            rows, scales = np.empty((m, padded), np.int8), np.empty((m, factors.shape[1]))
            rows[order] = pairs.reshape(len(order), padded)
            scales[order] = factors[:, :, [0, 2]].transpose(0, 2, 1).reshape(len(order), -1)
        parts = rows.reshape(m, -1, self.fold.parts, 32 // self.fold.parts).astype(np.float64)
        for part in reversed(range(self.fold.parts - 1)):
            parts[:, :, part] += parts[:, :, part + 1] * 2.0**-self.fold.width
        scales = scales.astype(np.float64) * 2.0**self.fold.shift
        values = parts.reshape(m, scales.shape[1], -1) * scales[..., None]
        return values.reshape(m, -1)[:, : self.spec.k], scales


CASES: tuple[tuple[str, str, int, int, tuple[int, ...], dict[str, object]], ...] = (
    # kernel, scheme, N, K, rows of x, decisions
    ("gemv_W4A8_smmla_r4k8m1", "W4A8g32", 35, 100, (1, 2), {}),
    ("gemv_W4A8_smmla_r4k8m1", "W4zA8tg128", 20, 250, (1,), {"streams": 2}),
    ("gemv_W4A8_smmla_r4k8m1", "W4zA8g128", 32, 250, (2,), {}),
    ("gemv_W4A8_smmla_r4k8m2", "W4A8g32", 35, 100, (2, 3), {}),
    ("gemv_W4A8_smmla_r4k8m2", "W4A8g32", 16, 96, (2,), {"unfolded": True, "own": False}),
    ("gemv_W4A8_smmla_r4k8m4", "W4zA8g32", 18, 100, (3, 4, 5), {}),
    ("gemv_W4A8_smmla_r4k8m4", "W4A8tg64", 16, 128, (4,), {"unfolded": False}),
    ("gemv_W4A8_smmla_r4k8m8", "W4A8g32", 21, 70, (7, 8, 17), {}),
    ("gemv_W4A8_smmla_r4k8m8", "W4zA8g128", 8, 300, (9,), {"own": False}),
    ("gemv_W2A8_smmla_r4k8m1", "W2A8g32", 33, 95, (2,), {}),
    ("gemv_W2A8_smmla_r4k8m8", "W2zA8tg64", 12, 130, (8,), {}),
    ("gemv_W3A8_smmla_r4k8m1", "W3A8g32", 16, 70, (1,), {}),
    ("gemv_W3A8_smmla_r4k8m4", "W3zA8g64", 9, 70, (6,), {}),
    ("gemv_W8A8_smmla_r4k8m1", "W8A8", 21, 333, (1,), {}),
    ("gemv_W8A8_smmla_r4k8m8", "W8zA8g32", 12, 64, (8,), {}),
    ("gemv_W4A8_smmla_r8k8m1", "W4A8g32", 35, 100, (1,), {}),
    ("gemv_W4A8_smmla_r8k8m2", "W4zA8g64", 19, 128, (2, 3), {}),
    ("gemv_W4A8_smmla_r8k8m4", "W4A8tg32", 17, 100, (5,), {}),
    ("gemv_W4A8_smmla_r8k8m8", "W4zA8g32", 35, 100, (7, 9), {}),
    ("gemv_W8A8_smmla_r8k8m8", "W8A8", 27, 290, (8,), {}),
    ("gemv_W2A8_smmla_r8k8m8", "W2zA8tg64", 36, 130, (8,), {}),
    ("gemv_W2A8_smmla_r8k8m4", "W2zA8g32", 24, 64, (4,), {}),
    ("gemv_W8A8_smmla_r8k8m1", "W8zA8", 12, 200, (1,), {}),
    ("gemv_W8A8_smmla_r8k8m1", "W8A8", 31, 256, (1,), {}),
    ("gemv_W2A8_smmla_r8k8m1", "W2zA8tg128", 32, 256, (1,), {}),
)


@pytest.mark.few(5)
@needs_qemu
@pytest.mark.parametrize("case", range(len(CASES)))
def test_formats_and_tails(case: int, tmp_path: Path) -> None:
    name, scheme, n, k, rows, choices = CASES[case]
    rng = np.random.default_rng(case)
    spec = LinearSpec(n, k, parse_scheme(scheme))
    layer = Layer(name, spec, tmp_path, choices)
    assert spec.scheme is not None
    weight = quantized_weight(n, k, spec.scheme, rng)
    weight.scales[::3] *= -1
    for m in rows:
        x = rng.normal(size=(m, k)).astype(np.float32)
        x[0, :5] *= 30
        y, values, scales = layer.run(x, weight)
        want = values @ dequantized(weight).T
        bound = rounding(layer.fold, weight, scales) + RELATIVE_ERROR * (1 + np.abs(want).max())
        assert (np.abs(y - want) <= bound).all()
        # every activation is rounded once: within half a step of what it was
        width = layer.layout.padded_k(k) // scales.shape[1]
        per_step = np.repeat(scales, width, axis=1)[:, :k]
        assert (np.abs(values - x) <= 0.5001 * per_step).all()


@needs_qemu
@pytest.mark.parametrize(
    ("name", "activation"),
    (("gemv_W4A8_smmla_r4k8m4", "relu"), ("gemv_W4A8_smmla_r8k8m1", "gelu_tanh")),
)
def test_epilogue(name: str, activation: str, tmp_path: Path) -> None:
    spec = LinearSpec(18, 64, parse_scheme("W4zA8g32"), True, activation, True)
    rng = np.random.default_rng(1)
    layer = Layer(name, spec, tmp_path, {})
    assert spec.scheme is not None
    weight = quantized_weight(18, 64, spec.scheme, rng)
    x, residual = (rng.normal(size=(5, c)).astype(np.float32) for c in (64, 18))
    bias = rng.normal(size=18).astype(np.float32)
    y, values, _ = layer.run(x, weight, bias, residual)
    want = ACTIVATIONS[activation](values @ dequantized(weight).T + bias) + residual
    assert np.abs(y - want).max() <= 1e-5


def test_what_they_decline() -> None:
    kernel = next(k for k in PAIRED_KERNELS if k.name == "gemv_W4A8_smmla_r4k8m1")
    spec = LinearSpec(8, 64, parse_scheme("W4A8g32"))
    with pytest.raises(NotApplicable, match="needs i8mm; graviton2 has none"):
        kernel.check(spec, find_profile("graviton2"))
    with pytest.raises(NotApplicable, match="is for weights in 4x8; --layout 8x8 was asked for"):
        kernel.check(spec, find_profile("graviton3", layout="8x8"))
    with pytest.raises(NotApplicable, match="is for weights in 4x8; on armv8"):
        kernel.check(spec, find_profile(I8MM))
