"""Names like the one that was meant, for errors about regular expressions that match nothing."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


def nearest(pattern: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The names that have most of a pattern's text in them, in its order.

    Parameters
    ----------
    pattern : str
        A regular expression; its operators occur in no name, so that they count for nothing.
    names : iterable of str
    count : int
        At most so many; of equals those that come first.
    """
    matcher = SequenceMatcher(None, b=pattern, autojunk=False)

    def shared(name: str) -> int:
        matcher.set_seq1(name)
        return sum(block.size for block in matcher.get_matching_blocks() if block.size > 1)

    return sorted(dict.fromkeys(names), key=shared, reverse=True)[:count]
