"""glibc keeps what is freed: TVM makes a Z3 of some MB for many a question, and frees it again.

Otherwise `malloc` gives the top of its heap back each time, and the kernel fills the same pages
with zeros again: 1.4 of 1.5 million page faults of a compile for a GPU, and a third of its time.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD`` of ``malloc.h``."""

_KEPT = 128 << 20
"""Bytes that may lie free at the top, of a compile that takes some hundred millions."""

_MAPPED = 32 << 20
"""From which size on arrays lie by themselves and are given back: the most that glibc would take
by itself, which it no longer does once one of both is set."""


def keep() -> None:
    """Do so in this process, where its C library is glibc."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_TRIM_THRESHOLD, _KEPT)
        set_option(_MMAP_THRESHOLD, _MAPPED)
