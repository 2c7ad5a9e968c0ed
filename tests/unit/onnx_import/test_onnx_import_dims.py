"""Symbolic dimensions: normal form, order, text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apq_tvm.onnx_import.symbolic.dims import (
    LONGEST,
    Dim,
    as_attr,
    bounds,
    compare,
    equal,
    evaluate,
    floordiv,
    maximum,
    minimum,
    mod,
    needs_one,
    negative,
    not_negative,
    parse,
    positive,
    product,
    symbol,
    symbols,
)

A, B = symbol("a"), symbol("b")
VALUES = st.fixed_dictionaries({"a": st.integers(1, 40), "b": st.integers(1, 40)})
FROM_0 = st.fixed_dictionaries({"a": st.integers(0, 40), "b": st.integers(0, 40)})
LEAVES = st.one_of(st.integers(-3, 9), st.sampled_from([A, B]))


def combine(inner: st.SearchStrategy[Dim]) -> st.SearchStrategy[Dim]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda p: p[0] + p[1]),
        pairs.map(lambda p: p[0] - p[1]),
        pairs.map(lambda p: p[0] * p[1]),
        pairs.map(lambda p: minimum(*p)),
        pairs.map(lambda p: maximum(*p)),
        st.tuples(inner, st.integers(1, 7)).map(lambda p: floordiv(*p)),
        st.tuples(inner, st.integers(1, 7)).map(lambda p: mod(*p)),
    )


DIMS = st.recursive(LEAVES, combine, max_leaves=8)


@given(DIMS, VALUES)
def test_text_and_back(dim: Dim, values: dict[str, int]) -> None:
    text = as_attr(dim)
    assert parse(text) == dim
    assert symbols(dim) <= {"a", "b"}
    assert evaluate(text, values) == evaluate(as_attr(parse(text)), values)


@given(DIMS, DIMS, VALUES)
def test_operations_agree_with_integers(x: Dim, y: Dim, values: dict[str, int]) -> None:
    a, b = evaluate(as_attr(x), values), evaluate(as_attr(y), values)
    for result, expected in (
        (x + y, a + b),
        (x - y, a - b),
        (x * y, a * b),
        (minimum(x, y), min(a, b)),
        (maximum(x, y), max(a, b)),
    ):
        assert evaluate(as_attr(result), values) == expected
    if b > 0:
        assert evaluate(as_attr(floordiv(x, y)), values) == a // b
        assert evaluate(as_attr(mod(x, y)), values) == a % b


@given(DIMS, DIMS, VALUES)
def test_what_is_decided_holds(x: Dim, y: Dim, values: dict[str, int]) -> None:
    a, b = evaluate(as_attr(x), values), evaluate(as_attr(y), values)
    low, high = bounds(x)
    assert low is None or low <= a
    assert high is None or high >= a
    order, same = compare(x, y), equal(x, y)
    assert order is None or ((order <= 0 or a >= b) and (order >= 0 or a <= b))
    assert same is None or same == (a == b)


@given(DIMS, DIMS, FROM_0)
def test_a_decision_that_0_would_change_tells_so(x: Dim, y: Dim, values: dict[str, int]) -> None:
    a, b = evaluate(as_attr(x), values), evaluate(as_attr(y), values)
    needed = set[str]()
    with needs_one(needed):
        order = compare(x, y)
        signs = positive(x), not_negative(x), negative(x)
    if any(values[name] == 0 for name in needed):
        return
    assert order is None or ((order <= 0 or a >= b) and (order >= 0 or a <= b))
    assert all(not said or holds for said, holds in zip(signs, (a > 0, a >= 0, a < 0), strict=True))


def test_exact_quotients_cancel() -> None:
    assert floordiv(A * B * 384, A * B) == 384
    assert floordiv(A * B * 12, B * 3) == A * 4
    assert mod(A * 6, A) == 0
    assert as_attr(floordiv(A + 1, 2)) == "(a + 1) // 2"
    assert product([A, 2, B]) == A * B * 2


def test_lengths_are_positive_and_not_endless() -> None:
    assert equal(A, -1) is False
    assert equal(A, 0) is False
    assert equal(A, 1) is None
    assert minimum(A, 2**31 - 1) == minimum(A, 10**9) == A
    assert maximum(A, 1) == A
    assert bounds(A) == (1, LONGEST)


@pytest.mark.parametrize("text", ["a.b", "a + 'x'", "unknown", "print(a)", "a ** 2"])
def test_what_is_no_dimension_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        evaluate(text, {"a": 1})
