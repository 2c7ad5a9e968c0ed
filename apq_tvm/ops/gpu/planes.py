"""Dynamic quantization of activations to planes of bits, operand B of ``mma.m16n8k256``.

Scales, codes and sums are those of `apq_tvm.ops.activations.quantize`. Codes are two's complement
of 2, 4 or 8 bits, the fewest that hold them: signs are -1 and +1 of two. Planes of rows that
follow each other are columns of B that do (ABQ-LLM, section 3.4, "GEMV elimination": eight planes
of one row fill an ``mma``), so BitPacking, [M, K, p] to [M, p, K], is all that is done, fused with
the quantization.

Word ``w`` of 8 of a unit of 256 columns has at bit ``8 b + t`` column ``32 t + 4 w + b``, as planes
of weights have (`apq_tvm.codegen.layouts.fragments`). Where groups of weights are of 128 columns, a
unit has two such octets of words, with zeros where the other group is: products of the two stay
apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts.fragments import STEP_K, FragmentLayout
from apq_tvm.ops.activations.quantize import scale_and_inverse
from apq_tvm.ops.gpu.quantize import Four, GroupQuantizer, Value
from apq_tvm.ops.gpu.team import Call, Team, local
from apq_tvm.tensorize.exprs import Expr, f32, i32, i64, magnitude_bits

WORDS = 8
"""Words of a plane that a unit has."""


def planes_of(bits: int) -> int:
    """Planes of activations of 1..8 bits."""
    return max(2, 1 << (bits - 1).bit_length())


@dataclass(frozen=True)
class PlaneFactors:
    """The arrays that a product of planes reads: codes, scales f32 [M, Ga], sums i32 [M, Gw].

    Of whole rows there is a scale and, as a second group, their middle.

    Parameters
    ----------
    layout : FragmentLayout
        In planes.
    k : int
    act_group : int
        Columns of x that share a scale; -1 for a row.
    centres : int
        1 if rows have a middle.
    planes : int
        2, 4 or 8.
    """

    layout: FragmentLayout
    k: int
    act_group: int
    centres: int
    planes: int

    @property
    def padded(self) -> int:
        """Columns of codes."""
        return self.layout.padded_k(self.k)

    @property
    def width(self) -> int:
        """Columns that share a scale."""
        return self.padded if self.act_group == -1 else self.act_group

    @property
    def sum_width(self) -> int:
        """Columns that share a sum."""
        return self.layout.group_width(self.k)

    @property
    def parts(self) -> int:
        """Groups of weights that share a unit, an octet of words each."""
        return max(1, self.layout.unit_k // self.sum_width)

    def words(self, m: Expr) -> tuple[Any, ...]:
        """Shape of the codes."""
        return (m, self.planes, self.padded // self.layout.unit_k * self.parts * WORDS)

    def scales(self, m: Expr) -> tuple[Any, ...]:
        """Shape of ``xs``."""
        return (m, self.padded // self.width + self.centres)

    def starts(self, m: Expr) -> tuple[Any, ...]:
        """Shape of the sums."""
        return (m, self.padded // self.sum_width)

    def divided(self, scale: Expr, group: Expr) -> Expr:
        """A group's scale as it is stored."""
        return scale


class PlaneQuantizer(GroupQuantizer):
    """Writes planes, scale and sums of one group of a row.

    Parameters
    ----------
    factors : PlaneFactors
    bits : int
        1..8.
    call : callable
        Device functions of teams.
    """

    factors: PlaneFactors

    def __init__(self, factors: PlaneFactors, bits: int, call: Call) -> None:
        super().__init__(factors, bits, call)
        self.signs = bits == 1

    def keep(self, array: Any, row: Expr, group: Expr, value: Expr) -> None:
        """Rows lie one by one."""
        b.buffer_store(array, value, [row, group])

    def scale(self, team: Team, first: Expr, value: Value, four: Four | None) -> tuple[Expr, ...]:
        """That of signs is the mean magnitude."""
        if not self.signs:
            return super().scale(team, first, value, four)
        total = local(1, "float32")
        b.buffer_store(total, f32(0.0), [0])
        with team.share(self.width) as at:
            bits = magnitude_bits(value(first + at.astype("int64")))
            b.buffer_store(total, total[0] + tirx.reinterpret("float32", bits), [0])
        left = tirx.max(i64(1), i64(self.factors.k) - first)
        columns = tirx.min(i64(self.width), left).astype("float32")
        return scale_and_inverse(team.find("sum", total[0]) / columns, 1.0)

    def codes(
        self, team: Team, row: Expr, group: Expr, part: Expr, factors: Any, four: Four, inside: Expr
    ) -> None:
        """Codes of columns that share a sum, a word of all planes each turn of a thread; and their
        sum."""
        layout, parts, planes = self.factors.layout, self.factors.parts, self.factors.planes
        steps = layout.unit_steps // parts
        number = group * i64(self.width // self.sum_width) + part.astype("int64")
        count = self.sum_width * parts // STEP_K  # words of the group
        mine, packed = local(1, "int32"), local(planes, "int32")
        b.buffer_store(mine, i32(0), [0])
        with team.share(count) as at:
            word = number * i64(count) + at.astype("int64")
            octet, place = word // i64(WORDS), word % i64(WORDS)
            unit, first = octet // i64(parts), octet % i64(parts) * i64(steps)
            for plane in range(planes):
                b.buffer_store(packed, i32(0), [plane])
            with b.serial(0, steps) as turn:
                step = first + turn.astype("int64")
                whole: Any = None
                column = (unit * i64(layout.unit_steps) + step) * i64(STEP_K) + place * i64(4)
                for byte, x in enumerate(four(column)):
                    at = column + i64(byte)
                    code = self._sign(at, x) if self.signs else self.code(x, factors)
                    b.buffer_store(mine, mine[0] + code, [0])
                    bits = (code & i32(255)) << i32(8 * byte)
                    whole = bits if whole is None else whole | bits
                word_of_four = local(1, "int32")
                b.buffer_store(word_of_four, whole, [0])
                for plane in range(planes):
                    ones = (word_of_four[0] >> i32(plane)) & i32(0x01010101)
                    more = packed[plane] | ones << step.astype("int32")
                    b.buffer_store(packed, more, [plane])
            with b.If(inside), b.Then():
                for plane in range(planes):
                    b.buffer_store(self.xq, packed[plane], [row, i64(plane), word])
        total = team.find("sum", mine[0])
        with b.If(tirx.all(team.lane == 0, inside)), b.Then():
            self.keep(self.start, row, number, total)

    def _sign(self, column: Expr, x: Expr) -> Expr:
        """-1 or +1; 0 past K."""
        sign = tirx.Select(x >= f32(0.0), i32(1), i32(-1))
        if self.factors.padded == self.factors.k:
            return sign
        return tirx.Select(column < i64(self.factors.k), sign, i32(0))
