"""The exact answers of GPU bundles: x as kernels round it, and figures that leave no doubt."""

from __future__ import annotations

import numpy as np
import pytest

from apq_tvm.bench.gpu.reference import MARGIN, round_rows
from apq_tvm.formats import parse_scheme
from apq_tvm.types import Scheme

SCHEMES = ("W4A8g32", "W8A8", "W4A8tg64", "W1A4", "W4A2g128", "W2A8g128", "W1A8")
ROWS, K = 64, 336


def rounded(name: str) -> tuple[Scheme, np.ndarray, np.ndarray, np.ndarray]:
    """A scheme, some rows, these made clear, and what their codes mean."""
    scheme = parse_scheme(name)
    assert scheme is not None
    x = np.random.default_rng(3).standard_normal((ROWS, K)).astype(np.float32)
    return scheme, x, *round_rows(x, scheme)


@pytest.mark.parametrize("name", SCHEMES)
def test_it_is_what_evaluation_simulates(name: str) -> None:
    torch = pytest.importorskip("torch")
    from apq_tvm.quantizers.torch.round import round_activations

    scheme, _, clear, exact = rounded(name)
    simulated = round_activations(torch.from_numpy(clear), scheme).numpy()
    np.testing.assert_allclose(exact, simulated, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
def test_no_code_is_near_the_middle_between_two(name: str) -> None:
    """Figures that are a hair larger or smaller get the same codes; and few were moved, and
    little."""
    scheme, x, clear, exact = rounded(name)
    for factor in (1 - 1e-6, 1 + 1e-6):
        noise = np.where(np.arange(K) % 2, np.float32(factor), np.float32(1))
        again = round_rows(clear * noise, scheme)[1]
        np.testing.assert_allclose(again, exact, rtol=1e-4, atol=1e-4)
    moved = x != clear
    assert moved.mean() < 4 * MARGIN
    step = np.abs(x).max() / (2 ** (scheme.act_bits - 1) - 1)
    assert np.abs(x - clear).max() < step


def test_one_bit_is_a_sign_and_the_mean_magnitude() -> None:
    _, x, clear, exact = rounded("W4A1g32")
    assert np.array_equal(x, clear)
    first = exact[0, :32]
    np.testing.assert_allclose(np.abs(first), np.abs(x[0, :32].astype(np.float64)).mean())
    assert np.array_equal(np.sign(first), np.sign(x[0, :32]))
    last = exact[0, K // 32 * 32 :]  # a group of 16
    np.testing.assert_allclose(np.abs(last), np.abs(x[0, -len(last) :].astype(np.float64)).mean())


def test_no_figure_moves_past_the_largest() -> None:
    """It would make the scale: an H200 was called wrong so, of one row of 14336 columns in 128."""
    row = np.array([[126.52, -126.48, 126.51, *range(29)]], np.float32)
    scheme = parse_scheme("W8A8")
    assert scheme is not None
    clear, exact = round_rows(row, scheme)
    assert clear.max() == row.max() and clear[0, 2] == row.max()
    np.testing.assert_allclose(exact[0, :3], [127, -126, 127], rtol=1e-6)
