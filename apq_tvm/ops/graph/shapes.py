"""Shapes with named dynamic dimensions, shared by the operation families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
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


def symbols_of(inputs: Sequence[Any], params: Sequence[Any]) -> list[tuple[Any, Any]]:
    """What the symbols of tensors' shapes are, where others take their places."""
    return [
        (mine, theirs)
        for given, param in zip(inputs, params, strict=True)
        for mine, theirs in zip(given.shape, param.shape, strict=True)
        if isinstance(mine, tirx.Var)
    ]


def substituted(e: Any, places: Sequence[tuple[Any, Any]]) -> Any:
    """`e` with expressions in the places of variables."""

    def visit(var: Any) -> Any:
        return next((place for known, place in places if known.same_as(var)), var)

    return tvm_ffi.structural_map(e, (tirx.Var, visit))
