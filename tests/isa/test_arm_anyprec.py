"""Any-precision kernels on Arm: every width under qemu, and what LLVM makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from arm_tools import emulated, needs_qemu, scheduled
from test_anyprec import (
    RELATIVE_ERROR,
    SHAPES,
    integer_weights,
    kernel_of,
    quantized,
    random_tensor,
)

from apq_tvm.errors import NotApplicable
from apq_tvm.formats import details, parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.anyprec import ANYPREC_KERNELS
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.types import QuantizedTensor

TARGETS = {
    "sdot_sve": "graviton3",
    "sdot": "graviton2",
    "sdot_tbx": "cortex-a55",
    "smull": "cortex-a53",
}


def record(kind: str, bits: int, instruction: str) -> LinearKernel:
    return kernel_of(kind, bits, instruction, ANYPREC_KERNELS)


def check(
    kernel: LinearKernel, target: str, tensor: QuantizedTensor, epilogue: bool, folder: Path
) -> None:
    (n, k), profile = tensor.codes.shape, find_profile(target)
    activation = "relu" if epilogue else ""
    spec = LinearSpec(n, k, tensor.scheme, epilogue, activation, epilogue, details(tensor))
    layout = kernel.layout(spec, profile)
    packed = layout.pack(tensor).arrays.values()
    program = emulated(scheduled(kernel, spec, profile), profile, folder)
    weight, rng = integer_weights(tensor, kernel.width), np.random.default_rng(n + k)
    for m in (kernel.m_tile, kernel.m_tile + 1):
        x = rng.normal(size=(m, k)).astype(np.float32)
        xq, xs, xsum = quantized(x, layout.padded_k(k))
        bias = rng.normal(size=n).astype(np.float32)
        residual = rng.normal(size=(m, n)).astype(np.float32)
        want = (xq[:, :k].astype(np.float64) * xs) @ weight.T
        largest = np.abs(want).max() + 1
        want = np.maximum(want + bias, 0) + residual if epilogue else want
        y = np.full((m, n), np.nan, np.float32)
        program(xq, xs, xsum, *packed, *([bias, residual] if epilogue else []), y)
        np.testing.assert_allclose(y, want, rtol=0, atol=RELATIVE_ERROR * largest)


CASES = [
    *(("gemv", bits, "sdot") for bits in range(1, 9)),
    *(("gemv", bits, "sdot_sve") for bits in (2, 3)),
    *(("gemv", bits, "sdot_tbx") for bits in (7, 8)),
    ("gemv", 3, "smull"),
    ("gemv", 8, "smull"),
    ("gemm", 4, "sdot"),
    ("gemm", 5, "smull"),
]


@pytest.mark.few(3)
@needs_qemu
@pytest.mark.parametrize(("kind", "bits", "instruction"), CASES)
def test_every_width(kind: str, bits: int, instruction: str, tmp_path: Path) -> None:
    """Cases share out shapes: K of whole units, half ones, less than one; ragged N."""
    n, k, channels = SHAPES[bits % len(SHAPES)]
    tensor = random_tensor(n, k, "anyprec1-8sA8", channels, bits)
    kernel = record(kind, bits, instruction)
    check(kernel, TARGETS[instruction], tensor, bits % 2 == 1, tmp_path)


@needs_qemu
@pytest.mark.parametrize("channels", [1, 4, 8])
def test_runs_of_large_tables(channels: int, tmp_path: Path) -> None:
    """Two runs of columns and a rest; rows that share a table, and one alone."""
    tensor = random_tensor(9, 1100, "anyprec7-8sA8", channels, 8)
    check(record("gemv", 8, "sdot"), TARGETS["sdot"], tensor, True, tmp_path)


@needs_qemu
@pytest.mark.parametrize("instruction", ["sdot", "smull"])
def test_extreme_centroids(instruction: str, tmp_path: Path) -> None:
    tensor = random_tensor(8, 64, "anyprec2-2sA8", 8)
    tables = {name: np.sign(t) * np.float16(127) for name, t in tensor.tables.items()}
    worst = QuantizedTensor(tensor.codes, tensor.scales, None, tensor.scheme, tables)
    check(record("gemv", 2, instruction), TARGETS[instruction], worst, False, tmp_path)


def test_every_width_has_a_kernel_on_every_core() -> None:
    scheme = parse_scheme("anyprec2-8sA8")
    assert scheme is not None
    spec = LinearSpec(64, 64, scheme, details=(("channels", 2),))
    for target in ("graviton2", "graviton4", "cortex-a53", "cortex-a76"):
        profile, widths = find_profile(target), set()
        for kernel in linear_kernels(profile):
            mine = kernel.width in scheme.widths
            if mine and (kernel.kind, kernel.family) == ("gemv", "anyprec"):
                try:
                    kernel.check(spec, profile)
                except NotApplicable:
                    continue
                widths.add(kernel.width)
        assert widths == set(scheme.widths)
