"""Arrays as the C library takes them: DLPack's DLTensor, described once for each shape."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

CPU = 1  # DLPack kDLCPU
DL_CODES = {"b": 6, "i": 0, "u": 1, "f": 2, "V": 4}  # numpy kind → DLDataTypeCode; V: bfloat16


class DLTensor(ctypes.Structure):
    """DLTensor of DLPack: device and dtype spelled out, pointers as numbers."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


# ---- where arrays' data lie ----


def _asked(arrays: Sequence[Array]) -> list[int]:
    return [array.__array_interface__["data"][0] for array in arrays]


_HEAD = object.__basicsize__
_pointer_at = ctypes.c_void_p.from_address


def _read(arrays: Sequence[Array]) -> list[Any]:
    return [_pointer_at(id(array) + _HEAD).value for array in arrays]


def _can_read() -> bool:
    """Whether the pointer is the first field of an array's object.

    So NumPy's C API has it (``PyArrayObject_fields``), and extension modules read it there; asking
    for ``__array_interface__`` or ``ctypes`` takes ten times as long.
    """
    if sys.implementation.name != "cpython":
        return False
    base = np.zeros(64, np.uint8)
    views = (base, base[3:], base[40:].view(np.float64), base.reshape(8, 8).T, np.zeros(1 << 20))
    return _read(views) == _asked(views)


addresses_of = _read if _can_read() else _asked


# ---- descriptions ----


@lru_cache(maxsize=1024)
def c_dims(dims: tuple[int, ...]) -> tuple[int, Any]:
    """A shape, or strides in elements, as C has it: the address, and what must live on."""
    made = (ctypes.c_int64 * max(len(dims), 1))(*dims)
    return ctypes.addressof(made), made


def shape_of(tensor: DLTensor) -> tuple[int, ...]:
    """The shape that C wrote."""
    return tuple((ctypes.c_int64 * tensor.ndim).from_address(tensor.shape)) if tensor.ndim else ()


class Tensors:
    """DLTensors of all inputs or outputs; what stays the same from call to call is left there.

    Parameters
    ----------
    types : sequence of numpy.dtype
    """

    def __init__(self, types: Sequence[np.dtype[Any]]) -> None:
        self.c = (DLTensor * max(len(types), 1))()
        self.types = tuple(types)
        self.addresses: list[int] = []  # where the arrays lie that are pointed at
        self._tensors = list(self.c)[: len(types)]
        self._shapes: list[tuple[int, ...] | None] = [None] * len(types)
        self._strided: set[int] = set()
        self._kept: list[Any] = [None] * len(types)  # what the library's pointers point to
        self._lent: dict[int, Any] = {}  # tensors of a GPU's memory
        for tensor, dtype in zip(self._tensors, types, strict=True):
            self._describe(tensor, dtype)

    @staticmethod
    def _describe(tensor: DLTensor, dtype: np.dtype[Any]) -> None:
        """As a processor's tensor of a type."""
        tensor.device_type, tensor.device_id, tensor.byte_offset = CPU, 0, 0
        tensor.code, tensor.bits, tensor.lanes = DL_CODES[dtype.kind], dtype.itemsize * 8, 1

    def point(self, arrays: Sequence[Array], shapes: list[tuple[int, ...]]) -> bool:
        """Let the tensors be contiguous arrays of their types, whose shapes are these.

        Returns
        -------
        bool
            Whether a shape is another than before.
        """
        self.addresses = addresses_of(arrays)
        for tensor, address in zip(self._tensors, self.addresses, strict=True):
            tensor.data = address
        if shapes == self._shapes and not self._strided:
            return False
        changed = False
        for index, shape in enumerate(shapes):
            if shape != self._shapes[index] or index in self._strided:
                changed = True
                self._dense(index, shape)
        return changed

    def point_any(self, arrays: Sequence[Any]) -> bool:
        """As `point`, but arrays may be strided, or what a GPU's are lent as."""
        changed, self.addresses = False, []
        for index, array in enumerate(arrays):
            if not isinstance(array, np.ndarray):
                changed |= self._point_at(index, array)
                continue
            found = addresses_of((array,))
            self.addresses += found
            (self._tensors[index].data,) = found
            changed |= array.shape != self._shapes[index]
            self._dense(index, array.shape)
            if not array.flags.c_contiguous:
                self._stride(index, array)
        return changed

    def _dense(self, index: int, shape: tuple[int, ...]) -> None:
        tensor, dims = self._tensors[index], c_dims(shape)
        tensor.ndim, tensor.shape, tensor.strides = len(shape), dims[0], None
        self._shapes[index], self._kept[index] = shape, dims
        self._strided.discard(index)

    def _stride(self, index: int, array: Array) -> None:
        strides = c_dims(tuple(s // array.itemsize for s in array.strides))
        self._tensors[index].strides = strides[0]
        self._kept[index] = (self._kept[index], strides)
        self._strided.add(index)

    def _point_at(self, index: int, lent: Any) -> bool:
        """Let a tensor be one of a GPU's, until `give_back`."""
        tensor = self._tensors[index]
        ctypes.memmove(ctypes.addressof(tensor), lent.address, ctypes.sizeof(DLTensor))
        shape = shape_of(tensor)
        changed = shape != self._shapes[index]
        self._shapes[index] = shape
        self._lent[index] = lent
        return changed

    def give_back(self) -> None:
        """Let go of GPUs' tensors."""
        for index in self._lent:
            tensor = self._tensors[index]
            self._describe(tensor, self.types[index])
            tensor.strides = None
            self._shapes[index] = None
        self._lent.clear()
