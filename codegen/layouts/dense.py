"""The float32 weight layout ``F32r{R}``: R rows interleaved, for layers that stay float.

Array ``weight`` float32 [ceil(N / R), K, R]; rows past N are 0. ``F32r1`` is the plain matrix with
a last axis of 1: embedding tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.codegen.layouts.layout import Details
from apq_tvm.errors import PackError
from apq_tvm.types import PackedTensor, Scheme

_NAME = re.compile(r"F32r([1-9]\d?)\Z")


@dataclass(frozen=True)
class FloatLayout:
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

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= 99:
            raise PackError(f"float layout rows={self.rows}: 1..99 are possible")

    @classmethod
    def parse(cls, name: str, scheme: Scheme | None, details: Details = ()) -> FloatLayout | None:
        """Read `name`; None if it is not of this family.

        Raises
        ------
        PackError
            If a scheme is given: the layout holds no codes.
        """
        match = _NAME.match(name)
        if match is None:
            return None
        if scheme is not None:
            raise PackError(f"layout {name} holds float weights, not scheme {scheme}")
        return cls(int(match[1]))

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, lanes: int) -> FloatLayout | None:
        """One vector of rows, for float32 weights."""
        return cls(lanes) if scheme is None else None

    @property
    def name(self) -> str:
        """``F32r{R}``."""
        return f"F32r{self.rows}"

    def shapes(self, n: int, k: int) -> dict[str, tuple[tuple[int, ...], str]]:
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
        n, k = weight.shape
        blocks = -(-n // self.rows)
        padded = np.zeros((blocks * self.rows, k), np.float32)
        padded[:n] = weight
        # [NB, R, K] -> [NB, K, R]
        packed = padded.reshape(blocks, self.rows, k).transpose(0, 2, 1)
        return PackedTensor(self.name, {"weight": np.ascontiguousarray(packed)})

    def row_blocks(self, n: int) -> int:
        """Blocks of R rows that hold `n` rows."""
        return -(-n // self.rows)

    def padded_k(self, k: int) -> int:
        """K: there is no padding."""
        return k

    def weight(
        self, arrays: Mapping[str, Any], block: Any, lane: Any, k: Any, bits: int = 0
    ) -> Any:
        """TensorIR float32 expression of the weight of row ``block * R + lane``, column `k`."""
        return arrays["weight"][block, k, lane]

    def unpack(
        self, packed: PackedTensor, n: int, k: int, scheme: Scheme | None = None
    ) -> NDArray[np.float32]:
        """Inverse of `pack`: float32 [n, k].

        Raises
        ------
        PackError
            If the array is not this layout's array for an [n, k] matrix.
        """
        shape, dtype = self.shapes(n, k)["weight"]
        weight = packed.arrays.get("weight")
        if packed.layout != self.name or weight is None or set(packed.arrays) != {"weight"}:
            raise PackError(f"{packed.layout} with {sorted(packed.arrays)} is no {self.name}")
        if weight.shape != shape or weight.dtype != np.dtype(dtype):
            raise PackError(
                f"{self.name} weight is {weight.dtype} {list(weight.shape)}; "
                f"{dtype} {list(shape)} is needed"
            )
        # [NB, K, R] -> [NB, R, K]
        return np.ascontiguousarray(weight.transpose(0, 2, 1)).reshape(-1, k)[:n].copy()
