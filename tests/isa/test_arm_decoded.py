"""GEMMs on Arm of formats that decode to int8, under qemu, with their preparation."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_tools import emulated, needs_qemu, scheduled
from linear_cases import RELATIVE_ERROR
from test_anyprec import integer_weights, random_tensor

from apq_tvm.errors import NotApplicable
from apq_tvm.formats import dequantize, details, parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.schedules.arm.decoded import DECODED_KERNELS
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.types import QuantizedTensor

Array = Any

TARGETS = {"smmla": "graviton3", "sdot": "graviton2"}


@cache
def quantized(scheme: str, n: int, k: int, channels: int = 0) -> QuantizedTensor:
    if channels:
        return random_tensor(n, k, scheme, channels)
    w = np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)
    return quantize_tensor(w, parse_scheme(scheme))


def kernel_of(scheme: str, instruction: str, width: int = 0) -> LinearKernel:
    family = parse_scheme(scheme).family
    (found,) = (
        kernel
        for kernel in DECODED_KERNELS
        if (kernel.family, kernel.width) == (family, width)
        and kernel.instruction.name == instruction
    )
    return found


class Layer:
    """A layer's kernel and its preparation as programs under qemu."""

    def __init__(
        self,
        kernel: LinearKernel,
        tensor: QuantizedTensor,
        target: str,
        folder: Path,
        cpu: str = "max",
        **epilogue: Any,
    ) -> None:
        n, k = tensor.codes.shape
        profile = find_profile(target)
        self.spec = LinearSpec(n, k, tensor.scheme, details=details(tensor), **epilogue)
        layout = kernel.layout(self.spec, profile)
        self._packed = list(layout.pack(tensor).arrays.values())
        if kernel.width:
            self._weight = integer_weights(tensor, kernel.width)
        else:
            self._weight = dequantize(tensor).astype(np.float64)
        self._outliers = np.zeros_like(self._weight)
        self.sparse = "outliers" in layout.shapes(n, k)
        if self.sparse:  # multiplied with x as it is
            tables = tensor.tables
            rows = np.repeat(np.arange(n), np.diff(tables["row_start"]))
            self._outliers[rows, tables["columns"]] = tables["outliers"]
            self._weight -= self._outliers
        preparation = kernel.prepare(kernel.choose(self.spec, profile, Defaults()))
        assert preparation is not None
        prepare, _ = schedule_preparation(preparation, preparation.func, profile, Defaults())
        self.together = 2 if kernel.instruction.name == "smmla" else 4
        self._prepare = emulated(prepare, profile, folder)
        self._multiply = emulated(scheduled(kernel, self.spec, profile), profile, folder, cpu)

    def check(self, m: int, relative: float = RELATIVE_ERROR) -> None:
        """Compare with the decoded weights times what the activations' codes mean."""
        spec, rng, scheme = self.spec, np.random.default_rng(m), self.spec.scheme
        assert scheme is not None
        x = rng.standard_normal((m, spec.k)).astype(np.float32)
        step = max(32, scheme.group_size)
        kp, together = -(-spec.k // step) * step, self.together
        act = 1 if scheme.act_group == -1 else kp // scheme.act_group
        sums = 1 if scheme.group_size == -1 else kp // scheme.group_size
        blocks = -(-m // together)
        xq = np.zeros((blocks, kp * together // 16, together, 16 // together), np.int8)
        xs = np.zeros((blocks, act, 4), np.float32)
        xsum = np.zeros(
            (blocks, sums, 4), np.float32 if scheme.family in ("super", "bcq") else np.int32
        )
        copy = [np.zeros_like(x)] if self.sparse else []
        self._prepare(x, xq, xs, xsum, *copy)
        codes = xq.transpose(0, 2, 1, 3).reshape(blocks * together, kp)[:m]
        scales = xs[:, :, :: 4 // together].transpose(0, 2, 1).reshape(-1, act)[:m]
        meant = codes.astype(np.float64) * np.repeat(scales, kp // act, axis=1)
        assert np.abs(meant[:, : spec.k] - x).max() <= 0.51 * scales.max()
        want = meant[:, : spec.k] @ self._weight.T + x.astype(np.float64) @ self._outliers.T
        largest = np.abs(want).max()
        more: list[Array] = []
        if spec.bias:
            more.append(rng.standard_normal(spec.n).astype(np.float32))
            want = np.maximum(want + more[0], 0)
        if spec.residual:
            more.append(rng.standard_normal(want.shape).astype(np.float32))
            want = want + more[-1]
        y = np.full((m, spec.n), np.nan, np.float32)
        self._multiply(xq, xs, xsum, *copy, *self._packed, *more, y)
        np.testing.assert_allclose(y, want, rtol=0, atol=relative * largest)


CASES = (
    ("nl4", "smmla", 0),
    pytest.param("nl4g64", "sdot", 0, marks=pytest.mark.all_cases),
    ("W2*A8", "smmla", 0),
    pytest.param("W2*A8g128", "smmla", 0, marks=pytest.mark.all_cases),
    pytest.param("W2*A8", "sdot", 0, marks=pytest.mark.all_cases),
    ("W2*A8g128", "sdot", 0),
    ("cb2", "smmla", 0),
    pytest.param("cb3", "smmla", 0, marks=pytest.mark.all_cases),
    ("cb3", "sdot", 0),
    ("cb4", "smmla", 0),
    ("W2sA8", "smmla", 0),
    ("W3sA8", "sdot", 0),
    ("bcq2g128", "smmla", 0),
    pytest.param("bcq3g32", "smmla", 0, marks=pytest.mark.all_cases),
    ("mixed24", "smmla", 0),
    pytest.param("mixed24o0", "sdot", 0, marks=pytest.mark.all_cases),
    ("mixed24", "sdot", 0),
    ("anyprec2-8sA8", "smmla", 2),
    pytest.param("anyprec2-8sA8", "smmla", 5, marks=pytest.mark.all_cases),
    ("anyprec2-8sA8", "smmla", 8),
    ("anyprec2-8sA8", "sdot", 3),
    ("anyprec2-8s", "smmla", 3),
    pytest.param("anyprec2-8sA8g64", "smmla", 4, marks=pytest.mark.all_cases),
    pytest.param("anyprec2-8sA8g16", "sdot", 2, marks=pytest.mark.all_cases),
    ("anyprec2-8s", "sdot", 4),
)


@pytest.mark.few(4)
@needs_qemu
@pytest.mark.parametrize(("scheme", "instruction", "width"), CASES)
def test_matches_float64_at_edges(
    scheme: str, instruction: str, width: int, tmp_path: Path
) -> None:
    # N: whole panels, a part of one and a ragged vector. K: no multiple of the unit. M: odd, even.
    kernel = kernel_of(scheme, instruction, width)
    layer = Layer(
        kernel,
        quantized(scheme, 41, 300, {0: 0, 3: 2, 5: 8}.get(width, 16)),
        TARGETS[instruction],
        tmp_path,
        bias=True,
        activation="relu",
        residual=True,
    )
    for m in (kernel.m_tile, kernel.m_tile + 1, 19):
        layer.check(m)


@needs_qemu
@pytest.mark.parametrize("scheme", ("nl4", "W2*A8"))
def test_several_k_blocks_and_tasks(scheme: str, tmp_path: Path) -> None:
    Layer(kernel_of(scheme, "smmla"), quantized(scheme, 14, 4160), "graviton3", tmp_path).check(131)


@pytest.mark.few(3)
@needs_qemu
@pytest.mark.parametrize("scheme", ("nl4", "W2*A8g128", "W2sA8", "mixed24", "cb2"))
def test_least_shapes(scheme: str, tmp_path: Path) -> None:
    Layer(kernel_of(scheme, "smmla"), quantized(scheme, 3, 20), "graviton3", tmp_path).check(12)


@needs_qemu
def test_graviton2_needs_no_smmla(tmp_path: Path) -> None:
    tensor = quantized("nl4", 8, 64)
    Layer(kernel_of("nl4", "sdot"), tensor, "graviton2", tmp_path, "neoverse-n1").check(12)


@pytest.mark.parametrize("kernel", DECODED_KERNELS, ids=lambda k: k.name)
def test_is_for_one_family(kernel: LinearKernel) -> None:
    assert not kernel.is_for(LinearSpec(64, 64, None))
    assert not kernel.is_for(LinearSpec(64, 64, parse_scheme("W4A8")))


def test_declines_devices_and_floats() -> None:
    a72, spec = find_profile("cortex-a72"), LinearSpec(64, 64, parse_scheme("nl4"))
    with pytest.raises(NotApplicable, match="needs i8mm; cortex-a72"):
        kernel_of("nl4", "smmla").check(spec, a72)
    with pytest.raises(NotApplicable, match="integer activations"):
        kernel_of("nl4", "sdot").check(LinearSpec(64, 64, parse_scheme("nl4A32")), a72)


def test_declines_planes_of_one_group_and_other_books() -> None:
    profile = find_profile("graviton3")
    with pytest.raises(NotApplicable, match="K=100: is for planes whose rows have several groups"):
        kernel = kernel_of("bcq1g128", "smmla")
        kernel.check(LinearSpec(64, 100, parse_scheme("bcq1g128")), profile)
    with pytest.raises(NotApplicable, match="four codebooks in groups of 16, not cb2g32"):
        kernel_of("cb2", "smmla").check(LinearSpec(64, 64, parse_scheme("cb2g32")), profile)
    with pytest.raises(NotApplicable, match="K=96 has half of that left"):
        kernel_of("cb4", "smmla").check(LinearSpec(64, 96, parse_scheme("cb4")), profile)
    with pytest.raises(NotApplicable, match="a quarter of 4-bit groups"):
        scheme = parse_scheme("mixed24r0.5")
        kernel_of("mixed24", "smmla").check(LinearSpec(64, 64, scheme), profile)
