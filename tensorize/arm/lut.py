"""Table lookups of one unit of binary codes (16 rows x 32 k x q planes) with 16-byte Arm vectors.

A vector of keys holds two nibbles of 16 rows. Per nibble: one ``tbl`` among the 16 sums of its
quad, and ``uaddw``, ``uaddw2`` into the 16-bit sums of the rows; ``and`` and ``ushr`` part the
nibbles. So 128 weights of a plane take 8 operations. Source: Arm Architecture Reference Manual (DDI
0487); LLVM's IntrinsicsAArch64.td.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import neon
from apq_tvm.tensorize.meaning.binary_codes import ENTRIES, QUADS
from apq_tvm.tensorize.pairs.lut_dot import LutBuffers, LutInstruction

ROWS = 16
"""Rows of a unit."""


def _tbl(o: LutBuffers) -> None:
    bits, low = o.dot.unit.bits, tirx.Broadcast(tirx.const(15, "uint8"), ROWS)
    four = tirx.Broadcast(tirx.const(4, "uint8"), ROWS)
    at = {(i, p): o.acc_at(i, p) for i in range(o.dot.m) for p in range(bits)}
    sums = {key: o.acc[tuple(index)] for key, index in at.items()}
    for chunk in range(QUADS // 2):
        for p in range(bits):
            keys = o.codes.vload([(chunk * bits + p) * ROWS], f"uint8x{ROWS}")
            for side, half in enumerate((tirx.bitwise_and(keys, low), keys >> four)):
                for i in range(o.dot.m):
                    table = o.entries(i, (2 * chunk + side) * ENTRIES, ENTRIES)
                    found = neon("uint8x16", "tbl1.v16i8", table, half)
                    sums[i, p] = sums[i, p] + found.astype(f"uint16x{ROWS}")
    for key, index in at.items():
        b.buffer_store(o.acc, sums[key], index)


TBL = LutInstruction("tbl", ROWS, ("neon",), "uint8", _tbl, narrow=True, tile_sums=4, sums=4)
"""A sum of 16 rows is two registers; four of them, their tables and keys fit in 32."""
