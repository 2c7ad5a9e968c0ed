"""Scheme strings: ``W{bits}[z]A{8|16|32}[t][g{group}]`` and ``float``.

``W4A8g32``: 4-bit weights in groups of 32, int8 activations in groups of 32. ``z`` gives every
weight group a zero point, ``t`` one activation scale per token though weights are grouped, ``A16``
and ``A32`` float activations; no ``g`` means one scale per row, and per token. In full:

>>> parse_scheme("w4zA8tG128")
Scheme(bits=4, zero_points=True, act_bits=8, per_token=True, group_size=128)
>>> parse_scheme("float") is None
True
"""

from __future__ import annotations

import difflib
import itertools
import re

from apq_tvm.errors import BadScheme
from apq_tvm.types import Scheme

BITS = tuple(range(1, 9))
"""Weight bits."""

ACT_BITS = (8, 16, 32)
"""Activation bits: dynamic int8, float16, float32."""

GROUP_SIZES = (16, 32, 64, 128, 256)
"""Codes along K that may share a scale, besides a whole row."""

FLOAT = "float"
"""Keeps a layer float32."""

_PATTERN = re.compile(r"W(\d+)(Z?)A(\d+)(T?)(?:G(\d+))?\Z")


def scheme_names() -> tuple[str, ...]:
    """Every valid scheme string, canonical spelling, ``float`` last."""
    names = []
    for bits, zero, act, group in itertools.product(
        BITS, (False, True), ACT_BITS, (-1, *GROUP_SIZES)
    ):
        names.append(str(Scheme(bits, zero, act, False, group)))
        if act == 8 and group != -1:
            names.append(str(Scheme(bits, zero, act, True, group)))
    return (*names, FLOAT)


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
    match = _PATTERN.match(word)
    if match is None:
        raise _bad(text, "it is not W{bits}[z]A{8|16|32}[t][g{group}], nor float")
    bits, act = int(match[1]), int(match[3])
    zero_points, per_token = bool(match[2]), bool(match[4])
    group = -1 if match[5] is None else int(match[5])
    if bits not in BITS:
        raise _bad(text, f"weights of {bits} bits; {BITS[0]}..{BITS[-1]} are possible")
    if act not in ACT_BITS:
        raise _bad(text, f"activations of {act} bits; {_either(ACT_BITS)} are possible")
    if group not in (-1, *GROUP_SIZES):
        raise _bad(text, f"groups of {group}; {_either(GROUP_SIZES)} or a whole row are possible")
    if per_token and act != 8:
        raise _bad(text, f"t is for int8 activations; A{act} has no activation scales")
    return Scheme(bits, zero_points, act, per_token and group != -1, group)


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
        parse_scheme(str(scheme))
    except BadScheme as error:
        raise BadScheme(f"{name}: {error}") from None
    if scheme.group_size <= 0 and scheme.group_size != -1:
        raise BadScheme(
            f"{name}: scheme {scheme} has groups of {scheme.group_size}; {_either(GROUP_SIZES)} "
            "or -1 for a whole row are possible"
        )


def _either(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" and {values[-1]}"


def _bad(text: str, reason: str) -> BadScheme:
    names = {name.upper(): name for name in scheme_names()}
    near = difflib.get_close_matches(text.strip().upper(), names, n=3, cutoff=0.5)
    hint = " or ".join(names[n] for n in near) if near else "W4A8g32, W8A8 or float"
    return BadScheme(f"scheme {text!r}: {reason}; nearest: {hint}")
