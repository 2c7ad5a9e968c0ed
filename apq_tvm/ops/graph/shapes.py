"""Shapes with named dynamic dimensions, shared by the operation families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

Dim = int | str


class Symbols:
    """One int64 variable per dimension name, so that equal names are equal sizes."""

    def __init__(self) -> None:
        self._vars: dict[str, Any] = {}

    def shape(self, dims: Sequence[Dim]) -> tuple[Any, ...]:
        """TIR extents: int64 constants and variables.

        Parameters
        ----------
        dims : sequence of int or str
            A string names a dynamic dimension.
        """
        return tuple(self.dim(d) for d in dims)

    def dim(self, d: Dim) -> Any:
        """One TIR extent."""
        if isinstance(d, str):
            return self._vars.setdefault(d, tirx.Var(d, "int64"))
        return tirx.const(d, "int64")


def stored_index(order: Sequence[int], logical: Sequence[Any]) -> list[Any]:
    """Where an element of a tensor lies whose Transpose by `order` has it at `logical`."""
    index: list[Any] = [None] * len(order)
    for position, axis in enumerate(order):
        index[axis] = logical[position]
    return index
