"""Windows of a strip of an image share a scale, others have one each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from built import built

from apq_tvm.formats.integer import PAIR_INPUT
from apq_tvm.ops.activations import windows, windows_lines, windows_strips
from apq_tvm.ops.activations.quantize import ASYMMETRIC
from apq_tvm.ops.activations.windows_lines import LineWindows
from apq_tvm.ops.activations.windows_strips import (
    StripWindows,
    among_lines,
    covered,
    strip_rows,
)
from apq_tvm.ops.images.windows import Geometry
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rewrites.lets import spill_lets
from apq_tvm.schedules.linear.quantize import schedule_quantize
from apq_tvm.tensorize.exprs import i64

HOST = find_profile("host")

CASES = (
    ((2, 9, 11, 48), Geometry((3, 3), (2, 1), (1, 2), (1, 2), (0, 1)), (0, 48), 8),
    ((1, 5, 6, 32), Geometry((2, 3), (1, 1), (1, 1), (), (), "SAME_LOWER"), (16, 16), 5),
    ((3, 20, 16), Geometry((5,), (3,), (1,), (2,), (4,)), (0, 16), 8),
    ((1, 3, 4, 5, 32), Geometry((2, 2, 2), (1, 1, 1), (1, 1, 1), (0, 1, 0), (1, 0, 1)), (0, 32), 8),
    ((2, 31, 16), Geometry((3,), (2,), (4,), (3,), (8,)), (0, 16), 8),
    ((2, 9, 32), Geometry((2,), (1,), (16,), (8,), (16,)), (0, 32), 8),
    ((1, 13, 5, 16), Geometry((3, 2), (6, 1), (4, 2), (5, 2), (4, 0)), (0, 16), 8),
)
"""Shape of the image, geometry, channels, bits; images of one to three axes."""

LINES = (
    ((2, 12, 15, 3), Geometry((7, 7), (2, 2), (1, 1), (3, 3), (3, 3)), (0, 3), 8),
    ((2, 9, 21, 1), Geometry((3, 3), (1, 4), (1, 1), (0, 1), (0, 0)), (0, 1), 8),
    ((1, 7, 10, 24), Geometry((2, 3), (1, 2), (2, 1), (), (), "SAME_UPPER"), (0, 24), 5),
    ((2, 5, 4, 3), Geometry((1, 2), (1, 1), (1, 1), (0, 1), (0, 0)), (0, 3), 8),
    ((1, 3, 4, 9, 5), Geometry((2, 2, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1), (1, 0, 1)), (0, 5), 8),
    ((1, 6, 40, 2), Geometry((3, 20), (2, 3), (1, 1), (1, 4), (1, 9)), (0, 2), 8),
    ((2, 5, 39, 3), Geometry((3, 5), (2, 1), (1, 1), (1, 2), (1, 2)), (0, 3), 8),
    ((2, 17, 12, 3), Geometry((3, 3), (2, 1), (5, 1), (5, 1), (5, 1)), (0, 3), 8),
)
"""The same, of channels that are no whole vectors."""


OTHER = ((2, 8, 8, 24), Geometry((3, 3), (1, 1), (1, 2), (1, 2), (1, 2)), (0, 24), 8)
"""Windows that are gathered one by one."""


def extents(x: Any, geometry: Geometry) -> list[int]:
    """Positions along every axis."""
    return [int(geometry.extent(i, i64(size))) for i, size in enumerate(x.shape[1:-1])]


def quantized(
    x: Any,
    geometry: Geometry,
    channels: tuple[int, int],
    bits: int,
    asymmetric: bool = False,
    known: bool = True,
    unsigned: bool = False,
) -> list[Any]:
    shape = ("n", *(x.shape[1:-1] if known else ["h", "w", "d"][: x.ndim - 2]), x.shape[-1])
    func = windows.quantize_windows(
        shape, geometry, channels, (-1, -1), 32, bits, asymmetric, unsigned=unsigned
    )
    m, k = len(x) * int(np.prod(extents(x, geometry))), geometry.taps * channels[1]
    factors = np.full((m, 1 + asymmetric), np.nan, np.float32)
    out = [np.full((m, -(-k // 32) * 32), 77, np.int8), factors]
    out.append(np.full((m, 1), 77, np.int32))
    given = out[: len(func.params) - 1]  # unsigned codes have no sums
    built(spill_lets(schedule_quantize(func, HOST, Defaults())), HOST)(x, *given)
    return [func.attrs["apq.op"], *out]


def padded(x: Any, geometry: Geometry) -> Any:
    """The image with zeros around it, as far as windows reach."""
    wide = []
    for i, (size, pixels) in enumerate(
        zip(x.shape[1:-1], covered(geometry, [*map(i64, extents(x, geometry))]), strict=True)
    ):
        begin = int(geometry.begin(i, i64(size)))
        wide.append((begin, max(0, int(pixels) - begin - size)))
    return np.pad(x, [(0, 0), *wide, (0, 0)])


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("scratch", [1, 2000, 1 << 15])
@pytest.mark.parametrize("case", range(len(CASES) + len(LINES)))
def test_windows_of_a_strip_share_a_scale(
    case: int, scratch: int, known: bool, asymmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows_strips, "SCRATCH", scratch)
    monkeypatch.setattr(windows_lines, "SCRATCH", scratch)
    shape, geometry, (first, count), bits = (*CASES, *LINES)[case]
    x = np.random.default_rng(case).standard_normal(shape).astype(np.float32)
    x[0, :3] = 0  # some strips have nothing else: their scale is 0
    x[0, -1, ..., first] *= np.float32(1e30)
    if asymmetric:
        bits, x = 8, x + np.float32(0.7)
    name, codes, factors, sums = quantized(x, geometry, (first, count), bits, asymmetric, known)
    assert name == (StripWindows.name if case < len(CASES) else LineWindows.name)
    image, out = padded(x[..., first : first + count], geometry), extents(x, geometry)
    step, among = among_lines(geometry)
    rows = int(strip_rows(among, [i64(-(-out[0] // step)), *map(i64, out[1:])], count, scratch))
    assert rows == 1 if scratch == 1 else rows >= 1
    codes, factors, sums = (
        a.reshape(len(x), *out, -1).astype(np.float64) for a in (codes, factors, sums)
    )
    for place in np.ndindex(len(x), *out):
        n, *at = place
        begin = at[0] % step + at[0] // step // rows * rows * step
        mine = range(begin, min(begin + rows * step, out[0]), step)
        taps = range(0, geometry.reach(0), geometry.dilations[0])
        seen = image[n, sorted({row * geometry.strides[0] + tap for row in mine for tap in taps})]
        window = [
            slice(a * s, a * s + geometry.reach(i), d)
            for i, (a, s, d) in enumerate(
                zip(at, geometry.strides, geometry.dilations, strict=True)
            )
        ]
        window = image[(n, *window)].reshape(-1).astype(np.float64)
        high, low = max(0.0, seen.max()), min(0.0, seen.min())
        most = ASYMMETRIC if asymmetric else 2 ** (bits - 1) - 1
        size = (high - low) / 2 if asymmetric else max(high, -low)
        scale = np.float32(size / most)
        np.testing.assert_allclose(factors[place][0], scale, rtol=1e-6)
        centre = np.rint(factors[place][1] / scale) if asymmetric and size else 0.0
        if asymmetric:
            assert abs(centre - (high + low) / 2 * (most / size if size else 0)) <= 0.5 + 1e-4
            np.testing.assert_allclose(factors[place][1], scale * centre, rtol=1e-6)
        exact = window * (most / size if size else 0.0) - centre
        got, filling = codes[place][: len(window)], codes[place][len(window) :]
        assert np.abs(got - exact).max() <= 0.5 + 1e-4
        assert (filling == -centre).all()
        assert sums[place] == got.sum() + filling.sum()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("case", [0, 2, len(CASES), len(CASES) + 1, -1])
def test_unsigned_codes_mean_the_same(case: int, known: bool) -> None:
    """Of strips, of lines, and of windows that are neither."""
    shape, geometry, (first, count), _ = [*CASES, *LINES][case] if case >= 0 else OTHER
    x = np.random.default_rng(abs(case)).standard_normal(shape).astype(np.float32) + np.float32(0.7)
    x[0, :3] = 0
    name, codes, factors, _ = quantized(x, geometry, (first, count), 8, True, known)
    mine, other, others, _ = quantized(x, geometry, (first, count), 8, True, known, unsigned=True)
    other = other.view(np.uint8)
    assert mine == name and other.min() >= 1 and other.max() <= PAIR_INPUT
    np.testing.assert_allclose(others[:, 0], factors[:, 0] * 253 / (PAIR_INPUT - 2), rtol=1e-6)
    signed, unsigned = (
        c * f[:, :1].astype(np.float64) + f[:, 1:] for c, f in ((codes, factors), (other, others))
    )
    assert (np.abs(signed - unsigned) <= 0.502 * (factors[:, :1] + others[:, :1])).all()


def test_infinities_make_the_scale_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_strips, "SCRATCH", 1)
    x = np.ones((2, 4, 4, 16), np.float32)
    x[0, 0, 0, 3], x[0, 3, 3, 5] = np.inf, np.nan
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    scales = quantized(x, geometry, (0, 16), 8)[2].reshape(2, 4, 4)
    assert np.isinf(scales[0, :2]).all() and np.isnan(scales[0, 2:]).all()
    assert np.isfinite(scales[1]).all()


def test_images_without_columns_have_no_windows() -> None:
    geometry = Geometry((3, 3), (2, 3), (1, 1), (1, 1), (1, 1))
    for channels, padded in ((16, 160), (3, 32)):
        x = np.ones((2, 5, 0, channels), np.float32)
        codes = quantized(x, geometry, (0, channels), 8, known=False)[1]
        assert codes.shape == (0, padded)


@pytest.mark.parametrize("dilation", [1, 64, 4096])
def test_lines_of_a_strip_are_those_that_are_read(dilation: int) -> None:
    wide = Geometry((3,), (1,), (dilation,), (dilation,), (dilation,))
    step, among = among_lines(wide)
    rows = int(strip_rows(among, [i64(-(-7500 // step))], 128, windows_strips.SCRATCH))
    (lines,) = covered(among, [i64(rows)])
    assert step == dilation and int(lines) == rows + 2 and int(lines) <= 2 * rows


def test_what_it_does_not_take() -> None:
    three = Geometry((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    one = Geometry((1, 1), (2, 2), (1, 1), (0, 0), (0, 0))
    dilated = Geometry((3, 3), (1, 1), (1, 2), (1, 2), (1, 2))
    tall = Geometry((40, 3), (1, 1), (1, 1), (20, 1), (20, 1))
    for shape, geometry, first, channels in (
        (("n", 8, 8, 24), three, 8, 8),
        (("n", 8, 8, 24), dilated, 0, 24),
        (("n", 8, 8, 3), tall, 0, 3),
        (("n", 8, 3), Geometry((3,), (1,), (1,), (1,), (1,)), 0, 3),
        (("n", 8, 8, 32), one, 0, 32),
    ):
        func = windows.quantize_windows(shape, geometry, (first, channels), (-1, -1), 32, 8)
        assert func.attrs["apq.op"] == "quantize_windows"
