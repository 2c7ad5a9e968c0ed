"""Batched float32 matrix product: register tiles over packed panels.

Each task is one panel of ``NR`` columns of one matrix of the batch. The panel of the right operand
is copied, transposed where needed, into a small scratch ``[KC, NR]`` padded with zeros; then blocks
of ``MR`` rows run down it with ``MR x NR`` accumulators in registers. Rows left over go through
blocks of half the height, so no row is computed twice and nothing is predicated; columns left over
are stored under a mask. The roles of the operands are exchanged if the result's rows are
contiguous.

Matrices times vectors, and products of two vectors, read each element once: no panel is packed for
them, and what the loops of `schedule_generic` read lies in a row.

Register tiles after Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
(2008).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import sym, tirx

from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.generic import schedule_generic
from apq_tvm.schedules.graph.panel import (
    Flat,
    Packing,
    Tile,
    bind_all,
    flat_views,
    is_const,
    loop,
    strides,
)
from apq_tvm.schedules.graph.rewrites.loops import parallel_when
from apq_tvm.schedules.graph.rewrites.lowering import finish
from apq_tvm.tensorize.exprs import Expr, Stmt, i64
from apq_tvm.types import DeviceProfile

LEAST_COLUMNS = 16
"""Of a row, times which a vector is multiplied without a panel."""


def micro_kernel(
    tile: Tile,
    rows: int,
    depth: Expr,
    left: Callable[[int, Expr], Expr],
    panel: Any,
    along: Callable[[int, Expr], Expr] | None = None,
) -> tuple[list[Stmt], Callable[[int, int], Expr], Any]:
    """Accumulate ``rows x tile.cols`` over `depth`.

    Parameters
    ----------
    tile : Tile
    rows : int
        Of this block, at most ``tile.rows``.
    depth : PrimExpr
    left : callable
        (row, k) → scalar.
    panel : Buffer
        Flat ``[tile.depth, tile.cols]``.
    along : callable, optional
        (row, k) → vector of ``tile.lanes`` consecutive k, for devices that multiply by a lane.

    Returns
    -------
    list of Stmt, callable, Buffer
        The loops over k; (row, vector) → index of an accumulator vector; the accumulators, which
        the caller allocates and initialises.
    """
    acc = tirx.decl_buffer((rows * tile.cols,), "float32", "acc")

    def place(row: int, vector: int) -> Expr:
        at = row * tile.cols + vector * tile.lanes
        return tirx.Ramp(tirx.const(at, "int32"), tirx.const(1, "int32"), tile.lanes)

    def step(k: Expr, factor: Callable[[int], Expr]) -> Stmt:
        out: list[Stmt] = []
        cols: list[Expr] = []
        for v in range(tile.vectors):
            at = tirx.Ramp(k * i64(tile.cols) + i64(v * tile.lanes), i64(1), tile.lanes)
            value = tirx.BufferLoad(panel, [at])
            var = tirx.Var(f"b{v}", str(value.ty))
            out.append(tirx.Bind(var, value))
            cols.append(var)
        for r in range(rows):
            scalar = tirx.Var(f"a{r}", f"float32x{tile.lanes}")
            out.append(tirx.Bind(scalar, factor(r)))
            for v in range(tile.vectors):
                at = place(r, v)
                value = tirx.BufferLoad(acc, [at]) + scalar * cols[v]
                out.append(tirx.BufferStore(acc, value, [at]))
        return tirx.stmt_seq(*out)

    def one(k: Expr) -> Stmt:
        return step(k, lambda r: tirx.Broadcast(left(r, k), tile.lanes))

    if along is None:
        return [loop(depth, one)], place, acc
    load = along

    def several(block: Expr) -> Stmt:
        first = block * i64(tile.lanes)
        binds, vectors = bind_all([load(r, first) for r in range(rows)], "left")
        lanes = [[tirx.const(i, "int32")] * tile.lanes for i in range(tile.lanes)]
        steps = [
            step(first + i64(i), lambda r, i=i: tirx.Shuffle([vectors[r]], lanes[i]))  # type: ignore[misc]
            for i in range(tile.lanes)
        ]
        return tirx.stmt_seq(*binds, *steps)

    simplify = sym.Analyzer().simplify
    blocks = simplify(depth // i64(tile.lanes))
    done = simplify(blocks * i64(tile.lanes))
    rest = loop(simplify(depth - done), lambda k: one(done + k))
    return [loop(blocks, several), rest], place, acc


@dataclass(frozen=True)
class _Problem:
    """One product in terms of flat buffers: `left` is (m, k), `right` (k, n), `out` (m, n)."""

    m: Expr
    n: Expr
    k: Expr
    left: Flat
    right: Flat
    out: Flat
    right_layout: str
    left_runs: bool
    """Whether a row of `left` is contiguous and the device multiplies by a lane."""


def _batch_indices(task: Expr, batch: Sequence[Expr]) -> list[Expr]:
    out: list[Expr] = []
    for extent in reversed(list(batch)):
        if is_const(extent, 1):
            out.insert(0, i64(0))
        else:
            out.insert(0, task % extent)
            task = task // extent
    return out


class _Layout:
    """Where the logical axes of one operand lie in memory."""

    def __init__(self, param: Any, order: Sequence[int]) -> None:
        self.order = list(order)
        self.shape = [param.shape[p] for p in self.order]
        steps = strides(param.shape)
        self.strides = [steps[p] for p in self.order]
        self.contiguous = self.order.index(len(self.order) - 1)

    def offset(self, batch: Sequence[Expr], batch_shape: Sequence[Expr]) -> Expr:
        """Offset of one matrix; broadcast axes add nothing."""
        own = len(self.order) - 2
        used = list(batch)[len(batch) - own :]
        total: Any = i64(0)
        for index, extent, step in zip(used, self.shape[:-2], self.strides[:-2], strict=True):
            if not is_const(extent, 1):
                total = total + index * step
        return total


def _inverse(order: Sequence[int]) -> list[int]:
    out = [0] * len(order)
    for position, axis in enumerate(order):
        out[axis] = position
    return out


def schedule_batch_matmul(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule `apq_tvm.ops.graph.batch_matmul.batch_matmul`.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    profile : DeviceProfile
    decide : Decide
        ``rows`` and ``vectors`` of the register tile, ``depth`` of the panel, ``parallel_least``
        (multiply-adds worth a second thread). Of products of vectors those of `schedule_generic`.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    if _has_vector(func):
        return schedule_generic(func, profile, decide)[0]
    views_decl, views = flat_views(func)
    a = _Layout(func.params[0], [int(p) for p in func.attrs["apq.perm_a"]])
    b = _Layout(func.params[1], [int(p) for p in func.attrs["apq.perm_b"]])
    # The output's permutation goes from the product to memory; its inverse names the product's
    # axes.
    y = _Layout(func.params[2], _inverse([int(p) for p in func.attrs["apq.perm_out"]]))
    batch_shape = y.shape[:-2]
    rank = len(y.shape)

    swap = y.contiguous == rank - 2
    count: Any = i64(1)
    for extent in batch_shape:
        count = count * extent
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    if swap:
        m, n = n, m
    tile = _tile(profile, decide, n)
    panels = sym.Analyzer().simplify((n + i64(tile.cols - 1)) // i64(tile.cols))

    def task(t: Expr) -> Stmt:
        batch = _batch_indices(t // panels, batch_shape)
        offsets = [layout.offset(batch, batch_shape) for layout in (a, b, y)]
        binds, bases = bind_all(offsets, "base")

        def flat(which: int, layout: _Layout, row: int, col: int) -> Flat:
            rs, cs = layout.strides[row], layout.strides[col]
            return Flat(views[which], lambda i, j: bases[which] + i * rs + j * cs)

        if swap:
            left, right, out = flat(1, b, -1, -2), flat(0, a, -1, -2), flat(2, y, -1, -2)
            along, down = (len(a.order) - 2, len(a.order) - 1), a.contiguous
        else:
            left, right, out = flat(0, a, -2, -1), flat(1, b, -2, -1), flat(2, y, -2, -1)
            along, down = (len(b.order) - 1, len(b.order) - 2), b.contiguous
        layout = "rows" if down == along[0] else "columns" if down == along[1] else "strided"
        runs = a.contiguous == len(a.order) - 1
        if swap:
            runs = b.contiguous == len(b.order) - 2
        by_lane = runs and profile.arch == "aarch64"
        problem = _Problem(m, n, k, left, right, out, layout, by_lane)
        dense = y.contiguous >= rank - 2
        return tirx.stmt_seq(*binds, _panel(problem, tile, t % panels, dense))

    body = loop(count * panels, task, tirx.ForKind.PARALLEL)
    scheduled = func.with_body(tirx.stmt_seq(*views_decl, body))
    return finish(parallel_when(scheduled, count * m * n * k, 1 << 18, decide))


def _has_vector(func: Any) -> bool:
    """Whether a product is one of a vector; a row of few columns is a tile's, for its lanes."""
    a, b = func.params[:2]
    m, k = (a.shape[int(p)] for p in func.attrs["apq.perm_a"][-2:])
    n = b.shape[int(func.attrs["apq.perm_b"][-1])]
    few = is_const(n) and int(n) < LEAST_COLUMNS
    return is_const(n, 1) or is_const(k, 1) or (is_const(m, 1) and not few)


