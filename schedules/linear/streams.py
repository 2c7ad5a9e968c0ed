"""How many row blocks a kernel for few rows of x reads at once."""

from __future__ import annotations

from collections.abc import Sequence

from apq_tvm.schedules.decide import Decide

M_TILES = (4, 2, 1)
"""Rows of x that share what is made of the weights; a kernel is for at least that many rows."""

AHEADS = (4096, 0, 2048, 8192)
"""Software prefetch distances in bytes; 4 KB is a page, where hardware stops."""

FOLLOWED_AHEADS = (0, 1024, 2048, 4096)
"""The same where weights are one stream or two, which hardware follows: none by default."""

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
