"""Problems for linear kernels with their float64 reference, and a builder of one kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
from built import Kernel, built
from linear_cases import ACTIVATIONS

from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide, Defaults
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.types import DeviceProfile, QuantizedTensor, Scheme

FLOAT32_SUM = 4e-6
"""Largest error of a float32 sum of up to 1300 terms, relative to the largest result."""

Array = Any


def build(
    kernel: LinearKernel,
    spec: LinearSpec,
    profile: DeviceProfile,
    decide: Decide | None = None,
    on: DeviceProfile | None = None,
) -> Kernel:
    """The kernel, callable over numpy arrays (the last is the result).

    With `on`, the PrimFunc is left unscheduled and built for that profile: its plain loops.
    """
    choice = kernel.choose(spec, profile, decide or Defaults())
    return built(kernel.scheduled(choice) if on is None else kernel.func(choice), on or profile)


def quantize_reference(
    x: Array, padded_k: int, act_width: int, sum_width: int
) -> tuple[Array, Array, Array]:
    """int8 codes [M, Kp], float32 scales [M, Kp / act_width], int32 sums [M, Kp / sum_width]."""
    m, k = x.shape
    padded = np.zeros((m, padded_k), np.float32)
    padded[:, :k] = x
    groups = padded.reshape(m, -1, act_width)
    largest = np.abs(groups).max(-1, keepdims=True)
    zero = largest < 2.0**-100
    inverse = np.float32(127) / np.where(zero, np.float32(1), largest)
    codes = np.clip(np.rint(groups * np.where(zero, np.float32(0), inverse)), -127, 127)
    scales = np.where(zero, 0, largest / np.float32(127))[..., 0]
    codes = codes.astype(np.int8).reshape(m, padded_k)
    sums = codes.reshape(m, -1, sum_width).sum(-1, dtype=np.int32)
    return codes, scales.astype(np.float32), sums


def problem(
    kernel: LinearKernel,
    spec: LinearSpec,
    profile: DeviceProfile,
    m: int,
    seed: int = 0,
    extreme: bool = False,
) -> tuple[list[Array], Array]:
    """Arguments of the kernel, y last and full of NaN, and the float64 result.

    `extreme` sets every code to its largest value and every activation to the same magnitude, with
    one sign per row.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, spec.k)).astype(np.float32)
    if extreme:
        x = np.where(np.arange(m)[:, None] % 2, np.float32(-3), np.float32(3)) * np.ones_like(x)
    layout = kernel.layout(spec, profile)
    if spec.scheme is None:
        weight = rng.standard_normal((spec.n, spec.k)).astype(np.float32)
        arrays: list[Array] = [x, *layout.pack(weight).arrays.values()]
        y = x.astype(np.float64) @ weight.astype(np.float64).T
    else:
        tensor = _random_tensor(spec, spec.scheme, rng, extreme)
        packed = list(layout.pack(tensor).arrays.values())
        used: Array = x.astype(np.float64)
        arrays = [x]
        if spec.scheme.act_bits == 8:
            kp, width = layout.padded_k(spec.k), layout.group_width(spec.k)
            act = kp if spec.scheme.act_group == -1 else width
            xq, xs, xsum = quantize_reference(x, kp, act, width)
            used = (xq * np.repeat(xs.astype(np.float64), act, axis=1))[:, : spec.k]
            arrays = [xq, xs, xsum]
        arrays += packed
        y = used @ dequantized(tensor).T
    if spec.bias:
        arrays.append(rng.standard_normal(spec.n).astype(np.float32))
        y = y + arrays[-1]
    y = ACTIVATIONS[spec.activation](y)
    if spec.residual:
        arrays.append(rng.standard_normal((m, spec.n)).astype(np.float32))
        y = y + arrays[-1]
    return [*arrays, np.full((m, spec.n), np.nan, np.float32)], y


def relative_error(got: Array, want: Array) -> float:
    """Largest difference, relative to the largest wanted value."""
    return float(np.abs(got - want).max() / np.abs(want).max())


def _random_tensor(
    spec: LinearSpec, scheme: Scheme, rng: np.random.Generator, extreme: bool
) -> QuantizedTensor:
    width = spec.k if scheme.group_size == -1 else scheme.group_size
    groups = (spec.n, -(-spec.k // width))
    top = 1 << scheme.bits
    codes = rng.integers(0, top, (spec.n, spec.k), dtype=np.uint8)
    scales = (rng.random(groups) * 0.01 + 0.001).astype(np.float16)
    zeros = rng.integers(0, top, groups, dtype=np.uint8) if scheme.zero_points else None
    if extreme:
        codes = np.full_like(codes, top - 1)
        zeros = None if zeros is None else np.zeros_like(zeros)
    return QuantizedTensor(codes, scales, zeros, scheme)


def dequantized(tensor: QuantizedTensor) -> Array:
    """The float64 weights [N, K] that a quantized tensor stands for (types.QuantizedTensor)."""
    k = tensor.codes.shape[1]
    scheme = tensor.scheme
    width = k if scheme.group_size == -1 else scheme.group_size
    scales = np.repeat(tensor.scales.astype(np.float64), width, axis=1)[:, :k]
    if tensor.zeros is not None:
        zero: Array = np.repeat(tensor.zeros.astype(np.float64), width, axis=1)[:, :k]
    elif scheme.bits == 1:
        return scales * (2.0 * tensor.codes - 1)
    else:
        zero = float(1 << (scheme.bits - 1))
    return scales * (tensor.codes - zero)
