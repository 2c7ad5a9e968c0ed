"""softmax with ``zero_masked``: rows that are masked altogether are 0, all others as always."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tvm")

from test_softmax import AVX2, TOLERANCE, compiled, reference

from apq_tvm.ops.graph.softmax import softmax


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 33])
def test_rows_that_are_all_masked_are_zero(columns: int) -> None:
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((6, columns)).astype(np.float32) * 10
    mask = np.where(rng.random((6, columns)) < 0.5, -np.inf, 0).astype(np.float32)
    mask[0] = 0
    mask[3] = -np.inf
    y = np.empty_like(x)
    compiled(softmax(("R", "S"), ("R", "S"), 0.5, zero_masked=True), AVX2)(x, mask, y)
    alive = (mask > -np.inf).any(axis=1)
    assert (y[~alive] == 0).all()
    expected = reference(x[alive], mask[alive], 0.5)
    np.testing.assert_allclose(y[alive], expected, atol=TOLERANCE, rtol=0)
