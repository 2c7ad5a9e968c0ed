"""A compiled module through its C functions: no Python between two runs, and several weight copies.

The Python package of a module checks and converts what it is given; its C library is what an app
links, and what a benchmark of one layer should time.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.codegen.templates.tensors import CPU, DL_CODES, DLTensor
from apq_tvm.errors import BadInput, BuildError
from apq_tvm.module import read_manifest
from apq_tvm.types import Array


class Tensors:
    """numpy arrays as a C array of `DLTensor`; keeps what it points to alive."""

    def __init__(self, arrays: list[Array]) -> None:
        self._keep: list[Any] = [*arrays]
        self.c = (DLTensor * len(arrays))()
        for tensor, array in zip(self.c, arrays, strict=True):
            shape = (ctypes.c_int64 * array.ndim)(*array.shape)
            self._keep.append(shape)
            tensor.data, tensor.shape = array.ctypes.data, ctypes.addressof(shape)
            tensor.device_type, tensor.ndim = CPU, array.ndim
            tensor.code, tensor.bits = DL_CODES[array.dtype.kind], array.dtype.itemsize * 8
            tensor.lanes = 1


def aligned_empty(shape: tuple[int, ...], dtype: type[np.generic], alignment: int = 64) -> Array:
    """An uninitialized array that starts at a multiple of `alignment` bytes, so is never copied."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def aligned(array: Array) -> Array:
    """A copy of `array` in aligned memory."""
    copy = aligned_empty(array.shape, array.dtype.type)
    copy[...] = array
    return copy


class Library:
    """The C functions of the compiled module in a folder.

    Parameters
    ----------
    path : Path
        The module's folder.

    Raises
    ------
    BadInput
        The folder is no compiled module.
    BuildError
        Its library does not load.
    """

    def __init__(self, path: Path) -> None:
        manifest = read_manifest(path)
        self.path = path
        self.name: str = manifest["library"]["name"]
        file = path / f"lib{self.name}.so"
        try:
            self._lib = ctypes.CDLL(str(file.resolve()))
        except OSError as error:
            raise BuildError(f"{file} does not load: {error}") from error
        self.function("last_error").restype = ctypes.c_char_p
        for name in ("close", "context_destroy"):
            self.function(name).argtypes = [ctypes.c_void_p]
            self.function(name).restype = None

    def function(self, name: str) -> Any:
        """One of the C functions, by its name without the module's."""
        return getattr(self._lib, f"{self.name}_{name}")

    def check(self, code: int) -> None:
        """Raise BadInput with the library's message unless `code` is 0."""
        if code != 0:
            raise BadInput(f"lib{self.name}: {self.function('last_error')().decode()}")

    def open(self, weights: Path, threads: int) -> Runner:
        """Open a handle on a copy of the module's weights, with one context.

        Parameters
        ----------
        weights : Path
            A safetensors file; distinct files are mapped to distinct memory.
        threads : int

        Returns
        -------
        Runner
        """
        handle, context = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.function("open")(str(weights).encode(), ctypes.byref(handle)))
        self.check(self.function("set_num_threads")(handle, ctypes.c_int32(threads)))
        self.check(self.function("context_create")(handle, ctypes.byref(context)))
        return Runner(self, handle, context)


class Runner:
    """One handle and its context; closed when it is garbage."""

    def __init__(self, library: Library, handle: ctypes.c_void_p, context: ctypes.c_void_p) -> None:
        self.library, self._handle, self.context = library, handle, context
        self._finalizer = weakref.finalize(self, _close, library, handle, context)

    def set_num_threads(self, threads: int) -> None:
        """Use `threads` threads from the next run on."""
        code = self.library.function("set_num_threads")(self._handle, ctypes.c_int32(threads))
        self.library.check(code)

    def set_precision(self, bits: int) -> None:
        """Run every layer whose bits can be chosen with `bits` from the next run on."""
        code = self.library.function("set_precision")(self._handle, None, ctypes.c_int32(bits))
        self.library.check(code)

    def bind(self, inputs: Tensors, outputs: Tensors) -> Callable[[], None]:
        """Return a function that runs the module on these tensors or raises BadInput."""
        run, context, check = (
            self.library.function("run"),
            self.context,
            self.library.check,
        )

        def call() -> None:
            code = run(context, inputs.c, outputs.c)
            if code:
                check(code)

        return call


def _close(library: Library, handle: ctypes.c_void_p, context: ctypes.c_void_p) -> None:
    library.function("context_destroy")(context)
    library.function("close")(handle)
