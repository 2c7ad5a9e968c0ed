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

from apq_tvm.tensorize.exprs import i32, i64, neon
from apq_tvm.tensorize.meaning.balance import PARTS, STORED, VECTORS, BalanceUnit
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.pairs.unit_dot import prefetch
from apq_tvm.tensorize.registry import register

Expr = Any  # tvm is untyped

LANES = 4
_BYTES = 16


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
        The intrinsic's name; its operands are those of `BalanceUnit`.
    """
    name = f"apq_{instruction.name}_{m}x{PARTS * LANES}x{UNIT_K}_s8t5s32"
    name += f"_pf{ahead}" if ahead else ""
    unit = (_Sdot if instruction is SDOT else _Smlal)(m, ahead)
    return register(name, lambda: (unit.member(False), unit.member(True)))


def code_vectors(codes: Any) -> list[Expr]:
    """uint8 [16] codes of all eight vectors of a unit's buffer."""
    stored = [codes.vload([i64(_BYTES * j)], f"uint8x{_BYTES}") for j in range(STORED)]
    pooled = _int8(stored[-1])
    for j in range(1, STORED):
        vector = _int8(stored[STORED - 1 - j])
        pooled = neon("int8x16", "vsri.v16i8", pooled, vector, i32(j))
    masked = [vector & _all(0x7F) for vector in stored]
    return [*masked, _uint8(pooled) >> _all(1)]


def quotients(codes: Expr) -> tuple[Expr, Expr]:
    """uint8 [16] each: c // 5 and c // 25."""
    from tvm import tirx

    above, factor = codes + _all(1), tirx.Broadcast(tirx.const(51, "uint8"), 8)
    halves = []
    for first in (0, 8):
        half = tirx.Shuffle([above], [i32(first + i) for i in range(8)])
        product = neon("uint16x8", "umull.v8i16", half, factor)
        halves.append(tirx.reinterpret("uint8x16", product))
    fifth = tirx.Shuffle(halves, [i32(i) for i in range(1, 32, 2)])
    table = [
        tirx.Shuffle(
            [tirx.const(v // 5, "uint8") for v in range(first, first + _BYTES)],
            [i32(i) for i in range(_BYTES)],
        )
        for first in (0, _BYTES)
    ]
    return fifth, neon("uint8x16", "tbl2.v16i8", *table, fifth)


class _Unit(BalanceUnit):
    def __init__(self, m: int, ahead: int) -> None:
        super().__init__(LANES, m)
        self.ahead = ahead

    def _activations(self, row: int, vector: int) -> Expr:
        """int8 [16]: k = 4 * vector .. + 3 of one row, repeated for four rows of weights."""
        from tvm import tirx

        half = self.x.vload([*self.lead(row), i64(vector // 4 * _BYTES)], f"int8x{_BYTES}")
        fours = tirx.reinterpret("int32x4", half)
        return tirx.reinterpret("int8x16", tirx.Shuffle([fours], [i32(vector % 4)] * 4))

    def _add(self, row: int, part: int, total: Expr) -> None:
        from tvm.tirx.script.builder import ir as b

        index = self.sums_at(row, part)
        b.buffer_store(self.acc, self.acc[tuple(index)] + total, index)


class _Sdot(_Unit):
    def instructions(self) -> None:
        """Emit the instructions."""
        from tvm import tirx

        prefetch(self.codes, STORED * _BYTES, self.ahead)
        zero, five = (tirx.Broadcast(i32(v), LANES) for v in (0, 5))
        sums = [[zero] * PARTS for _ in range(self.m)]
        for j, code in enumerate(code_vectors(self.codes)):
            parts = (code, *quotients(code))
            for i in range(self.m):
                x = self._activations(i, j)
                sums[i] = [
                    neon("int32x4", "sdot.v4i32.v16i8", total, _int8(part), x)
                    for total, part in zip(sums[i], parts, strict=True)
                ]
        for i, (t0, t1, t2) in enumerate(sums):
            for part, total in enumerate((t0 - t1 * five, t1 - t2 * five, t2)):
                self._add(i, part, total)


class _Smlal(_Unit):
    def instructions(self) -> None:
        """Emit the instructions."""
        prefetch(self.codes, STORED * _BYTES, self.ahead)
        five = _all(5)
        digits = []
        for code in code_vectors(self.codes):
            fifth, last = quotients(code)
            digits.append((code - fifth * five, fifth - last * five, last))
        for i in range(self.m):
            for part in range(PARTS):
                self._add(i, part, self._sum(i, [digits[j][part] for j in range(VECTORS)]))

    def _sum(self, row: int, digits: list[Expr]) -> Expr:
        """int32 [4] of one row of x."""
        from tvm import tirx

        halves = []
        for first in (0, 8):
            lanes = [i32(first + i) for i in range(8)]
            words: Expr = None
            for j, digit in enumerate(digits):
                pair = (_int8(digit), self._activations(row, j))
                part = [tirx.Shuffle([value], lanes) for value in pair]
                product = neon("int16x8", "smull.v8i16", *part)
                words = product if words is None else words + product
            halves.append(words)
        pairs = neon("int16x8", "addp.v8i16", *halves)  # two sums of two k each per row
        return neon("int32x4", "saddlp.v4i32.v8i16", pairs)


def _all(value: int) -> Expr:
    from tvm import tirx

    return tirx.Broadcast(tirx.const(value, "uint8"), _BYTES)


def _int8(vector: Expr) -> Expr:
    from tvm import tirx

    return tirx.reinterpret("int8x16", vector)


def _uint8(vector: Expr) -> Expr:
    from tvm import tirx

    return tirx.reinterpret("uint8x16", vector)
