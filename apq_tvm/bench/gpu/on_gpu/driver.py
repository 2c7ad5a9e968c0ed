"""The CUDA driver by ctypes: one GPU, its memory, kernels and captured graphs.

Functions: CUDA Driver API reference, https://docs.nvidia.com/cuda/cuda-driver-api.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MULTIPROCESSORS, _L2_BYTES, _MAJOR, _MINOR, _SHARED_OPTIN = 16, 38, 75, 76, 97
"""CUdevice_attribute."""

_DYNAMIC_SHARED = 8
"""CUfunction_attribute."""

_OUT_OF_MEMORY = 2
_RELAXED = 2
"""CUstreamCaptureMode."""

_KINDS: Mapping[str, Callable[[int], Any]] = {
    "pointer": ctypes.c_uint64,
    "int64": ctypes.c_int64,
    "int32": ctypes.c_int32,
}


class Unfit(Exception):
    """This machine cannot run the bundle; the message is one line."""


class CudaError(Exception):
    """A function of the driver failed.

    Parameters
    ----------
    function, name : str
        Which, and its result's name.
    code : int
    """

    def __init__(self, function: str, name: str, code: int) -> None:
        super().__init__(f"{function}: {name} ({code})")
        self.code = code

    @property
    def fatal(self) -> bool:
        """True if nothing works after it in this process: "must be relaunched"."""
        return self.code in (700, 702) or 710 <= self.code <= 719


class Gpu:
    """The first GPU that the driver shows, current on this thread.

    Raises
    ------
    Unfit
        No driver, or no GPU.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unfit(f"no NVIDIA driver on this machine ({error})") from error
        count, device = ctypes.c_int(), ctypes.c_int()
        try:
            self._call("cuInit", 0)
            self._call("cuDeviceGetCount", ctypes.byref(count))
            self._call("cuDeviceGet", ctypes.byref(device), 0)
        except CudaError as error:
            raise Unfit(f"the NVIDIA driver gives no GPU: {error}") from error
        self._device = device
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, 128, device)
        version, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        self._call("cuStreamCreate", ctypes.byref(stream), 1)  # waits for no other stream
        self.name, self.version, self.stream = name.value.decode(), version.value, stream
        self.sm = 10 * self._attribute(_MAJOR) + self._attribute(_MINOR)
        self.multiprocessors = self._attribute(_MULTIPROCESSORS)

    def l2_bytes(self, otherwise: int) -> int:
        """Size of the cache that all multiprocessors share; `otherwise` where nobody says."""
        with suppress(CudaError):
            return self._attribute(_L2_BYTES)
        return otherwise

    def free_bytes(self) -> int:
        """Memory that is left."""
        left, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(left), ctypes.byref(total))
        return left.value

    def load(self, image: bytes) -> Kernels:
        """Load an image for this GPU."""
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
        return Kernels(self, module)

    def synchronize(self) -> None:
        """Wait for everything on the stream."""
        self._call("cuStreamSynchronize", self.stream)

    def capture(self, work: Callable[[], None]) -> Graph:
        """What `work` launches, as one graph."""
        graph, exec_ = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self.stream, _RELAXED)
        try:
            work()
        finally:
            self._call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        flags = ctypes.c_ulonglong(0)
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(exec_), graph, flags)
        self._call("cuGraphDestroy", graph)
        return Graph(self, exec_)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy inside the GPU's memory, on the stream."""
        addresses = ctypes.c_uint64(to), ctypes.c_uint64(source)
        self._call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(nbytes), self.stream)

    def fill(self, to: int, nbytes: int) -> None:
        """Fill with ones, which are NaN: what nobody writes shows."""
        words = ctypes.c_size_t(nbytes // 4)
        self._call(
            "cuMemsetD32Async", ctypes.c_uint64(to), ctypes.c_uint(0xFFFFFFFF), words, self.stream
        )

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def _call(self, function: str, *args: Any) -> None:
        try:
            found = getattr(self._library, function)
        except AttributeError as error:
            raise Unfit(f"the NVIDIA driver is too old: it lacks {function}") from error
        code = int(found(*args))
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(function, (text.value or b"unknown error").decode(), code)


class Kernels:
    """A loaded image."""

    def __init__(self, gpu: Gpu, module: ctypes.c_void_p) -> None:
        self._gpu, self._module = gpu, module
        self._functions: dict[str, ctypes.c_void_p] = {}

    def launch(
        self, kernel: str, extents: Sequence[int], arguments: Sequence[tuple[str, int]]
    ) -> None:
        """Launch a kernel.

        Parameters
        ----------
        kernel : str
        extents : sequence of int
            Blocks x, y, z, threads x, y, z, bytes of dynamic shared memory.
        arguments : sequence of (str, int)
            Kind of each, ``"pointer"``, ``"int64"`` or ``"int32"``, and its value.
        """
        values = [_KINDS[kind](value) for kind, value in arguments]
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        sizes = map(ctypes.c_uint, extents)
        function = self._function(kernel, extents[6] > 0)
        self._gpu._call("cuLaunchKernel", function, *sizes, self._gpu.stream, places, None)

    def unload(self) -> None:
        """Give its memory back."""
        with suppress(CudaError):
            self._gpu._call("cuModuleUnload", self._module)

    def _function(self, kernel: str, dynamic: bool) -> ctypes.c_void_p:
        if kernel not in self._functions:
            made = ctypes.c_void_p()
            named = kernel.encode()
            self._gpu._call("cuModuleGetFunction", ctypes.byref(made), self._module, named)
            if dynamic:
                most = self._gpu._attribute(_SHARED_OPTIN)
                self._gpu._call("cuFuncSetAttribute", made, _DYNAMIC_SHARED, most)
            self._functions[kernel] = made
        return self._functions[kernel]


class Graph:
    """Captured launches."""

    def __init__(self, gpu: Gpu, graph: ctypes.c_void_p) -> None:
        self._gpu, self._graph = gpu, graph

    def run(self, times: int = 1) -> None:
        """Launch them all, so often, and wait."""
        for _ in range(times):
            self._gpu._call("cuGraphLaunch", self._graph, self._gpu.stream)
        self._gpu.synchronize()

    def destroy(self) -> None:
        """Give it back."""
        with suppress(CudaError):
            self._gpu._call("cuGraphExecDestroy", self._graph)


class Memory:
    """Blocks of the GPU's memory that are given back together, at the end of a ``with``."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._blocks = gpu, list[int]()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        for block in self._blocks:
            with suppress(CudaError):
                self._gpu._call("cuMemFree_v2", ctypes.c_uint64(block))

    def take(self, nbytes: int) -> int:
        """The address of a new block.

        Raises
        ------
        Unfit
            So much is not left.
        """
        address = ctypes.c_uint64()
        try:
            self._gpu._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        except CudaError as error:
            if error.code == _OUT_OF_MEMORY:
                raise Unfit(f"too little memory: {nbytes} bytes are not left") from error
            raise
        self._blocks.append(address.value)
        return address.value

    def upload(self, array: NDArray[Any]) -> int:
        """The address of a copy of `array`."""
        data = np.ascontiguousarray(array)
        address = self.take(data.nbytes)
        place, size = ctypes.c_uint64(address), ctypes.c_size_t(data.nbytes)
        given = ctypes.c_void_p(data.ctypes.data)
        self._gpu._call("cuMemcpyHtoDAsync_v2", place, given, size, self._gpu.stream)
        self._gpu.synchronize()
        return address

    def download(self, address: int, shape: Sequence[int]) -> NDArray[np.float32]:
        """float32 figures."""
        data = np.empty(shape, np.float32)
        place, size = ctypes.c_uint64(address), ctypes.c_size_t(data.nbytes)
        given = ctypes.c_void_p(data.ctypes.data)
        self._gpu._call("cuMemcpyDtoHAsync_v2", given, place, size, self._gpu.stream)
        self._gpu.synchronize()
        return data
