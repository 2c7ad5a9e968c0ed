"""Scheme strings: what they mean, how they print, and what a wrong one is told."""

from __future__ import annotations

import pytest

from apq_tvm.errors import BadScheme
from apq_tvm.formats.scheme import (
    ACT_BITS,
    BITS,
    GROUP_SIZES,
    check_scheme,
    parse_scheme,
    scheme_names,
)
from apq_tvm.types import Scheme

MEANINGS = {
    "W4A8g32": Scheme(4, False, 8, False, 32),
    "W4zA8g32": Scheme(4, True, 8, False, 32),
    "W8A8": Scheme(8, False, 8, False, -1),
    "W4A16g128": Scheme(4, False, 16, False, 128),
    "W3A8g64": Scheme(3, False, 8, False, 64),
    "W4A8tg128": Scheme(4, False, 8, True, 128),
    "W1A32": Scheme(1, False, 32, False, -1),
    "W8zA8tg256": Scheme(8, True, 8, True, 256),
}


@pytest.mark.parametrize("text", MEANINGS)
def test_meaning(text: str) -> None:
    assert parse_scheme(text) == MEANINGS[text]


def test_every_name_is_its_own_canonical_spelling() -> None:
    names = scheme_names()
    integers = 2 * len(BITS) * (len(ACT_BITS) * 6 + 8 * 5)
    assert len(set(names)) == len(names) > integers
    for name in names[:-1]:
        scheme = parse_scheme(name)
        assert scheme is not None and str(scheme) == name
        assert scheme == parse_scheme(name.lower()) == parse_scheme(f" {name.upper()} ")
    groups = {parse_scheme(n).group_size for n in names[:integers]}  # type: ignore[union-attr]
    assert groups == {-1, *GROUP_SIZES}


@pytest.mark.parametrize("text", ("float", "FLOAT", " Float "))
def test_float_is_none(text: str) -> None:
    assert parse_scheme(text) is None


def test_activation_groups() -> None:
    assert Scheme(4, group_size=32).act_group == 32
    assert Scheme(4, per_token=True, group_size=32).act_group == -1
    assert parse_scheme("W4A8t") == parse_scheme("W4A8") == Scheme(4)


@pytest.mark.parametrize(
    "text,reason,nearest",
    (
        ("W9A8g32", "weights of 9 bits", "W4A8g32"),
        ("W0A8", "weights of 0 bits", "W1A8"),
        ("W4A9g32", "activations of 9 bits", "W4A8g32"),
        ("W4A8g17", "groups of 17", "W4A8g16"),
        ("W4A8g0", "groups of 0", "W4A8"),
        ("W4A16tg32", "t is for integer activations", "W4A16g32"),
        ("W4Ag32", "of no family", "W4A8g32"),
        ("W4A8g", "of no family", "W4A8"),
        ("W4A8g32\n x", "of no family", "W4A8g32"),
        ("int4", "of no family", "W4A8g32"),
        ("", "of no family", "W4A8g32"),
        ("floaty", "of no family", "float"),
    ),
)
def test_bad_text_is_explained(text: str, reason: str, nearest: str) -> None:
    with pytest.raises(BadScheme) as caught:
        parse_scheme(text)
    message = str(caught.value)
    assert repr(text) in message and reason in message
    hints = message.split("nearest: ")[1].replace(",", " ").split()
    assert all(parse_scheme(hint) or hint == "float" for hint in hints if hint != "or")
    assert nearest in hints or reason != "of no family"


@pytest.mark.parametrize(
    "scheme",
    (
        Scheme(4, group_size=17),
        Scheme(4, group_size=0),
        Scheme(4, group_size=-32),
        Scheme(9),
        Scheme(0, group_size=32),
        Scheme(4, act_bits=9),
        Scheme(4, min_bits=2),
        Scheme(4, family="unknown"),
        Scheme(4, act_bits=16, per_token=True, group_size=32),
    ),
)
def test_hand_made_scheme_is_refused_by_layer(scheme: Scheme) -> None:
    with pytest.raises(BadScheme, match=r"encoder\.0"):
        check_scheme(scheme, "encoder.0")


@pytest.mark.parametrize("text", MEANINGS)
def test_parsed_schemes_pass_the_check(text: str) -> None:
    check_scheme(MEANINGS[text], "encoder.0")
