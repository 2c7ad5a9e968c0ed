"""Random linear layers, a float64 reference, and a way to run a kernel record on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from built import aligned, built

from apq_tvm.codegen.layouts import FloatLayout, InterleavedLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.types import DeviceProfile, QuantizedTensor, Scheme

Array = Any

ACTIVATIONS = {
    "": lambda v: v,
    "relu": lambda v: np.maximum(v, 0),
    "gelu": lambda v: 0.5 * v * (1 + np.vectorize(math.erf)(v / math.sqrt(2))),
    "gelu_tanh": lambda v: 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    "tanh": np.tanh,
    "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    "silu": lambda v: v / (1 + np.exp(-v)),
    "relu6": lambda v: np.clip(v, 0, 6),
    "hardsigmoid": lambda v: np.clip(v / 6 + 0.5, 0, 1),
    "hardswish": lambda v: v * np.clip(v / 6 + 0.5, 0, 1),
}

RELATIVE_ERROR = 2e-6
"""Of float32 sums over a few hundred products, against the largest output."""


def quantized_weight(n: int, k: int, scheme: Scheme, rng: np.random.Generator) -> QuantizedTensor:
    """Random codes, scales and zero points."""
    groups = 1 if scheme.group_size == -1 else -(-k // scheme.group_size)
    top = 1 << scheme.bits
    zeros = rng.integers(0, top, (n, groups), dtype=np.uint8) if scheme.zero_points else None
    scales = rng.uniform(0.001, 0.02, (n, groups)).astype(np.float16)
    return QuantizedTensor(rng.integers(0, top, (n, k), dtype=np.uint8), scales, zeros, scheme)


def dequantized(weight: QuantizedTensor) -> Array:
    """float64 [N, K]."""
    scheme, k = weight.scheme, weight.codes.shape[1]
    width = k if scheme.group_size == -1 else scheme.group_size
    codes, scales = weight.codes.astype(np.float64), weight.scales.astype(np.float64)
    scales = np.repeat(scales, width, axis=1)[:, :k]
    if weight.zeros is not None:
        return (codes - np.repeat(weight.zeros.astype(np.float64), width, axis=1)[:, :k]) * scales
    if scheme.bits == 1:
        return (2 * codes - 1) * scales
    return (codes - (1 << (scheme.bits - 1))) * scales


def quantized_activations(
    x: Array, layout: InterleavedLayout, scheme: Scheme
) -> tuple[Array, Array, Array]:
    """(xq, xs, xsum) as the kernels take them."""
    m, k = x.shape
    padded = np.zeros((m, layout.padded_k(k)), np.float32)
    padded[:, :k] = x
    groups = 1 if scheme.act_group == -1 else layout.padded_groups(k)
    grouped = padded.reshape(m, groups, -1)
    scale = np.abs(grouped).max(-1, keepdims=True) / np.float32(127)
    codes = np.rint(np.divide(grouped, scale, where=scale > 0, out=np.zeros_like(grouped)))
    xq = np.clip(codes, -127, 127).astype(np.int8).reshape(m, -1)
    xsum = xq.reshape(m, layout.padded_groups(k), -1).sum(-1, dtype=np.int32)
    return xq, scale[..., 0].astype(np.float32), xsum


def profile_for(kernel: LinearKernel) -> DeviceProfile:
    """The smallest profile that has the kernel's instructions; skips if this machine has not."""
    host = find_profile("host")
    wanted = find_profile("x86-64" if kernel.instruction.lanes == 4 else "x86-64-v3")
    if kernel.instruction.lacks(wanted.features):
        return host
    if not wanted.features <= host.features:
        pytest.skip(f"{host.name} is no {wanted.name}")
    return wanted


def build(kernel: LinearKernel, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
    """Compile one kernel; skips with the reason if it declines."""
    try:
        kernel.check(spec, profile)
    except NotApplicable as reason:
        pytest.skip(f"{kernel.name}: {reason}")
    return built(kernel.scheduled(kernel.choose(spec, profile, decide)), profile)


class Case:
    """One layer with its weights; `check` compares a compiled kernel with float64."""

    def __init__(self, spec: LinearSpec, layout: Any, seed: int = 0) -> None:
        self.spec, self.layout = spec, layout
        self._rng = np.random.default_rng(seed)
        self.bias = self._rng.normal(size=spec.n).astype(np.float32)
        if spec.scheme is None:
            assert isinstance(layout, FloatLayout)
            self.dense = self._rng.normal(size=(spec.n, spec.k)).astype(np.float32)
            packed = layout.pack(self.dense)
        else:
            weight = quantized_weight(spec.n, spec.k, spec.scheme, self._rng)
            self.dense = dequantized(weight)
            packed = layout.pack(weight)
        self._packed = [aligned(array) for array in packed.arrays.values()]

    def activations(self, x: Array) -> tuple[list[Array], Array]:
        """The kernel's activation operands, and the float64 values they stand for."""
        scheme = self.spec.scheme
        if scheme is None or scheme.act_bits != 8:
            return [x], x.astype(np.float64)
        xq, xs, xsum = quantized_activations(x, self.layout, scheme)
        values = xq.reshape(*xs.shape, -1).astype(np.float64) * xs[..., None]
        return [xq, xs, xsum], values.reshape(len(x), -1)[:, : self.spec.k]

    def check(self, kernel: Any, m: int) -> None:
        """Compare a kernel that was built for this machine."""

        def run(operands: list[Array], extra: list[Array], y: Array) -> Array:
            kernel(*operands, *self._packed, *extra, y)
            return y

        self.compare(run, m)

    def compare(self, run: Callable[[list[Array], list[Array], Array], Array], m: int) -> None:
        """Compare what `run` makes of m rows: (activation operands, bias and residual, y) to y."""
        spec = self.spec
        x = self._rng.normal(size=(m, spec.k)).astype(np.float32)
        residual = self._rng.normal(size=(m, spec.n)).astype(np.float32)
        operands, values = self.activations(x)
        want = values @ self.dense.T
        largest = np.abs(want).max() + 1
        want = ACTIVATIONS[spec.activation](want + self.bias if spec.bias else want)
        want = want + residual if spec.residual else want
        extra = ([self.bias] if spec.bias else []) + ([residual] if spec.residual else [])
        y = run(operands, extra, np.full((m, spec.n), np.nan, np.float32))
        np.testing.assert_allclose(y, want, rtol=0, atol=RELATIVE_ERROR * largest)
