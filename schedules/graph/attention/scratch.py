"""What a task of attention keeps: rows in scratch, values in slots that become registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from tvm import tirx

from apq_tvm.ops.graph.attention import PACK
from apq_tvm.ops.graph.softmax import LOWEST, exp_of_nonpositive
from apq_tvm.schedules.graph.exprs import substitute
from apq_tvm.tensorize.exprs import Expr, Stmt, f32, i32, i64

BLOCK = 64
"""Keys of a block: the largest score of a row changes once a block."""

VECTORS = BLOCK // PACK


@dataclass(frozen=True)
class Rows:
    """Register tile and task.

    Parameters
    ----------
    rows : int
        Of a register tile.
    tiles : int
        Register tiles of a task, at most.
    vectors : int
        Of 16 keys, or 16 columns of values, of a register tile.
    part : int
        Blocks of keys of a part.
    """

    rows: int
    tiles: int
    vectors: int
    part: int = 8


def slots(values: list[Expr], name: str) -> tuple[list[Stmt], list[Expr]]:
    """Keep each value in a slot of its own, which LLVM makes a register.

    TVM's simplifier puts back what a ``Bind`` binds at every use, which takes long, and takes
    ``x + c - c`` for x, which rounds nothing.
    """
    out: list[Stmt] = []
    names: list[Expr] = []
    for value in values:
        kind, _, lanes = str(value.ty).partition("x")
        slot = tirx.decl_buffer((int(lanes or 1),), kind, name)
        at = tirx.Ramp(i32(0), i32(1), int(lanes)) if lanes else i32(0)
        out += [tirx.AllocBuffer(slot), tirx.BufferStore(slot, value, [at])]
        names.append(tirx.BufferLoad(slot, [at]))
    return out, names


def runs(extent: int) -> list[tuple[int, int]]:
    """An axis as vectors: where each begins and its lanes."""
    out, begin = [], 0
    for lanes in (16, 8, 4, 1):
        while extent - begin >= lanes:
            out.append((begin, lanes))
            begin += lanes
    return out


@dataclass(frozen=True)
class Scratch:
    """What a task keeps, flat and by rows."""

    q: Any
    scores: Any
    total: Any
    most: Any
    """Largest scores so far, in whole vectors of rows."""
    top: Any
    """Those of a block, then what is taken off scores."""
    sums: Any
    fade: Any
    before: Any
    """Largest scores of earlier parts."""
    hidden: Any
    edge: Any
    least: Any
    codes: Any = None
    """Of q, where int8 keys are multiplied as they are."""
    steps: Any = None
    """What a product of a row's codes is worth, but for the key's scale."""
    offsets: Any = None
    """What its sums begin with."""
    q_sums: Any = None
    """What its groups of columns add up to, where keys are int4."""
    spans: Any = None
    """Scales and leasts of a block's int4 values."""

    @classmethod
    def of(
        cls, rows: Rows, size: int, width: int, coded: bool = False, groups: tuple[int, ...] = ()
    ) -> Scratch:
        """For so many rows of `size` columns, of values of `width`; with codes of q if `coded`, and
        with what int4 keys and values of so many `groups` need."""
        count = rows.rows * rows.tiles
        padded = -(-count // PACK) * PACK

        def buffer(name: str, extent: int, dtype: str = "float32") -> Any:
            return tirx.decl_buffer((extent,), dtype, name)

        made = cls(
            buffer("q_rows", count * size),
            buffer("scores", count * BLOCK),
            buffer("total", count * width),
            buffer("most", padded),
            buffer("top", padded),
            buffer("sums", count * PACK),
            buffer("fade", padded),
            buffer("before", count),
            buffer("hidden", count, "int64"),
            buffer("edge", PACK),
            buffer("least", 1),
            *(
                (
                    buffer("q_codes", count * size, "int8"),
                    buffer("q_steps", count),
                    buffer("q_offsets", count, "int32"),
                )
                if coded
                else ()
            ),
        )
        if not groups:
            return made
        sums, spans = buffer("q_sums", count * groups[0]), buffer("spans", 2 * BLOCK * groups[1])
        return replace(made, q_sums=sums, spans=spans)

    @property
    def buffers(self) -> tuple[Any, ...]:
        """All of them."""
        return tuple(buffer for buffer in vars(self).values() if buffer is not None)

    @staticmethod
    def load(buffer: Any, at: Expr, lanes: int = 1) -> Expr:
        """Neighbouring elements."""
        return tirx.BufferLoad(buffer, [at if lanes == 1 else tirx.Ramp(at, i64(1), lanes)])

    @staticmethod
    def store(buffer: Any, at: Expr, value: Expr, lanes: int = 1) -> Stmt:
        """Likewise."""
        return tirx.BufferStore(buffer, value, [at if lanes == 1 else tirx.Ramp(at, i64(1), lanes)])


def across(join: Callable[[Expr, Expr], Expr], vectors: list[Expr]) -> tuple[list[Stmt], Expr]:
    """All lanes of all vectors of 16 joined, halves of halves."""
    found, lanes = reduce(join, vectors), PACK
    parts: list[Stmt] = []
    while lanes > 1:
        binds, (whole,) = slots([found], "part")
        parts += binds
        lanes //= 2
        halves = [
            tirx.Shuffle([whole], [i32(i) for i in range(begin, begin + lanes)])
            for begin in (0, lanes)
        ]
        found = join(*halves)
    binds, (found,) = slots([found], "joined")
    return [*parts, *binds], found


def exponential(x: Expr) -> tuple[list[Stmt], Expr]:
    """e^x by statements."""
    value = exp_of_nonpositive(x)
    parts: list[Stmt] = []
    known: list[tuple[Any, Expr]] = []
    while isinstance(value, tirx.Let):
        binds, (slot,) = slots([_replaced(value.value, known)], value.var.name)
        parts += binds
        known.append((value.var, slot))
        value = value.body
    return parts, _replaced(value, known)


def _replaced(e: Expr, known: list[tuple[Any, Expr]]) -> Expr:
    for var, slot in known:
        e = substitute(e, var, slot)
    return e


@dataclass(frozen=True)
class Kept:
    """A row's sums in memory: what its keys weigh, the largest score, the sum of exponentials."""

    buffer: Any
    at: Expr
    width: Expr

    @classmethod
    def alone(cls, width: int, rows: int = 1) -> Kept:
        """The first of `rows` in scratch of their own."""
        scratch = tirx.decl_buffer((rows * (width + PACK),), "float32", "kept")
        return cls(scratch, i64(0), i64(width))

    def moved(self, by: Expr) -> Kept:
        """Others in the same memory."""
        return Kept(self.buffer, self.at + by, self.width)

    @property
    def most(self) -> Expr:
        """Where the largest score lies."""
        return self.at + self.width

    @property
    def sum(self) -> Expr:
        """Where the sum of exponentials lies."""
        return self.at + self.width + i64(1)

    def clear(self) -> Stmt:
        """No keys."""
        store = Scratch.store
        return tirx.stmt_seq(
            *(
                store(self.buffer, self.at + i64(begin), tirx.Broadcast(f32(0.0), lanes), lanes)
                for begin, lanes in runs(int(self.width))
            ),
            store(self.buffer, self.most, f32(-float("inf"))),
            store(self.buffer, self.sum, f32(0.0)),
        )

    def join(self, other: Kept) -> Stmt:
        """Add the keys of another, which come behind these."""
        load, store = Scratch.load, Scratch.store
        old, new = load(self.buffer, self.most), load(other.buffer, other.most)
        parts, (top,) = slots([tirx.max(old, new)], "top")
        binds, (base,) = slots([tirx.max(top, f32(LOWEST))], "least")
        parts += binds
        factors: list[Expr] = []
        for value in (old, new):
            more, found = exponential(value - base)
            binds, (factor,) = slots([found], "factor")
            parts += [*more, *binds]
            factors.append(factor)

        def joined(a: Expr, c: Expr, lanes: int = 1) -> Expr:
            wide = factors if lanes == 1 else [tirx.Broadcast(f, lanes) for f in factors]
            return a * wide[0] + c * wide[1]

        for begin, lanes in runs(int(self.width)):
            mine = load(self.buffer, self.at + i64(begin), lanes)
            theirs = load(other.buffer, other.at + i64(begin), lanes)
            value = joined(mine, theirs, lanes)
            parts.append(store(self.buffer, self.at + i64(begin), value, lanes))
        whole = joined(load(self.buffer, self.sum), load(other.buffer, other.sum))
        parts.append(store(self.buffer, self.sum, whole))
        return tirx.stmt_seq(*parts, store(self.buffer, self.most, top))
