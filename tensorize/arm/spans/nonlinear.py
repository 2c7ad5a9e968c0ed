"""Dot products with weights of one table on Arm: a span of 4 rows, and its scales.

Weights are looked up by ``tbl`` and multiplied by ``sdot`` by lane: a lane of the activations is
four k, a lane of the sums one row, so that nothing is summed across lanes. What is left beside is
the scaling, where conversions are what costs most (two uops on every Neoverse, of two cycles each
on N1):

- sums start at `MAGIC`, which comes with the activations (`extra`: a load, where a constant would
  have to be copied), so that they are floats as they are: the product of `MAGIC` with the
  activations' scale is in `extra`, and ``xs (MAGIC + sum) - xs MAGIC`` is one ``fmla``;
- a float16 scale becomes a float by a shift and a mask, 2^-112 too small; `UNITS_ACTS` in `xs` and
  `unit_scale` after the last sum bring back two halves of that.

A float16 scale below 2^-14 is a denormal on this way: a process that flushes those to zero loses
scales so small.
"""

from __future__ import annotations

from tvm import tirx

from apq_tvm.tensorize.arm.lookup import Dot, masked, shifted, table_lookup
from apq_tvm.tensorize.arm.spans.span import (
    fma,
    instruction_name,
    start_of,
    store_sums,
    sums_of,
    tables_of,
    x_of,
)
from apq_tvm.tensorize.exprs import splat
from apq_tvm.tensorize.meaning.spans.kinds import UnitsDot
from apq_tvm.tensorize.meaning.spans.lookup import ROWS, SpanOperands, span_pair
from apq_tvm.tensorize.registry import register

UNITS_ACTS = 2.0**56
"""What `xs` is multiplied by for `units_intrinsic`."""

UNITS_FACTOR = -1.5 * 2.0**23
"""What `extra` multiplies `xs` by for `units_intrinsic`: less the float of `MAGIC`."""

UNITS_UNIT = 2.0**-112
"""`SpanDot.unit` of `units_intrinsic`."""

_NOT_EXPONENT = ~0x70000000
"""Clears the copies that sign extension made between a float16's sign and its exponent."""


def units_intrinsic(dot: UnitsDot, fused: bool, sve: bool) -> str:
    """Register (once) and name the dot product of a group of 4-bit codes and one table.

    For 32 codes of 4 rows there are 8 products, 8 lookups, 8 masks or shifts, and 4 instructions
    for the scales: 7 cycles of four vector pipes, 14 of two at least, 1.65 times what the 17 of
    W4A8g32 take.

    Parameters
    ----------
    dot : UnitsDot
    fused : bool
        Whether there is ``sdot``.
    sve : bool
        Whether there is SVE.

    Returns
    -------
    str
        The intrinsic's name. Its `xs` has 22 bits and is scaled by `UNITS_ACTS`; `extra` is `MAGIC`
        four times and `UNITS_FACTOR` times `xs` four times.
    """
    name = f"apq_{instruction_name(fused, sve)}_{dot.m}x{ROWS}x{dot.k}_s8lut4f32"

    def implement(o: SpanOperands) -> None:
        _add_units(o, dot, fused, sve)

    return register(name, lambda: span_pair(dot, implement))


def _add_units(o: SpanOperands, dot: UnitsDot, fused: bool, sve: bool) -> None:
    """The products of a group."""
    (table,) = tables_of(o, [list(range(16))])
    dots = [Dot(fused, dot.offset, start_of(o, i, 0)) for i in range(dot.m)]
    for unit in range(dot.units):
        lead = [tirx.const(unit, "int64")] if dot.units > 1 else []
        for i in range(4):
            codes = o.arrays["codes"].vload([*lead, 16 * i], "uint8x16")
            for half, index in enumerate((masked(codes, 15), shifted(codes, -4))):
                values = table_lookup([table], index, sve)
                for row, each in enumerate(dots):
                    each.add(values, x_of(o, row, 32 * unit + 16 * half), i)
    halves = tirx.reinterpret("int16x4", o.scales.vload([0], "float16x4"))
    bits = tirx.shift_left(halves.astype("int32x4"), splat(13, "int32", 4))
    bits = tirx.bitwise_and(bits, splat(_NOT_EXPONENT, "int32", 4))
    scale = tirx.reinterpret("float32x4", bits)
    for row, each in enumerate(dots):
        xs = tirx.Broadcast(o.xs[tuple(o.at(row, 0))], ROWS)
        less = o.extra.vload(o.at(row, 0, 4), "float32x4")
        # Exact but for one rounding: xs has 22 bits, so its product with `MAGIC` is exact.
        value = fma(tirx.reinterpret("float32x4", each.total()), xs, less)
        store_sums(o, row, fma(value, scale, sums_of(o, row)))
