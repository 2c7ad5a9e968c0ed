"""Panels of a matrix in scratch: flat views, register tiles, and packing with transposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from apq_tvm.tensorize.exprs import i64

Expr = Any
Stmt = Any


def is_const(e: Expr, value: int | None = None) -> bool:
    """True if `e` is an integer constant (and equal to `value`)."""
    return isinstance(e, tirx.IntImm) and (value is None or int(e) == value)


def loop(extent: Expr, body: Callable[[Expr], Stmt], kind: Any = tirx.ForKind.SERIAL) -> Stmt:
    """``for v in range(extent): body(v)``; no loop around a single iteration."""
    if is_const(extent, 1):
        return body(i64(0))
    if is_const(extent, 0):
        return tirx.Evaluate(tirx.const(0, "int32"))
    var = tirx.Var("i", "int64")
    return tirx.For(var, i64(0), extent, kind, body(var))


@dataclass(frozen=True)
class Flat:
    """A flat view of an argument and the position of one matrix element in it."""

    buffer: Any
    index: Callable[[Expr, Expr], Expr]

    def at(self, row: Expr, col: Expr) -> Expr:
        """The element (row, col)."""
        return tirx.BufferLoad(self.buffer, [self.index(row, col)])

    def run(self, row: Expr, col: Expr, lanes: int) -> Expr:
        """Index of `lanes` consecutive elements from (row, col) on."""
        return tirx.Ramp(self.index(row, col), i64(1), lanes)


def strides(shape: Sequence[Expr]) -> list[Expr]:
    """Row-major strides in elements."""
    out: list[Expr] = []
    step: Any = i64(1)
    for extent in reversed(list(shape)):
        out.insert(0, step)
        step = step * extent
    return out


@dataclass(frozen=True)
class Tile:
    """The register tile: `rows` x (`vectors` of `lanes` columns), `depth` rows of packed panel."""

    rows: int
    vectors: int
    lanes: int
    depth: int

    @property
    def cols(self) -> int:
        """Columns of a panel."""
        return self.vectors * self.lanes

    @property
    def masks(self) -> bool:
        """Whether loads and stores can be masked: AVX and later, but neither SSE nor NEON."""
        return self.lanes >= 8


def bind_all(values: list[Expr], name: str) -> tuple[list[Stmt], list[Expr]]:
    """Name each value once, so that later uses do not repeat it."""
    out: list[Stmt] = []
    names: list[Expr] = []
    for i, value in enumerate(values):
        var = tirx.Var(f"{name}{i}", str(value.ty))
        out.append(tirx.Bind(var, value))
        names.append(var)
    return out, names


def transpose_block(source: list[Expr], store: Callable[[int, Expr], Stmt]) -> Stmt:
    """Transpose a square of vectors and store row i of the result with ``store(i, vector)``."""
    width = len(source)
    out, rows = bind_all(source, "t")
    span = 1
    level = 0
    while span < width:
        mixed = list(rows)
        for r in range(width):
            if r & span:
                continue
            low, high = rows[r], rows[r + span]
            first = [(i & ~span) + (width if i & span else 0) for i in range(width)]
            second = [(i | span) + (width if i & span else 0) for i in range(width)]
            mixed[r] = tirx.Shuffle([low, high], [tirx.const(i, "int32") for i in first])
            mixed[r + span] = tirx.Shuffle([low, high], [tirx.const(i, "int32") for i in second])
        binds, rows = bind_all(mixed, f"t{level}_")
        out += binds
        span *= 2
        level += 1
    return tirx.stmt_seq(*out, *(store(i, row) for i, row in enumerate(rows)))


SQUARE = 8  # lanes of the transposed squares: 8 x 8 fits the registers of AVX2 and AVX-512 alike


def pack_panel(
    tile: Tile, panel: Any, right: Flat, first: Expr, cols: Expr, start: Expr, depth: Expr,
    layout: str,
) -> Stmt:  # fmt: skip
    """Copy ``right[start : start+depth, first : first+cols]`` to the panel, 0 past `cols`.

    Parameters
    ----------
    tile : Tile
    panel : Buffer
        Flat ``[tile.depth, tile.cols]``.
    right : Flat
    first, cols : PrimExpr
        Columns of the operand, at most ``tile.cols`` of them.
    start, depth : PrimExpr
        Rows of the operand, at most ``tile.depth`` of them.
    layout : {"rows", "columns", "strided"}
        Which axis of the operand is contiguous: columns run along a row, or down a column, or
        neither.
    """
    width = i64(tile.cols)

    def element(k: Expr, j: Expr) -> Stmt:
        return tirx.BufferStore(panel, right.at(start + k, first + j), [k * width + j])

    def zero(k: Expr, j: Expr) -> Stmt:
        return tirx.BufferStore(panel, tirx.const(0.0, "float32"), [k * width + j])

    def rest(k: Expr) -> Stmt:
        return tirx.stmt_seq(
            loop(cols, lambda j: element(k, j)), loop(width - cols, lambda j: zero(k, cols + j))
        )

    if layout == "rows":

        def whole(k: Expr) -> Stmt:
            return tirx.stmt_seq(
                *(
                    tirx.BufferStore(
                        panel,
                        tirx.BufferLoad(
                            right.buffer,
                            [right.run(start + k, first + i64(v * tile.lanes), tile.lanes)],
                        ),
                        [tirx.Ramp(k * width + i64(v * tile.lanes), i64(1), tile.lanes)],
                    )
                    for v in range(tile.vectors)
                )
            )

        def part(k: Expr) -> Stmt:
            out = []
            for v in range(tile.vectors):
                at = i64(v * tile.lanes)
                lane = tirx.Ramp(at, i64(1), tile.lanes)
                mask = tirx.LT(lane, tirx.Broadcast(cols, tile.lanes))
                value = tirx.op.masked_load(
                    f"float32x{tile.lanes}", right.buffer,
                    right.run(start + k, first + at, tile.lanes), mask,
                )  # fmt: skip
                out.append(
                    tirx.BufferStore(panel, value, [tirx.Ramp(k * width + at, i64(1), tile.lanes)])
                )
            return tirx.stmt_seq(*out)

        if is_const(cols, tile.cols):
            return loop(depth, whole)
        end = part if tile.masks else rest
        return tirx.IfThenElse(cols >= width, loop(depth, whole), loop(depth, end))

    if layout == "strided":
        return loop(depth, rest)

    squares = cols // i64(SQUARE)

    def square(kb: Expr, jb: Expr) -> Stmt:
        k, j = kb * i64(SQUARE), jb * i64(SQUARE)
        source = [
            tirx.BufferLoad(
                right.buffer,
                [tirx.Ramp(right.index(start + k, first + j + i64(i)), i64(1), SQUARE)],
            )
            for i in range(SQUARE)
        ]

        def store(i: int, row: Expr) -> Stmt:
            at = tirx.Ramp((k + i64(i)) * width + j, i64(1), SQUARE)
            return tirx.BufferStore(panel, row, [at])

        return transpose_block(source, store)

    def beside(k: Expr) -> Stmt:
        done = squares * i64(SQUARE)
        return tirx.stmt_seq(
            loop(cols - done, lambda j: element(k, done + j)),
            loop(width - cols, lambda j: zero(k, cols + j)),
        )

    whole_k = depth // i64(SQUARE)
    done_k = whole_k * i64(SQUARE)
    parts = [loop(whole_k, lambda kb: loop(squares, lambda jb: square(kb, jb)))]
    if not is_const(cols, tile.cols):
        parts.append(tirx.IfThenElse(cols < width, loop(done_k, beside), None))
    parts.append(loop(depth - done_k, lambda k: rest(done_k + k)))
    return tirx.stmt_seq(*parts)
