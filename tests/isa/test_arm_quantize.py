"""Quantization of activations on Arm under qemu: codes, scales and sums, and its assembly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_tools import emulated, needs_qemu

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.ops.activations.fold import fold_activations
from apq_tvm.ops.activations.normalize import Normalize
from apq_tvm.ops.activations.windows import quantize_windows
from apq_tvm.ops.few_rows.folded import fold_of
from apq_tvm.ops.graph.layernorm import layernorm
from apq_tvm.ops.images.windows import Geometry
from apq_tvm.schedules.arm.chunks import schedule_fold
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rewrites.lets import spill_lets
from apq_tvm.schedules.graph.rules import schedule_function
from apq_tvm.schedules.linear.quantize import quantize_func
from apq_tvm.tensorize.exprs import MAGIC_BITS
from apq_tvm.tensorize.meaning.interleaved import VECTORS
from apq_tvm.tensorize.pairs.folded_dot import STARTS
from apq_tvm.types import Scheme


def quantize(k: int, act: int, weight: int, target: str, bits: int = 8) -> Any:
    profile = find_profile(target)
    func = quantize_func(k, act, weight, profile, Defaults(), bits)
    return schedule_function(func, profile, Defaults())[0]


def run(
    x: Any, act: int, weight: int, target: str, folder: Path, bits: int = 8
) -> tuple[Any, Any, Any]:
    m, k = x.shape
    step = max(32, weight)
    kp = -(-k // step) * step
    results = (
        np.full((m, kp), 99, np.int8),
        np.full((m, kp // (kp if act == -1 else act)), np.nan, np.float32),
        np.full((m, kp // (kp if weight == -1 else weight)), 99, np.int32),
    )
    cpu = {"cortex-a72": "cortex-a72", "graviton2": "neoverse-n1"}.get(target, "max")
    program = emulated(quantize(k, act, weight, target, bits), find_profile(target), folder, cpu)
    program(x, *results)
    return results


def expect(x: Any, act: int, weight: int, got: tuple[Any, Any, Any], bits: int = 8) -> None:
    """Exactly the rounded products where they are rounded once, as multiply-add does."""
    codes, scales, sums = got
    m, kp = codes.shape
    padded = np.zeros((m, kp), np.float32)
    padded[:, : x.shape[1]] = x
    groups = padded.reshape(m, -1, kp if act == -1 else act)
    size = np.abs(groups).max(-1)
    size[size < 2.0**-100] = 0
    most = np.float32((1 << (bits - 1)) - 1)
    inverse = np.divide(most, size, out=np.zeros_like(size), where=size > 0)
    want = np.rint(groups.astype(np.float64) * inverse[..., None]).reshape(m, kp)
    np.testing.assert_array_equal(codes, want)
    np.testing.assert_allclose(scales, size / most, rtol=2.0**-22)
    width = kp if weight == -1 else weight
    np.testing.assert_array_equal(sums, want.reshape(m, -1, width).sum(-1))


CASES = (
    (384, 32, 32, "graviton2", 8),  # three fours
    (75, 16, 16, "graviton2", 8),  # one four and a tail
    (297, 32, 32, "cortex-a72", 8),  # without dot products; two fours, one group, a tail
    (257, -1, 32, "graviton3", 8),  # padded row, sums one by one
    (384, -1, -1, "cortex-a72", 8),
    (300, -1, 64, "graviton2", 4),
    (640, 128, 128, "graviton3", 2),
)


@needs_qemu
@pytest.mark.parametrize(("k", "act", "weight", "target", "bits"), CASES)
def test_matches_the_reference(
    k: int, act: int, weight: int, target: str, bits: int, tmp_path: Path
) -> None:
    """Three rows: noise, tiny values with a group of them alone, and exact halves."""
    rng = np.random.default_rng(k)
    x = rng.standard_normal((3, k)).astype(np.float32)
    x[1] *= 1e-30
    x[1, : min(k, 32)] = 2.0**-101
    x[2] = np.arange(k) % 100 - 50 + 0.5
    x[2, ::16] = 127
    expect(x, act, weight, run(x, act, weight, target, tmp_path, bits), bits)


@needs_qemu
@pytest.mark.parametrize(
    ("k", "group", "target"), [(384, 32, "graviton2"), (300, -1, "cortex-a72")]
)
def test_a_normalization_quantizes_its_result(
    k: int, group: int, target: str, tmp_path: Path
) -> None:
    profile, normalize = find_profile(target), Normalize(layernorm(("R", k)), 4)
    func = quantize_func(k, group, group, profile, Defaults(), normalize=normalize)
    rng = np.random.default_rng(k)
    x, (scale, bias) = rng.standard_normal((19, k)), rng.standard_normal((2, k))
    wanted = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) * scale + bias
    given = (x.astype(np.float32), scale.astype(np.float32), bias.astype(np.float32))
    padded = -(-k // 32) * 32
    groups = k // group if group > 0 else 1
    y, codes = np.zeros((19, k), np.float32), np.full((19, padded), 99, np.int8)
    scales, sums = np.zeros((19, groups), np.float32), np.zeros((19, groups), np.int32)
    cpu = "cortex-a72" if target == "cortex-a72" else "neoverse-n1"
    scheduled = schedule_function(func, profile, Defaults())[0]
    emulated(scheduled, profile, tmp_path, cpu)(*given, y, codes, scales, sums)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
    expect(y, group, group, (codes, scales, sums))


@needs_qemu
@pytest.mark.parametrize("bits", (2, 4))
def test_folded_sums_start_from_corrections_rounded_to_even(bits: int, tmp_path: Path) -> None:
    """What the sum of unsigned codes is too large by is a fraction here, often a half."""
    layout = InterleavedLayout.of_lanes(Scheme(bits, group_size=32), 4)
    profile = find_profile("graviton2")
    fold = fold_of(layout)
    assert fold.shift
    m, k = 64, 64
    x = np.random.default_rng(bits).standard_normal((m, k)).astype(np.float32)
    codes = np.zeros((m, k), np.int8)
    starts, factors = np.zeros((m, 2, 1, STARTS), np.float32), np.zeros((m, 2, 4), np.float32)
    func = schedule_fold(fold_activations(k, layout, False, 1), profile, Defaults())
    emulated(func, profile, tmp_path)(x, codes, starts, factors)
    four = codes.astype(np.int64).reshape(m, 2, VECTORS, 4).sum(-1)  # of every vector of a group
    total = sum(four[..., j] * fold.corrections[fold.part(j)] for j in range(VECTORS))
    exact = total / 2.0**fold.shift
    assert (exact % 1 == 0.5).any()
    want = (MAGIC_BITS >> fold.shift) - np.rint(exact).astype(np.int32)
    np.testing.assert_array_equal(starts.view(np.int32)[:, :, 0, 0], want)


@needs_qemu
def test_nan_and_infinity_make_scales_of_their_kind(tmp_path: Path) -> None:
    x = np.ones((1, 160), np.float32)
    x.view(np.uint32)[0, 40] = 0x7FC00080  # a NaN whose low byte would be -128
    x[0, 70] = -np.inf
    codes, scales, _ = run(x, 32, 32, "graviton2", tmp_path)
    assert scales[0, [0, 3, 4]].tolist() == [np.float32(1 / 127)] * 3
    assert np.isnan(scales[0, 1]) and np.isinf(scales[0, 2])
    assert codes.min() >= -127


@needs_qemu
def test_windows_of_few_channels_have_the_sums_of_their_codes(tmp_path: Path) -> None:
    profile, geometry = find_profile("graviton2"), Geometry((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    func = quantize_windows(("n", 4, 37, 3), geometry, (0, 3), (-1, -1), 32, 8, True)
    scheduled = spill_lets(schedule_function(func, profile, Defaults())[0])
    x = np.random.default_rng(0).standard_normal((1, 4, 37, 3)).astype(np.float32)
    m = 4 * 37
    codes, factors = np.full((m, 32), 99, np.int8), np.full((m, 2), np.nan, np.float32)
    sums = np.full((m, 1), 99, np.int32)
    emulated(scheduled, profile, tmp_path, "neoverse-n1")(x, codes, factors, sums)
    np.testing.assert_array_equal(sums[:, 0], codes.sum(axis=1, dtype=np.int32))
    middle = codes[:, 12:15].astype(np.float32) * factors[:, :1] + factors[:, 1:]
    np.testing.assert_allclose(middle, x.reshape(m, 3), atol=float(factors[:, 0].max()))
