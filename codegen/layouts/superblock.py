"""The layout ``W{bits}sr{R}k4`` of uniform super-blocks: R rows interleaved.

``codes`` [NB, U, 4 * bits * R]; ``scales`` and ``min_scales`` float16 [NB, S, R]; ``subs`` and
``mins`` [NB, U, R]: the byte of a unit's row has that of k 0..15 below that of k 16..31.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from apq_tvm.codegen.layouts.layout import Details, Shapes
from apq_tvm.codegen.layouts.spans import Arrays, SpanLayout
from apq_tvm.formats.superblock import GROUP, NAME, SUB_BITS, SUPER
from apq_tvm.tensorize.exprs import Expr
from apq_tvm.types import Array, QuantizedTensor, Scheme


@dataclass(frozen=True)
class SuperBlockLayout(SpanLayout):
    """How one matrix of uniform super-blocks lies in memory."""

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"W(\d)sr(\d+)k4\Z")
    span_groups: ClassVar[int] = SUPER

    @classmethod
    def named(cls, match: re.Match[str], scheme: Scheme | None, details: Details) -> Self | None:
        """Everything but the rows comes from the scheme."""
        if scheme is None or scheme.family != NAME:
            return None
        return cls(scheme.bits, int(match[2]), GROUP)

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, lanes: int) -> Self | None:
        """One vector of rows; None for other schemes."""
        if scheme is None or scheme.family != NAME:
            return None
        return cls(scheme.bits, lanes, GROUP)

    @property
    def name(self) -> str:
        """``W{bits}sr{R}k4``."""
        return f"W{self.bits}sr{self.rows}k4"

    @property
    def family(self) -> str:
        """Uniform super-blocks."""
        return NAME

    @property
    def minima(self) -> bool:
        """True."""
        return True

    def more_shapes(self, blocks: int, k: int) -> Shapes:
        """Shapes of what there is besides codes and scales."""
        small = self.small_shape(blocks, k, SUB_BITS)
        scales = ((blocks, self.spans(k), self.rows), "float16")
        return {"min_scales": scales, "subs": small, "mins": small}

    def pack_more(self, tensor: QuantizedTensor, k: int) -> dict[str, Array]:
        """The arrays of `more_shapes`."""
        tables = tensor.tables
        return {
            "min_scales": self.interleave(tables["min_scales"], self.spans(k)),
            "subs": self.pack_small(tables["subs"], k, SUB_BITS),
            "mins": self.pack_small(tables["mins"], k, SUB_BITS),
        }

    def unpack_more(self, arrays: Mapping[str, Array], n: int, k: int) -> dict[str, Array]:
        """The tables of the tensor that `pack_more` was given."""
        return {
            "min_scales": self.deinterleave(arrays["min_scales"], n, -(-k // self.span)),
            "subs": self.unpack_small(arrays["subs"], n, k, SUB_BITS),
            "mins": self.unpack_small(arrays["mins"], n, k, SUB_BITS),
        }

    def sub(self, arrays: Arrays, block: Expr, group: Expr, lane: Expr) -> Expr | None:
        """A group's sub-scale, uint8."""
        return self.small(arrays["subs"], block, group, lane, SUB_BITS)

    def minimum(self, arrays: Arrays, block: Expr, group: Expr, lane: Expr) -> Expr | None:
        """A group's minimum, uint8."""
        return self.small(arrays["mins"], block, group, lane, SUB_BITS)
