"""Random ``mixed24`` layers with their prepared activations and float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from built import built
from linear_cases import ACTIVATIONS

from apq_tvm.formats import dequantize
from apq_tvm.formats.mixed import dense_part
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.types import DeviceProfile, QuantizedTensor

RELATIVE_ERROR = 3e-6
"""Of float32 sums over a few hundred products, against the largest output."""


class MixedCase:
    """A layer with its weights, prepared activations and a float64 reference.

    `compiled` makes a scheduled PrimFunc callable over numpy arrays, on another machine if need be.
    """

    def __init__(
        self,
        kernel: LinearKernel,
        spec: LinearSpec,
        profile: DeviceProfile,
        seed: int = 0,
        compiled: Callable[[Any, DeviceProfile], Callable[..., None]] = built,
    ) -> None:
        assert spec.scheme is not None
        self.spec, self.rng = spec, np.random.default_rng(seed)
        w = self.rng.standard_normal((spec.n, spec.k)).astype(np.float32)
        tensor = self.tensor = quantize_tensor(w, spec.scheme, search=False)
        self.layout = kernel.layout(spec, profile)
        self.arrays = self.layout.pack(tensor).arrays
        self.dense = dense_part(tensor).astype(np.float64)
        self.sparse = dequantize(tensor).astype(np.float64) - self.dense
        self.bias = self.rng.standard_normal(spec.n).astype(np.float32)
        self.most = (1 << (spec.scheme.act_bits - 1)) - 1
        preparation = kernel.prepare(kernel.choose(spec, profile, Defaults()))
        assert preparation is not None and preparation.weights == ("permutation",)
        scheduled, name = schedule_preparation(preparation, preparation.func, profile, Defaults())
        assert name == f"{profile.arch}_mixed_activations"
        self.outputs = list(preparation.func.params)[2:]
        self.prepare = compiled(scheduled, profile)

    def prepared(self, x: np.ndarray) -> list[Any]:
        """The kernel's first arguments."""
        made = []
        for buffer in self.outputs:
            shape = [len(x), int(buffer.shape[1])]
            made.append(np.full(shape, 77, str(buffer.dtype)))
        self.prepare(x, self.arrays["permutation"], *made)
        return made

    def largest(self) -> dict[str, np.ndarray]:
        """Packed arrays of the largest codes, sub-scales and second-order zeros; scales are 1.

        Kernels check their sums against such weights, whose zero points are 0.
        """
        t, n = self.tensor.tables, self.spec.n
        wide = np.repeat(t["wide"].astype(bool), 16)[: self.spec.k]
        subs = np.resize(np.array((15, 7, 7), np.uint8), t["sub_scales"].shape[1])
        tables = {
            **t,
            "sub_scales": np.tile(subs, (n, 1)),
            "sub_zeros": np.zeros_like(t["sub_zeros"]),
            "super_scales": np.ones_like(t["super_scales"]),
            "super_zeros": np.full_like(t["super_zeros"], 15),
        }
        codes = np.tile(np.where(wide, 15, 3).astype(np.uint8), (n, 1))
        ones, zeros = np.ones((n, 1), np.float16), np.zeros((n, 1), np.uint8)
        tensor = QuantizedTensor(codes, ones, zeros, self.tensor.scheme, tables)
        return dict(self.layout.pack(tensor).arrays)

    def check(self, kernel: Any, m: int) -> None:
        spec = self.spec
        x = self.rng.standard_normal((m, spec.k)).astype(np.float32)
        residual = self.rng.standard_normal((m, spec.n)).astype(np.float32)
        scale = np.abs(x).max(1, keepdims=True) / np.float32(self.most)
        rounded = (np.rint(x / scale) * scale).astype(np.float64)
        want = rounded @ self.dense.T + x.astype(np.float64) @ self.sparse.T
        limit = RELATIVE_ERROR * (np.abs(want).max() + 1)
        want = ACTIVATIONS[spec.activation](want + self.bias if spec.bias else want)
        want = want + residual if spec.residual else want
        extra = ([self.bias] if spec.bias else []) + ([residual] if spec.residual else [])
        y = np.full((m, spec.n), np.nan, np.float32)
        kernel(*self.prepared(x), *self.arrays.values(), *extra, y)
        np.testing.assert_allclose(y, want, rtol=0, atol=limit)
