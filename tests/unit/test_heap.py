"""The heap's top stays where TVM's solvers come and go."""

from __future__ import annotations

import subprocess
import sys

import pytest

FREED = """
import ctypes
from apq_tvm import heap
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
if {kept}:
    heap.keep()
blocks = [libc.malloc(100_000) for _ in range(200)]
top = libc.sbrk(0)
for block in blocks:
    libc.free(block)
print(libc.sbrk(0) == top)
"""


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_freed_is_kept(kept: bool) -> None:
    """Of glibc; without, its top goes back to the system."""
    text = FREED.format(kept=kept)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(kept)]
