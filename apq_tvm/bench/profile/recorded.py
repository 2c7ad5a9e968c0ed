"""What a module's C library recorded of a run: its calls, as ``NAME_profile`` gives them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.bench.clib import Runner
from apq_tvm.errors import BadInput


class _Tensor(ctypes.Structure):
    """``NAME_call_tensor`` of the module's header."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("elements", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("weight", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    """``NAME_call`` of the module's header."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("begin_ns", ctypes.c_uint64),
        ("end_ns", ctypes.c_uint64),
        ("products", ctypes.c_double),
        ("tasks", ctypes.c_int32),
        ("num_tensors", ctypes.c_int32),
        ("tensors", ctypes.POINTER(_Tensor)),
    )


_RECORD = np.dtype(
    {
        "names": ["begin", "end"],
        "formats": ["<u8", "<u8"],
        "offsets": [_Call.begin_ns.offset, _Call.end_ns.offset],
        "itemsize": ctypes.sizeof(_Call),
    }
)
"""The times of a record, to read them all at once."""


@dataclass(frozen=True)
class TensorUse:
    """A tensor of a call: address, elements, bytes, first dimension, place in the weights or -1."""

    address: int
    elements: int
    nbytes: int
    rows: int
    weight: int


@dataclass(frozen=True)
class CallRecord:
    """One call of one run.

    Parameters
    ----------
    kernel : str
    begin_ns, end_ns : int
        Of the monotonic clock, which is `time.perf_counter_ns`.
    products : float
        Multiply-adds, where it is no linear layer.
    tasks : int
        Threads it was cut for.
    tensors : tuple of TensorUse
        What it writes stands last.
    """

    kernel: str
    begin_ns: int
    end_ns: int
    products: float
    tasks: int
    tensors: tuple[TensorUse, ...]


class Recorder:
    """Switches the recording of a runner's context on and off, and reads it.

    Raises
    ------
    BadInput
        The module is of an apq_tvm that had no profiles, or of a GPU.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner, library = runner, runner.library
        try:
            self._set, self._get = library.function("set_profile"), library.function("profile")
        except AttributeError:
            raise BadInput(
                f"{library.path} was compiled by an apq-tvm that kept no profiles; compile it again"
            ) from None

    def record(self, on: bool) -> None:
        """Let the runs from now on keep their calls, or not."""
        self._runner.library.check(self._set(self._runner.context, ctypes.c_int32(on)))

    def times(self) -> NDArray[np.float64]:
        """Nanoseconds of every call of the last run: no more is read between runs."""
        calls, count = self._last()
        records = np.frombuffer(ctypes.string_at(calls, count * ctypes.sizeof(_Call)), _RECORD)
        took: NDArray[np.float64] = (records["end"] - records["begin"]).astype(np.float64)
        return took

    def calls(self) -> list[CallRecord]:
        """The last run, whole."""
        calls, count = self._last()
        return [_read(calls[i]) for i in range(count)]

    def _last(self) -> tuple[Any, int]:
        calls, count = ctypes.POINTER(_Call)(), ctypes.c_int32()
        code = self._get(self._runner.context, ctypes.byref(calls), ctypes.byref(count))
        self._runner.library.check(code)
        return calls, count.value


def _read(call: _Call) -> CallRecord:
    tensors = tuple(
        TensorUse(t.data or 0, t.elements, t.bytes, t.rows, t.weight)
        for t in call.tensors[: call.num_tensors]
    )
    kernel = call.kernel.decode()
    return CallRecord(kernel, call.begin_ns, call.end_ns, call.products, call.tasks, tensors)
