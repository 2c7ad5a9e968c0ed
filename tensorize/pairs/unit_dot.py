"""The scaffold of every dot product of one unit: operands, loops of the meaning, names.

``acc[p, i, r] += Σ_k product(code[r, k], x[i, k])`` over the k of group p of a unit of packed
codes, for rows i of x and rows r of the weights. The group axis is left out where a unit is one
group, the row axis where there is one row: a tensorized block has no axes of extent 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import i64, operand, prefetch_line, whole
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, decode

Expr = Any  # tvm is untyped
Buffer = Any
Product = Callable[[Expr, Expr, Expr | None], Expr]
Body = Callable[["Operands"], None]


@dataclass(frozen=True)
class UnitDot:
    """Shape of one dot product of a unit.

    Parameters
    ----------
    unit : Unit
    m : int
        Rows of x.
    x_dtype, acc_dtype : str
    zeros : bool
        True if the product needs the zero points, uint8 [R] or [2, R].
    """

    unit: Unit
    m: int
    x_dtype: str
    acc_dtype: str
    zeros: bool = False

    @property
    def spatial(self) -> tuple[int, ...]:
        """Shape of the sums."""
        groups = (self.unit.groups,) if self.unit.groups > 1 else ()
        return (*groups, *((self.m,) if self.m > 1 else ()), self.unit.rows)

    def split(self, axes: tuple[Expr, ...]) -> tuple[Expr | None, Expr | None, Expr]:
        """(group or None, row of x or None, row of weights) of an index into the sums."""
        group = axes[0] if self.unit.groups > 1 else None
        return group, axes[-2] if self.m > 1 else None, axes[-1]


@dataclass(frozen=True)
class Operands:
    """Buffers of one pair member: codes uint8 [bytes], x [m, 32] or [32], zeros, sums."""

    dot: UnitDot
    codes: Buffer
    x: Buffer
    zeros: Buffer | None
    acc: Buffer

    def sums_at(self, group: int, row: int) -> list[Expr]:
        """Index of all lanes of one group and row of x."""
        from tvm import tirx

        unit = self.dot.unit
        lead = ([i64(group)] if unit.groups > 1 else []) + ([i64(row)] if self.dot.m > 1 else [])
        return [*lead, tirx.Ramp(i64(0), i64(1), unit.rows)]

    def x_at(self, row: int, k: int) -> list[Expr]:
        """Index of one activation."""
        return [i64(row), i64(k)] if self.dot.m > 1 else [i64(k)]


def make_pair(dot: UnitDot, product: Product, implement: Body) -> tuple[Any, Any]:
    """(desc, impl) of a unit's dot product.

    Parameters
    ----------
    dot : UnitDot
    product : callable
        ``(code int32, x, zero uint8 or None)`` to a term of the sum, in `acc_dtype`.
    implement : callable
        Emits the instructions on the operands.
    """
    return _member(dot, lambda o: _plain_loops(o, product)), _member(dot, implement)


def _member(dot: UnitDot, body: Body) -> Any:
    """PrimFunc (codes, x, [zeros,] acc) whose block holds `body`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    unit = dot.unit

    x_shape = (dot.m, UNIT_K) if dot.m > 1 else (UNIT_K,)
    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            b.func_name("dot")
            codes = operand("codes", (unit.nbytes,), "uint8", unit.vector_bytes, None)
            row_stride = ["row_stride", i64(1)] if dot.m > 1 else None
            x = operand("x", x_shape, dot.x_dtype, 4, row_stride)
            zeros_shape = (unit.groups, unit.rows) if unit.groups > 1 else (unit.rows,)
            zeros = operand("zeros", zeros_shape, "uint8", unit.rows, None) if dot.zeros else None
            acc = operand("acc", dot.spatial, dot.acc_dtype, unit.vector_bytes, None)
            with b.sblock("root"):
                inputs = [codes, x] if zeros is None else [codes, x, zeros]
                b.reads(*(whole(buffer) for buffer in (acc, *inputs)))
                b.writes(whole(acc))
                body(Operands(dot, codes, x, zeros, acc))
    return builder.get()


def _plain_loops(o: Operands, product: Product) -> None:
    from tvm.tirx.script.builder import ir as b

    dot, unit = o.dot, o.dot.unit
    extents = [i64(e) for e in (*dot.spatial, unit.vectors, 4)]
    with b.grid(*extents) as loops, b.sblock("dot"):
        axes = b.axis.remap("S" * len(dot.spatial) + "RR", loops)
        at, (j, c) = tuple(axes[:-2]), axes[-2:]
        group, row, r = dot.split(at)
        vector = j if group is None else group * i64(unit.vectors) + j
        lead = () if row is None else (row,)
        zero_at = (r,) if group is None else (group, r)
        reads = [o.acc[at], o.codes[0 : unit.nbytes], o.x[(*lead, slice(0, UNIT_K))]]
        b.reads(*reads, *([] if o.zeros is None else [o.zeros[zero_at]]))
        b.writes(o.acc[at])
        code = decode(unit, lambda byte: o.codes[byte], vector, r * i64(4) + c)
        x = o.x[(*lead, vector * i64(4) + c)]
        zero = None if o.zeros is None else o.zeros[zero_at]
        b.buffer_store(o.acc, o.acc[at] + product(code, x, zero), list(at))


def prefetch(codes: Buffer, nbytes: int, distance: int) -> None:
    """Prefetch a unit's cache lines `distance` bytes ahead of it, 0 for none.

    A prefetch never faults, so the address may lie past the end of the weights.
    """

    for line in range(0, nbytes if distance else 0, 64):
        prefetch_line(codes[i64(distance + line)])


def decoded(unit: Unit, codes: Buffer, vector: int) -> Expr:
    """uint8 [4R]: codes of one vector, from each field by at most a shift and a mask."""
    from tvm import tirx

    size = unit.vector_bytes
    result: Expr = None
    for width, shift in unit.fields:
        part = codes.vload([i64(size * (shift + vector % width))], f"uint8x{size}")
        if unit.inverted and (width == 8 or vector // width * width + width == 8):
            part = tirx.bitwise_xor(part, tirx.Broadcast(tirx.const(0x80, "uint8"), size))
        if width < 8:
            # Shifted in 16-bit lanes: x86 has no 8-bit shift, and the mask drops what crosses over.
            down = vector // width * width - shift
            words = tirx.reinterpret(f"uint16x{size // 2}", part)
            if down:
                move = tirx.shift_right if down > 0 else tirx.shift_left
                amount = tirx.Broadcast(tirx.const(abs(down), "uint16"), size // 2)
                part = tirx.reinterpret(f"uint8x{size}", move(words, amount))
            mask = tirx.const(((1 << width) - 1) << shift, "uint8")
            part = tirx.bitwise_and(part, tirx.Broadcast(mask, size))
        result = part if result is None else tirx.bitwise_or(result, part)
    return result
