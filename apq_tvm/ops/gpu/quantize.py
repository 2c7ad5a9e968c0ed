"""Dynamic quantization of activations on a GPU: a team of threads a group.

Scales, codes and sums are those of `apq_tvm.ops.activations.quantize`, which says what they mean.
How they lie is a subclass's: words of codes, or planes of bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.activations.quantize import range_factors, scale_and_inverse
from apq_tvm.ops.blocks import argument
from apq_tvm.ops.gpu.team import WARP, Call, Team, last, local
from apq_tvm.tensorize.exprs import Expr, PrimFunc, f32, i32, i64, magnitude_bits

BLOCK = 256
"""Threads of a block."""

Value = Callable[[Expr], Expr]
Four = Callable[[Expr], Sequence[Expr]]


class Factors(Protocol):
    """How codes, scales and sums of rows lie."""

    @property
    def k(self) -> int:
        """Columns of x."""

    @property
    def centres(self) -> int:
        """1 if rows have a middle."""

    @property
    def padded(self) -> int:
        """Columns of codes."""

    @property
    def width(self) -> int:
        """Columns that share a scale."""

    @property
    def sum_width(self) -> int:
        """Columns that share a sum."""

    def words(self, m: Expr) -> tuple[Any, ...]:
        """Shape of the codes, int32."""

    def scales(self, m: Expr) -> tuple[Any, ...]:
        """Shape of the scales, float32."""

    def starts(self, m: Expr) -> tuple[Any, ...]:
        """Shape of the sums, int32."""

    def divided(self, scale: Expr, group: Expr) -> Expr:
        """A group's scale as it is stored."""


