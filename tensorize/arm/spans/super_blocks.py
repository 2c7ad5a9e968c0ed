"""Dot products of super-blocks on Arm: ``sdot`` by lane, and integer sub-scales and minima.

As `spans.codebook_quads`, sums start at `MAGIC`; a sub-scale and a minimum per row
are spread by ``tbl`` from nibbles to 32-bit lanes. `extra` has per group four times `MAGIC` and
four times the sum of the activations, which the minima multiply.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.lookup import Dot, as_float, masked, shifted, table_lookup
from apq_tvm.tensorize.arm.spans.span import (
    fma,
    instruction_name,
    load_low,
    start_of,
    store_sums,
    sums_of,
    vector_constant,
    x_of,
)
from apq_tvm.tensorize.exprs import Expr, splat
from apq_tvm.tensorize.meaning.spans.kinds import SuperDot
from apq_tvm.tensorize.meaning.spans.lookup import ROWS, SpanOperands, span_pair
from apq_tvm.tensorize.registry import register

_TWO_23_BITS = 0x4B000000
"""Of the float 2^23, whose low bits count in ones."""


def super_intrinsic(dot: SuperDot, fused: bool, sve: bool) -> str:
    """Register (once) and name the dot product of a super-block.

    Parameters
    ----------
    dot : SuperDot
    fused, sve : bool
        Whether there is ``sdot``, and SVE.

    Returns
    -------
    str
        The intrinsic's name.
    """
    top = (1 << dot.bits) - 1
    name = f"apq_{instruction_name(fused, sve)}_{dot.m}x{ROWS}x{dot.k}_s8u{dot.bits}sf32"

    def implement(o: SpanOperands) -> None:
        totals = b.alloc_buffer((2, dot.m, ROWS), "float32", align=16)

        def add(which: int, row: int, value: Expr, factor: Expr) -> None:
            total = fma(value, factor, totals.vload([which, row, 0], "float32x4"))
            b.buffer_store(totals, total, [which, row, tirx.Ramp(0, 1, ROWS)])

        for which in range(2):
            for row in range(dot.m):
                zero = splat(0.0, "float32", 4)
                b.buffer_store(totals, zero, [which, row, tirx.Ramp(0, 1, ROWS)])
        with b.serial(0, tirx.const(dot.units, "int64")) as loop:
            unit = loop if dot.units > 1 else tirx.const(0, "int64")
            for group in range(2):
                dots = [Dot(fused, top, start_of(o, i, unit * 2 + group)) for i in range(dot.m)]
                for i in range(4):
                    values = _codes(o, unit, 4 * group + i)
                    for row, each in enumerate(dots):
                        each.add(values, x_of(o, row, unit * 32 + 16 * group), i)
                sub, least = (_small(o, n, unit, group, sve) for n in ("subs", "mins"))
                for row, each in enumerate(dots):
                    at = unit * 2 + group
                    xs = tirx.Broadcast(o.xs[tuple(o.at(row, at))], ROWS)
                    add(0, row, as_float(each.total()), sub * xs)
                    add(1, row, least, o.extra.vload(o.at(row, at, 4), "float32x4"))
        scale, min_scale = (
            s.vload([0], "float16x4").astype("float32x4")
            for s in (o.scales, o.arrays["min_scales"])
        )
        for row in range(dot.m):
            total, least = (totals.vload([which, row, 0], "float32x4") for which in range(2))
            sums = fma(total, scale, sums_of(o, row))
            store_sums(o, row, sums - least * min_scale)

    return register(name, lambda: span_pair(dot, implement))


def _unit_at(o: SpanOperands, unit: Expr, byte: int) -> list[Expr]:
    dot = o.dot
    assert isinstance(dot, SuperDot)
    return [unit, byte] if dot.units > 1 else [byte]


def _codes(o: SpanOperands, unit: Expr, vector: int) -> Expr:
    """int8 [16]: the codes of one vector of a unit."""
    dot, code = o.dot, None
    assert isinstance(dot, SuperDot)
    for width, shift in dot.codes_unit.fields:
        at = 16 * (shift + vector % width)
        part = o.arrays["codes"].vload(_unit_at(o, unit, at), "uint8x16")
        moved = shifted(part, shift - vector // width * width)
        part = masked(moved, ((1 << width) - 1) << shift)
        code = part if code is None else tirx.bitwise_or(code, part)
    return tirx.reinterpret("int8x16", code)


def _small(o: SpanOperands, name: str, unit: Expr, group: int, sve: bool) -> Expr:
    """float32 [4]: a group's sub-scales or minima."""
    packed = load_low(o.arrays[name], _unit_at(o, unit, 0), "float32")
    nibbles = shifted(packed, -4) if group else masked(packed, 15)
    zero = ROWS  # a byte that is 0
    order = vector_constant([at for r in range(ROWS) for at in (r, zero, zero, zero)])
    lanes = tirx.reinterpret("int32x4", table_lookup([nibbles], order, sve))
    # Two operations where ``scvtf`` may take as long as four.
    raised = tirx.bitwise_or(lanes, splat(_TWO_23_BITS, "int32", 4))
    return tirx.reinterpret("float32x4", raised) - splat(2.0**23, "float32", 4)
