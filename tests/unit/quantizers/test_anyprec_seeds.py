"""Seeds by dynamic programming: the optimum of short rows, and near it of long ones."""

from __future__ import annotations

import numpy as np
import pytest

from apq_tvm.quantizers.families.anyprec_seeds import GRID, optimal_ends


def sums(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    start = np.zeros((len(values), 1))
    return (
        np.concatenate([start, np.cumsum(weights, 1)], 1),
        np.concatenate([start, np.cumsum(weights * values, 1)], 1),
    )


def gains(mass: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """What every interval explains, [S + 1, S + 1]; -inf where it is reversed."""
    m, q = mass[None] - mass[:, None], moment[None] - moment[:, None]
    gain = np.divide(q * q, m, out=np.zeros_like(q), where=m > 0)
    gain[np.tril_indices(len(gain), -1)] = -np.inf
    return gain


def excess(values: np.ndarray, weights: np.ndarray, clusters: int) -> float:
    """Squared error above the optimum, as a share of it; the worst row."""
    mass, moment = sums(values, weights)
    ends = optimal_ends(values, mass, moment, clusters)
    assert (np.diff(ends, axis=1) >= 0).all()
    assert (ends[:, 0] == 0).all() and (ends[:, -1] == values.shape[1]).all()
    worst = 0.0
    for row in range(len(values)):
        gain = gains(mass[row], moment[row])
        best = gain[0]
        for _ in range(clusters - 1):
            best = (best[:, None] + gain).max(axis=0)
        found = gain[ends[row, :-1], ends[row, 1:]].sum()
        total = float((weights[row] * values[row] ** 2).sum())
        worst = max(worst, (total - found) / max(total - best[-1], 1e-9 * total) - 1)
    return worst


@pytest.mark.parametrize("size", (1, 2, 7, GRID))
@pytest.mark.parametrize("clusters", (2, 8))
def test_short_rows_are_the_optimum(size: int, clusters: int) -> None:
    rng = np.random.default_rng(size)
    values = np.sort(rng.standard_t(3, (4, size)), 1)
    weights = rng.uniform(0.01, 1, values.shape) ** 2
    assert excess(values, weights, clusters) < 1e-3  # the grid's sums are float32


@pytest.mark.parametrize("kind", ("normal", "heavy", "equal"))
@pytest.mark.parametrize("bits", (1, 3, 4))
def test_long_rows_are_near_it(kind: str, bits: int) -> None:
    rng = np.random.default_rng(bits)
    values = rng.standard_normal((3, 600))
    if kind == "heavy":
        values = rng.standard_t(2, values.shape)
    if kind == "equal":
        values = np.rint(values)
    values = np.sort(values, 1)
    assert excess(values, np.ones_like(values), 1 << bits) < 1e-2
