"""Any-precision kernels on Arm whose activations have groups, under qemu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_tools import emulated, needs_qemu, scheduled
from test_anyprec import integer_weights, random_tensor
from test_arm_anyprec import TARGETS, record

from apq_tvm.errors import NotApplicable
from apq_tvm.formats import details, parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.decoded import DECODED_KERNELS
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.tensorize.meaning.planes import QUAD
from apq_tvm.types import QuantizedTensor

Array = Any

RELATIVE_ERROR = 2e-6
"""Of float32 sums over some hundred columns, against the largest output."""


def spread(x: Array, group: int) -> tuple[Array, Array, Array]:
    """(xq, xs, xsum) of x in 8 bits."""
    m, k = x.shape
    kp = -(-k // max(32, group)) * max(32, group)
    padded = np.zeros((m, kp), np.float32)
    padded[:, :k] = x
    parts = padded.reshape(m, -1, group)
    scale = np.abs(parts).max(2, keepdims=True) / np.float32(127)
    codes = np.divide(parts, scale, out=np.zeros_like(parts), where=scale > 0)
    xq = np.clip(np.rint(codes), -127, 127).astype(np.int8).reshape(m, kp)
    xs = np.repeat(scale[..., 0], group // QUAD, 1).astype(np.float32)
    meant = xq * np.repeat(xs, QUAD, 1)
    return xq, xs, meant.sum(1, keepdims=True, dtype=np.float32)


def check(
    kind: str, bits: int, instruction: str, tensor: QuantizedTensor, group: int, folder: Path
) -> None:
    (n, k), profile = tensor.codes.shape, find_profile(TARGETS[instruction])
    kernel = record(kind, bits, instruction)
    spec = LinearSpec(n, k, tensor.scheme, True, "relu", False, details(tensor))
    packed = kernel.layout(spec, profile).pack(tensor).arrays.values()
    program = emulated(scheduled(kernel, spec, profile), profile, folder)
    weight, rng = integer_weights(tensor, bits), np.random.default_rng(n + k)
    for m in (kernel.m_tile, kernel.m_tile + 1):
        x = rng.normal(size=(m, k)).astype(np.float32)
        x[:, k // 3] *= 50
        xq, xs, xsum = spread(x, group)
        bias = rng.normal(size=n).astype(np.float32)
        product = (xq.astype(np.float64) * np.repeat(xs, QUAD, 1))[:, :k] @ weight.T
        largest, y = np.abs(product).max() + 1, np.full((m, n), np.nan, np.float32)
        program(xq, xs, xsum, *packed, bias, y)
        want = np.maximum(product + bias, 0)
        np.testing.assert_allclose(y, want, rtol=0, atol=RELATIVE_ERROR * largest)


CASES = (
    ("gemv", 2, "sdot", 32, (16, 576, 1)),
    ("gemv", 3, "sdot_sve", 64, (9, 96, 4)),
    ("gemv", 4, "sdot", 16, (9, 80, 8)),
    ("gemv", 4, "sdot", 128, (9, 160, 8)),
    ("gemv", 7, "sdot_tbx", 32, (9, 576, 2)),
    ("gemv", 8, "sdot", 64, (9, 1100, 8)),
    ("gemv", 3, "smull", 32, (5, 96, 1)),
    ("gemm", 4, "sdot", 32, (9, 96, 2)),
    ("gemm", 5, "smull", 64, (9, 160, 2)),
)


@pytest.mark.few(4)
@needs_qemu
@pytest.mark.parametrize(("kind", "bits", "instruction", "group", "shape"), CASES)
def test_matches_float64(
    kind: str,
    bits: int,
    instruction: str,
    group: int,
    shape: tuple[int, int, int],
    tmp_path: Path,
) -> None:
    n, k, channels = shape
    tensor = random_tensor(n, k, f"anyprec1-8sA8g{group}", channels, bits)
    check(kind, bits, instruction, tensor, group, tmp_path)


@needs_qemu
def test_preparation(tmp_path: Path) -> None:
    """Codes, scales of every 4 columns and sums; K no multiple of the group."""
    profile, group, k = find_profile("graviton2"), 64, 80
    scheme = parse_scheme(f"anyprec1-8sA8g{group}")
    spec = LinearSpec(8, k, scheme, details=(("channels", 1),))
    kernel = record("gemv", 4, "sdot")
    preparation = kernel.prepare(kernel.choose(spec, profile, Defaults()))
    assert preparation is not None
    func, _ = schedule_preparation(preparation, preparation.func, profile, Defaults())
    program = emulated(func, profile, tmp_path)
    x = np.random.default_rng(0).normal(size=(3, k)).astype(np.float32)
    want = spread(x, group)
    outputs = [np.full_like(array, 77) for array in want]
    program(x, *outputs)
    assert np.abs(outputs[0].astype(int) - want[0]).max() <= 1
    assert np.mean(outputs[0] == want[0]) > 0.99
    np.testing.assert_allclose(outputs[1], want[1], rtol=1e-6)
    meant = outputs[0] * np.repeat(outputs[1].astype(np.float64), QUAD, 1)
    np.testing.assert_allclose(outputs[2][:, 0], meant.sum(1), atol=1e-4)


def test_panels_need_whole_groups() -> None:
    kernel = next(
        k
        for k in DECODED_KERNELS
        if (k.family, k.width, k.instruction.name) == ("anyprec", 4, "smmla")
    )
    spec = LinearSpec(8, 96, parse_scheme("anyprec2-8sA8g128"), details=(("channels", 1),))
    with pytest.raises(NotApplicable, match="not full"):
        kernel.check(spec, find_profile("graviton3"))
