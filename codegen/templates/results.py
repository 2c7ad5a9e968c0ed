"""What a run writes: shapes, memory for the outputs, and arrays of the caller's own."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import accumulate, pairwise, repeat
from typing import Any

import numpy as np

from .errors import InputError
from .library import Context, Library
from .ports import Array, aligned_empty, dtype_of
from .tensors import DLTensor, addresses_of, shape_of

COPIED = 4096  # bytes of a tensor that are copied in less time than memory is aligned in


class Results:
    """The outputs of a module's runs.

    Parameters
    ----------
    library : Library
    on_device : callable
        Makes an array of a shape and type in the GPU's memory.
    """

    def __init__(self, library: Library, on_device: Callable[..., Any]) -> None:
        self._library, self._on_device = library, on_device
        self._infos = library.outputs
        self.names = tuple(info.name for info in self._infos)
        ends = [*accumulate((len(info.shape) for info in self._infos), initial=0)]
        self._dims = tuple(pairwise(ends))  # where, among those of all outputs
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def find_shapes(self, context: Context) -> None:
        """Ask the library for the shapes of the outputs; those that only a run tells stay empty."""
        self._library.check(self._library.shapes_c(context.c, context.given.c, context.dims))
        dims = context.dims[:]
        context.shapes = [tuple(dims[start:end]) for start, end in self._dims]
        context.late = (
            [i for i, s in enumerate(context.shapes) if s and min(s) < 0] if -1 in dims else []
        )
        for index in context.late:
            context.shapes[index] = (0,)
        every = zip(context.shapes, context.wanted.types, strict=True)
        context.small = [math.prod(shape) * kind.itemsize <= COPIED for shape, kind in every]
        context.known = True

    def memory(
        self,
        context: Context,
        stay: Container[str],
        into: Mapping[str, Array],
        given: Sequence[Any],
    ) -> dict[str, Any]:
        """Memory for the outputs, by name; the dict is the caller's."""
        if into and self._are_like_results(into, context, stay):
            return dict(into)
        if into:
            self._check(into, context, stay, given)
        elif not stay:
            return {
                name: np.empty(shape, kind) if small else aligned_empty(shape, kind)
                for name, shape, kind, small in zip(
                    self.names, context.shapes, context.wanted.types, context.small, strict=True
                )
            }
        ports = zip(self.names, context.shapes, context.wanted.types, strict=True)
        return {
            name: into[name]
            if name in into
            else self._on_device(shape, kind)
            if name in stay
            else aligned_empty(shape, kind)
            for name, shape, kind in ports
        }

    def kept(self, context: ctypes.c_void_p, index: int) -> Array:
        """A copy of an output that the context keeps: its shape depends on the data."""
        tensor, info = DLTensor(), self._infos[index]
        self._library.check(
            self._library.result_c(context, ctypes.c_int32(index), ctypes.byref(tensor))
        )
        result = aligned_empty(shape_of(tensor), dtype_of(info))
        if result.size:
            ctypes.memmove(result.ctypes.data, tensor.data, result.nbytes)
        return result

    def _are_like_results(
        self, into: Mapping[str, Array], context: Context, stay: Container[str]
    ) -> bool:
        """Whether they are what a run returned, or just like it: nothing else to check."""
        arrays = [*into.values()]
        if (*into,) != self.names or stay or context.late:
            return False
        plain = all(
            [
                type(array) is np.ndarray
                and array.dtype == kind
                and array.flags.carray  # writeable
                for array, kind in zip(arrays, context.wanted.types, strict=True)
            ]
        )
        if not plain or [array.shape for array in arrays] != context.shapes:
            return False
        memory = addresses_of(arrays) + context.given.addresses
        return len(set(memory)) == len(arrays) + len(set(context.given.addresses))

    def _check(
        self,
        into: Mapping[str, Array],
        context: Context,
        stay: Container[str],
        given: Sequence[Any],
    ) -> None:
        """Refuse arrays that outputs cannot be written into."""
        here = [array for array in given if isinstance(array, np.ndarray)]
        taken = dict(zip(addresses_of(here), repeat("an input"), strict=False))
        for name, array in into.items():
            if name not in self._numbers:
                known = ", ".join(self.names)
                raise InputError(f"into has an unknown output: {name}; there are {known}")
            why = (
                "is to stay in the GPU's memory"
                if name in stay
                else self._unfit(array, context, name)
            )
            if why is None and array.size:
                (address,) = addresses_of((array,))
                why = f"is {taken[address]} too" if address in taken else None
                taken[address] = f"output '{name}'"
            if why is not None:
                raise InputError(f"into: the array of output '{name}' {why}")

    def _unfit(self, array: Any, context: Context, name: str) -> str | None:
        """Why an output cannot be written into an array; None if it can."""
        index = self._numbers[name]
        kind, shape = context.wanted.types[index], context.shapes[index]
        if index in context.late:
            return "cannot be given: its shape depends on data"
        if not isinstance(array, np.ndarray):
            return f"is a {type(array).__name__}, wanted a numpy array"
        if array.dtype != kind:
            return f"has dtype {array.dtype}, wanted {kind}"
        if array.shape != shape:
            return f"has shape {array.shape}, wanted {shape}"
        if not array.flags.c_contiguous:
            return "is not contiguous"
        return None if array.flags.writeable else "is read-only"
