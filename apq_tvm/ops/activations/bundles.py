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

from apq_tvm.ops.activations.quantize import TINY, Quantize, checked_widths
from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.meaning.rounding import CODES, round_loops, store, sum_loops, tree_loops

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any
Load = Callable[[Expr], Expr]

BUNDLE = 4
"""Groups whose results are one vector."""

SPAN = 64
"""Groups whose scales are in scratch at once, at most."""


def quantize_bundles(
    k: int, act_group: int, weight_group: int, row_block: int, bits: int
) -> PrimFunc:
    """Quantize rows of float32 activations to int8, or to fewer bits in int8.

    Parameters
    ----------
    k, act_group, weight_group, row_block : int
        As in `apq_tvm.ops.activations.quantize.quantize_activations`.
    bits : int
        2..8.

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
    func = Bundles(k, padded, width, sum_width, CODES, row_block, bits).build()
    return func.with_attr("apq.bits", bits)


class Bundles(Quantize):
    """The loops; a subclass may store more of a row."""

    name = "quantize_bundles"

    def _row(self, row: Expr) -> None:
        groups, whole = self.padded // self.width, self.k // self.width
        bundled = whole // BUNDLE * BUNDLE if self.width == self.sum_width else 0
        if bundled:
            span = max(s for s in range(BUNDLE, SPAN + 1, BUNDLE) if bundled % s == 0)
            with b.serial(0, bundled // span) as s0, b.sblock("span"):
                first = b.axis.spatial(bundled // span, s0) * span
                b.reads()
                b.writes()
                self._span(row, first, span, lambda c: self.x[row, first * self.width + c], "")
        if bundled < whole:
            with b.serial(0, whole - bundled) as g0, b.sblock("group"):
                group = b.axis.spatial(whole - bundled, g0) + bundled
                b.reads()
                b.writes()
                self._span(row, group, 1, lambda c: self.x[row, group * self.width + c], "_rest")
        if whole < groups:
            copy = self._padded_copy(row, whole, groups)
            with b.serial(0, groups - whole) as g0, b.sblock("tail_group"):
                tail = b.axis.spatial(groups - whole, g0)
                b.reads()
                b.writes()
                self._span(row, tail + whole, 1, lambda c: copy[tail * self.width + c], "_tail")

    def _padded_copy(self, row: Expr, whole: int, groups: int) -> Buffer:
        """The columns from group `whole` on, with zeros past K."""
        copy = b.sblock_alloc_buffer(((groups - whole) * self.width,), "float32", align=64)
        kept = self.k - whole * self.width
        with b.serial(0, kept) as c, b.sblock("copy"):
            col = b.axis.spatial(kept, c)
            b.reads()
            b.writes(copy[col])
            b.buffer_store(copy, self.x[row, col + whole * self.width], [col])
        with b.serial(0, copy.shape[0] - kept) as c, b.sblock("pad"):
            col = b.axis.spatial(copy.shape[0] - kept, c) + kept
            b.reads()
            b.writes(copy[col])
            b.buffer_store(copy, tirx.const(0.0, "float32"), [col])
        return copy

    def _span(self, row: Expr, first: Expr, count: int, x: Load, suffix: str) -> None:
        """Everything of `count` groups; `x` is an activation by its column in them."""
        inverse = b.sblock_alloc_buffer((count,), "float32", align=64)
        self._scales(row, first, count, x, inverse, suffix)
        parts = self.width // self.sum_width
        sums = count * parts
        many = BUNDLE if sums % BUNDLE == 0 else 1
        with b.serial(0, sums // many) as g0, b.sblock(f"bundle{suffix}"):
            bundle = b.axis.spatial(sums // many, g0)
            b.reads()
            b.writes()
            self._codes(row, first * parts, bundle * many, many, x, inverse, suffix)

    def _scales(
        self, row: Expr, first: Expr, count: int, x: Load, inverse: Buffer, suffix: str
    ) -> None:
        many = BUNDLE if count % BUNDLE == 0 else 1
        lanes = 4 if many == BUNDLE else 16
        tops = b.sblock_alloc_buffer((count,), "int32", align=64)
        with b.serial(0, count // many) as g0, b.sblock(f"bundle_top{suffix}"):
            bundle = b.axis.spatial(count // many, g0)
            b.reads()
            b.writes()
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
            _combine(f"top{suffix}", tirx.max, largest, lambda g: tops[bundle * many + g])
        with b.serial(0, count) as g0, b.sblock(f"factors{suffix}"):
            g = b.axis.spatial(count, g0)
            b.reads(tops[g])
            b.writes(inverse[g], self.xs[row, first + g])
            size = tirx.reinterpret("float32", tops[g])
            tiny = size < tirx.const(TINY, "float32")
            zero, most = tirx.const(0.0, "float32"), tirx.const(self.most, "float32")
            scale = tirx.Select(tiny, zero, size * tirx.const(1 / self.most, "float32"))
            b.buffer_store(self.xs, scale, [row, first + g])
            b.buffer_store(inverse, tirx.Select(tiny, zero, most / size), [g])

    def _codes(
        self, row: Expr, first: Expr, start: Expr, many: int, x: Load, inverse: Buffer, suffix: str
    ) -> None:
        """Codes and sums of `many` sum groups, from `start` of those that begin with `first`."""
        parts, chunks = self.width // self.sum_width, self.sum_width // CODES
        sums = b.sblock_alloc_buffer((many, 4), "int32", align=64)
        with b.grid(many, 4) as (g0, e0), b.sblock(f"clear{suffix}"):
            g, e = b.axis.remap("SS", [g0, e0])
            b.reads()
            b.writes(sums[g, e])
            b.buffer_store(sums, tirx.const(0, "int32"), [g, e])
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
        _combine(
            f"total{suffix}", lambda a, c: a + c, sums, lambda g: self.xsum[row, first + start + g]
        )


def _combine(
    name: str, combine: Callable[[Expr, Expr], Expr], source: Buffer, target: Callable[[Expr], Any]
) -> None:
    """``target(g) = combine over lanes of source[g]``: by pairs, or one by one for one group."""
    many, lanes = (int(extent) for extent in source.shape)
    if many > 1:
        tree_loops(name, combine, source, target)
        return
    at = target(i64(0))
    with b.serial(0, lanes) as e0, b.sblock(name):
        e = b.axis.reduce(lanes, e0)
        b.reads(source[0, e])
        b.writes(at)
        with b.init():
            store(at, tirx.const(0, "int32"))
        store(at, combine(at, source[0, e]))
