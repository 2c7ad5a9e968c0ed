"""What an instruction set adds to the lookups of one unit of binary codes: instructions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import Expr, i64, prefetch
from apq_tvm.tensorize.meaning.binary_codes import LutDot, LutUnit, lut_meaning
from apq_tvm.tensorize.meaning.scaffold import Bound, pair
from apq_tvm.tensorize.registry import register


class LutBuffers(Bound):
    """Operands of `lut_meaning`."""

    def acc_at(self, row: int, plane: int, half: int = 0) -> list[Expr]:
        """Index of all lanes of one row of x and plane (and half, in paired units)."""
        from tvm import tirx

        unit = self.dot.unit
        lead = ([plane] if unit.bits > 1 else []) + ([half] if unit.paired else [])
        return self.at(row, *lead, tirx.Ramp(i64(0), i64(1), 16 if unit.paired else unit.rows))

    def entries(self, row: int, first: int, count: int) -> Expr:
        """`count` entries of the tables of one row of x, as a vector."""
        return self.table.vload(self.at(row, first), f"{self.dot.table_dtype}x{count}")


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
    body: Callable[[LutBuffers], None]
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
        The intrinsic's name; its operands are those of `lut_meaning`.
    """
    unit = instruction.unit(bits)
    name = f"apq_{instruction.name}_{m}x{unit.rows}x32_b{bits}"
    name += f"_pf{ahead}" if ahead else ""

    dot = LutDot(unit, m, instruction.table_dtype)
    meaning = lut_meaning(dot)

    def emit(*buffers: Any) -> None:
        o = LutBuffers(dot, meaning, buffers)
        prefetch(o.codes, unit.nbytes, ahead)
        instruction.body(o)

    return register(name, lambda: pair(meaning, emit))
