"""The scaffold of every table lookup of one unit of binary codes: operands, meaning, names.

``acc[i, p, r] += Σ_quad table[i, quad, key(p, r, quad)]`` over the eight quads of a unit, for rows
i of x, planes p and rows r of the weights. Row and plane axes are left out where there is one.

A unit of 32 rows has two uint16 sums per pair of rows t and 16 + t, modulo 2^16::

    acc[i, p, 0, t] += table[key(t)] + 256 table[key(16 + t)]
    acc[i, p, 1, t] += table[key(16 + t)]

which is what adding a vector of bytes as 16-bit lanes, and its high bytes once more, gives. A unit
of 16 rows in bytes has one uint16 sum per row.
A lookup with a key from memory cannot be tensorized, so the meaning sums over all 16 entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import i64, operand, whole
from apq_tvm.tensorize.meaning.binary_codes import ENTRIES, QUADS, LutUnit
from apq_tvm.tensorize.pairs.unit_dot import prefetch
from apq_tvm.tensorize.registry import register

Expr = Any  # tvm is untyped
Buffer = Any


@dataclass(frozen=True)
class LutDot:
    """Shape of the lookups of one unit.

    Parameters
    ----------
    unit : LutUnit
    m : int
        Rows of x.
    table_dtype : str
        ``uint8`` or ``float32``.
    """

    unit: LutUnit
    m: int
    table_dtype: str

    @property
    def acc_dtype(self) -> str:
        """Of the sums."""
        if self.table_dtype == "float32":
            return "float32"
        return "uint16" if self.unit.bytewise else "int32"

    @property
    def acc_shape(self) -> tuple[int, ...]:
        """Shape of the sums."""
        lead = (
            *((self.m,) if self.m > 1 else ()),
            *((self.unit.bits,) if self.unit.bits > 1 else ()),
        )
        return (*lead, *((2, 16) if self.unit.paired else (self.unit.rows,)))

    def split(self, axes: list[Expr]) -> tuple[Expr | None, Expr, list[Expr]]:
        """(row of x or None, plane, the rest) of an index into the sums."""
        axes = list(axes)
        row = axes.pop(0) if self.m > 1 else None
        plane = axes.pop(0) if self.unit.bits > 1 else i64(0)
        return row, plane, axes

    def term(self, code: Callable[[Any], Any], table: Callable[[Any], Any], at: Any) -> Expr:
        """One term of the sums.

        Parameters
        ----------
        code : callable
            Byte of the unit by its index.
        table : callable
            Entry by ``[quad * 16 + entry]``.
        at : tuple
            (index into the sums, reduction axes): axes are quad and entry, and before them, in
            paired units, which of the two rows.
        """
        from tvm import tirx

        target, (*side, quad, entry) = at
        _, plane, rest = self.split(target)
        lane = side[0] * i64(16) + rest[1] if side else rest[0]
        key = tirx.bitwise_and(self.unit.key(code, plane, lane, quad), tirx.const(15, "int32"))
        value = table(quad * i64(ENTRIES) + entry).astype(self.acc_dtype)
        zero = tirx.const(0, self.acc_dtype)
        if side:
            second, half = side[0] == i64(1), rest[0] == i64(1)
            one, high = tirx.const(1, self.acc_dtype), tirx.const(256, self.acc_dtype)
            factor = tirx.Select(second, tirx.Select(half, one, high), tirx.Select(half, zero, one))
            value = value * factor
        return tirx.Select(key == entry.astype("int32"), value, zero)

    @property
    def reduced(self) -> tuple[int, ...]:
        """Extents of the reduction axes of `term`."""
        return (*((2,) if self.unit.paired else ()), QUADS, ENTRIES)


@dataclass(frozen=True)
class LutOperands:
    """Buffers of one pair member: codes uint8 [bytes], table [m, 128] or [128], sums."""

    dot: LutDot
    codes: Buffer
    table: Buffer
    acc: Buffer

    def acc_at(self, row: int, plane: int, half: int = 0) -> list[Expr]:
        """Index of all lanes of one row of x and plane (and half, in paired units)."""
        from tvm import tirx

        dot = self.dot
        lead = ([row] if dot.m > 1 else []) + ([plane] if dot.unit.bits > 1 else [])
        lanes = 16 if dot.unit.paired else dot.unit.rows
        half_at = [half] if dot.unit.paired else []
        return [*map(i64, lead + half_at), tirx.Ramp(i64(0), i64(1), lanes)]

    def entries(self, row: int, first: int, count: int) -> Expr:
        """`count` entries of the tables of one row of x, as a vector."""
        lead = [i64(row)] if self.dot.m > 1 else []
        return self.table.vload([*lead, i64(first)], f"{self.dot.table_dtype}x{count}")


@dataclass(frozen=True)
class LutInstruction:
    """How tables are looked up.

    Parameters
    ----------
    name : str
    rows : int
        R of the layout.
    features : tuple of str
        LLVM features it needs, all of them.
    table_dtype : str
        ``uint8`` (sums plus 128) or ``float32``.
    body : callable
        Emits the lookups of one unit.
    narrow : bool
        As in `LutUnit`.
    tile_sums : int
        Most rows of x times planes for which the sums, with the tables of each row, fit in
        registers; any for one row of x, and 0 for no limit.
    sums : int
        Most row blocks read at once times rows of x times planes; any for one block, 0 for no
        limit.
    """

    name: str
    rows: int
    features: tuple[str, ...]
    table_dtype: str
    body: Callable[[LutOperands], None]
    narrow: bool = False
    tile_sums: int = 0
    sums: int = 0

    def unit(self, bits: int) -> LutUnit:
        """What it reads at once."""
        return LutUnit(bits, self.rows, self.narrow)


def lut_intrinsic(instruction: LutInstruction, bits: int, m: int = 1, ahead: int = 0) -> str:
    """Register (once) and name the lookups of one unit.

    Parameters
    ----------
    instruction : LutInstruction
    bits : int
        Planes.
    m : int
        Rows of x that share the extracted keys.
    ahead : int
        Bytes ahead of the unit to prefetch, 0 for none.

    Returns
    -------
    str
        The intrinsic's name; its operands are those of `LutDot`.
    """
    unit = instruction.unit(bits)
    name = f"apq_{instruction.name}_{m}x{unit.rows}x32_b{bits}"
    name += f"_pf{ahead}" if ahead else ""

    def implement(operands: LutOperands) -> None:
        prefetch(operands.codes, unit.nbytes, ahead)
        instruction.body(operands)

    dot = LutDot(unit, m, instruction.table_dtype)
    return register(name, lambda: make_pair(dot, implement))


def make_pair(dot: LutDot, implement: Callable[[LutOperands], None]) -> tuple[Any, Any]:
    """(desc, impl) of a unit's lookups."""
    return _member(dot, _plain_loops), _member(dot, implement)


