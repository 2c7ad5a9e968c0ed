"""The arena planner of the C runtime, on random lifetimes."""

from __future__ import annotations

import ctypes
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apq_tvm.codegen.package.folder import COMMON

ALIGNMENT = 64
Buffer = tuple[int, int, int]  # first call, last call, bytes


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("plan") / "plan.so"
    source = str(COMMON / "plan.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", source, "-o", str(path)], check=True)
    loaded = ctypes.CDLL(str(path))
    loaded.apq_plan.restype = loaded.apq_live_bytes.restype = ctypes.c_size_t
    return loaded


def plan(library: Any, buffers: list[Buffer]) -> tuple[int, int, list[int]]:
    """Arena bytes, live bytes, offsets."""
    n = len(buffers)
    lifetimes = (ctypes.c_int32 * (2 * n))(
        *(v for first, last, _ in buffers for v in (first, last))
    )
    sizes = (ctypes.c_size_t * n)(*(size for _, _, size in buffers))
    offsets, order = (ctypes.c_size_t * n)(), (ctypes.c_int32 * (2 * n))()
    arena = library.apq_plan(n, lifetimes, sizes, offsets, order)
    return arena, library.apq_live_bytes(n, lifetimes, sizes), list(offsets)


def buffer(draw: tuple[int, int, int]) -> Buffer:
    first, length, size = draw
    return first, first + length, size


BUFFERS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(0, 5000)).map(buffer), max_size=40
)


@given(buffers=BUFFERS)
def test_buffers_alive_together_do_not_overlap(library: Any, buffers: list[Buffer]) -> None:
    arena, live, offsets = plan(library, buffers)
    assert arena >= live
    assert arena % ALIGNMENT == 0
    for i, (first, last, size) in enumerate(buffers):
        assert offsets[i] % ALIGNMENT == 0
        assert offsets[i] + size <= arena
        for j in range(i):
            other_first, other_last, other_size = buffers[j]
            if first <= other_last and other_first <= last and size and other_size:
                apart = offsets[i] + size <= offsets[j] or offsets[j] + other_size <= offsets[i]
                assert apart, (buffers[i], buffers[j])


@given(buffers=BUFFERS)
def test_live_bytes(library: Any, buffers: list[Buffer]) -> None:
    _, live, _ = plan(library, buffers)
    most = max(
        (sum(size for first, last, size in buffers if first <= call <= last) for call in range(30)),
        default=0,
    )
    assert live == most


def test_a_chain_needs_two_buffers(library: Any) -> None:
    """Each call reads the last result and writes the next one: two places suffice."""
    arena, live, _ = plan(library, [(i, i + 1, 6400) for i in range(50)])
    assert arena == live == 12800


def test_a_gap_is_reused(library: Any) -> None:
    """A small buffer goes where a dead larger one was, beside one that stays."""
    arena, _, offsets = plan(library, [(0, 1, 1280), (0, 9, 640), (2, 9, 640), (2, 9, 640)])
    assert arena == 1920
    assert sorted(offsets[2:]) == [0, 640]
