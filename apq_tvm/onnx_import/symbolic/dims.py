"""Dimensions: integers, or polynomials over the model's symbolic dimensions.

A dimension is an ``int`` when it is known and an `Expr` otherwise. Expressions are kept in one
normal form, a sum of products, so that equal dimensions compare equal: ``(b * s) // s == b``. In
node attributes they are text (``"2 * batch + 1"``), which `evaluate` reads back over whatever
numbers the caller has: integers here, TIR variables in `apq_tvm.lower`.

Every symbol is taken to be at least 1 (0 for the length of a cache, inside `may_be_zero`, and for
sizes that only a run knows, `is_run`) and below a thousand million, so that a comparison of
``sequence`` with -1, or with the huge numbers exporters write for "to the end", is decided. Where
a decision would be another if a symbol were 0, `needs_one` tells: a run refuses that 0.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from math import gcd
from operator import mul
from typing import Any, TypeVar, Union

Dim = Union[int, "Expr"]
Atom = Union[str, "Call"]
Monomial = tuple[Atom, ...]
Answer = TypeVar("Answer")

LONGEST = 10**9 - 1  # tf2onnx writes 10**9 where others write 2**31 - 1 or 2**63 - 1


_zeros: ContextVar[frozenset[str]] = ContextVar("zeros", default=frozenset())
_needed: ContextVar[set[str] | None] = ContextVar("needed", default=None)


@contextmanager
def _within(variable: ContextVar[Answer], value: Answer) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def may_be_zero(names: frozenset[str]) -> AbstractContextManager[None]:
    """Inside this, the symbols `names` are at least 0 instead of 1."""
    return _within(_zeros, names)


def needs_one(names: set[str]) -> AbstractContextManager[None]:
    """Inside this, symbols that a decision takes to be at least 1 are put into `names`."""
    return _within(_needed, names)


def _decided(answer: Callable[[Dim], Answer], dim: Dim) -> Answer:
    """What `answer` says of a dimension; notes its symbols if 0 would change that."""
    found, needed = answer(dim), _needed.get()
    if needed is not None and found and isinstance(dim, Expr):
        zeros = _zeros.get()
        fresh = {name for name in symbols(dim) - zeros if not is_run(name)}
        with may_be_zero(zeros | fresh):
            if answer(dim) != found:
                needed |= fresh
    return found


RUN = re.compile(r"run(\d+)")
"""Symbols that a run computes from data; no dimension of an input is called so."""


def is_run(name: str) -> bool:
    """Whether a symbol is a size that only a run knows."""
    return RUN.fullmatch(name) is not None


def run_symbols(dim: Dim) -> frozenset[str]:
    """Those of the symbols in `dim` that only a run knows."""
    return frozenset(name for name in symbols(dim) if is_run(name))


@dataclass(frozen=True)
class Call:
    """What is no polynomial: ``floordiv``, ``mod``, ``min`` or ``max`` of two dimensions."""

    fn: str
    a: Dim
    b: Dim

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.fn, self.a, self.b))

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        infix = {"floordiv": "//", "mod": "%"}.get(self.fn)
        if infix:
            a, b = (f"({d})" if " " in str(d) else str(d) for d in (self.a, self.b))
            return f"{a} {infix} {b}"
        return f"{self.fn}({self.a}, {self.b})"


@dataclass(frozen=True)
class Expr:
    """A sum of products of atoms: ``terms`` holds ``(atoms, coefficient)``, sorted, none zero.

    Text and hash are kept: sums are sorted by the text of their parts, again and again, and images
    of any size that are cut into windows have long ones.
    """

    terms: tuple[tuple[Monomial, int], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.terms)

    def __add__(self, other: Dim) -> Dim:
        total = dict(self.terms)
        for atoms, coefficient in _terms(other):
            total[atoms] = total.get(atoms, 0) + coefficient
        return _dim(total)

    def __mul__(self, other: Dim) -> Dim:
        total: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in _terms(other):
                atoms = tuple(sorted(left + right, key=str))
                total[atoms] = total.get(atoms, 0) + a * b
        return _dim(total)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Dim) -> Dim:
        return self + -other

    def __rsub__(self, other: Dim) -> Dim:
        return -self + other

    def __floordiv__(self, other: Dim) -> Dim:
        return floordiv(self, other)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return floordiv(other, self)

    def __mod__(self, other: Dim) -> Dim:
        return mod(self, other)

    def __rmod__(self, other: Dim) -> Dim:
        return mod(other, self)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        text = ""
        for atoms, coefficient in self.terms:
            factors = [str(abs(coefficient))] if abs(coefficient) != 1 or not atoms else []
            alone = len(factors) + len(atoms) == 1 and coefficient > 0
            factors += [str(a) if alone or isinstance(a, str) else f"({a})" for a in atoms]
            sign = "-" if coefficient < 0 else "+"
            text += f" {sign} " if text else "-" * (coefficient < 0)
            text += " * ".join(factors)
        return text


def symbol(name: str) -> Expr:
    """The symbolic dimension `name`, an identifier."""
    return Expr((((name,), 1),))


def _terms(dim: Dim) -> tuple[tuple[Monomial, int], ...]:
    return dim.terms if isinstance(dim, Expr) else (((), int(dim)),)


def _dim(terms: Mapping[Monomial, int]) -> Dim:
    kept = {atoms: c for atoms, c in terms.items() if c}
    if not kept.keys() - {()}:
        return kept.get((), 0)
    # Constants last: "batch + 1".
    return Expr(tuple(sorted(kept.items(), key=lambda t: (not t[0], [str(a) for a in t[0]]))))


def _call(fn: str, a: Dim, b: Dim) -> Dim:
    return Expr((((Call(fn, a, b),), 1),))


def _without(atoms: Monomial, part: Monomial) -> Monomial | None:
    """`atoms` divided by `part`, or None."""
    left = list(atoms)
    for atom in part:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def exact(a: Dim, b: Dim) -> Dim | None:
    """``a / b`` where every term of `a` is a multiple of the single term of `b`."""
    if a == b:
        return 1
    divisor = _terms(b)
    if len(divisor) != 1:
        return None
    (part, by), quotient = divisor[0], {}
    for atoms, coefficient in _terms(a):
        rest = _without(atoms, part)
        if rest is None or coefficient % by:
            return None
        quotient[rest] = coefficient // by
    return _dim(quotient)


def floordiv(a: Dim, b: Dim) -> Dim:
    """``a // b``, rounded down as in Python.

    Multiples of `b` are taken out, and division by one number after another becomes division by
    their product: sizes of pooled pooled images then have one spelling.
    """
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    quotient = exact(a, b)
    if quotient is not None:
        return quotient
    whole, rest = _taken_out(a, b)
    if isinstance(rest, int) and isinstance(b, int):
        return whole + rest // b
    if isinstance(b, int) and b > 0 and isinstance(rest, Expr):
        common = gcd(b, *(c for _, c in rest.terms))
        if common > 1:
            return whole + floordiv(exact(rest, common) or 0, b // common)
        inner = _lone_call(rest, "floordiv")
        if inner is not None and isinstance(inner.b, int) and inner.b > 0:
            return whole + floordiv(inner.a, inner.b * b)
        first, number = _constant(rest)
        inner = _lone_call(first, "floordiv")
        if number and inner is not None and isinstance(inner.b, int) and inner.b > 0:
            # x // m + c = (x + c * m) // m
            return whole + floordiv(inner.a + number * inner.b, inner.b * b)
    return whole + _call("floordiv", rest, b)


def _taken_out(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """``(q, r)`` with ``a = q * b + r``: the terms of `a` that are multiples of `b` make q."""
    if len(_terms(b)) != 1:
        return 0, a
    (part, by) = _terms(b)[0]
    whole: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for atoms, coefficient in _terms(a):
        left = _without(atoms, part)
        if left is None:
            rest[atoms] = coefficient
            continue
        # Of a multiple of a symbol only whole ones; of numbers the remainder counts from 0.
        times = coefficient // by if not part or coefficient % by == 0 else 0
        whole[left] = whole.get(left, 0) + times
        rest[atoms] = coefficient - times * by
    return _dim(whole), _dim(rest)


def _constant(dim: Dim) -> tuple[Dim, int]:
    """`dim` without its number, and that."""
    number = next((c for atoms, c in _terms(dim) if not atoms), 0)
    return dim - number, number


def _lone_call(dim: Dim, fn: str) -> Call | None:
    """`dim` if it is one call of `fn` and nothing else."""
    if not isinstance(dim, Expr) or len(dim.terms) != 1 or dim.terms[0][1] != 1:
        return None
    atoms = dim.terms[0][0]
    call = atoms[0] if len(atoms) == 1 else None
    return call if isinstance(call, Call) and call.fn == fn else None


def mod(a: Dim, b: Dim) -> Dim:
    """``a % b`` with the sign of `b`."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    rest = _taken_out(a, b)[1]
    if isinstance(rest, int) and isinstance(b, int):
        return rest % b
    return 0 if exact(a, b) is not None else _call("mod", rest, b)


