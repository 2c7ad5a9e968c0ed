"""Tensors that stay in a GPU's memory, and how libraries lend theirs: DLPack.

The structures are those of dlpack.h 0.8 and the protocol is that of the Python array API standard
(``__dlpack__``, ``__dlpack_device__``).
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tensors import DL_CODES, DLTensor

GPU, MANAGED = 2, 13  # DLDeviceType kDLCUDA, kDLCUDAManaged
_NAME = b"dltensor"  # of capsules that nobody has taken yet

_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor; it begins with a DLTensor."""

    _fields_ = (
        *DLTensor._fields_,
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", _DELETER),
    )


_lent: dict[int, tuple[_Managed, DeviceArray, Any]] = {}  # by address: in which capsule


def _take_back(address: int) -> None:
    _lent.pop(address, None)


_deleter = _DELETER(_take_back)  # C keeps no reference


def forget() -> None:
    """Let go of what is in capsules that nobody took anything from, nor has any more.

    A destructor of capsules would do so at once; but libraries drop a capsule that they refuse
    while an error is on its way, which a callback into Python loses.
    """
    for address in list(_lent):
        unwanted = sys.getrefcount(_lent[address][2]) == 2  # the tuple's, and the call's
        if unwanted and _is_capsule(id(_lent[address][2]), _NAME):
            del _lent[address]


_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class DeviceArray:
    """An array in the memory of the module's GPU.

    It goes into ``run`` as it is, and into every library that takes DLPack
    (``torch.from_dlpack(y)``) without a copy; ``numpy.asarray(y)`` is a copy. Its memory goes when
    nobody uses it any more.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    nbytes : int
    device : int
        The GPU, as ``devices()`` counts.
    """

    def __init__(self, library: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype, self.device = shape, dtype, library.device
        self.nbytes = math.prod(shape) * dtype.itemsize
        self._library, self._data = library, ctypes.c_void_p()
        library.check(
            library.call("device_alloc", ctypes.c_size_t(self.nbytes), ctypes.byref(self._data))
        )
        library.arrays += 1
        self._dims = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self._tensor = self._described()
        self.address = ctypes.addressof(self._tensor)  # of its DLTensor

    def _described(self) -> _Managed:
        code, bits = DL_CODES[self.dtype.kind], 8 * self.dtype.itemsize
        dims = ctypes.cast(self._dims, ctypes.c_void_p)
        head = (self._data, GPU, self.device, len(self.shape), code, bits, 1, dims, None, 0)
        return _Managed(*head, None, _deleter)

    def __del__(self) -> None:
        if getattr(self, "_data", None):
            self._library.call("device_free", self._data)  # a fork's child cannot: nothing is lost
            self._library.arrays -= 1

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Copy it to the processor's memory."""
        if copy is False:
            raise ValueError("an array in a GPU's memory is no numpy array without a copy")
        result: NDArray[Any] = np.empty(self.shape, self.dtype)
        self._move("device_read", result)
        return result if dtype is None else result.astype(dtype, copy=False)

    def fill(self, array: NDArray[Any]) -> None:
        """Take the values of an array of its shape and type."""
        self._move("device_write", np.ascontiguousarray(array))

    def _move(self, how: str, array: NDArray[Any]) -> None:
        size, here = ctypes.c_size_t(self.nbytes), ctypes.c_void_p(array.ctypes.data)
        if self.nbytes == 0:
            return
        pair = (here, self._data) if how == "device_read" else (self._data, here)
        self._library.check(self._library.call(how, *pair, size))

    def __dlpack_device__(self) -> tuple[int, int]:
        """kDLCUDA and the GPU's number."""
        return GPU, self.device

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        """Lend the memory; what wrote it has ended, so that no stream has to wait.

        Raises
        ------
        BufferError
            Another device or a copy is wanted.
        """
        elsewhere = options.get("dl_device") not in (None, self.__dlpack_device__())
        if elsewhere or options.get("copy"):
            raise BufferError(f"{self!r} is lent where it lies, or copied by numpy.asarray")
        forget()
        tensor = self._described()
        address = ctypes.addressof(tensor)
        capsule = _new_capsule(address, _NAME, None)
        _lent[address] = (tensor, self, capsule)
        return capsule


class Borrowed:
    """A tensor of another library, as long as this lives: the `address` of its DLTensor."""

    def __init__(self, value: Any, stream: int) -> None:
        if isinstance(value, DeviceArray):
            self._owner, self.address = value, value.address
            return
        self._owner = value.__dlpack__(stream=stream)  # it waits for what writes the tensor
        found = _pointer_in(id(self._owner), _NAME)
        if not found:
            raise BufferError("its __dlpack__ gave no capsule of the name 'dltensor'")
        self.address = found


def in_gpu_memory(value: Any) -> bool:
    """Whether it is a tensor that lies on a GPU."""
    device = getattr(value, "__dlpack_device__", None)
    return device is not None and int(device()[0]) in (GPU, MANAGED)
