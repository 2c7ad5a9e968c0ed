"""Random ``W2*`` layers with their float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from built import built
from linear_cases import ACTIVATIONS, RELATIVE_ERROR

from apq_tvm.codegen.layouts import BalanceLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.formats import dequantize
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Recorded
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.types import DeviceProfile, QuantizedTensor


def quantized_rows(x: Any, kp: int, acts: int, groups: int) -> tuple[Any, Any, Any]:
    """(xq, xs, xsum) with `acts` scales and `groups` sums to a row."""
    padded = np.zeros((len(x), kp), np.float32)
    padded[:, : x.shape[1]] = x
    grouped = padded.reshape(len(x), acts, -1)
    scale = np.abs(grouped).max(-1, keepdims=True) / np.float32(127)
    codes = np.rint(np.divide(grouped, scale, out=np.zeros_like(grouped), where=scale > 0))
    xq = codes.astype(np.int8).reshape(len(x), kp)
    return xq, scale[..., 0], xq.reshape(len(x), groups, -1).sum(-1, dtype=np.int32)


class Layer:
    """One compiled kernel and a random layer for it.

    `compiled` makes a scheduled PrimFunc callable over numpy arrays, on another machine if need be.
    """

    def __init__(
        self,
        kernel: LinearKernel,
        spec: LinearSpec,
        profile: DeviceProfile,
        decisions: Any = None,
        compiled: Callable[[Any, DeviceProfile], Callable[..., None]] = built,
    ) -> None:
        try:
            kernel.check(spec, profile)
        except NotApplicable as reason:
            pytest.skip(f"{kernel.name}: {reason}")
        decide = Recorded(decisions or {})
        self.kernel = compiled(kernel.scheduled(kernel.choose(spec, profile, decide)), profile)
        self.spec = spec
        layout = kernel.layout(spec, profile)
        assert isinstance(layout, BalanceLayout)
        self.layout = layout

    def check(self, m: int, extreme: bool = False) -> None:
        spec, layout, rng = self.spec, self.layout, np.random.default_rng(m)
        scheme = spec.scheme
        assert scheme is not None
        groups, kp = layout.padded_groups(spec.k), layout.padded_k(spec.k)
        real = 1 if scheme.group_size == -1 else -(-spec.k // scheme.group_size)
        shape = (spec.n, spec.k)
        codes = np.full(shape, 4) if extreme else rng.integers(0, 5, shape)
        scales = rng.uniform(0.001, 0.02, (spec.n, real)).astype(np.float16)
        weight = QuantizedTensor(codes.astype(np.uint8), scales, None, scheme)
        x = np.full((m, spec.k), -1.0) if extreme else rng.standard_normal((m, spec.k))
        acts = 1 if scheme.act_group == -1 else groups
        xq, xs, xsum = quantized_rows(x.astype(np.float32), kp, acts, groups)
        values = (xq.reshape(m, acts, -1) * xs[..., None].astype(np.float64)).reshape(m, kp)
        want = values[:, : spec.k] @ dequantize(weight).astype(np.float64).T
        atol = RELATIVE_ERROR * (np.abs(want).max() + 1)
        bias = rng.standard_normal(spec.n).astype(np.float32)
        residual = rng.standard_normal((m, spec.n)).astype(np.float32)
        want = ACTIVATIONS[spec.activation](want + bias if spec.bias else want)
        want = want + residual if spec.residual else want
        y = np.full((m, spec.n), np.nan, np.float32)
        packed = layout.pack(weight).arrays.values()
        extra = ([bias] if spec.bias else []) + ([residual] if spec.residual else [])
        self.kernel(xq, xs, xsum, *packed, *extra, y)
        np.testing.assert_allclose(y, want, rtol=0, atol=atol)