def _tile(profile: DeviceProfile, decide: Decide, n: Expr) -> Tile:
    """The register tile of a product of `n` columns.

    No wider than they are: what a load masks out altogether has no value, not even zero, and a
    product with what happens to be there takes a hundred cycles where it is a denormal.
    """
    rows = decide("rows", (8, 6, 12, 4) if profile.vector_registers >= 32 else (6, 4, 5))
    vectors, lanes = decide("vectors", (2, 1)), profile.vector_bytes // 4
    if is_const(n):
        vectors = min(vectors, max(1, -(-int(n) // lanes)))
    return Tile(rows, vectors, lanes, decide("depth", (128, 64, 256)))


def _panel(p: _Problem, tile: Tile, index: Expr, dense: bool) -> Stmt:
    """One panel of columns: pack, then all blocks of rows, for each slice of the depth."""
    first = index * i64(tile.cols)
    if is_const(p.n) and int(p.n) % tile.cols == 0:
        cols: Any = i64(tile.cols)
    else:
        cols = tirx.min(i64(tile.cols), p.n - first)
    one_slice = is_const(p.k) and int(p.k) <= tile.depth
    panel_size = (int(p.k) if one_slice else tile.depth) * tile.cols
    panel = tirx.decl_buffer((panel_size,), "float32", "panel")

    def slice_of(start: Expr, depth: Expr) -> Stmt:
        parts: list[Stmt] = [
            Packing(tile, panel, p.right, first, cols, start, depth).emit(p.right_layout)
        ]
        done: Any = i64(0)
        rows = tile.rows
        while rows:
            blocks = (p.m - done) // i64(rows)
            origin = done

            def block(i: Expr, rows: int = rows, origin: Any = origin) -> Stmt:
                at = (origin + i * i64(rows), first, cols, start, depth)
                return _block(p, tile, rows, panel, *at, dense=dense, continued=not one_slice)

            parts.append(loop(sym.Analyzer().simplify(blocks), block))
            done = sym.Analyzer().simplify(done + blocks * i64(rows))
            rows = 4 if rows > 4 else rows // 2
        return tirx.stmt_seq(*parts)

    if one_slice:
        work = slice_of(i64(0), p.k)
    else:
        slices = tirx.max(i64(1), (p.k + i64(tile.depth - 1)) // i64(tile.depth))
        work = loop(
            slices,
            lambda s: slice_of(
                s * i64(tile.depth), tirx.min(i64(tile.depth), p.k - s * i64(tile.depth))
            ),
        )
    return tirx.stmt_seq(tirx.AllocBuffer(panel), work)


def _block(
    p: _Problem, tile: Tile, rows: int, panel: Any, row: Expr, first: Expr, cols: Expr,
    start: Expr, depth: Expr, *, dense: bool, continued: bool,
) -> Stmt:  # fmt: skip
    """One block of rows of one panel; later slices of the depth add to what is there."""

    def along(r: int, k: Expr) -> Expr:
        run = p.left.run(row + i64(r), start + k, tile.lanes)
        return tirx.BufferLoad(p.left.buffer, [run])

    steps, place, acc = micro_kernel(
        tile,
        rows,
        depth,
        lambda r, k: p.left.at(row + i64(r), start + k),
        panel,
        along if p.left_runs else None,
    )
    zero = tirx.Broadcast(tirx.const(0.0, "float32"), tile.lanes)
    edge = tirx.decl_buffer((rows * tile.cols,), "float32", "edge")
    sums = _Sums(p.out, tile, rows, row, first, cols, acc, place, edge)
    begin = tirx.stmt_seq(*(tirx.BufferStore(acc, zero, [place(r, v)]) for r, v in sums.grid))
    move = sums.move if dense else sums.scatter
    end = move(back=False)
    if continued:
        begin = tirx.IfThenElse(start > 0, move(back=True), begin)
    return tirx.stmt_seq(tirx.AllocBuffer(acc), tirx.AllocBuffer(edge), begin, *steps, end)


@dataclass(frozen=True)
class _Sums:
    """Accumulators of a block of rows on their way to the result, or back from it."""

    out: Flat
    tile: Tile
    rows: int
    row: Expr
    first: Expr
    cols: Expr
    acc: Any
    place: Callable[[int, int], Expr]
    edge: Any
    """Scratch for columns that cannot be masked."""

    @property
    def grid(self) -> list[tuple[int, int]]:
        """Rows and vectors of the accumulators."""
        return [(r, v) for r in range(self.rows) for v in range(self.tile.vectors)]

    def move(self, back: bool) -> Stmt:
        """Vectors of the result; under a mask where the panel is not whole."""
        whole = tirx.stmt_seq(*(self._vector(r, v, back) for r, v in self.grid))
        if is_const(self.cols, self.tile.cols):
            return whole
        # Masked stores cost some 20 cycles each on AVX2: only the last panel needs them.
        if self.tile.masks:
            part = tirx.stmt_seq(*(self._masked(r, v, back) for r, v in self.grid))
        else:
            part = self.scatter(back)
        return tirx.IfThenElse(self.cols >= i64(self.tile.cols), whole, part)

    def _run(self, r: int, v: int) -> Expr:
        at = self.first + i64(v * self.tile.lanes)
        return self.out.run(self.row + i64(r), at, self.tile.lanes)

    def _vector(self, r: int, v: int, back: bool) -> Stmt:
        there, here = (self.out.buffer, self._run(r, v)), (self.acc, self.place(r, v))
        (source, at), (target, to) = (there, here) if back else (here, there)
        return tirx.BufferStore(target, tirx.BufferLoad(source, [at]), [to])

    def _masked(self, r: int, v: int, back: bool) -> Stmt:
        lanes, buffer, run = self.tile.lanes, self.out.buffer, self._run(r, v)
        lane = tirx.Ramp(i64(v * lanes), i64(1), lanes)
        mask = tirx.LT(lane, tirx.Broadcast(self.cols, lanes))
        if back:
            value = tirx.op.masked_load(f"float32x{lanes}", buffer, run, mask)
            return tirx.BufferStore(self.acc, value, [self.place(r, v)])
        value = tirx.BufferLoad(self.acc, [self.place(r, v)])
        return tirx.Evaluate(tirx.op.masked_store(buffer, value, run, mask))

    def scatter(self, back: bool) -> Stmt:
        """Element by element, from or to a copy: the sums keep constant indices."""
        out, edge, cols = self.out, self.edge, self.tile.cols

        def one(r: Expr, j: Expr) -> Stmt:
            at, here = out.index(self.row + r, self.first + j), r * i64(cols) + j
            if back:
                return tirx.BufferStore(edge, tirx.BufferLoad(out.buffer, [at]), [here])
            return tirx.BufferStore(out.buffer, tirx.BufferLoad(edge, [here]), [at])

        source, target = (edge, self.acc) if back else (self.acc, edge)
        places = [self.place(r, v) for r, v in self.grid]
        copies = [tirx.BufferStore(target, tirx.BufferLoad(source, [at]), [at]) for at in places]
        each = loop(i64(self.rows), lambda r: loop(self.cols, lambda j: one(r, j)))
        return tirx.stmt_seq(*((each, *copies) if back else (*copies, each)))
