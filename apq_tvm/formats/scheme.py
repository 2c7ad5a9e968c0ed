"""Scheme strings: ``W{bits}[z]A{1..8|16|32}[t][g{group}]``, the other families' and ``float``.

``W4A8g32``: 4-bit weights in groups of 32, int8 activations in groups of 32. ``z`` gives every
weight group a zero point, ``t`` one activation scale per token though weights are grouped, ``A16``
and ``A32`` float activations; no ``g`` means one scale per row, and per token. In full:

>>> parse_scheme("w4zA8tG128") == Scheme(4, zero_points=True, per_token=True, group_size=128)
True
>>> parse_scheme("float") is None
True
"""

from __future__ import annotations

import difflib
import itertools
import re
from typing import TYPE_CHECKING

from apq_tvm.errors import BadScheme
from apq_tvm.types import Scheme

if TYPE_CHECKING:
    from apq_tvm.formats.family import Family

BITS = tuple(range(1, 9))
"""Weight bits."""

ACT_BITS = (*range(1, 9), 16, 32)
"""Activation bits: integers quantized at run time, float16, float32."""

GRAMMAR = (
    "W{bits}[z]A{1..8|16|32}[t][g{group}]: z zero points per group, t one activation scale per "
    "token, no g one scale per row"
)

GROUP_SIZES = (16, 32, 64, 128, 256)
"""Codes along K that may share a scale, besides a whole row."""

FLOAT = "float"
"""Keeps a layer float32."""

_PATTERN = re.compile(r"W(\d+)(Z?)A(\d+)(T?)(?:G(\d+))?\Z")


def scheme_names() -> tuple[str, ...]:
    """Every integer scheme, examples of the other families, ``float`` last; canonical spellings."""
    names = []
    for bits, zero, act, group in itertools.product(
        BITS, (False, True), ACT_BITS, (-1, *GROUP_SIZES)
    ):
        names.append(str(Scheme(bits, zero, act, False, group)))
        if act <= 8 and group != -1:
            names.append(str(Scheme(bits, zero, act, True, group)))
    others = [name for family in _families() for name in family.examples if family.name != "int"]
    return (*names, *others, FLOAT)


def _families() -> tuple[Family, ...]:
    from apq_tvm.formats.families import FAMILIES  # which import this module

    return FAMILIES


def parse_scheme(text: str) -> Scheme | None:
    """Read a scheme string; upper and lower case are equal.

    Parameters
    ----------
    text : str
        E.g. ``"W4A8g32"``. ``"W4A8t"`` is ``"W4A8"``: without groups activations are per token.

    Returns
    -------
    Scheme or None
        None for ``"float"``.

    Raises
    ------
    BadScheme
        With the text, what is wrong with it and the nearest valid schemes.
    """
    word = text.strip().upper()
    if word == FLOAT.upper():
        return None
    try:
        for family in _families():
            scheme = family.parse(word)
            if scheme is not None:
                return scheme
    except ValueError as reason:
        raise _bad(text, str(reason)) from None
    raise _bad(text, "it is of no family of formats (apq-tvm formats)")


def parse_at(text: str) -> tuple[Scheme | None, int]:
    """Read a scheme that may be used at some of its bits: ``anyprec3-8@4``.

    Returns
    -------
    scheme : Scheme or None
        None for ``"float"``.
    bits : int
        0 if the text names none.

    Raises
    ------
    BadScheme
        The scheme is bad, or has no such bits.
    """
    word, at, bits = text.partition("@")
    scheme = parse_scheme(word)
    if not at:
        return scheme, 0
    widths = scheme.widths if scheme else (0,)
    if not bits.isdecimal() or int(bits) not in widths or widths == (0,):
        have = f"{widths[0]}..{widths[-1]} are possible" if widths[0] else "there is no choice"
        raise BadScheme(f"scheme {text!r}: of the bits after @, {have}")
    return scheme, int(bits)


def parse_integer(word: str) -> Scheme | None:
    """Read an upper-case scheme of uniform integers; None if it is none.

    Raises
    ------
    ValueError
        With the reason, if there are no such bits, activations or groups.
    """
    match = _PATTERN.match(word)
    if match is None:
        return None
    bits, act = int(match[1]), int(match[3])
    zero_points, per_token = bool(match[2]), bool(match[4])
    group = -1 if match[5] is None else int(match[5])
    if bits not in BITS:
        raise ValueError(f"weights of {bits} bits; {BITS[0]}..{BITS[-1]} are possible")
    if act not in ACT_BITS:
        raise ValueError(f"activations of {act} bits; {_either(ACT_BITS)} are possible")
    check_group(group)
    if per_token and act > 8:
        raise ValueError(f"t is for integer activations; A{act} has no activation scales")
    return Scheme(bits, zero_points, act, per_token and group != -1, group)


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
        raise ValueError(f"activations {word!r}; A with {_either(ACT_BITS)} are possible")
    return int(word[1:])


def check_group(group: int) -> None:
    """Refuse a group size that does not exist.

    Raises
    ------
    ValueError
        With the sizes there are.
    """
    if group not in (-1, *GROUP_SIZES):
        raise ValueError(f"groups of {group}; {_either(GROUP_SIZES)} or a whole row are possible")


def check_scheme(scheme: Scheme, name: str) -> None:
    """Refuse a `Scheme` built by hand that no scheme string gives.

    Parameters
    ----------
    scheme : Scheme
    name : str
        Layer or tensor, for the error.

    Raises
    ------
    BadScheme
        With the layer's name and what `parse_scheme` says.
    """
    try:
        same = parse_scheme(str(scheme)) == scheme
    except BadScheme as error:
        raise BadScheme(f"{name}: {error}") from None
    if scheme.group_size <= 0 and scheme.group_size != -1:
        raise BadScheme(
            f"{name}: scheme {scheme} has groups of {scheme.group_size}; {_either(GROUP_SIZES)} "
            "or -1 for a whole row are possible"
        )
    if not same:
        raise BadScheme(f"{name}: {scheme!r} is not what {scheme} means; use parse_scheme")


def _either(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" and {values[-1]}"


def _bad(text: str, reason: str) -> BadScheme:
    names = {name.upper(): name for name in scheme_names()}
    near = difflib.get_close_matches(text.strip().upper(), names, n=3, cutoff=0.6)
    hint = " or ".join(names[n] for n in near) if near else "W4A8g32, W8A8 or float"
    return BadScheme(f"scheme {text!r}: {reason}; nearest: {hint}")