def minimum(a: Dim, b: Dim) -> Dim:
    """The smaller of two dimensions."""
    order = compare(a, b)
    if order is None:
        return _call("min", a, b)
    return a if order <= 0 else b


def maximum(a: Dim, b: Dim) -> Dim:
    """The larger of two dimensions."""
    order = compare(a, b)
    if order is None:
        return _call("max", a, b)
    return a if order >= 0 else b


def compare(a: Dim, b: Dim) -> int | None:
    """-1, 0 or 1 where the order holds for all values of the symbols, else None.

    The order may be weak: -1 means ``a <= b`` always, and not always equal.
    """
    return _decided(_sign, a - b)


def _sign(dim: Dim) -> int | None:
    low, high = bounds(dim)
    if low == high == 0:
        return 0
    if high is not None and high <= 0:
        return -1
    return 1 if low is not None and low >= 0 else None


def not_negative(dim: Dim) -> bool:
    """Whether a dimension is at least 0 for all values of the symbols."""
    return _decided(lambda d: (bounds(d)[0] or 0) >= 0 and bounds(d)[0] is not None, dim)


def positive(dim: Dim) -> bool:
    """Whether it is at least 1."""
    return _decided(lambda d: (bounds(d)[0] or 0) > 0, dim)


def negative(dim: Dim) -> bool:
    """Whether it is at most -1."""
    return _decided(lambda d: (bounds(d)[1] or 0) < 0, dim)


