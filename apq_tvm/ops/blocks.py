"""What operators say of most of their blocks: a loop and its axis, what is read and written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, Expr, i64
from apq_tvm.tensorize.meaning.rounding import reduce_loop, tree_loops

STAGES = "apq.stages"
"""Annotation of the root block: names of the blocks whose innermost loop is one vector."""


@contextmanager
def loops(extents: Sequence[Any]) -> Iterator[list[Expr]]:
    """A loop for each extent, of which there may be none."""
    if not extents:
        yield []
        return
    with b.grid(*extents) as variables:
        yield [variables] if len(extents) == 1 else list(variables)


@contextmanager
def stage(names: list[str], name: str, *extents: Any) -> Iterator[tuple[Expr, ...]]:
    """A nest of loops over `extents` around a block with an axis for each, noted in `names`."""
    names.append(name)
    with b.sblock(f"{name}_stage"):
        b.reads()
        b.writes()
        with loops(extents) as variables, b.sblock(name):
            pairs = zip(extents, variables, strict=True)
            yield tuple(b.axis.spatial(extent, loop) for extent, loop in pairs)


@contextmanager
def each(name: str, extent: Any) -> Iterator[Expr]:
    """A loop around a block of other blocks: the block's axis."""
    with b.serial(0, extent) as i, b.sblock(name):
        axis = b.axis.spatial(extent, i)
        b.reads()
        b.writes()
        yield axis


@contextmanager
def row_tasks(
    rows: Expr, together: int, reads: Sequence[Any] = (), writes: Sequence[Any] = ()
) -> Iterator[tuple[Expr, Expr]]:
    """Block ``root`` around `tasks`."""
    with b.sblock("root"):
        b.reads()
        b.writes()
        with tasks(rows, together, reads, writes) as (first, mine):
            yield first, mine


@contextmanager
def tasks(
    rows: Expr,
    together: int,
    reads: Sequence[Any] = (),
    writes: Sequence[Any] = (),
    name: str = "task",
) -> Iterator[tuple[Expr, Expr]]:
    """A loop around block `name`, of `together` rows each: the first one and how many."""
    count = (rows + i64(together - 1)) // i64(together)
    with b.serial(0, count) as t, b.sblock(name):
        task = b.axis.spatial(count, t)
        b.reads(*reads)
        b.writes(*writes)
        first = b.bind(task * i64(together))
        yield first, b.bind(tirx.min(i64(together), rows - first))


def put(buffer: Buffer, at: Sequence[Expr], value: Expr, *reads: Any) -> None:
    """Store the one element that a block writes, by all that it reads."""
    b.reads(*reads)
    b.writes(buffer[tuple(at)])
    b.buffer_store(buffer, value, list(at))


def reduce_all(name: str, operation: str, source: Buffer, target: Buffer) -> None:
    """All of `source`, of one axis, to the one element of `target`, in block `name`."""
    reduce_loop(name, operation, int(source.shape[0]), lambda e: source[e], target[0])


def reduce_rows(name: str, operation: str, source: Buffer) -> Buffer:
    """Int32 [N] of int32 [N, N]: a number for each row, in block `name`."""
    rows = int(source.shape[0])
    target = b.sblock_alloc_buffer((rows,), "int32", align=64)
    with b.sblock(f"{name}_stage"):
        b.reads()
        b.writes()
        tree_loops(name, operation, source, lambda row: target[row])
    return target


def argument(name: str, shape: Sequence[Any], dtype: str, align: int = 4) -> Buffer:
    """Declare the next buffer argument, aligned to `align` bytes."""
    extents = [i64(s) if isinstance(s, int) else s for s in shape]
    return b.match_buffer(b.arg(name, b.handle()), extents, dtype, align=align, offset_factor=1)
