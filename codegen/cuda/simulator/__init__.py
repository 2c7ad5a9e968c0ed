"""A GPU of our own, for tests: images that g++ makes, and a driver that runs them.

What TVM writes compiles unedited against ``include/`` (a fiber for each thread); `driver.cc` is a
``libcuda.so.1`` whose images are such libraries. Slow, exact in integers, and strict: the order of
threads is random, device memory cannot be touched by the host.
"""

from __future__ import annotations

import base64
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from apq_tvm.codegen.build.toolchain import run
from apq_tvm.codegen.cuda.split import DeviceCode

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
DRIVER = "libcuda.so.1"

PTX = b"// cusim\n"
"""Begins what stands for PTX; an image in base64 follows."""

_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-w", "-fno-strict-aliasing")


@dataclass(frozen=True)
class Simulator:
    """Makes images for the driver of `build_driver`.

    Parameters
    ----------
    compiler : str
        A g++ for the machine that runs them.
    checked : bool
        Races and reads of what nobody wrote end the process (``include/cusim_check.h``).
    """

    compiler: str = "g++"
    checked: bool = False

    def image(self, code: DeviceCode, sm: int) -> bytes:
        """A shared library with the kernels of `code`.

        Raises
        ------
        BuildError
            The compiler's messages.
        """
        entries = [*(kernel.name for kernel in code.kernels), "apq_check_ids"]
        text = "\n".join([code.source, *(f"CUSIM_KERNEL({name})" for name in entries), ""])
        return _image(self.compiler, text, sm, self.checked)

    def ptx(self, code: DeviceCode, sm: int) -> bytes:
        """The same, as text for our driver alone."""
        return PTX + base64.b64encode(self.image(code, sm))


@lru_cache(maxsize=8)
def _image(compiler: str, text: str, sm: int, checked: bool) -> bytes:
    with tempfile.TemporaryDirectory(prefix="apq.") as folder:
        source, image = Path(folder, "kernels.cc"), Path(folder, "kernels.so")
        source.write_text(text)
        # A module without kernels of its own includes nothing.
        given = (*_FLAGS, f"-D__CUDA_ARCH__={sm * 10}", f"-I{INCLUDE}", "-include", "cuda.h")
        if not checked:
            run([compiler, "-Og", *given, str(source), "-o", str(image)])
            return image.read_bytes()
        # Linked without the sanitizer: its functions are ours. A float4 stays one access, and what
        # lies in registers on a GPU is no access at all.
        part = Path(folder, "kernels.o")
        sanitized = ("-O1", "-DCUSIM_CHECK", "-fsanitize=thread", "-fno-tree-sra", "-c")
        run([compiler, *given, *sanitized, str(source), "-o", str(part)])
        run([compiler, "-shared", str(part), "-o", str(image)])
        return image.read_bytes()


def build_driver(folder: Path, compiler: str = "g++") -> Path:
    """Build the driver.

    Parameters
    ----------
    folder : Path
        Receives ``libcuda.so.1``. A process that loads it first, or has the folder in
        ``LD_LIBRARY_PATH``, gives it to every module.
    compiler : str

    Returns
    -------
    Path

    Raises
    ------
    BuildError
        The compiler's messages.
    """
    path = folder / DRIVER
    given = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
    named = f"-Wl,-soname,{DRIVER}"
    run([compiler, *given, named, str(HERE / "driver.cc"), "-ldl", "-o", str(path)])
    return path
