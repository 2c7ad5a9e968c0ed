"""Register tiles for sums of products: convolution, and matrix products that Relax legalized.

A nest ``out[.., i, .., j] += f(i, j, k)`` whose loads partly do not depend on ``i`` runs in blocks
of rows of ``i`` times vectors of ``j``: the accumulators stay in registers over all of ``k``, and
what does not depend on ``i`` is loaded once for all rows (LLVM merges the equal loads).
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from apq_tvm.schedules.graph.exprs import substitute, uses
from apq_tvm.schedules.graph.rewrites.loops import fuse_outer, mergeable, nest, rebuild
from apq_tvm.schedules.graph.rewrites.vectorize import Loop, NotVector, Vectorizer
from apq_tvm.tensorize.exprs import Expr, Stmt


def _is_int(e: Expr) -> bool:
    return isinstance(e, tirx.IntImm)


def _is_one(e: Expr) -> bool:
    return _is_int(e) and int(e) == 1


def _sum_of(store: Any) -> Expr | None:
    """f of ``out[x] = out[x] + f``, else None."""
    value = store.value
    if not isinstance(value, tirx.Add) or not isinstance(value.a, ir.TensorLoad):
        return None
    same = value.a.source.same_as(store.buffer) and tvm_ffi.structural_equal(
        value.a.indices[0], store.indices[0]
    )
    return value.b if same else None


def _loads(e: Expr) -> list[Any]:
    found: list[Any] = []

    def keep(load: Any) -> Any:
        found.append(load)
        return load

    tvm_ffi.structural_map(e, (ir.TensorLoad, keep))
    return found


class _Tile:
    """One nest split into outer loops, rows `i`, columns `j` and reductions."""

    def __init__(self, loops: list[Any], store: Any, lanes: int) -> None:
        self.store = store
        self.lanes = lanes
        index = store.indices[0]
        spatial = [loop for loop in loops if uses(index, loop.loop_var)]
        self.reductions = [loop for loop in loops if not uses(index, loop.loop_var)]
        analysis = {loop: Loop(loop.loop_var, lanes).stride(index) for loop in spatial}
        columns = [
            loop
            for loop in spatial
            if _is_one(analysis[loop]) and not (_is_int(loop.extent) and int(loop.extent) < 4)
        ]
        if not columns or not self.reductions:
            raise NotVector("no sum along memory")
        self.j = columns[-1]
        self.outer = [loop for loop in spatial if not loop.same_as(self.j)]
        self._merge_columns()
        self.i = self._rows()
        self.outer = [loop for loop in self.outer if not loop.same_as(self.i)]

    def _merge_columns(self) -> None:
        for loop in reversed(list(self.outer)):
            unit = _is_int(loop.extent) and int(loop.extent) == 1
            if unit or not mergeable(self.store, loop, self.j):
                continue
            var = self.j.loop_var
            self.store = substitute(self.store, loop.loop_var, tirx.const(0, str(var.ty)))
            extent = sym.Analyzer().simplify(loop.extent * self.j.extent)
            self.j = tirx.For(var, self.j.min, extent, self.j.kind, self.j.body)
            self.outer = [x for x in self.outer if not x.same_as(loop)]

    def _rows(self) -> Any:
        """The loop that leaves most loads as they are."""
        loads = _loads(_sum_of(self.store))

        def reuse(loop: Any) -> tuple[int, bool]:
            kept = [x.indices[0] for x in loads if not uses(x.indices[0], loop.loop_var)]
            # A vector kept saves more than a scalar; a dynamic extent may be 1.
            return sum(1 + uses(i, self.j.loop_var) for i in kept), _is_int(loop.extent)

        rows = [x for x in self.outer if not (_is_int(x.extent) and int(x.extent) == 1)]
        best = max(rows, key=reuse, default=None)
        if best is None or reuse(best)[0] == 0:
            raise NotVector("nothing is used twice")
        return best

    def block(self, first: Expr, rows: int, base: Expr, vectors: int, mask: Expr | None) -> Stmt:
        """`rows` rows from `first`, `vectors` vectors from column `base`."""
        lanes = self.lanes
        acc = tirx.decl_buffer((rows * vectors * lanes,), str(self.store.value.ty), "acc")
        dtype = str(self.j.loop_var.ty)
        start: list[Stmt] = []
        step: list[Stmt] = []
        end: list[Stmt] = []
        for r in range(rows):
            row_var = self.i.loop_var
            row = substitute(self.store, row_var, first + tirx.const(r, str(row_var.ty)))
            for v in range(vectors):
                column = base + tirx.const(v * lanes, dtype)
                vector = Vectorizer(Loop(self.j.loop_var, lanes), column, mask, 0)
                at = [tirx.Ramp(tirx.const((r * vectors + v) * lanes, "int32"), 1, lanes)]
                here = tirx.BufferLoad(acc, at)
                start.append(tirx.BufferStore(acc, vector.expr(row.value.a), at))
                term = vector.wide(vector.expr(row.value.b))
                step.append(tirx.BufferStore(acc, here + term, at))
                end.append(vector.write(row.buffer, here, row.indices))
        return tirx.stmt_seq(
            tirx.AllocBuffer(acc), *start, rebuild(self._unrolled(), tirx.stmt_seq(*step)), *end
        )

    def _unrolled(self) -> list[Any]:
        """The reduction loops; short inner ones (a convolution's kernel) are unrolled."""
        out: list[Any] = []
        copies = 1
        for loop in reversed(self.reductions):
            copies *= int(loop.extent) if _is_int(loop.extent) else 1 << 20
            kind = tirx.ForKind.UNROLLED if copies <= 9 else tirx.ForKind.SERIAL
            out.insert(0, tirx.For(loop.loop_var, loop.min, loop.extent, kind, loop.body))
        return out

    def scalar(self, first: Expr, rows: int, base: Expr, count: Expr) -> Stmt:
        """The same without vectors, for columns that have no masked form."""
        r, c = tirx.Var("r", str(self.i.loop_var.ty)), tirx.Var("c", str(self.j.loop_var.ty))
        body = substitute(self.store, self.i.loop_var, first + r)
        body = rebuild(self.reductions, substitute(body, self.j.loop_var, base + c))
        inner = tirx.For(c, tirx.const(0, str(c.ty)), count, tirx.ForKind.SERIAL, body)
        extent = tirx.const(rows, str(r.ty))
        return tirx.For(r, tirx.const(0, str(r.ty)), extent, tirx.ForKind.SERIAL, inner)

    def columns(self, first: Expr, rows: int, vectors: int) -> Stmt:
        """All columns of `rows` rows: whole tiles, single vectors, the rest."""
        n, lanes = self.j.extent, self.lanes
        dtype = str(n.ty)
        simplify = sym.Analyzer().simplify
        out: list[Stmt] = []
        done: Any = tirx.const(0, dtype)
        for width in dict.fromkeys((vectors, 1)):
            size = tirx.const(width * lanes, dtype)
            count = simplify((n - done) // size)
            if not (_is_int(count) and int(count) == 0):
                var = tirx.Var("jo", dtype)
                body = self.block(first, rows, done + var * size, width, None)
                zero = tirx.const(0, dtype)
                out.append(tirx.For(var, zero, count, tirx.ForKind.SERIAL, body))
            done = simplify(n // size * size)
        rest = simplify(n % tirx.const(lanes, dtype))
        if _is_int(rest) and int(rest) == 0:
            return tirx.stmt_seq(*out)
        lane = tirx.Ramp(tirx.const(0, dtype), tirx.const(1, dtype), lanes)
        try:
            tail = self.block(first, rows, done, 1, tirx.LT(lane, tirx.Broadcast(rest, lanes)))
            if not _is_int(rest):
                tail = tirx.IfThenElse(rest > 0, tail, None)
        except NotVector:  # strided loads
            tail = self.shorter(first, rows, done, rest)
        return tirx.stmt_seq(*out, tail)

    def shorter(self, first: Expr, rows: int, base: Expr, rest: Expr) -> Stmt:
        """Fewer columns than a vector has lanes: half vectors, quarters, single elements."""
        whole, dtype = self.lanes, str(rest.ty)
        simplify = sym.Analyzer().simplify
        out: list[Stmt] = []
        done: Any = tirx.const(0, dtype)
        self.lanes //= 2
        while self.lanes >= 4:
            size = tirx.const(self.lanes, dtype)
            some = simplify(rest - done >= size)
            body = self.block(first, rows, base + done, 1, None)
            if not _is_int(some):
                out.append(tirx.IfThenElse(some, body, None))
            elif int(some):
                out.append(body)
            self.lanes //= 2
            done = simplify(rest // size * size)
        self.lanes = whole
        left = simplify(rest - done)
        if not (_is_int(left) and int(left) == 0):
            out.append(self.scalar(first, rows, base + done, left))
        return tirx.stmt_seq(*out)


def register_tile(stmt: Stmt, lanes: int, rows: int, vectors: int) -> Stmt | None:
    """Tile one lowered nest of serial loops around one sum.

    Parameters
    ----------
    stmt : Stmt
    lanes : int
        float32 lanes of a vector.
    rows, vectors : int
        Of the tile; rows left over go through blocks of 4, 2 and 1.

    Returns
    -------
    Stmt or None
        Parallel over the outer loops and blocks of rows; None if the nest is no sum of products
        that reuses anything.
    """
    loops, body = nest(stmt)
    if not isinstance(body, tirx.BufferStore) or str(body.value.ty) != "float32":
        return None
    if _sum_of(body) is None or not all(_is_int(x.min) and int(x.min) == 0 for x in loops):
        return None
    try:
        tile = _Tile(loops, body, lanes)
        out: list[Stmt] = []
        extent = tile.i.extent
        dtype = str(extent.ty)
        simplify = sym.Analyzer().simplify
        done: Any = tirx.const(0, dtype)
        while rows:
            count = simplify((extent - done) // tirx.const(rows, dtype))
            if not (_is_int(count) and int(count) == 0):
                var = tirx.Var("io", dtype)
                body = tile.columns(done + var * tirx.const(rows, dtype), rows, vectors)
                block = tirx.For(var, tirx.const(0, dtype), count, tirx.ForKind.SERIAL, body)
                out.append(fuse_outer([block, *tile.outer], body))
            done = simplify(done + count * tirx.const(rows, dtype))
            rows = 4 if rows > 4 else rows // 2
        return tirx.stmt_seq(*out)
    except NotVector:
        return None
