"""The losses of block-wise learning, by hand."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")


def test_dlc_has_both_terms() -> None:
    from apq_tvm.quantizers.learn.losses import dlc_loss

    one, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    assert float(dlc_loss(one, 3 * one, 2 * one)) == pytest.approx(0.0, abs=1e-6)
    half = -math.log(math.cos(math.pi / 4))
    assert float(dlc_loss(one, other, one)) == pytest.approx(half, rel=1e-5)
    assert float(dlc_loss(one, one, other)) == pytest.approx(half, rel=1e-5)
    assert float(dlc_loss(one, other, other)) == pytest.approx(2 * half, rel=1e-5)


def test_akl_goes_both_ways() -> None:
    from apq_tvm.quantizers.learn.losses import akl_loss

    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.9, 0.1]])
    forward = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    backward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert float(akl_loss([p], [q])) == pytest.approx(forward + backward, rel=1e-5)
    assert float(akl_loss([q, p], [p, p])) == pytest.approx(forward + backward, rel=1e-5)
    assert float(akl_loss([], [])) == 0.0
    masked = torch.tensor([[1.0, 0.0]])  # shares of exactly 0 are no infinity
    assert math.isfinite(float(akl_loss([masked], [p])))


def test_length_is_relative() -> None:
    from apq_tvm.quantizers.learn.losses import length_loss

    full = torch.tensor([[3.0, 4.0], [300.0, 400.0]])
    assert float(length_loss(full * 1.1, full)) == pytest.approx(0.01, rel=1e-4)
