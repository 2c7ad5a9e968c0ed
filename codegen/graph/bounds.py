"""Inputs at which a kernel would reach past the end of an argument.

Kernels check the shapes of their arguments against each other, not their indices: a slice of 512
positions, read by a loop over the sequence, runs past its end at length 513, and a lookup reads
wherever its ids say. Both are found in the unscheduled function, whose blocks say what they read
and write, and are checked before the kernel runs. Blocks that guard their reads are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, tirx
from tvm.sym import Analyzer, IntervalSet

from apq_tvm.schedules.graph.attention.maker import maker_of
from apq_tvm.schedules.graph.exprs import call_name, collect

_LARGEST = (1 << 31) - 1


@dataclass(frozen=True)
class Reach:
    """An argument is touched up to element `highest` along an axis that has `extent`.

    Both are PrimExprs over the function's own symbols, and so are `sizes`: where one of those is 0
    nothing is touched.
    """

    argument: int
    highest: Any
    extent: Any
    sizes: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Lookup:
    """Elements of argument `ids`, as they are, index an axis of `rows` elements."""

    ids: int
    rows: int


def find_accesses(func: Any) -> tuple[list[Reach], list[Lookup]]:
    """List the accesses of a function that are not inside their argument for every input.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Not yet scheduled: every block runs over its whole domain.

    Returns
    -------
    list of Reach
        Without duplicates. Empty where everything is provably in bounds for symbols of at least 1.
    list of Lookup
        Without duplicates; ids that are computed inside the function are not found.
    """
    analyzer = Analyzer()
    for param in func.params:
        if isinstance(param.ty, tirx.BufferType):
            for dim in param.shape:
                if isinstance(dim, tirx.Var):
                    analyzer.bind(dim, ir.Range(1, _LARGEST), allow_override=True)
    arguments = {p: i for i, p in enumerate(func.params) if isinstance(p.ty, tirx.BufferType)}
    found: dict[str, Reach] = {}
    lookups: dict[Lookup, None] = {}
    for block in _blocks(func.body):
        domain = {
            v.var: IntervalSet(v.dom.min, v.dom.min + v.dom.extent - 1) for v in block.iter_vars
        }
        for region in (*block.reads, *block.writes):
            if region.source not in arguments:
                continue
            number = arguments[region.source]
            extents = func.params[number].shape
            for span, extent in zip(region.region, extents, strict=True):
                if isinstance(span.min, ir.TensorLoad):
                    ids, rows = arguments.get(span.min.source), _constant(extent)
                    if ids is not None and rows is not None and not _guarded(block):
                        lookups[Lookup(ids, rows)] = None
                    continue
                last = analyzer.simplify(span.min + span.extent - 1)
                highest = analyzer.simplify(analyzer.int_set(last, domain).max_value)
                if analyzer.can_prove(highest < extent) or _guarded(block):
                    continue
                spans = [v.dom.extent for v in block.iter_vars]
                sizes = tuple(size for size in spans if _constant(size) is None)
                key = f"{number} {highest} {extent} {sizes}"
                found.setdefault(key, Reach(number, highest, extent, sizes))
    made = maker_of(func)
    if made is not None:
        _of_maker(*made, found, lookups)
    return list(found.values()), list(lookups)


def _of_maker(maker: Any, place: int, found: dict[str, Reach], lookups: dict[Lookup, None]) -> None:
    """Add those of what makes an argument, whose inputs stand in its place."""
    reaches, ids = find_accesses(maker)
    for reach in reaches:
        if reach.argument < len(maker.params) - 1:
            moved = replace(reach, argument=reach.argument + place)
            found[f"made {moved}"] = moved
    lookups.update(dict.fromkeys(replace(each, ids=each.ids + place) for each in ids))


def _constant(extent: Any) -> int | None:
    return int(extent.value) if isinstance(extent, tirx.IntImm) else None


def _blocks(stmt: Any) -> Iterator[Any]:
    """Blocks that run for their whole domain: no predicate, no ``if`` around them."""
    if isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            yield from _blocks(part)
    elif hasattr(stmt, "block"):  # SBlockRealize
        predicate = stmt.predicate
        if isinstance(predicate, tirx.IntImm) and bool(predicate.value):
            yield stmt.block
            yield from _blocks(stmt.block.body)
    elif isinstance(getattr(stmt, "body", None), tirx.Stmt):
        yield from _blocks(stmt.body)


def _guarded(block: Any) -> bool:
    """Whether the block computes conditions of its own; its declared reads may be too wide then."""
    body = block.body
    return any(collect(body, kind) for kind in (tirx.Select, tirx.IfThenElse)) or any(
        call_name(call) == "if_then_else" for call in collect(body, ir.Call)
    )
