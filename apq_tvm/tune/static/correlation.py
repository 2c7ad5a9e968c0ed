"""How well one order of candidates agrees with another: rank correlations, with ties."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 1 on, float64 [N]; equal values share the mean of theirs."""
    array = np.asarray(values, np.float64)
    order = np.argsort(array, kind="stable")
    _, inverse, counts = np.unique(array[order], return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    found = np.empty(len(array))
    found[order] = ((ends - counts + 1 + ends) / 2)[inverse]
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Pearson's correlation of ranks (Spearman 1904), -1 to 1; nan where one side is all equal.

    Raises
    ------
    ValueError
        They are not of one length.
    """
    x, y = ranks(a), ranks(b)
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values beside {len(y)}")
    x, y = x - x.mean() if len(x) else x, y - y.mean() if len(y) else y
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale else math.nan


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Tau-b (Kendall 1945): pairs in one order less those in the other; nan as `spearman`.

    Raises
    ------
    ValueError
        They are not of one length.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values beside {len(b)}")
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    upper = np.triu_indices(len(x), 1)
    dx = np.sign(x[:, None] - x[None, :])[upper]
    dy = np.sign(y[:, None] - y[None, :])[upper]
    scale = math.sqrt(float((dx != 0).sum()) * float((dy != 0).sum()))
    return float((dx * dy).sum()) / scale if scale else math.nan