def equal(a: Dim, b: Dim) -> bool | None:
    """Whether two dimensions are equal: always, never (False), or that depends (None)."""
    low, high = bounds(a - b)
    if low == high == 0:
        return True
    if (low is not None and low > 0) or (high is not None and high < 0):
        return False
    return None


def bounds(dim: Dim) -> tuple[int | None, int | None]:
    """Least and greatest value over all symbols in 1 .. `LONGEST`; None is unknown."""
    low: int | None = 0
    high: int | None = 0
    for atoms, coefficient in _terms(dim):
        spans = [_span(atom) for atom in atoms]
        if any(lo is None or lo < 0 for lo, _ in spans):
            return None, None
        least = coefficient * reduce(mul, (lo or 0 for lo, _ in spans), 1)
        tops = [hi for _, hi in spans]
        most = None
        if all(hi is not None for hi in tops):
            most = coefficient * reduce(mul, (hi or 0 for hi in tops), 1)
        if coefficient < 0:
            least, most = most, least  # type: ignore[assignment]
        low = None if low is None or least is None else low + least
        high = None if high is None or most is None else high + most
    return low, high


def _span(atom: Atom) -> tuple[int | None, int | None]:
    if isinstance(atom, str):
        return (0 if is_run(atom) or atom in _zeros.get() else 1), LONGEST
    (a_low, a_high), (b_low, b_high) = bounds(atom.a), bounds(atom.b)
    if atom.fn == "mod":
        return 0, None if b_high is None else b_high - 1
    if atom.fn == "floordiv":
        if a_low is None or a_low < 0 or b_low is None or b_low <= 0:
            return None, None
        return 0, None if a_high is None else a_high // b_low
    lows, highs = [a_low, b_low], [a_high, b_high]
    least, greatest = [v for v in lows if v is not None], [v for v in highs if v is not None]
    if atom.fn == "min":
        return (min(least) if len(least) == 2 else None), (min(greatest) if greatest else None)
    return (max(least) if least else None), (max(greatest) if len(greatest) == 2 else None)


