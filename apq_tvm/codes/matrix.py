"""One matrix of a file of codes, whatever the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats import dequantize
from apq_tvm.types import F32, Array, QuantizedTensor

Rows = NDArray[np.intp]
"""Which rows of a matrix, in which order."""

Reading = Callable[[Rows], QuantizedTensor | F32]
"""Some rows: their codes, or floats where the file has floats."""


@dataclass(frozen=True)
class Matrix:
    """A matrix [N, K] and how it may be read.

    Parameters
    ----------
    name : str
        In the file.
    kind : str
        What the file calls its blocks: ``"Q4_1"``, ``"GPTQ of 4 bits"``.
    shape : tuple of int
        N, K.
    readings : tuple of Reading
        One for each thing that the bytes may mean, where the file does not tell; empty where
        nothing here reads them, and `refusal` says why.
    refusal : str
    heads : int
        Heads whose rows lie in pairs in the file and may lie in halves in a model; 0 for none.
    order : int64 [K], optional
        Which column of the model comes where, where the file's groups are no runs of columns
        (`apq_tvm.formats.order`): readings have the columns sorted by group.
    """

    name: str
    kind: str
    shape: tuple[int, int]
    readings: tuple[Reading, ...]
    refusal: str = ""
    heads: int = 0
    order: NDArray[np.int64] | None = None

    def sorted(self, weight: F32) -> F32:
        """A model's rows with their columns where the readings have them."""
        return weight if self.order is None else weight[:, self.order]


@dataclass(frozen=True)
class CodesFile:
    """What a file has.

    Parameters
    ----------
    label : str
        Its name, for notes.
    matrices : mapping of str to Matrix
    aliases : callable
        Name of a weight or layer of a model → names that it may have here, the likeliest first; a
        tuple of several is the parts, side by side, that it may be made of.
    """

    label: str
    matrices: Mapping[str, Matrix]
    aliases: Callable[[str], list[tuple[str, ...]]]


def values(found: QuantizedTensor | F32) -> F32:
    """What was read, as float32."""
    return dequantize(found) if isinstance(found, QuantizedTensor) else found


def beside(parts: list[Any]) -> QuantizedTensor | F32 | None:
    """Rows of several matrices as one; None where they are of several kinds."""
    first = parts[0]
    if len(parts) == 1:
        return first  # type: ignore[no-any-return]
    if not isinstance(first, QuantizedTensor):
        if any(isinstance(part, QuantizedTensor) for part in parts):
            return None
        return np.concatenate(parts)
    if any(not isinstance(p, QuantizedTensor) or p.scheme != first.scheme for p in parts):
        return None

    def joined(get: Callable[[QuantizedTensor], Array]) -> Array:
        return np.concatenate([get(part) for part in parts])

    zeros = None if first.zeros is None else joined(lambda part: np.asarray(part.zeros))
    tables = {key: joined(lambda part, key=key: part.tables[key]) for key in first.tables}  # type: ignore[misc]
    return QuantizedTensor(
        joined(lambda part: part.codes), joined(lambda part: part.scales), zeros, first.scheme,
        tables,
    )  # fmt: skip
