"""``y = act(x Wᵀ + b) + residual`` for super-blocks in records (`SuperRecordsLayout`).

For few rows of x tiles, streams and the epilogue are those of `apq_tvm.ops.few_rows.spans`. Per row
block and chunk of 64 columns one block for an intrinsic adds to two totals, with sub-scales and
with minima; another one scales them at the end of a super-block
(`apq_tvm.tensorize.meaning.super_records`). For many rows it is `apq_tvm.ops.many_rows.spans`,
whose stages read values from records.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts.super_records import SuperRecordsLayout
from apq_tvm.ops.few_rows.spans import SpanBlocking, SpanLinear
from apq_tvm.ops.linear.spec import LinearSpec, Operands
from apq_tvm.ops.many_rows.spans import SpanGemm
from apq_tvm.tensorize.exprs import Expr, i64
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.scaffold import View
from apq_tvm.tensorize.meaning.super_records import CHUNK, GROUP, RecordDot

_CHUNK_UNITS = CHUNK // UNIT_K


def records_linear(spec: LinearSpec, layout: SuperRecordsLayout, blocking: SpanBlocking) -> Any:
    """Linear layer with int8 activations for few rows of x.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations, one scale per group of weights.
    layout : SuperRecordsLayout
    blocking : SpanBlocking
        Its step is of no account.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, groups], xsum i32 [M, groups], factors f32 [M, groups, 2],
        records, [bias], [residual], y)``, M >= m_tile (`apq_tvm.ops.activations.factors`). The
        root's annotation `DOTS` of `apq_tvm.ops.few_rows.task` names the blocks for an intrinsic:
        ``dot...``, ``half...`` for the last 32 columns, ``scale...``.
    """
    return _RecordsLinear(spec, layout, blocking).build()


class _RecordsLinear(SpanLinear):
    layout: SuperRecordsLayout

    def declare(self, operands: Operands) -> None:
        super().declare(operands)
        shape = (self.m, self.layout.groups(self.spec.k), 2)
        self.factors = operands.declare("factors", shape, "float32")

    def span(self, span: Expr, units: int, suffix: str) -> None:
        from tvm.tirx.script.builder import ir as b

        streams, mt, rows = self.shape
        lead = (mt,) if mt > 1 else ()
        self.totals = self.cleared(f"totals{suffix}", "float32", streams, 2, *lead, rows)
        chunks, odd = divmod(units, _CHUNK_UNITS)
        first = span * i64(self.layout.span)
        if chunks:
            with b.serial(0, i64(chunks)) as c, b.sblock(f"chunks{suffix}"):
                chunk = b.axis.opaque(i64(chunks), c)
                b.reads()
                b.writes()
                for stream in range(streams):
                    at_k = first + chunk * i64(CHUNK)
                    self._dot(at_k, stream, CHUNK, f"dot{suffix}_{stream}")
        if odd:
            for stream in range(streams):
                at_k = first + i64(chunks * CHUNK)
                self._dot(at_k, stream, UNIT_K, f"half{suffix}_{stream}")
        for stream in range(streams):
            self._scale(span, stream, f"scale{suffix}_{stream}")

    def _dot(self, first: Expr, stream: int, k: int, name: str) -> None:
        """The products of columns `first` to ``first + k`` of a row block."""
        rec, block, group = self.layout.records, self.block(i64(stream)), first // i64(GROUP)
        views = [
            View(self.arrays["records"], (block, rec.chunk_at(first))),
            self.rows_of(self.xq, first),
            self.rows_of(self.xs, group),
            self.rows_of(self.factors, group, 0),
            View(self.totals, (i64(stream), *[0] * (len(self.totals.shape) - 1))),
        ]
        self.product(RecordDot(rec, self.m_tile, k).meaning, views, name)

    def _scale(self, span: Expr, stream: int, name: str) -> None:
        """The end of a super-block."""
        rec, records, zero = self.layout.records, self.arrays["records"], i64(0)
        start = rec.scales_at(span, int(records.shape[1]))
        views = [
            View(records, (self.block(i64(stream)), start)),
            View(self.totals, (i64(stream), *[zero] * (len(self.totals.shape) - 1))),
            View(self.sums, (i64(stream), zero, zero)),
        ]
        self.product(RecordDot(rec, self.m_tile).scaling, views, name)


class RecordsGemm(SpanGemm):
    """Values come from records."""

    def decode_unit(self, kb: Expr, j: Expr, u: Expr) -> None:
        from tvm.tirx.script.builder import ir as b

        layout = self.layout
        block, at = self.row_block(j), kb * (self.blocking.k_block // UNIT_K) + u
        # One for all lanes: of a lane's own column TVM does not see that.
        chunk = layout.records.chunk_at(at * UNIT_K)
        with self.stage("decode", 8, 4 * layout.rows) as (v, e):
            b.reads()
            k = at % _CHUNK_UNITS * UNIT_K + v * 4 + e % 4
            code = layout.value_of(self.weights, block, e // 4, chunk, k).astype("uint8")
            target = [j, u * 8 + v, e // 4, e % 4]
            b.writes(self.decoded[tuple(target)])
            b.buffer_store(self.decoded, code, target)

    def prefetch(self, kb: Expr, j: Expr, u: Expr) -> None:
        rec, records = self.layout.records, self.weights["records"]
        block, unit = self.following(kb, self.row_block(j), self.blocking.vectors, u)
        # Both units of a chunk ask for half of it.
        part = rec.chunk // 2
        start = rec.chunk_at(unit * UNIT_K) + unit % 2 * part
        self.prefetch_lines(lambda byte: records[block, start + byte], part)