def product(dims: Any) -> Dim:
    """The product of an iterable of dimensions."""
    total: Dim = 1
    for dim in dims:
        total = total * dim
    return total


def symbols(dim: Dim) -> frozenset[str]:
    """Names of the symbols in `dim`."""
    found: set[str] = set()
    for atoms, _ in _terms(dim):
        for atom in atoms:
            found |= {atom} if isinstance(atom, str) else symbols(atom.a) | symbols(atom.b)
    return frozenset(found)


def calls(dim: Dim) -> frozenset[Call]:
    """What of a dimension is no polynomial, but for what is inside of such."""
    return frozenset(a for atoms, _ in _terms(dim) for a in atoms if isinstance(a, Call))


def as_attr(dim: Dim) -> int | str:
    """A dimension as node attribute: an int, or text for `evaluate`."""
    return str(dim) if isinstance(dim, Expr) else int(dim)


def parse(text: int | str) -> Dim:
    """The inverse of `as_attr`.

    Raises
    ------
    ValueError
        `text` is not an expression that `as_attr` writes.
    """
    return text if isinstance(text, int) else _parsed(text, _zeros.get())


@lru_cache(maxsize=1 << 14)
def _parsed(text: str, zeros: frozenset[str]) -> Dim:
    """`parse`, where the symbols `zeros` may be 0."""
    names = {n.id for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.Name)}
    result: Dim = evaluate(
        text, {name: symbol(name) for name in names - {"min", "max"}}, minimum, maximum
    )
    return result


def evaluate(
    dim: int | str,
    values: Mapping[str, Any],
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> Any:
    """Value of a dimension attribute.

    Parameters
    ----------
    dim : int or str
        As in the attributes of ``apq.`` nodes: names, integers, ``+ - * // %``, ``min``, ``max``.
    values : mapping of str to number
        Of every symbol; anything with integer arithmetic, e.g. ``tvm.tirx.Var``.
    minimum, maximum : callable
        For numbers that Python's ``min`` and ``max`` do not take.

    Raises
    ------
    ValueError
        `dim` is no such expression, or names a symbol that `values` lacks.
    """
    if isinstance(dim, int):
        return dim
    calls = {"min": minimum, "max": maximum}

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and node.id in values:
            return values[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in calls:
            return calls[node.func.id](*(value(arg) for arg in node.args))  # type: ignore[attr-defined]
        if isinstance(node, ast.BinOp):
            a, b = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add):
                return a + b
            if isinstance(node.op, ast.Sub):
                return a - b
            if isinstance(node.op, ast.Mult):
                return a * b
            if isinstance(node.op, ast.FloorDiv):
                return a // b
            if isinstance(node.op, ast.Mod):
                return a % b
        raise ValueError(f"not a dimension: {dim!r} (known symbols: {sorted(values)})")

    return value(ast.parse(dim, mode="eval").body)