class GroupQuantizer(ABC):
    """Writes codes, scale and sums of one group of a row; part of a kernel that knows the row.

    Parameters
    ----------
    factors : Factors
    bits : int
        Of a code.
    call : callable
        Device functions of teams.
    """

    def __init__(self, factors: Factors, bits: int, call: Call) -> None:
        self.call, self.factors = call, factors
        self.width, self.sum_width = factors.width, factors.sum_width
        self.asymmetric = factors.centres > 0
        # Groups are of whole words and nest, as layouts have them.
        assert factors.padded % self.width == self.width % self.sum_width == self.sum_width % 4 == 0
        self.groups = factors.padded // self.width
        self.most = float((1 << (bits - 1)) - 1)

    @property
    def whole_rows(self) -> bool:
        """True if a row is one group that is worth a whole block of threads."""
        return self.width == self.sum_width == self.factors.padded and self.width > 4 * WARP

    @property
    def team_size(self) -> int:
        """Threads that a group is worth, of a warp at most."""
        return min(WARP, max(8, self.sum_width // 4))

    def declare(self, m: Expr) -> None:
        """The next arguments: ``(xq i32, xs f32, start i32)``."""
        self.m = m
        self.xq = argument("xq", self.factors.words(m), "int32")
        self.xs = argument("xs", self.factors.scales(m), "float32")
        self.start = argument("start", self.factors.starts(m), "int32")

    @abstractmethod
    def keep(self, array: Any, row: Expr, group: Expr, value: Expr) -> None:
        """Store a number of a row and group."""

    @abstractmethod
    def codes(
        self, team: Team, row: Expr, group: Expr, part: Expr, factors: Any, four: Four, inside: Expr
    ) -> None:
        """Store the codes of columns that share a sum, the group's `part`; and their sum.

        `factors` are what a value is multiplied by and what is taken off, `four`, `row`, `group`
        and `inside` as `write`'s.
        """

    def write(
        self,
        team: Team,
        row: Expr,
        group: Expr,
        value: Value,
        inside: Expr,
        four: Four | None = None,
    ) -> None:
        """What the threads of a team do.

        Parameters
        ----------
        team : Team
        row, group : Expr
            int64, one of which there is.
        value : callable
            Column of x, int64 below `factors.padded` → float32.
        inside : Expr
            False: nothing is stored.
        four : callable, optional
            Column of x, a multiple of 4 → the values of four columns, read at once.
        """
        first = group * i64(self.width)
        factors = local(2, "float32")
        parts = self.scale(team, first, value, four)
        with b.If(tirx.all(team.lane == 0, inside)), b.Then():
            self.keep(self.xs, row, group, self.factors.divided(parts[0], group))
            if self.asymmetric:
                self.keep(self.xs, row, i64(1), parts[0] * parts[2])
        for place, factor in enumerate(parts[1:]):
            b.buffer_store(factors, factor, [place])
        four = four or (lambda at: [value(at + i64(i)) for i in range(4)])
        with b.serial(0, self.width // self.sum_width) as part:
            self.codes(team, row, group, part, factors, four, inside)

    def scale(self, team: Team, first: Expr, value: Value, four: Four | None) -> tuple[Expr, ...]:
        """Of a group: scale, its inverse and, of rows with a middle, that."""
        if self.asymmetric:
            top = self._largest(team, lambda x: tirx.reinterpret("int32", x), first, value, four)
            low = self._largest(team, _negative_order, first, value, four)
            return range_factors(*(tirx.max(p, i32(0)) for p in (top, low)))
        top = self._largest(team, magnitude_bits, first, value, four)
        return scale_and_inverse(tirx.reinterpret("float32", top), self.most)

    def write_row(self, thread: Expr, threads: int, row: Expr, values: Any) -> None:
        """What a block of `threads` does with a whole row, `values` in shared memory."""
        words = local(4, "float32")

        def four(column: Expr) -> list[Expr]:
            """One after the other, four apart, would be conflicts of banks."""
            taken = values[tirx.Ramp(column.astype("int32"), 1, 4)]
            b.buffer_store(words, taken, [tirx.Ramp(i32(0), 1, 4)])
            return [words[i] for i in range(4)]

        size = threads if self.whole_rows else self.team_size
        team, teams = Team(size, thread, self.call), threads // size
        with b.serial(0, -(-self.groups // teams)) as turn:
            number = (turn * teams + team.number).astype("int64")
            inside = number < i64(self.groups)
            group = last(i64(self.groups), number)
            self.write(team, row, group, lambda at: values[at], inside, four)

    def _largest(
        self, team: Team, pattern: Any, first: Expr, value: Value, four: Four | None
    ) -> Expr:
        found = local(1, "int32")
        b.buffer_store(found, tirx.min_value("int32"), [0])
        wide = 1 if four is None else 4
        with team.share(self.width // wide) as at:
            column = first + at.astype("int64") * i64(wide)
            for x in [value(column)] if four is None else four(column):
                b.buffer_store(found, tirx.max(found[0], pattern(x)), [0])
        return team.find("max", found[0])

    def code(self, value: Expr, factors: Any) -> Expr:
        """int32: the nearest code of a value."""
        scaled = value * factors[0]
        scaled = scaled - factors[1] if self.asymmetric else scaled
        most = f32(self.most)
        return tirx.max(tirx.min(tirx.nearbyint(scaled), most), -most).astype("int32")


def quantize_groups(
    quantizer: GroupQuantizer, threads: int, name: str, read: Callable[..., Any]
) -> PrimFunc:
    """Build ``(x f32 [M, K], xq i32, xs f32, start i32)``, threads bound.

    Parameters
    ----------
    quantizer : GroupQuantizer
    threads : int
        That share a group: `GroupQuantizer.team_size`, or a block's.
    name : str
        Of the function.
    read : callable
        ``(function, to, from)`` → a statement, a call of a device function that reads.
    """
    m, k = tirx.Var("m", "int64"), quantizer.factors.k
    together = max(1, BLOCK // threads)
    count = m * i64(quantizer.groups)
    blocks = (count + i64(together - 1)) // i64(together)
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name(name)
        b.func_attr({"apq.op": name, "op_pattern": 8, "tirx.noalias": True})
        b.func_attr({"tirx.is_scheduled": True})
        x = argument("x", (m, k), "float32")
        quantizer.declare(m)
        with (
            b.thread_binding(0, blocks, "blockIdx.x") as block,
            b.thread_binding(0, threads * together, "threadIdx.x") as thread,
            b.sblock("group"),
        ):
            b.reads()
            b.writes()
            team = Team(threads, thread, quantizer.call)
            number = block * i64(together) + team.number.astype("int64")
            here = last(count, number)
            row, group = here // i64(quantizer.groups), here % i64(quantizer.groups)

            def value(column: Expr) -> Expr:
                """x, and 0 past K."""
                if quantizer.factors.padded == k:
                    return x[row, column]
                return tirx.if_then_else(column < i64(k), x[row, column], f32(0.0))

            words = local(4, "float32")

            def four(column: Expr) -> list[Expr]:
                """A warp's reads of single columns, four apart, would be of four times as much."""
                given = [tirx.address_of(place) for place in (words[0], x[row, column])]
                if quantizer.factors.padded == k:
                    b.evaluate(read("apq_read4", *given))
                else:
                    for i in range(4):
                        b.buffer_store(words, f32(0.0), [i])
                    with b.If(column < i64(k)), b.Then():
                        b.evaluate(read("apq_read4", *given))
                return [words[i] for i in range(4)]

            whole = four if k % 4 == 0 else None  # else rows are not aligned
            quantizer.write(team, row, group, value, number < count, whole)
    return builder.get()


def _negative_order(x: Expr) -> Expr:
    """`apq_tvm.ops.activations.quantize.negative_order` without the lowest int32, which is no int32
    in C: ``-2147483648`` negates a long."""
    return tirx.bitwise_not(tirx.reinterpret("int32", x)) ^ i32(0x7FFFFFFF)
