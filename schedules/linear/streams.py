"""How many row blocks a kernel for few rows of x reads at once."""

from __future__ import annotations

from collections.abc import Sequence

from apq_tvm.schedules.decide import Decide

TASKS = 8
"""Bundles of row blocks a layer should have, so that threads can share it evenly."""


def choose_streams(decide: Decide, choices: Sequence[int], blocks: int, most: int = 0) -> int:
    """Decide ``streams``: row blocks read at once.

    Parameters
    ----------
    decide : Decide
    choices : sequence of int
        The best first, 1 among them.
    blocks : int
        Row blocks of the layer.
    most : int
        No more than so many streams; by default as many as there are blocks.
    """
    possible = [s for s in choices if s == 1 or s <= min(blocks, most or blocks)]
    # Narrow layers keep work for every core rather than many streams.
    return decide("streams", sorted(possible, key=lambda s: blocks < TASKS * s))
