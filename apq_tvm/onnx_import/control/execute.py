"""Running a flat graph node by node, with its loops and branches, whatever its values are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apq_tvm.onnx_import.symbolic.dims import evaluate
from apq_tvm.onnx_import.symbolic.regions import ENDS, STARTS
from apq_tvm.types import Node

FOREVER = (1 << 63) - 1


@dataclass(frozen=True)
class Runner:
    """How values are read, made and kept.

    Parameters
    ----------
    run : callable
        ``(position, node)``: runs a node that starts or ends no region.
    read : callable
        ``name -> value``, None for ``""``.
    write : callable
        ``(name, value)``.
    number : callable
        ``int -> value`` of type int64 and no dimensions.
    stack : callable
        ``list of values -> value`` with a new first axis.
    """

    run: Callable[[int, Node], None]
    read: Callable[[str], Any]
    write: Callable[[str, Any], None]
    number: Callable[[int], Any]
    stack: Callable[[list[Any]], Any]


def execute(nodes: Sequence[Node], runner: Runner, symbols: Mapping[str, int]) -> None:
    """Run nodes in order; a region must lie wholly among them."""
    _span(nodes, 0, len(nodes), runner, symbols)


def _span(
    nodes: Sequence[Node], first: int, stop: int, runner: Runner, symbols: Mapping[str, int]
) -> None:
    at = first
    while at < stop:
        node = nodes[at]
        if node.op in STARTS:
            middle, end = _ends(nodes, at)
            region = _loop if node.op == "apq.Loop" else _branches
            region(nodes, (at, middle, end), runner, symbols)
            at = end
        else:
            runner.run(at, node)
        at += 1


def _ends(nodes: Sequence[Node], start: int) -> tuple[int, int]:
    """Where the Else and the end of a region stand."""
    depth, middle = 0, start
    for at in range(start, len(nodes)):
        op = nodes[at].op
        depth += (op in STARTS) - (op in ENDS)
        if op == "apq.Else" and depth == 1:
            middle = at
        if not depth:
            return middle, at
    raise ValueError(f"{nodes[start].name!r} does not end")


def _loop(
    nodes: Sequence[Node], at: tuple[int, int, int], runner: Runner, symbols: Mapping[str, int]
) -> None:
    start, end = nodes[at[0]], nodes[at[2]]
    limit, *given = [runner.read(value) for value in start.inputs]
    count = int(start.attrs["carried"])
    last = count + int(start.attrs["captured"])
    trip = FOREVER if limit is None else int(limit)
    if start.attrs["trip"] is not None:
        trip = int(evaluate(start.attrs["trip"], symbols))
    carried, fixed, scanned = given[:count], given[count:last], given[last:]
    collected: list[list[Any]] = [[] for _ in end.attrs["backward"]]
    number = 0
    while number < trip and not (start.attrs["conditional"] and not bool(carried[0])):
        entries = [
            value[trip - 1 - number if flag == "1" else number]
            for value, flag in zip(scanned, start.attrs["backward"], strict=True)
        ]
        inside = (runner.number(number), *carried, *fixed, *entries)
        for name, value in zip(start.outputs, inside, strict=True):
            runner.write(name, value)
        _span(nodes, at[0] + 1, at[2], runner, symbols)
        made = [runner.read(value) for value in end.inputs[1:]]
        carried = made[:count]
        for entry, value in zip(collected, made[count:], strict=True):
            entry.append(value)
        number += 1
    stacks = [
        runner.stack(entries[::-1] if flag == "1" else entries)
        for entries, flag in zip(collected, end.attrs["backward"], strict=True)
    ]
    for name, value in zip(end.outputs, (*carried, *stacks), strict=False):
        runner.write(name, value)


def _branches(
    nodes: Sequence[Node], at: tuple[int, int, int], runner: Runner, symbols: Mapping[str, int]
) -> None:
    first = bool(runner.read(nodes[at[0]].inputs[0]))
    start, stop = (at[0], at[1]) if first else (at[1], at[2])
    node, end = nodes[start], nodes[at[2]]
    for name, value in zip(node.outputs[1:], node.inputs[1:], strict=True):
        runner.write(name, runner.read(value))
    _span(nodes, start + 1, stop, runner, symbols)
    count = int(end.attrs["results"])
    skipped = 2 if first else 2 + count
    made = [runner.read(value) for value in end.inputs[skipped : skipped + count]]
    for name, value in zip(end.outputs, made, strict=True):
        runner.write(name, value)
