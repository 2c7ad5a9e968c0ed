"""What layouts ask of tensors before they pack them, and of packed arrays before they unpack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from apq_tvm import formats
from apq_tvm.errors import BadScheme, PackError
from apq_tvm.types import Array, PackedTensor, QuantizedTensor

if TYPE_CHECKING:
    from apq_tvm.codegen.layouts.layout import WeightLayout


def check_tensor(tensor: QuantizedTensor, name: str) -> None:
    """Refuse a tensor whose arrays do not fit its scheme.

    Raises
    ------
    PackError
        With the tensor's name and what is wrong.
    """
    try:
        formats.check_tensor(tensor, name)
    except BadScheme as reason:
        raise PackError(str(reason)) from None


def check_packed(packed: PackedTensor, layout: WeightLayout, n: int, k: int) -> None:
    """Refuse a tensor whose arrays are not those of an [n, k] matrix in `layout`.

    Raises
    ------
    PackError
        With what it is and what is needed.
    """
    if packed.layout != layout.name:
        raise PackError(f"a tensor in layout {packed.layout} is no {layout.name}")
    if n < 1 or k < 1:
        raise PackError(f"{layout.name}: shape [{n}, {k}]; N, K >= 1 is needed")
    shapes = layout.shapes(n, k)
    if set(packed.arrays) != set(shapes):
        raise PackError(f"{layout.name} needs {sorted(shapes)}, got {sorted(packed.arrays)}")
    for key, (shape, dtype) in shapes.items():
        check_array(f"{layout.name} {key}", packed.arrays[key], shape, dtype)


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
