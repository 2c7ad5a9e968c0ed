"""What every weight layout can do."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from apq_tvm import formats
from apq_tvm.codegen.layouts.checks import check_packed, check_tensor
from apq_tvm.errors import PackError
from apq_tvm.types import Array, PackedTensor, Scheme

Details = tuple[tuple[str, int], ...]
"""Sizes that differ between tensors of one scheme and shape, as `apq_tvm.formats.details`."""

Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of packed arrays, by name, in kernel argument order."""


class WeightLayout(ABC):
    """How one matrix [N, K] lies in memory: blocks of R rows, K padded to whole units."""

    pattern: ClassVar[re.Pattern[str]]
    """What names of the family look like."""

    @classmethod
    def parse(cls, name: str, scheme: Scheme | None, details: Details = ()) -> Self | None:
        """Read `name`; what it does not say comes from the scheme. None for other families' names.

        Raises
        ------
        PackError
            If a layout of this name cannot hold such tensors.
        """
        match = cls.pattern.match(name)
        if match is None:
            return None
        found = cls.named(match, scheme, details)
        if found is None or found.name != name:
            raise PackError(f"layout {name} cannot hold {scheme or 'float32 weights'}")
        return found

    @classmethod
    @abstractmethod
    def named(cls, match: re.Match[str], scheme: Scheme | None, details: Details) -> Self | None:
        """The layout that a match of `pattern` means for a scheme; None if it cannot hold it."""

    @classmethod
    @abstractmethod
    def choose(cls, scheme: Scheme | None, details: Details, vector_bytes: int) -> Self | None:
        """The layout for a scheme on a device with such vectors; None for another family's."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name, from which `parse` makes the layout again."""

    rows: Any
    """R, rows of one block."""

    @abstractmethod
    def padded_k(self, k: int) -> int:
        """K with the padding that activations need too."""

    def row_blocks(self, n: int) -> int:
        """Blocks of R rows that hold `n` rows."""
        return -(-n // int(self.rows))

    @abstractmethod
    def shapes(self, n: int, k: int) -> Shapes:
        """Shape and dtype of every packed array of an [n, k] matrix, in kernel argument order."""

    def holds(self, tensor: Any) -> bool:
        """Whether tensors such as this one lie in it."""
        try:
            return type(self).parse(self.name, tensor.scheme, formats.details(tensor)) == self
        except PackError:
            return False

    def pack(self, tensor: Any, name: str = "weight") -> PackedTensor:
        """Lay out a `QuantizedTensor` (a float32 matrix, for layouts without codes).

        Padding means 0: rows past N and groups past the last have scale 0, columns past K codes
        that stand for 0 or activations that are.

        Raises
        ------
        PackError
            If the tensor does not fit its scheme, or the scheme not the layout; with its `name`.
        """
        if not self.holds(tensor):
            raise PackError(f"{name}: layout {self.name} cannot hold scheme {tensor.scheme}")
        check_tensor(tensor, name)
        return PackedTensor(self.name, self.arrays(tensor))

    @abstractmethod
    def arrays(self, tensor: Any) -> dict[str, Array]:
        """The packed arrays of a tensor that was checked."""

    def unpack(self, packed: PackedTensor, n: int, k: int, scheme: Any = None) -> Any:
        """Inverse of `pack`, exact: a `QuantizedTensor` of `scheme`, or a float32 matrix.

        Raises
        ------
        PackError
            If the arrays are not this layout's arrays for an [n, k] matrix.
        """
        check_packed(packed, self, n, k)
        return self.tensor(packed.arrays, n, k, scheme)

    @abstractmethod
    def tensor(self, arrays: Mapping[str, Array], n: int, k: int, scheme: Any) -> Any:
        """The tensor whose packed arrays, checked, these are."""

    @abstractmethod
    def weight(
        self, arrays: Mapping[str, Any], block: Any, lane: Any, k: Any, bits: int = 0
    ) -> Any:
        """TensorIR float32 expression of one weight: row ``block * R + lane``, column `k`.

        `arrays` are the packed buffers by name; `bits` is a run-time width, 0 for the widest.
        """


@runtime_checkable
class SparseLayout(Protocol):
    """A layout whose weights are `WeightLayout.weight` plus a sparse matrix."""

    def sparse(self, arrays: Mapping[str, Any]) -> tuple[Any, Any, Any] | None:
        """(row_start int32, columns, values) of that matrix in CSR; None if it is empty."""
