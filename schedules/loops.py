"""Rewrites of lowered loops that TensorIR's schedule primitives cannot express."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from apq_tvm.schedules.vectorize import substitute

Expr = Any
Stmt = Any


def reuse_output(func: Any, scratch: str) -> Any:
    """Keep a scratch row in the output row that is computed from it, element by element.

    Given ``out[f(j)] = g(scratch[j])`` where ``f(j) - j`` does not depend on ``j``, the scratch is
    not needed: its values can wait where the results go. Saves a dynamic allocation and its traffic.

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


def parallel_when(func: Any, work: Expr, least: int) -> Any:
    """Run the parallel loops of a function on all threads only if there is enough to do.

    Waking the other threads costs 1 to 3 microseconds, more than a small operator takes.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Lowered, with ``parallel`` loops.
    work : PrimExpr
        Elements the function handles, of variables bound by its buffers.
    least : int
        Fewest elements worth a second thread.

    Returns
    -------
    tvm.tirx.PrimFunc
        With both versions of each outermost parallel loop, or one where `work` is constant.
    """
    enough = sym.Analyzer().simplify(work >= tirx.const(least, str(work.ty)))

    def serial(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body,
            annotations=loop.annotations,
        )  # fmt: skip

    def visit(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        if isinstance(enough, tirx.IntImm):
            return loop if int(enough) else serial(loop)
        return tirx.IfThenElse(enough, loop, serial(loop))

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, visit)))


def distribute_rows(func: Any, tile: int) -> Any:
    """Run the steps of a row operation step by step over `tile` rows instead of row by row.

    ``for row: max(row); exp(row); scale(row)`` becomes, over groups of rows, all the maxima, then all the
    exponentials, then all the scalings. Each step of a row waits for the horizontal reduction of the
    one before; the next row's same step does not, and fills the pipeline meanwhile.

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


def elements(buffer: Any) -> Expr:
    """Number of elements of a buffer, as an int64 expression."""
    count: Any = tirx.const(1, "int64")
    for extent in buffer.shape:
        count = count * extent
    return count
