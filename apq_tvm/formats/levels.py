"""Codes that each stand for a fixed value, times one scale per group: integers, or a table.

::

    w[n, k] = scales[n, k // group] * unit * values[code]
    w[n, k] = scales[n, k // group] * (code - zeros[n, k // group])        with zero points

A family that says its `Levels` (`apq_tvm.formats.family.level_family`) need not say more: check,
decoding and size are here, and a quantizer, error feedback, learning, a layout and the generic
kernel follow from the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.arrays import check_array, check_codes, check_tables, group_count, spread
from apq_tvm.types import QuantizedTensor


@dataclass(frozen=True)
class Levels:
    """What codes stand for.

    Parameters
    ----------
    values : tuple of int
        By code, not falling; with 0 among them they span at most 255.
    unit : float
        A power of 2 that values are multiples of, relative to a group's scale.

    Raises
    ------
    ValueError
        If the values are of another kind.
    """

    values: tuple[int, ...]
    unit: float = 1.0

    def __post_init__(self) -> None:
        if list(self.values) != sorted(self.values):
            raise ValueError(f"levels {self.values} fall; rising ones are needed")
        if max(0, self.values[-1]) - min(0, self.values[0]) > 255:
            raise ValueError(f"levels {self.values} do not fit a byte")

    @property
    def even(self) -> bool:
        """Whether codes are on an even grid of whole steps, so that rounding is a division."""
        first, count = self.values[0], len(self.values)
        return self.unit == 1 and self.values == tuple(range(first, first + count))

    @property
    def signs(self) -> bool:
        """Whether codes are -1 and +1."""
        return self.unit == 1 and self.values == (-1, 1)

    @property
    def farthest(self) -> int:
        """The value of largest magnitude, the negative one of two."""
        return max(self.values, key=abs)


def check_levels(tensor: QuantizedTensor, levels: Levels, name: str) -> None:
    """Refuse a tensor whose arrays are not codes of `levels` and their scales.

    Raises
    ------
    BadScheme
        With the tensor's name and what is wrong.
    """
    n, k = check_codes(tensor, name, len(levels.values) - 1)
    check_tables(tensor, name)
    shape = (n, group_count(k, tensor.scheme.group_size))
    check_array(f"{name}: scales", tensor.scales, "float16", shape)


def decode_levels(tensor: QuantizedTensor, levels: Levels) -> NDArray[np.float32]:
    """Decode to float32 [N, K], exact."""
    check_levels(tensor, levels, "tensor")
    values = np.array(levels.values, np.float32)[tensor.codes]
    scales = tensor.scales.astype(np.float32) * np.float32(levels.unit)
    values *= spread(scales, values.shape[1], tensor.scheme.group_size)
    return values
