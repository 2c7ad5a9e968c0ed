"""The float32 weight layout ``F32r{R}``: R rows interleaved, for layers that stay float.

Array ``weight`` float32 [ceil(N / R), K, R]; rows past N are 0. ``F32r1`` is the plain matrix with
a last axis of 1: embedding tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from apq_tvm.codegen.layouts.layout import Details, Shapes, WeightLayout
from apq_tvm.errors import PackError
from apq_tvm.types import Array, PackedTensor, Scheme


@dataclass(frozen=True)
class FloatLayout(WeightLayout):
    """How one float32 matrix [N, K] lies in memory.

    Parameters
    ----------
    rows : int
        R, rows interleaved, 1..99.

    Raises
    ------
    PackError
        If `rows` is out of range.
    """

    rows: int

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"F32r([1-9]\d?)\Z")

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= 99:
            raise PackError(f"float layout rows={self.rows}: 1..99 are possible")

    @classmethod
    def named(cls, match: re.Match[str], scheme: Scheme | None, details: Details) -> Self | None:
        """For float32 weights."""
        return cls(int(match[1])) if scheme is None else None

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, vector_bytes: int) -> Self | None:
        """One vector of rows, for float32 weights."""
        return cls(vector_bytes // 4) if scheme is None else None

    @property
    def name(self) -> str:
        """``F32r{R}``."""
        return f"F32r{self.rows}"

    def shapes(self, n: int, k: int) -> Shapes:
        """Shape and dtype of the packed array of an [n, k] matrix."""
        return {"weight": ((-(-n // self.rows), k, self.rows), "float32")}

    def pack(self, weight: NDArray[np.float32], name: str = "weight") -> PackedTensor:
        """Lay out a float32 matrix [N, K].

        Raises
        ------
        PackError
            If it is not a float32 matrix.
        """
        if weight.dtype != np.float32 or weight.ndim != 2 or weight.size == 0:
            raise PackError(
                f"{name}: {weight.dtype} {list(weight.shape)}; float32 [N, K] with N, K >= 1 "
                "is needed"
            )
        return PackedTensor(self.name, self.arrays(weight))

    def arrays(self, tensor: NDArray[np.float32]) -> dict[str, Array]:
        """The packed array of a float32 matrix."""
        n, k = tensor.shape
        padded = np.zeros((self.row_blocks(n) * self.rows, k), np.float32)
        padded[:n] = tensor
        # [NB, R, K] -> [NB, K, R]
        packed = padded.reshape(-1, self.rows, k).transpose(0, 2, 1)
        return {"weight": np.ascontiguousarray(packed)}

    def padded_k(self, k: int) -> int:
        """K: there is no padding."""
        return k

    def weight(
        self, arrays: Mapping[str, Any], block: Any, lane: Any, k: Any, bits: int = 0
    ) -> Any:
        """TensorIR float32 expression of the weight of row ``block * R + lane``, column `k`."""
        return arrays["weight"][block, k, lane]

    def tensor(
        self, arrays: Mapping[str, Array], n: int, k: int, scheme: Scheme | None
    ) -> NDArray[np.float32]:
        """float32 [n, k]."""
        # [NB, K, R] -> [NB, R, K]
        return np.ascontiguousarray(arrays["weight"].transpose(0, 2, 1)).reshape(-1, k)[:n].copy()
