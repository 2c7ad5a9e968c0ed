"""Rewrites of lowered loops that TensorIR's schedule primitives cannot express."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.exprs import collect, substitute, uses
from apq_tvm.tensorize.exprs import Expr, Stmt

GRAIN = "apq.grain"
"""Attribute of a PrimFunc (`with_grain`)."""


def reuse_output(func: Any, scratch: str) -> Any:
    """Keep a scratch row in the output row that is computed from it, element by element.

    Given ``out[f(j)] = g(scratch[j])`` where ``f(j) - j`` does not depend on ``j``, the scratch is
    not needed: its values can wait where the results go. Saves a dynamic allocation and its
    traffic.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Lowered.
    scratch : str
        Name of an allocated flat buffer; the last store that loads it is to the output.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    found: list[Any] = []
    last: list[tuple[Any, Any]] = []

    def find_alloc(node: Any) -> Any:
        if node.buffer.name == scratch:
            found.append(node)
        return node

    def find_store(store: Any) -> Any:
        def find_load(load: Any) -> Any:
            if load.source.same_as(buffer) and not store.buffer.same_as(buffer):
                last.append((store, load))
            return load

        tvm_ffi.structural_map(store.value, (ir.TensorLoad, find_load))
        return store

    tvm_ffi.structural_map(func.body, (tirx.AllocBuffer, find_alloc))
    if len(found) != 1:
        raise ValueError(f"{len(found)} allocations are named {scratch}")
    buffer = found[0].buffer
    tvm_ffi.structural_map(func.body, (tirx.BufferStore, find_store))
    store, load = last[-1]
    offset = sym.Analyzer().simplify(store.indices[0] - load.indices[0])

    def drop(node: Any) -> Any:
        return tirx.Evaluate(tirx.const(0, "int32")) if node.buffer.same_as(buffer) else node

    def moved_load(node: Any) -> Any:
        if not node.source.same_as(buffer):
            return node
        return tirx.BufferLoad(store.buffer, [node.indices[0] + offset])

    def moved_store(node: Any) -> Any:
        if not node.buffer.same_as(buffer):
            return node
        return tirx.BufferStore(store.buffer, node.value, [node.indices[0] + offset])

    body = tvm_ffi.structural_map(
        func.body,
        (
            (tirx.AllocBuffer, drop),
            (ir.TensorLoad, moved_load),
            (tirx.BufferStore, moved_store),
        ),
    )
    return func.with_body(body)


