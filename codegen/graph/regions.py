"""Loops and branches: from the calls that stand for them in Relax to steps of the graph.

`apq_tvm.lower.regions` writes a call where a region starts and where it ends. The calls carry what
goes in and out, so that nothing is moved across them; here they become copies and C's own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from apq_tvm.codegen.graph.plain import Buffer, Condition, Copy, Graph, Place, Region, Step, Tensor
from apq_tvm.errors import UnsupportedModel
from apq_tvm.types import REGION

Value = Tensor | str
Renamed = list[Tensor | None]


def is_region(name: str) -> bool:
    """Whether a packed function is such a call."""
    return name.startswith(REGION)


@dataclass
class _Open:
    """A region whose end was not met yet: where its last `Region` stands, and what it carries."""

    at: int
    carried: list[Tensor]
    branch: bool = False


class Regions:
    """Adds the steps of regions to a graph.

    Parameters
    ----------
    graph : Graph
        Its steps up to now; changed by `read`.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._open: list[_Open] = []
        self._loops = 0

    def require(self, condition: Condition) -> None:
        """Add a condition: on every input, or where it stands (a branch, sizes of a run)."""
        if self.branching or self._graph.waits_for(condition.test):
            self._graph.steps.append(condition)
        else:
            self._graph.conditions.append(condition)

    @property
    def branching(self) -> bool:
        """Whether what is read now may not run."""
        return any(region.branch for region in self._open)

    def read(self, name: str, given: Sequence[Value]) -> Renamed:
        """Add what one call stands for.

        Parameters
        ----------
        name : str
            The packed function, counts behind slashes.
        given : sequence of Tensor or str
            Inputs and then outputs, as `apq_tvm.lower.regions` orders them.

        Returns
        -------
        list of Tensor or None
            For every argument, the value it is another name of.

        Raises
        ------
        UnsupportedModel
            A value does not keep its shape or type.
        """
        kind, *counts = name.removeprefix(REGION).split("/")
        method = {
            "loop": self._loop,
            "end_loop": self._end_loop,
            "then": self._then,
            "else": self._else,
            "end_if": self._end_if,
        }[kind]
        return method(counts, list(given))

    def _loop(self, counts: list[str], given: list[Value]) -> Renamed:
        """``trip, carried, captured, scanned -> round, carried, captured, entries``."""
        carried, captured, backward = int(counts[0]), int(counts[1]), counts[3]
        trip, *values = given
        count = carried + captured + len(backward)
        sources, (counter, *targets) = _tensors(values[:count]), _tensors(values[count:])
        kept = targets[:carried]
        for target, source in zip(kept, sources, strict=False):
            self._copy(target, source)
        self._open.append(_Open(len(self._graph.steps), kept))
        number, self._loops = self._loops, self._loops + 1
        condition = kept[0] if int(counts[2]) else None
        self._graph.steps.append(Region("loop", number, trip, condition, counter, tuple(kept)))
        scanned = slice(carried + captured, None)
        for target, source, flag in zip(targets[scanned], sources[scanned], backward, strict=True):
            row = _row(number, source.dims[0], flag)
            self._graph.steps.append(Copy(target, source, source_row=row))
        same: Renamed = [None] * len(given)
        for i in range(carried, carried + captured):
            same[1 + count + 1 + i] = sources[i]
        return same

    def _end_loop(self, counts: list[str], given: list[Value]) -> Renamed:
        """``round, carried, entries -> carried, collected``."""
        carried, backward = int(counts[0]), counts[1]
        loop = self._open.pop()
        start = self._graph.steps[loop.at]
        assert isinstance(start, Region)
        count = carried + len(backward)
        values = _tensors(given[1:])
        sources, targets = values[:count], values[count:]
        rows = zip(targets[carried:], sources[carried:], backward, strict=True)
        for target, source, flag in rows:
            row = _row(start.number, target.dims[0], flag)
            entry = replace(target, dims=target.dims[1:])
            self._check(entry, source)
            self._graph.steps.append(Copy(entry, source, target_row=row))
        self._carry(loop.carried, sources[:carried])
        keeps = (*loop.carried, *targets[carried:])
        self._graph.steps[loop.at] = replace(start, keeps=keeps)
        self._graph.steps.append(Region("end_loop", start.number, keeps=keeps))
        return [None] * (1 + count) + [*loop.carried] + [None] * len(backward)

    def _carry(self, carried: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """What a round made is what the next one starts with, all at once."""
        old = {tensor.key for tensor in carried}
        held = []
        for target, source in zip(carried, made, strict=True):
            own = source.place is Place.BUFFER and source.key == target.key
            if source.place is Place.BUFFER and source.key in old and not own:
                # Another one's old value: it must not be overwritten before it is read.
                scratch = replace(source, key=len(self._graph.buffers))
                self._graph.buffers.append(Buffer("carried", source.dtype, source.dims))
                self._copy(scratch, source)
                source = scratch
            held.append((target, source, own))
        for target, source, own in held:
            if own:
                self._check(target, source)
            else:
                self._copy(target, source)

    def _then(self, counts: list[str], given: list[Value]) -> Renamed:
        """``condition, captured -> token, captured``."""
        condition, *captured = _tensors(given[: 1 + int(counts[0])])
        self._open.append(_Open(len(self._graph.steps), [], branch=True))
        self._graph.steps.append(Region("then", condition=condition))
        return [None] * (len(captured) + 2) + self._as_inside(captured, given)

    def _else(self, counts: list[str], given: list[Value]) -> Renamed:
        """``token, captured -> token, captured``."""
        _, *captured = _tensors(given[: 1 + int(counts[0])])
        self._open[-1].at = len(self._graph.steps)
        self._graph.steps.append(Region("else"))
        return [None] * (len(captured) + 2) + self._as_inside(captured, given)

    def _as_inside(self, captured: Sequence[Tensor], given: Sequence[Value]) -> Renamed:
        """What a branch captures, of the sizes it has there; the branch compares them."""
        inside = _tensors(given[len(given) - len(captured) :])
        pairs = list(zip(captured, inside, strict=True))
        for outer, inner in pairs:
            self._graph.steps += self._unequal(inner, outer)
        return [replace(outer, dims=inner.dims) for outer, inner in pairs]

    def _unequal(self, a: Tensor, b: Tensor) -> list[Condition]:
        """Conditions where two values of one type are not known to have one shape.

        Raises
        ------
        UnsupportedModel
            They are of different types or ranks.
        """
        if a.dtype != b.dtype or len(a.dims) != len(b.dims):
            self._check(a, b)
        differ = [pair for pair in zip(a.dims, b.dims, strict=True) if pair[0] != pair[1]]
        why = "these inputs do not fit the branch that runs"
        return [Condition(f"({x}) == ({y})", f"{why}: {y} is not {x}") for x, y in differ]

    def _end_if(self, counts: list[str], given: list[Value]) -> Renamed:
        """``token, token, results of then, results of else -> results``."""
        count = int(counts[0])
        values = _tensors(given)
        first, second = values[2 : 2 + count], values[2 + count : 2 + 2 * count]
        targets = values[2 + 2 * count :]
        at = self._open.pop().at
        self._graph.steps[at:at] = self._results(targets, first)
        self._graph.steps += self._results(targets, second)
        self._graph.steps.append(Region("end_if"))
        return [None] * len(given)

    def _results(self, targets: Sequence[Tensor], made: Sequence[Tensor]) -> list[Step]:
        """What a branch made becomes the results, whose sizes were chosen before."""
        steps: list[Step] = []
        for target, source in zip(targets, made, strict=True):
            steps += [*self._unequal(target, source), Copy(target, source)]
        return steps

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self._check(target, source)
        self._graph.steps.append(Copy(target, source))

    def _check(self, target: Tensor, source: Tensor) -> None:
        if (target.dtype, target.dims) != (source.dtype, source.dims):
            raise UnsupportedModel(
                "a value that a loop carries, or that both branches of an If make, must keep its "
                f"type and shape, but is {source.dtype}[{', '.join(source.dims)}] and "
                f"{target.dtype}[{', '.join(target.dims)}]"
            )


def _tensors(values: Sequence[Value]) -> list[Tensor]:
    found = [value for value in values if isinstance(value, Tensor)]
    assert len(found) == len(values), "a region takes tensors"
    return found


def _row(number: int, rows: str, flag: str) -> str:
    """Which row the round works on: the last first where the flag is 1."""
    return f"(({rows}) - 1 - i{number})" if flag == "1" else f"i{number}"
