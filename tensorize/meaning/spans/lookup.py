"""Dot products of one span of looked up weights with its scales: meaning and operands.

A *span* is what one float16 scale per row belongs to. Unlike those of
`apq_tvm.tensorize.meaning.packed_dot`, integers that the caller scales, these sums are floats, so
that an instruction set may choose how it gets there::

    acc[i, r] += unit * Σ_k scale[r] * factor[r, k] * (table[entry(r, k)] - offset) * x[i, k]

`factor` is the activations' scale of the group, with the weights' sub-scale where there is one;
`unit` a power of two that an implementation has left over.
What else an implementation wants of the activations comes in `extra`, which the meaning ignores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import Expr, i64
from apq_tvm.tensorize.meaning.scaffold import Bound, Load, Meaning, Operand, bound_pair

Arrays = Mapping[str, Load]
SpanOperands = Bound

ROWS = 4
"""Rows of weights."""

EXTRA = 8
"""Floats per group of activations in `extra`: two vectors."""


@dataclass(frozen=True)
class SpanDot(ABC):
    """Shape of one span's dot product.

    Parameters
    ----------
    m : int
        Rows of x.
    k : int
        Weights of a row.
    group : int
        Weights that share a scale of the activations.
    entries : int
        Of the table; 0 if codes are their own values.
    offset : int
        What its entries are too large by.
    unit : float
        A power of two.
    bits : int
        Of a code.
    """

    m: int
    k: int
    group: int
    entries: int
    offset: int
    unit: float
    bits: int

    @property
    @abstractmethod
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of the operands with a span's weights, `scales` and `table` aside."""

    @abstractmethod
    def entry(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """int32: which entry of the table a weight is, or its code."""

    def minimum(self, arrays: Arrays, r: Expr, k: Expr) -> Expr | None:
        """float32: what is taken off a weight besides; None if nothing is."""
        return None

    def sub(self, arrays: Arrays, r: Expr, k: Expr) -> Expr | None:
        """uint8 sub-scale of a weight's group; None if there are none."""
        return None

    @property
    def groups(self) -> int:
        """Scales of one row of activations."""
        return self.k // self.group

    @property
    def lead(self) -> tuple[int, ...]:
        """The axis of rows of x, left out where there is one."""
        return (self.m,) if self.m > 1 else ()

    @property
    def meaning(self) -> Meaning:
        """Operands of `arrays`, ``table``, ``scales``, ``x``, ``xs``, ``extra`` and ``acc``."""
        many = self.m > 1
        arrays = [
            Operand(name, shape, dtype, 8 if dtype == "float16" else 4)
            for name, (shape, dtype) in self.arrays.items()
        ]
        operands = (
            *arrays,
            *([Operand("table", (self.entries,), "uint8", 16)] if self.entries else []),
            Operand("scales", (ROWS,), "float16", 8),
            Operand("x", (*self.lead, self.k), "int8", 4, many),
            Operand("xs", (*self.lead, self.groups), "float32", 4, many),
            Operand("extra", (*self.lead, self.groups, EXTRA), "float32", 4, many, 2),
            Operand("acc", (*self.lead, ROWS), "float32", 16),
        )
        reduced = (self.k, *((self.entries,) if self.entries else ()))
        return Meaning("span", operands, (*self.lead, ROWS), reduced, self._term)

    def _term(self, axes: Sequence[Expr], *loads: Load) -> Expr:
        """float32 term of one row, k and entry."""
        from tvm import tirx

        at, inner = axes[: len(self.lead) + 1], axes[len(self.lead) + 1 :]
        (*m, r), (k, *entry) = at, inner
        *weights, scales, x, xs, _ = loads
        arrays = dict(zip((*self.arrays, "table"), weights, strict=False))
        value = self.entry(arrays, r, k)
        for e in entry:
            meant = arrays["table"](e).astype("int32") - tirx.const(self.offset, "int32")
            value = tirx.Select(value == e.astype("int32"), meant, tirx.const(0, "int32"))
        factor, unit = scales(r).astype("float32"), tirx.const(self.unit, "float32")
        sub, least = self.sub(arrays, r, k), self.minimum(arrays, r, k)
        scaled = xs(*m, k // i64(self.group))
        if sub is not None:
            factor = factor * sub.astype("float32")
        if least is None:
            product = value * x(*m, k).astype("int32")
            return product.astype("float32") * (factor * scaled * unit)
        weight = value.astype("float32") * factor - least
        return weight * (x(*m, k).astype("float32") * scaled * unit)


def span_pair(dot: SpanDot, implement: Callable[[Bound], None]) -> tuple[Any, Any]:
    """(desc, impl) of a span's dot product."""
    return bound_pair(dot, dot.meaning, implement)