def parallel_when(func: Any, work: Expr, usual: int, decide: Decide) -> Any:
    """Take the parallel loops of a function that is known to have little to do for serial ones.

    Waking the other threads costs 1 to 3 microseconds, more than a small operator takes. Where only
    a run knows how much there is to do, the runtime decides (`apq_call` in
    codegen/runtime/cpu/run.c), by its own estimate: a second copy of the loops would be built for
    nothing. What is decided is then the grain.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Lowered, with ``parallel`` loops.
    work : PrimExpr
        Elements the function handles, of variables bound by its buffers.
    usual : int
        Fewest elements worth a second thread, by default.
    decide : Decide
        Asked ``parallel_least``: the fewest.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    least = decide("parallel_least", (usual, usual // 4, usual * 4))
    enough = sym.Analyzer().simplify(work >= tirx.const(least, str(work.ty)))
    if not isinstance(enough, tirx.IntImm):
        return with_grain(func, least / usual)
    if int(enough):
        return func

    def serial(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body,
            annotations=loop.annotations,
        )  # fmt: skip

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, serial)))


def with_grain(func: Any, times: float) -> Any:
    """Have a function's parallel loops shared out among fewer threads, in fewer tasks.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    times : float
        How often the usual work a thread and a task need; of 1 the function stays as it is.
    """
    return func.with_attr(GRAIN, float(times)) if times != 1 else func


def grain_of(func: Any) -> float:
    """What `with_grain` gave a function, 1 by default."""
    return float(func.attrs[GRAIN]) if func.attrs is not None and GRAIN in func.attrs else 1.0


def unrolled_size(body: Any) -> int:
    """Variables that are mentioned in a statement once its loops are unrolled."""
    if isinstance(body, tirx.For):
        unrolled = body.kind == tirx.ForKind.UNROLLED and isinstance(body.extent, tirx.IntImm)
        return (int(body.extent) if unrolled else 1) * unrolled_size(body.body)
    if isinstance(body, tirx.SeqStmt):
        return sum(map(unrolled_size, body.seq))
    if isinstance(body, tirx.IfThenElse):
        other = unrolled_size(body.else_case) if body.else_case is not None else 0
        return unrolled_size(body.then_case) + other
    inner = getattr(body, "body", None)
    if isinstance(inner, tirx.Stmt):
        return unrolled_size(inner)
    return len(collect(body, tirx.Var))


def distribute_rows(func: Any, tile: int) -> Any:
    """Run the steps of a row operation step by step over `tile` rows instead of row by row.

    ``for row: max(row); exp(row); scale(row)`` becomes, over groups of rows, all the maxima, then
    all the exponentials, then all the scalings. Each step of a row waits for the horizontal
    reduction of the one before; the next row's same step does not, and fills the pipeline
    meanwhile.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Lowered, one outermost parallel loop over rows from 0; its body allocates only scratch of
        one element per row and holds a sequence of stores and loops.
    tile : int
        Rows per group, 1 leaves the function as it is.

    Returns
    -------
    tvm.tirx.PrimFunc
    """

    def visit(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        dtype = str(loop.extent.ty)
        size = tirx.const(tile, dtype)
        group, lane = tirx.Var("group", dtype), tirx.Var("lane", dtype)
        scratch: dict[str, Any] = {}
        steps: list[list[Stmt]] = [[]]
        for part in loop.body.seq:
            if isinstance(part, tirx.AllocBuffer):
                old = part.buffer
                scratch[old.name] = (old, tirx.decl_buffer((tile,), old.dtype, old.name))
                continue
            steps[-1].append(part)
            if isinstance(part, tirx.For):
                steps.append([])

        def moved(node: Any, buffer: Any) -> Any:
            entry = scratch.get(buffer.name)
            return entry[1] if entry is not None and entry[0].same_as(buffer) else None

        def load(node: Any) -> Any:
            buffer = moved(node, node.source)
            return node if buffer is None else tirx.BufferLoad(buffer, [lane])

        def store(node: Any) -> Any:
            buffer = moved(node, node.buffer)
            return node if buffer is None else tirx.BufferStore(buffer, node.value, [lane])

        row = group * size + lane
        rows = tirx.min(size, loop.extent - group * size)
        out: list[Stmt] = [tirx.AllocBuffer(new) for _, new in scratch.values()]
        for step in steps:
            if step:
                body = tvm_ffi.structural_map(
                    substitute(tirx.stmt_seq(*step), loop.loop_var, row),
                    ((ir.TensorLoad, load), (tirx.BufferStore, store)),
                )
                out.append(tirx.For(lane, tirx.const(0, dtype), rows, tirx.ForKind.SERIAL, body))
        groups = (loop.extent + size - 1) // size
        return tirx.For(
            group, tirx.const(0, dtype), groups, tirx.ForKind.PARALLEL, tirx.stmt_seq(*out)
        )

    if tile == 1:
        return func
    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, visit)))


def reuse_outputs(func: Any) -> Any:
    """`reuse_output` for every scratch that is provably as large as the output it ends in.

    Either a whole buffer (a convolution before its bias and activation) or one row per iteration
    (the exponentials of a softmax).
    """
    allocs = [b.buffer for b in collect(func.body, tirx.AllocBuffer)]
    for scratch in allocs:
        if _fits_output(func, scratch):
            func = reuse_output(func, scratch.name)
    return func


def _fits_output(func: Any, scratch: Any) -> bool:
    analyzer = sym.Analyzer()
    stores = collect(func.body, tirx.BufferStore)
    allocs = collect(func.body, tirx.AllocBuffer)
    inner = [a.buffer for a in allocs]
    if sum(a.name == scratch.name for a in inner) != 1 or len(scratch.shape) != 1:
        return False
    readers = []
    for s in stores:
        loads = [x for x in collect(s.value, ir.TensorLoad) if x.source.same_as(scratch)]
        if loads and not any(s.buffer.same_as(b) for b in inner):
            readers.append((s, loads))
    if len(readers) != 1:
        return False
    (store, loads) = readers[0]
    out = store.buffer
    used = sum(s.buffer.same_as(out) for s in stores)
    used += sum(x.source.same_as(out) for x in collect(func.body, ir.TensorLoad))
    index = loads[0].indices[0]
    if used != 1 or str(out.dtype) != str(scratch.dtype):
        return False
    if any(not analyzer.can_prove_equal(x.indices[0], index) for x in loads):
        return False
    if isinstance(scratch.shape[0], tirx.IntImm) and int(scratch.shape[0]) == 1:
        return False
    if analyzer.can_prove_equal(scratch.shape[0], out.shape[0]):
        return bool(analyzer.can_prove_equal(store.indices[0], index))
    inside = [x for x in collect(func.body, tirx.For) if not _allocates(x, scratch)]
    rows = [x for x in inside if x.loop_var.same_as(index)]
    offset = analyzer.simplify(store.indices[0] - index)
    return (
        len(rows) == 1
        and bool(analyzer.can_prove_equal(rows[0].extent, scratch.shape[0]))
        and not any(uses(offset, x.loop_var) for x in inside)
    )


def _allocates(stmt: Stmt, buffer: Any) -> bool:
    return any(a.buffer.same_as(buffer) for a in collect(stmt, tirx.AllocBuffer))


def elements(buffer: Any) -> Expr:
    """Number of elements of an argument, as an int64 expression; 1 for a scalar argument."""
    count: Any = tirx.const(1, "int64")
    if not tirx.is_buffer_var(buffer):
        return count
    for extent in buffer.shape:
        count = count * extent
    return count


def nest(stmt: Stmt) -> tuple[list[Any], Stmt]:
    """The serial loops around the innermost single statement, and that statement."""
    loops: list[Any] = []
    while isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.SERIAL:
        loops.append(stmt)
        stmt = stmt.body
    return loops, stmt


def rebuild(loops: list[Any], body: Stmt) -> Stmt:
    """Inverse of `nest`."""
    for loop in reversed(loops):
        body = tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind, body, annotations=loop.annotations
        )
    return body


def is_straight(stmt: Stmt) -> bool:
    """True for a store or a sequence of stores."""
    parts = stmt.seq if isinstance(stmt, tirx.SeqStmt) else [stmt]
    return all(isinstance(part, tirx.BufferStore) for part in parts)


def _accesses(body: Stmt) -> list[Any]:
    return collect(body, ir.TensorLoad) + collect(body, tirx.BufferStore)


def mergeable(body: Stmt, outer: Any, inner: Any) -> bool:
    """True if the loop variables occur only as ``outer * extent(inner) + inner``."""
    analyzer = sym.Analyzer()
    accesses = _accesses(body)
    for access in accesses:
        for index in access.indices:
            found = sym.detect_linear_equation(index, [outer.loop_var, inner.loop_var])
            if not found or any(uses(f, outer.loop_var) or uses(f, inner.loop_var) for f in found):
                return False
            if not analyzer.can_prove_equal(found[0], found[1] * inner.extent):
                return False
    # Outside of indices the variables must not occur.
    bare = tvm_ffi.structural_map(
        body,
        (
            (ir.TensorLoad, lambda node: tirx.const(0, str(node.ty))),
            (
                tirx.BufferStore,
                lambda node: tirx.BufferStore(node.buffer, node.value, [_zero(node)]),
            ),
        ),
    )
    return not (uses(bare, outer.loop_var) or uses(bare, inner.loop_var))


def _zero(store: Any) -> Expr:
    return tirx.const(0, str(store.indices[0].ty))


def collapse(stmt: Stmt) -> Stmt:
    """Merge neighbouring loops that together run along memory into one, from the inside out.

    Parameters
    ----------
    stmt : Stmt
        Lowered. Every perfect nest of serial loops around straight stores in it is treated.
    """

    def visit(loop: Any) -> Any:
        loops, body = nest(loop)
        if len(loops) < 2 or not is_straight(body):
            return loop
        outer, inner = loops[0], loops[1]
        rest = rebuild(loops[2:], body)
        if not (_starts_at_0(outer) and _starts_at_0(inner) and mergeable(rest, outer, inner)):
            return loop
        extent = sym.Analyzer().simplify(outer.extent * inner.extent)
        body = substitute(rest, outer.loop_var, tirx.const(0, str(outer.loop_var.ty)))
        return tirx.For(inner.loop_var, inner.min, extent, tirx.ForKind.SERIAL, body)

    return tvm_ffi.structural_map(stmt, (tirx.For, visit))


def _starts_at_0(loop: Any) -> bool:
    return isinstance(loop.min, tirx.IntImm) and int(loop.min) == 0


def fuse_outer(loops: list[Any], body: Stmt) -> Stmt:
    """One parallel loop over all iterations of `loops` around `body`.

    Dynamic extents come first: the first is no divisor, and TVM's bounds of a division by a size
    that it thinks may be 0 end in an error.
    """
    loops = sorted(loops, key=lambda loop: isinstance(loop.extent, tirx.IntImm))
    if len(loops) == 1:
        (only,) = loops
        return tirx.For(only.loop_var, only.min, only.extent, tirx.ForKind.PARALLEL, body)
    dtype = str(loops[0].loop_var.ty)
    fused = tirx.Var("fused", dtype)
    total: Any = tirx.const(1, dtype)
    index: Any = fused
    for loop in reversed(loops):
        total = total * loop.extent
        value = index if loop.same_as(loops[0]) else index % loop.extent
        body = tirx.stmt_seq(tirx.Bind(loop.loop_var, value), body)
        index = index // loop.extent
    return tirx.For(fused, tirx.const(0, dtype), total, tirx.ForKind.PARALLEL, body)


def chunk(loop: Any, size: int) -> Stmt:
    """One loop as a parallel loop over chunks of `size` iterations."""
    dtype = str(loop.loop_var.ty)
    step = tirx.const(size, dtype)
    outer, inner = tirx.Var("chunk", dtype), tirx.Var("j", dtype)
    body = substitute(loop.body, loop.loop_var, outer * step + inner)
    extent = tirx.min(step, loop.extent - outer * step)
    if isinstance(loop.extent, tirx.IntImm) and int(loop.extent) % size == 0:
        extent = step
    count = sym.Analyzer().simplify((loop.extent + step - 1) // step)
    zero = tirx.const(0, dtype)
    run = tirx.For(inner, zero, extent, tirx.ForKind.SERIAL, body)
    return tirx.For(outer, zero, count, tirx.ForKind.PARALLEL, run)
