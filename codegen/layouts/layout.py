"""What every weight layout can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self, runtime_checkable

from apq_tvm.types import PackedTensor, Scheme

NARROW = 4
"""Lanes of AdvSIMD, whose kernels multiply signed bytes and look up 16: layouts are made for that.
Kernels for any CPU read them too."""

Details = tuple[tuple[str, int], ...]
"""Sizes that differ between tensors of one scheme and shape, as `apq_tvm.formats.details`."""


class WeightLayout(Protocol):
    """How one matrix [N, K] lies in memory: blocks of R rows, K padded to whole units."""

    @classmethod
    def parse(cls, name: str, scheme: Scheme | None, details: Details = ()) -> Self | None:
        """Read `name`; None if it is not of this family. Raises PackError if it does not fit."""

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, lanes: int) -> Self | None:
        """The layout of a scheme for kernels with vectors of so many int32; None for another's."""

    @property
    def name(self) -> str:
        """Name, from which `parse` makes the layout again."""

    @property
    def rows(self) -> int:
        """R, rows of one block."""

    def padded_k(self, k: int) -> int:
        """K with the padding that activations need too."""

    def row_blocks(self, n: int) -> int:
        """Blocks of R rows that hold `n` rows."""

    def shapes(self, n: int, k: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every packed array of an [n, k] matrix, in kernel argument order."""

    def pack(self, tensor: Any, name: str = "weight") -> PackedTensor:
        """Lay out a `QuantizedTensor` (a float32 matrix, for layouts without codes)."""

    def unpack(self, packed: PackedTensor, n: int, k: int, scheme: Scheme) -> Any:
        """Inverse of `pack`, exact: a `QuantizedTensor` of `scheme`, or a float32 matrix."""

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
