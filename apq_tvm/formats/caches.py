"""Caches of keys and values that hold codes: what these lie in, and groups of int4.

int8 has one scale for the columns of a head of a token, symmetric. int4 has a scale and a least for
every group of `GROUP` columns, ``x = code * scale + least`` with codes from 0 to 15; both are
bfloat16, 5 bits an element in all (groups with a least of their own as KIVI has values, Liu et al.,
ICML 2024, arXiv:2402.02750). `apq_tvm.ops.graph.caches.coded` has the layouts.
"""

from __future__ import annotations

from apq_tvm.errors import NotApplicable

CACHES = {"f32": "float32", "f16": "float16", "i8": "int8", "i4": "int4"}
"""Types of caches, as users spell them; int8 with one scale for each head and token, int4 with a
scale and a least for each group of its columns."""

CODED = {"int8": ("int8", "float32"), "int4": ("uint8", "uint16")}
"""Types of keys and values that are codes, and those that these and what scales them lie in."""

GROUP = 32
"""Columns of int4 keys and values that share a scale and a least, if they divide a head's."""

WIDEST = 512
"""Columns of a head that attention has room for on the stack."""


def is_coded(kv: str) -> bool:
    """Whether caches of a type, as users spell it, hold codes."""
    return CACHES.get(kv) in CODED


def check_heads(heads: int | str, width: int | str, dtype: str) -> None:
    """Raise NotApplicable unless codes can be made of so many heads of `width` columns."""
    if not isinstance(heads, int) or not isinstance(width, int) or width > WIDEST:
        raise NotApplicable(
            f"{heads} heads of {width} columns: {dtype} wants numbers, {WIDEST} columns at most"
        )
    if dtype == "int4":
        group_size(width)


def group_size(columns: int | str) -> int:
    """Columns of an int4 head that share a scale and a least: `GROUP` or half of it.

    Raises
    ------
    NotApplicable
        A number that only a run knows, or no multiple of half `GROUP`.
    """
    for size in (GROUP, GROUP // 2):
        if isinstance(columns, int) and columns % size == 0:
            return size
    raise NotApplicable(f"heads of {columns} columns: int4 wants a multiple of {GROUP // 2}")
