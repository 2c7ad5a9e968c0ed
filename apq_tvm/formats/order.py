"""Columns of a matrix whose groups are no runs: GPTQ's ``act_order`` (``desc_act``).

GPTQ rounds the columns of the largest activations first and makes groups of them in that order; its
files keep the columns where they were and say the group of each, ``g_idx``. Our groups are runs of
columns: such a matrix is stored with its columns sorted by group, and its input is gathered alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from apq_tvm.errors import BadScheme


def column_order(groups: ArrayLike, size: int) -> NDArray[np.int64] | None:
    """Order in which columns lie in runs of their groups.

    Parameters
    ----------
    groups : array_like of int [K]
        The group of every column.
    size : int
        Columns of a group; the last one may have fewer.

    Returns
    -------
    int64 [K] or None
        Which column comes where; None if they lie in runs already.

    Raises
    ------
    BadScheme
        A group has other than `size` columns.
    """
    given = np.ravel(np.asarray(groups, np.int64))
    runs = np.arange(given.size) // size
    if np.array_equal(given, runs):
        return None
    order = np.argsort(given, kind="stable")
    if not np.array_equal(given[order], runs):
        count = -(-given.size // size)
        raise BadScheme(
            f"g_idx does not put {size} columns into each of groups 0 .. {count - 1}, in any order"
        )
    return order