def _member(dot: LutDot, body: Callable[[LutOperands], None]) -> Any:
    """PrimFunc (codes, table, acc) whose block holds `body`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    entries = QUADS * ENTRIES
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("lookup")
        codes = operand("codes", (dot.unit.nbytes,), "uint8", min(64, dot.unit.plane_bytes), None)
        many = dot.m > 1
        stride = ["row_stride", i64(1)] if many else None
        table_shape = (dot.m, entries) if many else (entries,)
        table = operand("table", table_shape, dot.table_dtype, 4, stride)
        acc = operand("acc", dot.acc_shape, dot.acc_dtype, 4, None)
        with b.sblock("root"):
            b.reads(*(whole(buffer) for buffer in (acc, codes, table)))
            b.writes(whole(acc))
            body(LutOperands(dot, codes, table, acc))
    return builder.get()


def _plain_loops(o: LutOperands) -> None:
    from tvm.tirx.script.builder import ir as b

    dot = o.dot
    count = len(dot.acc_shape)
    with b.grid(*map(i64, (*dot.acc_shape, *dot.reduced))) as loops, b.sblock("lookup"):
        axes = list(b.axis.remap("S" * count + "R" * len(dot.reduced), loops))
        target, reduced = axes[:count], axes[count:]
        row = dot.split(target)[0]
        lead = () if row is None else (row,)
        at = tuple(target)
        entries = slice(0, QUADS * ENTRIES)
        b.reads(o.acc[at], o.codes[0 : dot.unit.nbytes], o.table[(*lead, entries)])
        b.writes(o.acc[at])
        term = dot.term(
            lambda byte: o.codes[byte], lambda e: o.table[(*lead, e)], (target, reduced)
        )
        b.buffer_store(o.acc, o.acc[at] + term, target)
