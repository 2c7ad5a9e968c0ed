"""The machine's own limits, measured: bytes read from DRAM and multiply-adds, per second.

Published figures say little about a virtual machine, so both are measured by a small C program
(`roofline.c`) that is built for the CPU it runs on. `Limits.share` then says how much of what
is possible a kernel reached.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.bench.timing import COLD_BYTES
from apq_tvm.errors import BuildError

ROUNDS = 7

STEPS = 2_000_000
"""Of the arithmetic probes: some milliseconds."""

PREFETCH_BYTES = (0, 4096)
"""Distances of software prefetch that are tried; rivals and ours are free to use any."""

SOURCE = Path(__file__).with_suffix(".c")

MACHINES = ("x86_64", "AMD64", "aarch64", "arm64")
"""Values of `platform.machine()` that it is written for."""


@dataclass(frozen=True)
class Limits:
    """Peak rates of this machine on a number of threads.

    Parameters
    ----------
    threads : int
    read_gbs : float
        DRAM read bandwidth, 1e9 bytes per second.
    int8_gmacs, fp32_gmacs : float
        Multiply-adds, 1e9 per second, operands in registers.
    int8_instruction : str
        What the int8 figure was measured with.
    """

    threads: int
    read_gbs: float
    int8_gmacs: float
    fp32_gmacs: float
    int8_instruction: str

    def best_of(self, other: Limits) -> Limits:
        """The higher of every rate."""
        return replace(
            self,
            read_gbs=max(self.read_gbs, other.read_gbs),
            int8_gmacs=max(self.int8_gmacs, other.int8_gmacs),
            fp32_gmacs=max(self.fp32_gmacs, other.fp32_gmacs),
        )

    def share(self, us: float, nbytes: int, macs: int, integer: bool) -> tuple[float, str]:
        """How close a kernel comes to the limit that binds it.

        Parameters
        ----------
        us : float
            Its time.
        nbytes : int
            Bytes that have to come from memory; 0 where they are cached.
        macs : int
            Multiply-adds of the operation.
        integer : bool
            True if they are done in int8.

        Returns
        -------
        (float, str)
            The least possible time over `us`, and ``"memory"`` or ``"compute"``.
        """
        memory_us = nbytes / self.read_gbs / 1e3
        compute_us = macs / (self.int8_gmacs if integer else self.fp32_gmacs) / 1e3
        binding = "memory" if memory_us >= compute_us else "compute"
        return max(memory_us, compute_us) / us, binding


@cache
def library() -> Any:
    """Build and load this machine's C source; the library is gone again once it is loaded."""
    if platform.machine() not in MACHINES:
        raise BuildError(f"no program measures the limits of a {platform.machine()} machine")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BuildError("measuring the machine's limits needs a C compiler: install gcc")
    with tempfile.TemporaryDirectory(prefix="apq-roofline-") as folder:
        made = Path(folder) / "roofline.so"
        command = [compiler, "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        done = subprocess.run(
            [*command, str(SOURCE), "-o", str(made)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise BuildError(f"building {SOURCE.name} failed: {done.stderr.strip()}")
        lib = ctypes.CDLL(str(made))
    lib.apq_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t]
    lib.apq_read.restype = ctypes.c_uint64
    lib.apq_read_again.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long]
    lib.apq_read_again.restype = ctypes.c_uint64
    for kind in ("int8", "fp32"):
        work = getattr(lib, f"apq_{kind}")
        work.argtypes, work.restype = [ctypes.c_long, ctypes.c_int], ctypes.c_double
        macs = getattr(lib, f"apq_{kind}_macs")
        macs.argtypes, macs.restype = [ctypes.c_long], ctypes.c_long
    lib.apq_int8_name.restype = ctypes.c_char_p
    return lib


def best_seconds(work: Callable[[], Any]) -> float:
    """The shortest of `ROUNDS` runs after one untimed."""
    work()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


@cache
def _buffer() -> NDArray[np.uint8]:
    """What is read: more than the caches hold, and not all one zero page."""
    return np.ones(COLD_BYTES, np.uint8)


def evict(threads: int) -> None:
    """Read more than the caches hold, on so many threads: nothing else is left in them."""
    buffer = _buffer()
    try:
        library().apq_read(buffer.ctypes.data, buffer.nbytes, threads, 0)
    except BuildError:  # on one thread then
        buffer.max()


_best: dict[int, Limits] = {}


def measure(threads: int) -> Limits:
    """Measure the machine on `threads` threads; takes a fifth of a second.

    A limit that was measured while something else ran is too low, so the best that this process
    has ever seen is returned, and no less than that of one thread: call it again whenever a
    comparison is made.

    Raises
    ------
    BuildError
        There is no C compiler, or it fails.
    """
    lib, buffer = library(), _buffer()
    read = min(
        best_seconds(partial(lib.apq_read, buffer.ctypes.data, buffer.nbytes, threads, ahead))
        for ahead in PREFETCH_BYTES
    )
    int8 = best_seconds(lambda: lib.apq_int8(STEPS, threads))
    fp32 = best_seconds(lambda: lib.apq_fp32(STEPS, threads))
    now = Limits(
        threads=threads,
        read_gbs=buffer.nbytes / read / 1e9,
        int8_gmacs=lib.apq_int8_macs(STEPS) * threads / int8 / 1e9,
        fp32_gmacs=lib.apq_fp32_macs(STEPS) * threads / fp32 / 1e9,
        int8_instruction=lib.apq_int8_name().decode(),
    )
    if threads > 1:
        now = now.best_of(measure(1))
    _best[threads] = now.best_of(_best.get(threads, now))
    return _best[threads]
