"""Lookups in large tables of bitplanes on x86: codes first, then one table after the other.

Tables of 128 and 256 bytes are two and four registers of 512 bits. Eight rows of them do not fit,
and loading them anew for every register of codes costs more than the lookups. So the codes of a run
of columns are put together in memory, and a row's table stays in registers while its run is looked
up (`apq_tvm.ops.few_rows.anyprec.planes_gemv_apart`): 512x4096 in cache takes 67 us with 8 bits and
47 with 7, where tables in turn take 84 to 100 and 54 to 56 (Zen 5).

``vpermi2b`` looks up 128 entries; two of them are blended by the top bit. By ``vpshufb`` on 256
bits it does not pay: half of the tables would fill the registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import prefetch_line
from apq_tvm.tensorize.meaning.planes import ROWS, PlanesUnit
from apq_tvm.tensorize.pairs.planes import codes_pair, table_pair
from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.x86.planes_index import masked, wide_indices
from apq_tvm.tensorize.x86.planes_sums import add_scaled, multiply

if TYPE_CHECKING:
    from apq_tvm.tensorize.x86.planes import PlanesInstruction

Expr = Any  # tvm is untyped
Buffer = Any

AHEAD = 4096
"""Bytes ahead in every plane that codes are prefetched."""


def codes_intrinsic(instruction: PlanesInstruction, bits: int, k: int) -> str:
    """Register (once) and name the putting together of a run's codes of 7 or 8 bits.

    Operands: planes uint8 [bits, 1, k], out uint8 [8, k].
    """
    unit = instruction.unit(bits, 1, k)
    size, name = unit.vector, f"apq_{instruction.name}_codes_{unit}"

    def implement(planes: Buffer, out: Buffer) -> None:
        with b.serial(0, tirx.const(unit.registers, "int64")) as loop:
            at = loop * tirx.const(size, "int64")
            for p in range(bits):
                prefetch_line(planes[p, 0, at + AHEAD])
            registers = [planes.vload([p, 0, at], f"uint8x{size}") for p in reversed(range(bits))]
            # All rows before the first store to memory, after which planes would be loaded again.
            kept = b.alloc_buffer((ROWS, size), "uint8", align=64)
            for r, index in enumerate(wide_indices(registers)):
                code = masked(index.vector, (1 << bits) - 1)
                b.buffer_store(kept, code, [r, tirx.Ramp(0, 1, size)])
            for r in range(ROWS):
                code = kept.vload([r, 0], f"uint8x{size}")
                b.buffer_store(out, code, [r, tirx.Ramp(at, 1, size)])

    return register(name, lambda: codes_pair(unit, implement))


def table_dot_intrinsic(
    instruction: PlanesInstruction, bits: int, rows: int, k: int, group: int = 0
) -> str:
    """Register (once) and name the product of looked up codes of rows that share a table.

    Operands: codes uint8 [rows, k], table int8 [2^bits], x int8 [k], [scales float32 [k / 4],] sums
    int32 (with groups float32) [rows, vector / 4]; there is no axis of one row.
    """
    unit = instruction.unit(bits, 1, k, group)
    size, lanes = unit.vector, unit.lanes
    name = f"apq_{instruction.name}_table{rows}_{unit}"

    def implement(codes: Buffer, table: Buffer, x: Buffer, *more: Buffer) -> None:
        *scales, acc = more
        for r in range(rows):
            lead = [r] if rows > 1 else []
            with b.serial(0, tirx.const(unit.registers, "int64")) as loop:
                at = loop * tirx.const(size, "int64")
                w = _lookup(unit, table, codes.vload([*lead, at], f"uint8x{size}"))
                total = acc.vload([*lead, 0], f"{unit.sums}x{lanes}")
                xs = x.vload([at], f"int8x{size}")
                if scales:
                    scale = scales[0].vload([loop * tirx.const(lanes, "int64")], f"float32x{lanes}")
                    total = add_scaled(unit, total, multiply(unit, None, w, xs), scale)
                else:
                    total = multiply(unit, total, w, xs)
                b.buffer_store(acc, total, [*lead, tirx.Ramp(0, 1, lanes)])

    return register(name, lambda: table_pair(unit, rows, implement))


def _lookup(unit: PlanesUnit, table: Buffer, code: Expr) -> Expr:
    """int8 [64]: entries, offset, of tables of 128 or 256."""
    flip = tirx.Broadcast(tirx.const(-unit.offset, "int8"), 64)
    quarters = [
        tirx.bitwise_xor(table.vload([at], "int8x64"), flip) for at in range(0, unit.entries, 64)
    ]
    halves = [
        tirx.call_llvm_pure_intrin("int8x64", "llvm.x86.avx512.vpermi2var.qi.512", low, code, high)
        for low, high in zip(quarters[::2], quarters[1::2], strict=True)
    ]
    if len(halves) == 1:
        return halves[0]
    zero = tirx.Broadcast(tirx.const(0, "int8"), 64)
    return tirx.Select(tirx.LT(tirx.reinterpret("int8x64", code), zero), halves[1], halves[0])
