"""Panels of a matrix in scratch: flat views, register tiles, and packing with transposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from apq_tvm.tensorize.exprs import Expr, Stmt, i64


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


def flat_views(func: Any) -> tuple[list[Stmt], list[Any]]:
    """Flat views of the arguments that are buffers."""
    out: list[Stmt] = []
    views: list[Any] = []
    for p in func.params:
        if not hasattr(p, "shape"):  # a number
            continue
        size: Any = i64(1)
        for extent in p.shape:
            size = size * extent
        view = tirx.decl_buffer((size,), p.dtype, f"{p.name}_flat", data=p.data)
        out.append(tirx.DeclBuffer(view, data=p.data))
        views.append(view)
    return out, views


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


@dataclass(frozen=True)
class Packing:
    """A copy of ``right[start : start+depth, first : first+cols]`` to a panel, 0 past `cols`.

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
    """

    tile: Tile
    panel: Any
    right: Flat
    first: Expr
    cols: Expr
    start: Expr
    depth: Expr

    def emit(self, layout: str) -> Stmt:
        """The copy.

        Parameters
        ----------
        layout : {"rows", "columns", "strided"}
            Which axis of the operand is contiguous: columns run along a row, or down a column, or
            neither.
        """
        if layout == "strided":
            return loop(self.depth, self._elements)
        if layout == "columns":
            return self._transposed()
        if is_const(self.cols, self.tile.cols):
            return loop(self.depth, self._vectors)
        end = self._masked if self.tile.masks else self._elements
        whole = loop(self.depth, self._vectors)
        return tirx.IfThenElse(self.cols >= i64(self.tile.cols), whole, loop(self.depth, end))

    def _row(self, k: Expr) -> Expr:
        """Where row k of the panel begins."""
        return k * i64(self.tile.cols)

    def _elements(self, k: Expr, done: Any = None) -> Stmt:
        """Row k element by element, from column `done` on."""
        cols = self.cols

        def element(j: Expr) -> Stmt:
            j = j if done is None else done + j
            value = self.right.at(self.start + k, self.first + j)
            return tirx.BufferStore(self.panel, value, [self._row(k) + j])

        def zero(j: Expr) -> Stmt:
            place = self._row(k) + (cols + j)
            return tirx.BufferStore(self.panel, tirx.const(0.0, "float32"), [place])

        left = cols if done is None else cols - done
        return tirx.stmt_seq(loop(left, element), loop(i64(self.tile.cols) - cols, zero))

    def _vectors(self, k: Expr, masked: bool = False) -> Stmt:
        """Row k vector by vector."""
        lanes, out = self.tile.lanes, []
        for v in range(self.tile.vectors):
            at = i64(v * lanes)
            run = self.right.run(self.start + k, self.first + at, lanes)
            if masked:
                mask = tirx.LT(tirx.Ramp(at, i64(1), lanes), tirx.Broadcast(self.cols, lanes))
                value = tirx.op.masked_load(f"float32x{lanes}", self.right.buffer, run, mask)
            else:
                value = tirx.BufferLoad(self.right.buffer, [run])
            place = tirx.Ramp(self._row(k) + at, i64(1), lanes)
            out.append(tirx.BufferStore(self.panel, value, [place]))
        return tirx.stmt_seq(*out)

    def _masked(self, k: Expr) -> Stmt:
        return self._vectors(k, True)

    def _square(self, k: Expr, j: Expr) -> Stmt:
        """Transpose the square from row k and column j of the panel on."""

        def source(i: int) -> Expr:
            index = self.right.index(self.start + k, self.first + j + i64(i))
            return tirx.BufferLoad(self.right.buffer, [tirx.Ramp(index, i64(1), SQUARE)])

        def store(i: int, row: Expr) -> Stmt:
            at = tirx.Ramp(self._row(k + i64(i)) + j, i64(1), SQUARE)
            return tirx.BufferStore(self.panel, row, [at])

        return transpose_block([source(i) for i in range(SQUARE)], store)

    def _transposed(self) -> Stmt:
        """Squares, then what is beside and below them."""
        side = i64(SQUARE)
        squares, whole_k = self.cols // side, self.depth // side
        done_k = whole_k * side
        parts = [
            loop(whole_k, lambda kb: loop(squares, lambda jb: self._square(kb * side, jb * side)))
        ]
        if not is_const(self.cols, self.tile.cols):
            beside = loop(done_k, lambda k: self._elements(k, squares * side))
            parts.append(tirx.IfThenElse(self.cols < i64(self.tile.cols), beside, None))
        parts.append(loop(self.depth - done_k, lambda k: self._elements(done_k + k)))
        return tirx.stmt_seq(*parts)
