"""Dot products of one unit of ``W2*`` codes (12 rows x 32 k, three rows in 7 bits), on Arm.

A code is c = v0 + 5 v1 + 25 v2 (`apq_tvm.tensorize.meaning.balance`). With e = 51 (c + 1), c // 5
is the high byte of e (``umull``, ``uzp2``), exact for c <= 124, and c // 25 is looked up by it
(``tbl`` of two registers). The eighth code vector is inserted bit by bit out of the stored ones
(``sri``).

- ``sdot``: the digits themselves are not needed. With T0 = Σ c x, T1 = Σ (c // 5) x and T2 =
  Σ (c // 25) x their sums are T0 - 5 T1, T1 - 5 T2 and T2.
- ``smlal``, without dot products: digits of at most 4, so that int16 holds 8 products of 4 * 127.

Sources: Arm Architecture Reference Manual (DDI 0487); LLVM's IntrinsicsAArch64.td.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from apq_tvm.tensorize.arm.lookup import BYTES, lane, masked, small_dot
from apq_tvm.tensorize.exprs import Expr, i32, i64, neon, splat
from apq_tvm.tensorize.meaning.balance import PARTS, STORED, VECTORS
from apq_tvm.tensorize.pairs.balance_dot import BalanceBuffers
from apq_tvm.tensorize.pairs.balance_dot import balance_intrinsic as dot_intrinsic

LANES = 4


@dataclass(frozen=True)
class ArmBalance:
    """How digits are multiplied.

    Parameters
    ----------
    name : str
        First part of the intrinsics' names.
    feature : str
        LLVM feature it needs.
    """

    name: str
    feature: str
    lanes: int = LANES


SDOT = ArmBalance("sdot", "dotprod")
SMLAL = ArmBalance("smlal", "neon")

INSTRUCTIONS = (SDOT, SMLAL)
"""In order of preference."""


def balance_intrinsic(instruction: ArmBalance, m: int = 1, ahead: int = 0) -> str:
    """Register (once) and name the dot product of one unit.

    Parameters
    ----------
    instruction : ArmBalance
    m : int
        Rows of x; codes are taken apart once for all of them.
    ahead : int
        Bytes ahead of the unit to prefetch, 0 for none.

    Returns
    -------
    str
        The intrinsic's name; its operands are those of
        `apq_tvm.tensorize.meaning.balance.balance_dot`.
    """
    implement = _sdot if instruction is SDOT else _smlal
    return dot_intrinsic(instruction.name, LANES, m, ahead, implement)


def code_vectors(codes: Any) -> list[Expr]:
    """uint8 [16] codes of all eight vectors of a unit's buffer."""
    stored = [codes.vload([i64(BYTES * j)], f"uint8x{BYTES}") for j in range(STORED)]
    pooled = tirx.reinterpret("int8x16", stored[-1])
    for j in range(1, STORED):
        vector = tirx.reinterpret("int8x16", stored[STORED - 1 - j])
        pooled = neon("int8x16", "vsri.v16i8", pooled, vector, i32(j))
    return [
        *(masked(vector, 0x7F) for vector in stored),
        tirx.reinterpret("uint8x16", pooled) >> splat(1, "uint8"),
    ]


def quotients(codes: Expr) -> tuple[Expr, Expr]:
    """uint8 [16] each: c // 5 and c // 25."""
    above, factor = codes + splat(1, "uint8"), splat(51, "uint8", 8)
    halves = []
    for first in (0, 8):
        half = tirx.Shuffle([above], [i32(first + i) for i in range(8)])
        product = neon("uint16x8", "umull.v8i16", half, factor)
        halves.append(tirx.reinterpret("uint8x16", product))
    fifth = tirx.Shuffle(halves, [i32(i) for i in range(1, 32, 2)])
    table = [
        tirx.Shuffle(
            [tirx.const(v // 5, "uint8") for v in range(first, first + BYTES)],
            [i32(i) for i in range(BYTES)],
        )
        for first in (0, BYTES)
    ]
    return fifth, neon("uint8x16", "tbl2.v16i8", *table, fifth)


def _activations(o: BalanceBuffers, row: int, vector: int) -> Expr:
    """int8 [16]: k = 4 * vector .. + 3 of one row, repeated for four rows of weights."""
    return lane(o.x.vload(o.at(row, vector // 4 * BYTES), "int8x16"), "int8x16", vector % 4)


def _sdot(o: BalanceBuffers) -> None:
    zero, five = splat(0, "int32", LANES), splat(5, "int32", LANES)
    sums = [[zero] * PARTS for _ in range(o.dot.m)]
    for j, code in enumerate(code_vectors(o.codes)):
        parts = (code, *quotients(code))
        for i in range(o.dot.m):
            x = _activations(o, i, j)
            sums[i] = [
                neon("int32x4", "sdot.v4i32.v16i8", total, tirx.reinterpret("int8x16", part), x)
                for total, part in zip(sums[i], parts, strict=True)
            ]
    for i, (t0, t1, t2) in enumerate(sums):
        for part, total in enumerate((t0 - t1 * five, t1 - t2 * five, t2)):
            o.add(i, part, total)


def _smlal(o: BalanceBuffers) -> None:
    five = splat(5, "uint8")
    digits = []
    for code in code_vectors(o.codes):
        fifth, last = quotients(code)
        digits.append((code - fifth * five, fifth - last * five, last))
    for i in range(o.dot.m):
        for part in range(PARTS):
            x = [_activations(o, i, j) for j in range(VECTORS)]
            o.add(i, part, small_dot([digits[j][part] for j in range(VECTORS)], x))
