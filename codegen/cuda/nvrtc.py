"""NVRTC, NVIDIA's run-time compiler, by ctypes: images of CUDA source without a toolkit or a GPU.

From PyPI: ``nvidia-cuda-nvrtc-cu12`` and ``nvidia-cuda-nvrtc`` (CUDA 13), whose images load under
the drivers of their major version; with the headers of ``nvidia-cuda-runtime-cu12`` and
``nvidia-cuda-runtime``. API: https://docs.nvidia.com/cuda/nvrtc.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from apq_tvm.codegen.cuda.shims import HEADERS
from apq_tvm.errors import BuildError

_PACKAGES = {
    12: ("cuda_nvrtc/lib/libnvrtc.so.12", "cuda_runtime/include"),
    13: ("cu13/lib/libnvrtc.so.13", "cu13/include"),
}
"""Library and headers below ``nvidia``, by CUDA's major version."""


@dataclass(frozen=True)
class Nvrtc:
    """A loaded NVRTC.

    Parameters
    ----------
    library : ctypes.CDLL
    include : Path
        Where ``cuda_fp16.h`` lies.
    version : tuple of int
        Major and minor: (12, 9).
    """

    library: Any
    include: Path
    version: tuple[int, int]

    def __str__(self) -> str:
        return "NVRTC {}.{}".format(*self.version)

    def supports(self, sm: int) -> bool:
        """Whether it makes images for a compute capability."""
        count = ctypes.c_int()
        self._check(self.library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        archs = (ctypes.c_int * count.value)()
        self._check(self.library.nvrtcGetSupportedArchs(archs))
        return sm in archs

    def compile(self, source: str, arch: str) -> tuple[bytes, bytes]:
        """Make an image, and the PTX that it is of.

        Parameters
        ----------
        source : str
        arch : str
            ``"sm_86"``, or ``"compute_86"``, of which there is no image.

        Raises
        ------
        BuildError
            With the compiler's messages.
        """
        program = ctypes.c_void_p()
        count = len(HEADERS)
        texts = (ctypes.c_char_p * count)(*(text.encode() for text in HEADERS.values()))
        names = (ctypes.c_char_p * count)(*(name.encode() for name in HEADERS))
        lib = self.library
        self._check(
            lib.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), b"kernels.cu", count, texts, names
            )
        )
        try:
            given = (f"--gpu-architecture={arch}", "--std=c++17", f"-I{self.include}", "-w")
            options = (ctypes.c_char_p * len(given))(*(o.encode() for o in given))
            if lib.nvrtcCompileProgram(program, len(given), options) != 0:
                log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise BuildError(f"{self} cannot compile the kernels for {arch}:\n{log[-4000:]}")
            image = b"" if arch.startswith("compute_") else self._read(program, "CUBIN")
            return image, self._read(program, "PTX").rstrip(b"\0")
        finally:
            lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        data = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, data))
        return data.raw

    def _check(self, result: int) -> None:
        if result != 0:
            text = ctypes.cast(self.library.nvrtcGetErrorString(result), ctypes.c_char_p).value
            raise BuildError(f"{self} failed: {(text or b'?').decode()}")


@cache
def find_nvrtc(major: int) -> Nvrtc | None:
    """The NVRTC of a major version of CUDA, where its package is installed."""
    for root in _nvidia_folders():
        library, include = (root / part for part in _PACKAGES[major])
        if library.is_file() and (include / "cuda_fp16.h").is_file():
            loaded = ctypes.CDLL(str(library))
            loaded.nvrtcGetErrorString.restype = ctypes.c_void_p
            numbers = (ctypes.c_int(), ctypes.c_int())
            loaded.nvrtcVersion(*map(ctypes.byref, numbers))
            return Nvrtc(loaded, include, (numbers[0].value, numbers[1].value))
    return None


def _nvidia_folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    yield from map(Path, (spec.submodule_search_locations or []) if spec else [])
