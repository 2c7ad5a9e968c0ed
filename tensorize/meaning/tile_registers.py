"""The meaning of tiles in registers (AMX): which there are, what describes them, their products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from apq_tvm.tensorize.exprs import Expr, i32
from apq_tvm.tensorize.meaning.scaffold import Meaning, Operand
from apq_tvm.tensorize.meaning.tile import Tile

ROWS = 16
"""Rows of a tile register, and int32 in one of them."""

REGISTERS = 8

CONFIG = 64
"""Bytes that describe the registers."""


@dataclass(frozen=True)
class Registers:
    """The registers of one micro-kernel: sums come first, then activations, then codes."""

    tile: Tile

    def __post_init__(self) -> None:
        assert self.tile.m % ROWS == 0 and self.tile.lanes == ROWS and self.codes[-1] < REGISTERS

    @property
    def quads(self) -> int:
        """Fours of k in a step: the largest divisor of ``k / 4`` that a tile holds."""
        return max(q for q in range(1, ROWS + 1) if self.tile.k // 4 % q == 0)

    @property
    def sums(self) -> list[list[int]]:
        """By 16 rows of x, by vector of columns."""
        columns = self.tile.vectors
        return [[i * columns + j for j in range(columns)] for i in range(self.tile.m // ROWS)]

    @property
    def x(self) -> list[int]:
        """By 16 rows of x."""
        first = self.tile.m // ROWS * self.tile.vectors
        return [first + i for i in range(self.tile.m // ROWS)]

    @property
    def codes(self) -> list[int]:
        """By vector of columns."""
        return [self.x[-1] + 1 + j for j in range(self.tile.vectors)]

    @cached_property
    def description(self) -> bytes:
        """Palette 1; from byte 16 on words of bytes in a row, from byte 48 on bytes of rows."""
        config = bytearray(CONFIG)
        config[0] = 1
        for number in range(self.codes[-1] + 1):
            config[16 + 2 * number] = 4 * (self.quads if number in self.x else ROWS)
            config[48 + number] = self.quads if number in self.codes else ROWS
        return bytes(config)


def described(registers: Registers) -> Meaning:
    """``config[i]`` is the description's byte."""

    def term(axes: Sequence[Expr]) -> Expr:
        from tvm import tirx

        (i,) = axes
        value = i32(0)
        for place, byte in enumerate(registers.description):
            if byte:
                value = tirx.Select(i == i32(place), i32(byte), value)
        return value.astype("uint8")

    return Meaning("shapes", (_config(),), (CONFIG,), (), term, adds=False, index="int32")


def cleared() -> Meaning:
    """``config[i] = 0``."""

    def term(axes: Sequence[Expr]) -> Expr:
        from tvm import tirx

        return tirx.const(0, "uint8")

    return Meaning("release", (_config(),), (CONFIG,), (), term, adds=False, index="int32")


def _config() -> Operand:
    return Operand("config", (CONFIG,), "uint8", 64)
