"""What layouts ask of packed arrays before they take them apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from apq_tvm.errors import PackError
from apq_tvm.types import Array, PackedTensor

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype by array name, as `WeightLayout.shapes`."""


def check_packed(packed: PackedTensor, name: str, shapes: Shapes) -> None:
    """Refuse a tensor that is not of the layout called `name` with arrays of `shapes`.

    Raises
    ------
    PackError
        With what it is and what is needed.
    """
    if packed.layout != name or set(packed.arrays) != set(shapes):
        raise PackError(f"{packed.layout} with {sorted(packed.arrays)} is no {name}")
    check_arrays(packed.arrays, name, shapes)


def check_arrays(arrays: Mapping[str, Array], name: str, shapes: Shapes) -> None:
    """Refuse arrays of other shapes or dtypes.

    Raises
    ------
    PackError
        With the layout's and the array's name.
    """
    for key, (shape, dtype) in shapes.items():
        check_array(f"{name} {key}", arrays[key], shape, dtype)


def check_array(what: str, array: Array, shape: tuple[int, ...], dtype: str) -> None:
    """Refuse one array of another shape or dtype.

    Raises
    ------
    PackError
        With `what` it is and what is needed.
    """
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise PackError(
            f"{what} is {array.dtype} {list(array.shape)}; {dtype} {list(shape)} is needed"
        )
