"""A normalization in the function that quantizes its result, as unscheduled TensorIR.

Rows are normalised a few at a time and rounded while they are in the first cache. The result is
kept: more than linear layers may read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.blocks import argument, each, reduce_all
from apq_tvm.ops.graph.layernorm import of_last_axis
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, f32, i64

OP = "layernorm_"
"""What ``apq.op`` of the function begins with; the quantization's follows."""

NEAR = 6144
"""float32 of rows that are normalised before they are rounded: half of a first cache of 48 KB."""

SUMS = 4
"""Vectors of partial sums, so that additions do not wait for each other."""


class Normalize:
    """Makes rows of x, by `apq_tvm.ops.graph.layernorm`.

    Parameters
    ----------
    layernorm : PrimFunc
        The function that does so alone.
    lanes : int
        32-bit lanes of a vector.

    Raises
    ------
    NotApplicable
        More than the last axis is normalised, statistics are outputs, or rows are no whole vectors.
    """

    def __init__(self, layernorm: PrimFunc, lanes: int) -> None:
        self._epsilon, self._centred, self._biased = of_last_axis(layernorm)
        self.k, self.lanes = int(layernorm.params[0].shape[-1]), lanes
        if self.k % lanes:
            raise NotApplicable(f"rows of {self.k} columns are no whole vectors of {lanes}")

    def declare(self, m: Expr) -> Buffer:
        """Declare ``(source f32 [M, K], scale [K], [bias [K]])``: the source."""
        self.source = argument("source", (m, self.k), "float32")
        self._scale = argument("scale", (self.k,), "float32")
        self._bias = argument("bias", (self.k,), "float32") if self._biased else None
        return self.source

    def then(
        self, x: Buffer, first: Expr, mine: Expr, quantize: Callable[[Expr, Expr], None]
    ) -> None:
        """Make rows of x and `quantize` them: `mine` from `first` on."""
        near = max(1, NEAR // self.k)
        near = near // self.lanes * self.lanes or near
        count = b.bind((mine + i64(near - 1)) // i64(near))
        with each("near", count) as part:
            start = b.bind(first + part * i64(near))
            rows = b.bind(tirx.min(i64(near), first + mine - start))
            self._rows(x, start, rows, near)
            quantize(start, rows)

    def _rows(self, x: Buffer, start: Expr, rows: Expr, most: int) -> None:
        """One step of all rows after another: the steps of a row wait for each other."""
        means, inverses = (self._scratch(most) if self._centred else None), self._scratch(most)

        def centred(row: Expr, column: Expr) -> Any:
            value = self.source[start + row, column]
            return value if means is None else value - means[row]

        if means is not None:
            with each("mean", rows) as row:
                mean = self._mean("mean", lambda column: self.source[start + row, column])
                b.buffer_store(means, mean, [row])
        with each("variance", rows) as row:

            def square(column: Expr) -> Any:
                return centred(row, column) * centred(row, column)

            variance = self._mean("variance", square)
            inverse = f32(1.0) / tirx.sqrt(variance + f32(self._epsilon))
            b.buffer_store(inverses, inverse, [row])
        with each("normalize", rows) as row:
            inverse = b.bind(inverses[row])
            with b.serial(0, i64(self.k // self.lanes)) as c, self._vector() as e:
                column = c * i64(self.lanes) + e
                value = centred(row, column) * inverse * self._scale[column]
                value = value if self._bias is None else value + self._bias[column]
                b.buffer_store(x, value, [start + row, column])

    def _mean(self, name: str, term: Callable[[Expr], Expr]) -> Expr:
        """Of a term over the columns."""
        vectors = self.k // self.lanes
        several = max(n for n in range(1, SUMS + 1) if vectors % n == 0)
        sums = [self._scratch(self.lanes) for _ in range(several)]
        for total in sums:
            with self._vector() as e:
                b.buffer_store(total, f32(0.0), [e])
        with b.serial(0, i64(vectors // several)) as c:
            for number, total in enumerate(sums):
                with self._vector() as e:
                    column = (c * i64(several) + i64(number)) * i64(self.lanes) + e
                    b.buffer_store(total, total[e] + term(column), [e])
        joined, one = self._scratch(self.lanes), self._scratch(1)
        with self._vector() as e:
            b.buffer_store(joined, sum((total[e] for total in sums[1:]), sums[0][e]), [e])
        reduce_all(f"{name}_sum", "add", joined, one)
        return one[0] * f32(1 / self.k)

    def _vector(self) -> Any:
        return b.vectorized(0, i64(self.lanes))

    def _scratch(self, size: int) -> Buffer:
        return b.sblock_alloc_buffer((size,), "float32", align=64)
