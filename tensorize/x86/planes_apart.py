"""Lookups in large tables of bitplanes on x86: codes first, then one table after the other.

Tables of 128 and 256 bytes are two and four registers of 512 bits. Eight rows of them do not fit,
and loading them anew for every register of codes costs more than the lookups. So the codes of a run
of columns are put together in memory, and a row's table stays in registers while its run is looked
up (`apq_tvm.ops.few_rows.anyprec`): 512x4096 in cache takes 67 us with 8 bits and
47 with 7, where tables in turn take 84 to 100 and 54 to 56 (Zen 5).

``vpermi2b`` looks up 128 entries; two of them are blended by the top bit. By ``vpshufb`` on 256
bits it does not pay: half of the tables would fill the registers.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, i64, prefetch_line
from apq_tvm.tensorize.meaning.planes import ROWS, PlanesStep
from apq_tvm.tensorize.x86.planes_index import long_lookup, wide_indices
from apq_tvm.tensorize.x86.planes_sums import add_scaled, multiply
from apq_tvm.tensorize.x86.vectors import masked

AHEAD = 4096
"""Bytes ahead in every plane that codes are prefetched."""


def emit_codes(step: PlanesStep, planes: Buffer, out: Buffer) -> None:
    """Put together a run's codes of 7 or 8 bits."""
    bits, size = step.bits, step.vector
    with b.serial(0, i64(step.registers)) as loop:
        at = loop * i64(size)
        for p in range(bits):
            prefetch_line(planes[p, 0, at + AHEAD])
        registers = [planes.vload([p, 0, at], f"uint8x{size}") for p in reversed(range(bits))]
        # All rows before the first store to memory, after which planes would be loaded again.
        kept = b.alloc_buffer((ROWS, size), "uint8", align=64)
        for r, index in enumerate(wide_indices(registers)):
            code = masked(index.vector, (1 << bits) - 1)
            b.buffer_store(kept, code, [r, tirx.Ramp(0, 1, size)])
        for r in range(ROWS):
            b.buffer_store(out, kept.vload([r, 0], f"uint8x{size}"), [r, tirx.Ramp(at, 1, size)])


def emit_table_dot(step: PlanesStep, rows: int, *buffers: Buffer) -> None:
    """Multiply looked up codes of rows that share a table."""
    codes, table, x, *scales, acc = buffers
    size, lanes = step.vector, step.lanes
    flip = tirx.Broadcast(tirx.const(-step.offset, "int8"), size)
    for r in range(rows):
        lead = [r] if rows > 1 else []
        with b.serial(0, i64(step.registers)) as loop:
            at = loop * i64(size)
            parts = (table.vload([entry], f"int8x{size}") for entry in range(0, step.entries, size))
            code = codes.vload([*lead, at], f"uint8x{size}")
            w = long_lookup([tirx.bitwise_xor(part, flip) for part in parts], code)
            total = acc.vload([*lead, 0], f"{step.sums}x{lanes}")
            xs = x.vload([at], f"int8x{size}")
            if scales:
                scale = scales[0].vload([loop * i64(lanes)], f"float32x{lanes}")
                total = add_scaled(step, total, multiply(step, None, w, xs), scale)
            else:
                total = multiply(step, total, w, xs)
            b.buffer_store(acc, total, [*lead, tirx.Ramp(0, 1, lanes)])
