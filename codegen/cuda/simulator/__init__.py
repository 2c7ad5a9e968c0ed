"""A GPU of our own, for tests: images that g++ makes, and a driver that runs them.

What TVM writes compiles unedited against ``include/`` (a fiber for each thread); `driver.cc` is a
``libcuda.so.1`` whose images are such libraries. Slow, exact in integers, and strict: the order of
threads is random, device memory cannot be touched by the host.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from apq_tvm.codegen.build.toolchain import run
from apq_tvm.codegen.cuda.split import DeviceCode
from apq_tvm.types import GpuFacts

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
DRIVER = "libcuda.so.1"

_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-fno-strict-aliasing")


@dataclass(frozen=True)
class Simulator:
    """Makes images for the driver of `build_driver`.

    Parameters
    ----------
    compiler : str
        A g++ for the machine that runs them.
    """

    compiler: str = "g++"

    def image(self, code: DeviceCode, gpu: GpuFacts) -> bytes:
        """A shared library with the kernels of `code`.

        Raises
        ------
        BuildError
            The compiler's messages.
        """
        entries = [*(kernel.name for kernel in code.kernels), "apq_check_ids"]
        text = "\n".join([code.source, *(f"CUSIM_KERNEL({name})" for name in entries), ""])
        with tempfile.TemporaryDirectory(prefix="apq.") as folder:
            source, image = Path(folder, "kernels.cc"), Path(folder, "kernels.so")
            source.write_text(text)
            given = (*_FLAGS, f"-D__CUDA_ARCH__={gpu.sm * 10}", f"-I{INCLUDE}")
            run([self.compiler, *given, str(source), "-o", str(image)])
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
