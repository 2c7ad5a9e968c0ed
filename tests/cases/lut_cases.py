"""Random layers of binary codes, tables in numpy, and a way to run the kernels on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from built import built
from linear_cases import ACTIVATIONS

from apq_tvm.errors import NotApplicable
from apq_tvm.formats import bcq
from apq_tvm.formats.arrays import group_count
from apq_tvm.ops.activations.lut_tables import span_width
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide, Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.x86.lut import LUT_KERNELS
from apq_tvm.types import DeviceProfile, QuantizedTensor, Scheme

Array = Any

SIGNS = (np.arange(16)[:, None] >> np.arange(4) & 1) * 2.0 - 1
"""[16, 4]: what every entry of a table adds up."""


def weights(n: int, k: int, scheme: Scheme, seed: int = 0) -> QuantizedTensor:
    """Random codes, scales and offsets."""
    rng = np.random.default_rng(seed)
    groups = group_count(k, scheme.group_size)
    return QuantizedTensor(
        rng.integers(0, 1 << scheme.bits, (n, k), dtype=np.uint8),
        rng.uniform(0.001, 0.02, (n, groups, scheme.bits)).astype(np.float16),
        None,
        scheme,
        {bcq.OFFSETS: rng.normal(scale=0.01, size=(n, groups)).astype(np.float16)},
    )


def tables(x: Array, padded_k: int, span: int) -> tuple[Array, Array, Array]:
    """(uint8 tables, scales, sums) of float32 x, in float64 but for the scales."""
    m, k = x.shape
    padded = np.zeros((m, padded_k), np.float32)
    padded[:, :k] = x
    quads = padded.reshape(m, -1, span // 4, 4)
    scale = np.abs(quads).sum(-1, dtype=np.float32).max(-1) / np.float32(127)  # [M, spans]
    sums = quads.astype(np.float64) @ SIGNS.T  # [M, spans, quads, 16]
    step = scale[..., None, None]
    rounded = np.rint(np.divide(sums, step, where=step > 0, out=np.zeros_like(sums)))
    return (rounded + 128).reshape(m, -1), scale, quads.sum((-1, -2), dtype=np.float64)


def kernel_of(instruction: str, bits: int, m_tile: int = 1) -> LinearKernel:
    wanted = (instruction, bits, m_tile)
    (found,) = (k for k in LUT_KERNELS if (k.instruction.name, k.bits, k.m_tile) == wanted)
    return found


def profile_of(kernel: LinearKernel) -> DeviceProfile:
    """A profile with the kernel's instructions; skips if this machine has none."""
    host = find_profile("host")
    wide = kernel.instruction.name in ("vpermb", "permps512")
    profile = find_profile("znver4" if wide else "x86-64-v3")
    if not profile.features <= host.features | {"avx512bf16"}:
        pytest.skip(f"{host.name} is no {profile.name}")
    return profile


class Case:
    """One layer, compiled with its preparation.

    `compiled` makes a scheduled PrimFunc callable over numpy arrays, on another machine if need be.
    """

    def __init__(
        self,
        kernel: LinearKernel,
        spec: LinearSpec,
        decide: Decide | None = None,
        seed: int = 0,
        profile: DeviceProfile | None = None,
        compiled: Callable[[Any, DeviceProfile], Callable[..., None]] = built,
    ) -> None:
        assert spec.scheme is not None
        profile, decide = profile or profile_of(kernel), decide or Defaults()
        try:
            kernel.check(spec, profile)
        except NotApplicable as reason:
            pytest.skip(f"{kernel.name}: {reason}")
        choice = kernel.choose(spec, profile, decide)
        self._kernel = compiled(kernel.scheduled(choice), profile)
        preparation = kernel.prepare(choice)
        assert preparation is not None
        func, self.rule = schedule_preparation(preparation, preparation.func, profile, Defaults())
        self._tabulate = compiled(func, profile)
        self._outputs = list(preparation.func.params)[1:]
        self.spec, self.layout = spec, kernel.layout(spec, profile)
        self.tensor = weights(spec.n, spec.k, spec.scheme, seed)
        self.dense = bcq.dequantize(self.tensor).astype(np.float64)
        self._packed = list(self.layout.pack(self.tensor).arrays.values())
        self._rng = np.random.default_rng(seed)
        self.bias = self._rng.normal(size=spec.n).astype(np.float32)

    @property
    def span(self) -> int:
        """Columns that share a scale."""
        assert self.spec.scheme is not None
        return span_width(self.layout.padded_k(self.spec.k), self.spec.scheme.group_size)

    def tabulate(self, x: Array) -> list[Array]:
        """What the preparation makes of x."""
        outputs = []
        for buffer in self._outputs:
            shape = [len(x), *map(int, buffer.shape[1:])]
            outputs.append(np.zeros(shape, str(buffer.dtype)))
        self._tabulate(x, *outputs)
        return outputs

    def run(self, x: Array, residual: Array | None = None) -> tuple[Array, list[Array]]:
        """(y, tables)."""
        spec, prepared = self.spec, self.tabulate(x)
        extra = ([self.bias] if spec.bias else []) + ([residual] if spec.residual else [])
        y = np.full((len(x), spec.n), np.nan, np.float32)
        self._kernel(*prepared, *self._packed, *extra, y)
        return y, prepared

    def product(self, prepared: list[Array]) -> Array:
        """What looking up these tables gives, in float64."""
        table, sums = prepared[0].astype(np.float64), prepared[-1].astype(np.float64)
        m, spans = sums.shape
        entries = table.reshape(m, spans, -1, 16)
        if len(prepared) == 3:
            entries = (entries - 128) * prepared[1].astype(np.float64)[..., None, None]
        # A table is a linear map of signs: the entries 1, 2, 4, 8 less entry 0 would rebuild x
        # were they not rounded, so they are looked up one by one.
        n, k = self.tensor.codes.shape
        padded = np.zeros((n, self.layout.padded_k(k)), np.uint8)
        padded[:, :k] = self.tensor.codes
        quads = padded.reshape(n, spans, -1, 4)
        group = np.minimum(np.arange(spans) * self.span // self._width, self._groups - 1)
        total = np.einsum("ns,ms->mn", self._offset(group), sums)
        for plane in range(self.spec.scheme.bits):  # type: ignore[union-attr]
            keys = ((quads >> plane & 1) * (1 << np.arange(4))).sum(-1)  # [N, spans, quads]
            scale = self.tensor.scales[:, group, plane].astype(np.float64)
            at = np.arange(spans)[:, None], np.arange(keys.shape[-1])
            found = entries[:, at[0], at[1], keys]  # [M, N, spans, quads]
            total += np.einsum("mnsq,ns->mn", found, scale)
        return total

    @property
    def _groups(self) -> int:
        return self.tensor.scales.shape[1]

    @property
    def _width(self) -> int:
        return self.layout.group_width(self.spec.k)

    def _offset(self, group: Array) -> Array:
        return self.tensor.tables[bcq.OFFSETS].astype(np.float64)[:, group]

    def check(self, m: int) -> None:
        """Against the same tables looked up in float64, with the epilogue."""
        spec = self.spec
        x = self._rng.normal(size=(m, spec.k)).astype(np.float32)
        residual = self._rng.normal(size=(m, spec.n)).astype(np.float32)
        y, prepared = self.run(x, residual)
        want = self.product(prepared)
        largest = np.abs(want).max() + 1
        want = ACTIVATIONS[spec.activation](want + self.bias if spec.bias else want)
        want = want + residual if spec.residual else want
        np.testing.assert_allclose(y, want, rtol=0, atol=3e-6 * largest)
