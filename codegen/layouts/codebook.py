"""The layouts ``cb{bits}c{C}g{group}r{R}k4`` and ``{family}{bits}g{group}r{R}k4``: a table.

``codes`` [NB, U, 4 * bits * R], ``scales`` float16 [NB, S, R], ``table`` uint8: the codebooks one
after the other, every centroid raised by the largest there may be, so that none is negative.
Codebook layouts have besides ``subs`` [NB, ceil(G / 2), R], two groups to a byte, and ``index``,
four groups to a byte for four codebooks, else two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from apq_tvm.codegen.layouts.layout import Details, Shapes
from apq_tvm.codegen.layouts.spans import Arrays, SpanLayout
from apq_tvm.errors import PackError
from apq_tvm.formats import codebook, family_of
from apq_tvm.formats.levels import Levels
from apq_tvm.formats.superblock import SUB_BITS, SUPER
from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.types import Array, QuantizedTensor, Scheme


@dataclass(frozen=True)
class CodebookLayout(SpanLayout):
    """How one matrix with codebooks lies in memory.

    Parameters
    ----------
    codebooks : int
        How many there are, besides the parameters of `SpanLayout`.
    """

    codebooks: int = 4

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"cb(\d)c(\d+)g(\d+)r(\d+)k4\Z")
    span_groups: ClassVar[int] = SUPER

    @classmethod
    def named(cls, match: re.Match[str], scheme: Scheme | None, details: Details) -> Self | None:
        """Everything but the rows comes from the scheme."""
        return cls.choose(scheme, details, int(match[4]))

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, lanes: int) -> Self | None:
        """One vector of rows; None for other schemes."""
        if scheme is None or scheme.family != codebook.NAME:
            return None
        return cls(scheme.bits, lanes, scheme.group_size, codebook.codebook_count(scheme))

    @property
    def name(self) -> str:
        """``cb{bits}c{C}g{group}r{R}k4``."""
        return f"cb{self.bits}c{self.codebooks}g{self.group}r{self.rows}k4"

    @property
    def family(self) -> str:
        """Codebooks."""
        return codebook.NAME

    @property
    def entries(self) -> int:
        """Centroids of all codebooks."""
        return self.codebooks << self.bits

    @property
    def offset(self) -> int:
        """What makes the least centroid there may be 0."""
        return codebook.MAX_CENTROID[self.bits]

    @property
    def unit_scale(self) -> float:
        """The format's."""
        return codebook.UNIT

    @property
    def index_bits(self) -> int:
        """Bits that an index takes here: 2, or 4 for three as well."""
        return 2 if self.codebooks == 4 else 4

    def more_shapes(self, blocks: int, k: int) -> Shapes:
        """Shapes of what there is besides codes and scales."""
        return {
            "subs": self.small_shape(blocks, k, SUB_BITS),
            "index": self.small_shape(blocks, k, self.index_bits),
            "table": ((self.entries,), "uint8"),
        }

    def pack_more(self, tensor: QuantizedTensor, k: int) -> dict[str, Array]:
        """The arrays of `more_shapes`."""
        tables = tensor.tables
        return {
            "subs": self.pack_small(tables["subs"], k, SUB_BITS),
            "index": self.pack_small(tables["index"], k, self.index_bits),
            "table": (tables["codebooks"].astype(np.int16).ravel() + self.offset).astype(np.uint8),
        }

    def unpack_more(self, arrays: Mapping[str, Array], n: int, k: int) -> dict[str, Array]:
        """The tables of the tensor that `pack_more` was given."""
        centroids = (arrays["table"].astype(np.int16) - self.offset).astype(np.int8)
        return {
            "subs": self.unpack_small(arrays["subs"], n, k, SUB_BITS),
            "index": self.unpack_small(arrays["index"], n, k, self.index_bits),
            "codebooks": centroids.reshape(self.codebooks, -1),
        }

    def sub(self, arrays: Arrays, block: Expr, group: Expr, lane: Expr) -> Expr | None:
        """A group's sub-scale, uint8."""
        return self.small(arrays["subs"], block, group, lane, SUB_BITS)

    def book(self, arrays: Arrays, block: Expr, group: Expr, lane: Expr) -> Expr | None:
        """A group's codebook, uint8."""
        return self.small(arrays["index"], block, group, lane, self.index_bits)


@dataclass(frozen=True)
class NonlinearLayout(SpanLayout):
    """How one matrix lies in memory whose codes stand for fixed values, of any family of levels.

    Parameters
    ----------
    word : str
        The family, besides the parameters of `SpanLayout`.
    levels : Levels
        What its codes stand for.
    """

    word: str
    levels: Levels

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"(\w+?)(\d)g(\d+)r(\d+)k4\Z")

    @classmethod
    def named(cls, match: re.Match[str], scheme: Scheme | None, details: Details) -> Self | None:
        """Everything but the rows comes from the scheme."""
        return cls.choose(scheme, details, int(match[4]))

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, lanes: int) -> Self | None:
        """One vector of rows; None for schemes without levels."""
        levels = None if scheme is None else family_of(scheme).levels(scheme)
        if scheme is None or levels is None or scheme.zero_points:
            return None
        if scheme.group_size != UNIT_K // 2 and scheme.group_size % UNIT_K:
            return None
        return cls(scheme.bits, lanes, scheme.group_size, scheme.family, levels)

    @property
    def name(self) -> str:
        """``nl4g{group}r{R}k4``: family, bits, group and rows."""
        return f"{self.word}{self.bits}g{self.group}r{self.rows}k4"

    @property
    def family(self) -> str:
        """That of the scheme it was chosen for."""
        return self.word

    @property
    def entries(self) -> int:
        """Values of the table."""
        return len(self.levels.values)

    @property
    def offset(self) -> int:
        """What makes the least value 0."""
        return max(0, -self.levels.values[0])

    @property
    def unit_scale(self) -> float:
        """The format's."""
        return self.levels.unit

    @property
    def table(self) -> list[int]:
        """The values as they are stored."""
        return [value + self.offset for value in self.levels.values]

    def more_shapes(self, blocks: int, k: int) -> Shapes:
        """Shapes of what there is besides codes and scales."""
        return {"table": ((self.entries,), "uint8")}

    def pack_more(self, tensor: QuantizedTensor, k: int) -> dict[str, Array]:
        """The arrays of `more_shapes`."""
        return {"table": np.array(self.table, np.uint8)}

    def tensor(
        self, arrays: Mapping[str, Array], n: int, k: int, scheme: Scheme
    ) -> QuantizedTensor:
        """The tensor whose packed arrays these are.

        Raises
        ------
        PackError
            If their table is another, since the scheme has only one.
        """
        tensor = super().tensor(arrays, n, k, scheme)
        if arrays["table"].tolist() != self.table:
            raise PackError(f"{self.name}: the table is not that of {scheme}")
        return tensor
