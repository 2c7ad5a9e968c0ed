"""Dynamic quantization of activations for 16-byte vectors, four groups at a time, unscheduled.

Codes, scales and sums are those of `apq_tvm.ops.activations.quantize`, whose rules for zeros, NaN
and infinity hold here too. The loops are others: what remains of a group after its last vector
operation is one number, so four groups are brought to one vector of largest magnitudes and one of
sums, and a row (or as much of it as `SPAN` groups) gets all its scales before any of its codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.activations.normalize import Normalize
from apq_tvm.ops.activations.quantize import Load, Quantize, checked_widths, scale_and_inverse
from apq_tvm.ops.blocks import each, put
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, i64
from apq_tvm.tensorize.meaning.rounding import (
    CODES,
    reduce_loop,
    round_loops,
    sum_loops,
    tree_loops,
)

BUNDLE = 4
"""Groups whose results are one vector."""

SPAN = 64
"""Groups whose scales are in scratch at once, at most."""


def quantize_bundles(
    k: int,
    act_group: int,
    weight_group: int,
    row_block: int,
    bits: int,
    normalize: Normalize | None = None,
) -> PrimFunc:
    """Quantize rows of float32 activations to int8, or to fewer bits in int8.

    Parameters
    ----------
    k, act_group, weight_group, row_block : int
        As in `apq_tvm.ops.activations.quantize.quantize_activations`.
    bits : int
        2..8.
    normalize : Normalize or None
        As in `apq_tvm.ops.activations.quantize.quantize_activations`.

    Returns
    -------
    tvm.tirx.PrimFunc
        As `apq_tvm.ops.activations.quantize.quantize_activations`; its blocks are ``largest``,
        ``top``, ``factors``, ``clear``, ``round``, ``dot`` and ``total`` with the suffixes of
        the kinds of groups: whole ones in fours (none), the others (``_rest``), past K (``_tail``).

    Raises
    ------
    NotApplicable
        The groups do not divide each other.
    """
    padded, width, sum_width = checked_widths(k, act_group, weight_group, bits)
    func = Bundles(k, padded, width, sum_width, CODES, row_block, bits).build(normalize)
    return func.with_attr("apq.bits", bits)


class Bundles(Quantize):
    """The loops; a subclass may store more of a row."""

    name = "quantize_bundles"

    def _row(self, row: Expr) -> None:
        groups, whole = self.padded // self.width, self.k // self.width
        bundled = whole // BUNDLE * BUNDLE if self.width == self.sum_width else 0
        if bundled:
            span = max(s for s in range(BUNDLE, SPAN + 1, BUNDLE) if bundled % s == 0)
            with each("span", bundled // span) as s0:
                first = s0 * span
                self._span(row, first, span, lambda c: self.x[row, first * self.width + c], "")
        if bundled < whole:
            with each("group", whole - bundled) as g0:
                group = g0 + bundled
                self._span(row, group, 1, lambda c: self.x[row, group * self.width + c], "_rest")
        if whole < groups:
            copy = self._padded_copy(row, whole, groups)
            with each("tail_group", groups - whole) as tail:
                self._span(row, tail + whole, 1, lambda c: copy[tail * self.width + c], "_tail")

    def _padded_copy(self, row: Expr, whole: int, groups: int) -> Buffer:
        """The columns from group `whole` on, with zeros past K."""
        copy = b.sblock_alloc_buffer(((groups - whole) * self.width,), "float32", align=64)
        kept = self.k - whole * self.width
        with b.serial(0, kept) as c, b.sblock("copy"):
            col = b.axis.spatial(kept, c)
            put(copy, [col], self.x[row, col + whole * self.width])
        with b.serial(0, copy.shape[0] - kept) as c, b.sblock("pad"):
            col = b.axis.spatial(copy.shape[0] - kept, c) + kept
            put(copy, [col], tirx.const(0.0, "float32"))
        return copy

    def _span(self, row: Expr, first: Expr, count: int, x: Load, suffix: str) -> None:
        """Everything of `count` groups; `x` is an activation by its column in them."""
        inverse = b.sblock_alloc_buffer((count,), "float32", align=64)
        self._scales(row, first, count, x, inverse, suffix)
        parts = self.width // self.sum_width
        sums = count * parts
        many = BUNDLE if sums % BUNDLE == 0 else 1
        with each(f"bundle{suffix}", sums // many) as bundle:
            self._codes(row, first * parts, bundle * many, many, x, inverse, suffix)

    def _scales(
        self, row: Expr, first: Expr, count: int, x: Load, inverse: Buffer, suffix: str
    ) -> None:
        many = BUNDLE if count % BUNDLE == 0 else 1
        lanes = 4 if many == BUNDLE else 16
        tops = b.sblock_alloc_buffer((count,), "int32", align=64)
        with each(f"bundle_top{suffix}", count // many) as bundle:
            largest = b.sblock_alloc_buffer((many, lanes), "int32", align=64)
            extents = (self.width // lanes, many, lanes)
            with b.grid(*extents) as (c0, g0, e0), b.sblock(f"largest{suffix}"):
                c, g, e = b.axis.remap("RSS", [c0, g0, e0])
                value = x((bundle * many + g) * self.width + c * lanes + e)
                b.reads(value)
                b.writes(largest[g, e])
                with b.init():
                    b.buffer_store(largest, tirx.const(0, "int32"), [g, e])
                # A magnitude's pattern orders like the magnitude, NaN above infinity.
                pattern = tirx.reinterpret("int32", tirx.abs(value))
                b.buffer_store(largest, tirx.max(largest[g, e], pattern), [g, e])
            _combine(f"top{suffix}", "max", largest, lambda g: tops[bundle * many + g])
        with b.serial(0, count) as g0, b.sblock(f"factors{suffix}"):
            g = b.axis.spatial(count, g0)
            b.reads(tops[g])
            b.writes(inverse[g], self.xs[row, first + g])
            scale, over = scale_and_inverse(tirx.reinterpret("float32", tops[g]), self.most)
            b.buffer_store(self.xs, scale, [row, first + g])
            b.buffer_store(inverse, over, [g])

    def _codes(
        self, row: Expr, first: Expr, start: Expr, many: int, x: Load, inverse: Buffer, suffix: str
    ) -> None:
        """Codes and sums of `many` sum groups, from `start` of those that begin with `first`."""
        parts, chunks = self.width // self.sum_width, self.sum_width // CODES
        sums = b.sblock_alloc_buffer((many, 4), "int32", align=64)
        with b.grid(many, 4) as (g0, e0), b.sblock(f"clear{suffix}"):
            g, e = b.axis.remap("SS", [g0, e0])
            put(sums, [g, e], tirx.const(0, "int32"))
        with b.grid(chunks, many) as (c0, g0), b.sblock(f"chunk{suffix}"):
            c, g = b.axis.remap("SS", [c0, g0])
            b.reads()
            b.writes()
            column = (start + g) * self.sum_width + c * CODES
            target = first * self.sum_width + column
            factor = (start + g) // parts
            round_loops(
                f"round{suffix}",
                lambda e: x(column + e),
                inverse[factor],
                lambda e: self.xq[row, target + e],
                self.bits,
            )
            sum_loops(
                f"dot{suffix}",
                lambda lane, e: self.xq[row, target + lane * 4 + e],
                lambda lane: sums[g, lane],
            )
        _combine(f"total{suffix}", "add", sums, lambda g: self.xsum[row, first + start + g])


def _combine(name: str, operation: str, source: Buffer, target: Callable[[Expr], Any]) -> None:
    """``target(g) = combine over lanes of source[g]``: by pairs, or one by one for one group."""
    many, lanes = (int(extent) for extent in source.shape)
    if many > 1:
        tree_loops(name, operation, source, target)
    else:
        reduce_loop(name, operation, lanes, lambda e: source[0, e], target(i64(0)))
