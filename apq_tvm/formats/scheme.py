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

from apq_tvm.errors import BadScheme
from apq_tvm.formats.families import FAMILIES
from apq_tvm.formats.integer import BITS
from apq_tvm.formats.spelling import ACT_BITS, GROUP_SIZES, either
from apq_tvm.types import Scheme

FLOAT = "float"
"""Keeps a layer float32."""


def scheme_names() -> tuple[str, ...]:
    """Every integer scheme, examples of the other families, ``float`` last; canonical spellings."""
    names = []
    for bits, zero, act, group in itertools.product(
        BITS, (False, True), ACT_BITS, (-1, *GROUP_SIZES)
    ):
        names.append(str(Scheme(bits, zero, act, False, group)))
        if act <= 8 and group != -1:
            names.append(str(Scheme(bits, zero, act, True, group)))
    others = [name for family in FAMILIES for name in family.examples if family.name != "int"]
    return (*names, *others, FLOAT)


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
        for family in FAMILIES:
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
            f"{name}: scheme {scheme} has groups of {scheme.group_size}; {either(GROUP_SIZES)} "
            "or -1 for a whole row are possible"
        )
    if not same:
        raise BadScheme(f"{name}: {scheme!r} is not what {scheme} means; use parse_scheme")


def _bad(text: str, reason: str) -> BadScheme:
    names = {name.upper(): name for name in scheme_names()}
    near = difflib.get_close_matches(text.strip().upper(), names, n=3, cutoff=0.6)
    hint = " or ".join(names[n] for n in near) if near else "W4A8g32, W8A8 or float"
    return BadScheme(f"scheme {text!r}: {reason}; nearest: {hint}")
