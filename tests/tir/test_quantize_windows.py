"""Windows quantized straight from the image: the same as of rows that were gathered before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from built import built

from apq_tvm.ops.activations import windows
from apq_tvm.ops.activations.windows_direct import DirectWindows
from apq_tvm.ops.images.windows import Geometry
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.lets import spill_lets
from apq_tvm.schedules.linear.quantize import schedule_quantize

HOST = find_profile("host")

CASES = (
    ((2, 9, 11, 48), Geometry((3, 3), (2, 1), (1, 2), (1, 2), (0, 1)), (0, 48), 8),
    ((1, 5, 6, 32), Geometry((2, 3), (1, 1), (1, 1), (), (), "SAME_LOWER"), (16, 16), 5),
    ((3, 20, 16), Geometry((5,), (3,), (1,), (2,), (4,)), (0, 16), 8),
    ((1, 3, 4, 5, 32), Geometry((2, 2, 2), (1, 1, 1), (1, 1, 1), (0, 1, 0), (1, 0, 1)), (0, 32), 8),
)
"""Shape of the image, geometry, channels, bits; images of one to three axes."""


def quantized(
    x: Any, geometry: Geometry, channels: tuple[int, int], bits: int, asymmetric: bool = False
) -> list[Any]:
    shape = ("n", *x.shape[1:])
    func = windows.quantize_windows(shape, geometry, channels, (-1, -1), 32, bits, asymmetric)
    sizes = []
    for i, size in enumerate(x.shape[1:-1]):
        span = (geometry.kernel[i] - 1) * geometry.dilations[i] + 1
        padding = 0 if geometry.auto else geometry.begins[i] + geometry.ends[i]
        stride = geometry.strides[i]
        sizes.append(-(-size // stride) if geometry.auto else (size + padding - span) // stride + 1)
    m, k = len(x) * int(np.prod(sizes)), geometry.taps * channels[1]
    factors = np.full((m, 1 + asymmetric), np.nan, np.float32)
    out = [np.full((m, -(-k // 32) * 32), 77, np.int8), factors]
    out.append(np.full((m, 1), 77, np.int32))
    built(spill_lets(schedule_quantize(func, HOST, Defaults())), HOST)(x, *out)
    return [func.attrs["apq.op"], *out]


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_same_as_of_gathered_rows(
    case: int, asymmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, geometry, channels, bits = CASES[case]
    x = np.random.default_rng(case).standard_normal(shape).astype(np.float32)
    x[0, :3] = 0  # some windows have nothing else: their scale is 0
    x[0, -1, ..., channels[0]] *= np.float32(1e30)
    if asymmetric:
        bits, x = 8, x + np.float32(0.7)
    name, *direct = quantized(x, geometry, channels, bits, asymmetric)
    assert name == DirectWindows.name
    monkeypatch.setattr(windows, "takes", lambda *_: False)
    name, *rows = quantized(x, geometry, channels, bits, asymmetric)
    assert name == "quantize_windows"
    for got, want in zip(direct, rows, strict=True):
        np.testing.assert_array_equal(got, want)


def test_infinities_make_the_scale_infinite() -> None:
    x = np.ones((1, 4, 4, 16), np.float32)
    x[0, 0, 0, 3], x[0, 3, 3, 5] = np.inf, np.nan
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    scales = quantized(x, geometry, (0, 16), 8)[2].reshape(4, 4)
    assert np.isinf(scales[:2, :2]).all() and np.isnan(scales[2:, 2:]).all()
    assert np.isfinite(scales[0, 2:]).all() and np.isfinite(scales[2:, 0]).all()


def test_what_it_does_not_take() -> None:
    three = Geometry((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    one = Geometry((1, 1), (2, 2), (1, 1), (0, 0), (0, 0))
    for shape, geometry, channels in (
        (("n", 8, 8, 24), three, 24),
        (("n", "h", 8, 32), three, 32),
        (("n", 8, 8, 32), one, 32),
    ):
        func = windows.quantize_windows(shape, geometry, (0, channels), (-1, -1), 32, 8)
        assert func.attrs["apq.op"] == "quantize_windows"
