"""Who makes a GPU's images: NVRTC where its package is installed, else nvcc where it is on PATH.

An image of CUDA 13 does not load under a driver of CUDA 12, whatever the GPU: the oldest driver
that a profile names picks the major version. Other makers of images, such as the simulator of
`apq_tvm.codegen.cuda.simulator`, have the same method.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from apq_tvm.codegen.build.toolchain import run
from apq_tvm.codegen.cuda.nvrtc import find_nvrtc
from apq_tvm.codegen.cuda.split import DeviceCode
from apq_tvm.errors import BuildError
from apq_tvm.types import GpuFacts

_INSTALL = {12: "pip install 'apq-tvm[cuda]'", 13: "pip install 'apq-tvm[cuda13]'"}


class ImageCompiler(Protocol):
    """Makes what a driver loads."""

    def image(self, code: DeviceCode, sm: int) -> bytes:
        """The kernels of `code` for one compute capability."""

    def ptx(self, code: DeviceCode, sm: int) -> bytes:
        """Text of which drivers make an image for any later one."""


@dataclass
class _Nvrtc:
    major: int
    _texts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    """PTX by source and compute capability: what made an image had it at hand."""

    def image(self, code: DeviceCode, sm: int) -> bytes:
        image, self._texts[code.source, sm] = self._compile(code, f"sm_{sm}")
        return image

    def ptx(self, code: DeviceCode, sm: int) -> bytes:
        made = self._texts.get((code.source, sm))
        return self._compile(code, f"compute_{sm}")[1] if made is None else made

    def _compile(self, code: DeviceCode, arch: str) -> tuple[bytes, bytes]:
        nvrtc = find_nvrtc(self.major)
        assert nvrtc is not None
        return nvrtc.compile(code.source, arch)


@dataclass(frozen=True)
class _Nvcc:
    path: str

    def image(self, code: DeviceCode, sm: int) -> bytes:
        return self._compile(code, "-cubin", f"sm_{sm}")

    def ptx(self, code: DeviceCode, sm: int) -> bytes:
        return self._compile(code, "-ptx", f"compute_{sm}")

    def _compile(self, code: DeviceCode, kind: str, arch: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="apq.") as folder:
            source, image = Path(folder, "kernels.cu"), Path(folder, "kernels.image")
            source.write_text(code.source)
            given = (kind, "-w", "-std=c++17", f"--gpu-architecture={arch}")
            run([self.path, *given, str(source), "-o", str(image)])
            return image.read_bytes()


def cuda_major(gpu: GpuFacts) -> int:
    """The major version of CUDA whose images load under the oldest driver of a GPU."""
    return 13 if gpu.driver >= 580 else 12


def find_compiler(gpu: GpuFacts) -> ImageCompiler:
    """Find the compiler of a GPU's images.

    Raises
    ------
    BuildError
        There is none for this GPU and its oldest driver; with the line that installs one.
    """
    major = cuda_major(gpu)
    nvrtc = find_nvrtc(major)
    if nvrtc is not None and all(map(nvrtc.supports, gpu.images or (gpu.sm,))):
        return _Nvrtc(major)
    nvcc = shutil.which("nvcc")
    release = re.search(r"release (\d+)\.", run([nvcc, "--version"])) if nvcc else None
    if nvcc and release and int(release[1]) == major:
        return _Nvcc(nvcc)
    have = f"{nvrtc} does not know it" if nvrtc else "NVRTC is not installed"
    other = f", and nvcc on PATH is of CUDA {release[1]}" if release else ""
    raise BuildError(
        f"no compiler for compute capability {gpu.sm // 10}.{gpu.sm % 10} under driver "
        f"{gpu.driver}: {have}{other}; {_INSTALL[major]}"
    )
