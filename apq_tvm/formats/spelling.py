"""Parts of scheme strings that several families spell alike."""

from __future__ import annotations

ACT_BITS = (*range(1, 9), 16, 32)
"""Activation bits: integers quantized at run time, float16, float32."""

GROUP_SIZES = (16, 32, 64, 128, 256)
"""Codes along K that may share a scale, besides a whole row."""


def parse_acts(word: str) -> int:
    """Activation bits of ``""`` (8) or ``"A32"``, for families with a part of their own before.

    Raises
    ------
    ValueError
        With the reason.
    """
    if not word:
        return 8
    if not word.startswith("A") or not word[1:].isdigit() or int(word[1:]) not in ACT_BITS:
        raise ValueError(f"activations {word!r}; A with {either(ACT_BITS)} are possible")
    return int(word[1:])


def check_group(group: int) -> None:
    """Refuse a group size that does not exist.

    Raises
    ------
    ValueError
        With the sizes there are.
    """
    if group not in (-1, *GROUP_SIZES):
        raise ValueError(f"groups of {group}; {either(GROUP_SIZES)} or a whole row are possible")


def either(values: tuple[int, ...]) -> str:
    """``"1, 2 and 3"``."""
    return ", ".join(map(str, values[:-1])) + f" and {values[-1]}"
