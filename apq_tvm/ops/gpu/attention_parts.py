"""Parts of the keys that blocks of their own pass, and the kernel that joins what they found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.gpu.team import WARP, local
from apq_tvm.ops.graph.softmax import LOWEST, exp_of_nonpositive
from apq_tvm.tensorize.exprs import Expr, f32, i32


class Parts:
    """How many blocks share the keys of a tile of rows; all numbers are int32.

    Parameters
    ----------
    rows : int
        Of a tile.
    keys : int
        That a block's threads take at once: a turn.
    blocks : int
        At most so many have parts of keys.
    m, t, heads : Expr
        Rows of a head of keys, keys, and heads of all sequences.

    Attributes
    ----------
    tiles : Expr
        Of a head of keys.
    turns : Expr
        Of each part.
    count : Expr
        Parts of a tile; 1 where tiles are enough for the GPU.
    """

    def __init__(self, rows: int, keys: int, blocks: int, m: Expr, t: Expr, heads: Expr) -> None:
        self.rows, self.heads = rows, heads
        self.tiles = (m + i32(rows - 1)) // i32(rows)
        whole = tirx.max((t + i32(keys - 1)) // i32(keys), i32(1))
        most = tirx.max(i32(blocks) // tirx.max(self.tiles * heads, i32(1)), i32(1))
        self.turns = _up(whole, tirx.min(most, whole))
        self.count = _up(whole, self.turns)

    def slot(self, head: Expr, tile: Expr, part: Expr) -> Expr:
        """A block's number among all that have parts."""
        return (head * self.tiles + tile) * self.count + part


def _up(a: Expr, b: Expr) -> Expr:
    return (a + b - i32(1)) // b


def join_parts(made: Any, sizes: Sequence[tuple[Parts, Any]]) -> None:
    """The kernel that joins the sums of parts, a block for each row.

    Parameters
    ----------
    made : `apq_tvm.ops.gpu.cached_attention._Attention`
    sizes : sequence of (Parts, Expr or None)
        Parts as they are where a condition holds; the last one's is that of no other.
    """

    def of(value: Any) -> Any:
        (first, when), *others = sizes
        return tirx.Select(when, value(first), value(others[0][0])) if others else value(first)

    count = of(lambda parts: parts.count)
    rows = tirx.Select(count > i32(1), made.m, i32(0))
    threads = -(-made.out // WARP) * WARP
    with (
        b.thread_binding(0, rows, "blockIdx.x") as row,
        b.thread_binding(0, sizes[0][0].heads, "blockIdx.y") as number,
        b.thread_binding(0, threads, "threadIdx.x") as column,
        b.sblock("join"),
    ):
        b.reads()
        b.writes()
        with b.If(column < i32(made.out)), b.Then():
            _join(made, of, count, row, number, column)


def _join(made: Any, of: Any, count: Expr, row: Expr, number: Expr, column: Expr) -> None:
    top, whole, total = (local(1, "float32") for _ in range(3))
    b.buffer_store(top, f32(LOWEST), [0])
    b.buffer_store(whole, f32(0.0), [0])
    b.buffer_store(total, f32(0.0), [0])

    def slot(parts: Parts, part: Expr) -> Expr:
        tile = row // i32(parts.rows)
        return parts.slot(number, tile, part) * i32(parts.rows) + row % i32(parts.rows)

    begin, step = local(1, "int32"), local(1, "int32")
    b.buffer_store(begin, of(lambda parts: slot(parts, i32(0))), [0])
    b.buffer_store(step, of(lambda parts: i32(parts.rows)), [0])
    with b.serial(i32(0), count) as part:
        found = made.found[(begin[0] + part * step[0]) * i32(2)]
        b.buffer_store(top, tirx.max(top[0], found), [0])
    weight = local(1, "float32")
    with b.serial(i32(0), count) as part:
        at = begin[0] + part * step[0]
        b.buffer_store(weight, exp_of_nonpositive(made.found[at * i32(2)] - top[0]), [0])
        sums = made.found[at * i32(2) + i32(1)]
        b.buffer_store(whole, whole[0] + weight[0] * sums, [0])
        part_total = made.totals[at * i32(made.out) + column]
        b.buffer_store(total, total[0] + weight[0] * part_total, [0])
    place = made.place(number)
    made.finish(place, row, column, (whole[0], total[0]))
