"""Layers whose weights are looked up, for tests of kernels on Arm."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from arm_tools import emulated, inner_loop, scheduled
from linear_cases import RELATIVE_ERROR

from apq_tvm.formats import dequantize, parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.schedules.arm.codebook import LOOKUP_KERNELS
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.types import DeviceProfile, QuantizedTensor, Scheme


def loop_of(source: str, mnemonic: str) -> str:
    """The inner loop with most of an instruction, up to its branch back."""
    block = inner_loop(source, mnemonic)
    label = block.partition(":")[0]
    return re.split(rf"(?m)^\s+b\.ne\s+\.LBB{re.escape(label)}$", block)[0]


def scheme_of(name: str) -> Scheme:
    scheme = parse_scheme(name)
    assert isinstance(scheme, Scheme)
    return scheme


def record(name: str, m_tile: int, instruction: str = "sdot") -> LinearKernel:
    family = scheme_of(name).family
    wanted = family, instruction, m_tile
    return next(k for k in LOOKUP_KERNELS if (k.family, k.instruction.name, k.m_tile) == wanted)


@cache
def quantized(name: str, n: int, k: int) -> QuantizedTensor:
    w = np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)
    return quantize_tensor(w, scheme_of(name))


class Layer:
    """A layer's kernel and its preparation as programs under qemu."""

    def __init__(
        self,
        kernel: LinearKernel,
        tensor: QuantizedTensor,
        profile: DeviceProfile,
        folder: Path,
        cpu: str = "max",
        **epilogue: Any,
    ) -> None:
        n, k = tensor.codes.shape
        self.spec = LinearSpec(n, k, tensor.scheme, **epilogue)
        self.layout: Any = kernel.layout(self.spec, profile)
        self._packed = list(self.layout.pack(tensor).arrays.values())
        self._weight = dequantize(tensor).astype(np.float64)
        preparation = kernel.prepare(kernel.choose(self.spec, profile, Defaults()))
        assert preparation is not None
        prepare, _ = schedule_preparation(preparation, preparation.func, profile, Defaults())
        self._prepare = emulated(prepare, profile, folder)
        self._multiply = emulated(scheduled(kernel, self.spec, profile), profile, folder, cpu)

    def check(self, x: Any) -> None:
        """Compare with the decoded weights times what the activations' codes mean."""
        spec, rng, m = self.spec, np.random.default_rng(1), len(x)
        kp, groups = self.layout.padded_k(spec.k), self.layout.groups(spec.k)
        xq = np.zeros((m, kp), np.int8)
        xs, xsum = np.zeros((m, groups), np.float32), np.zeros((m, groups), np.int32)
        extra = np.zeros((m, groups, 8), np.float32)
        self._prepare(x, xq, xs, xsum, extra)
        grouped = np.zeros((m, kp), np.float64)
        grouped[:, : spec.k] = x
        scales = np.abs(grouped.reshape(m, groups, -1)).max(-1, keepdims=True) / 127
        meant = (xq.reshape(m, groups, -1) * scales).reshape(m, -1)
        assert np.abs(meant - grouped).max() <= 0.51 * scales.max()
        want = meant[:, : spec.k] @ self._weight.T
        more: list[Any] = []
        if spec.bias:
            more.append(rng.standard_normal(spec.n).astype(np.float32))
            want = np.maximum(want + more[0], 0)
        if spec.residual:
            more.append(rng.standard_normal(want.shape).astype(np.float32))
            want = want + more[-1]
        largest = np.abs(want).max()
        y = np.full((m, spec.n), np.nan, np.float32)
        self._multiply(xq, xs, xsum, extra, *self._packed, *more, y)
        assert np.abs(y - want).max() <= RELATIVE_ERROR * largest
