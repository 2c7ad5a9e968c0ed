"""Weight layouts: how a matrix lies in memory, with an inverse for every packer.

The numpy code here is the reference; `apq_tvm.codegen.layouts.tir` has the same transforms as
TensorIR. A layout's name appears verbatim in `KernelChoice.layout` and `PackedTensor.layout`.
"""

from __future__ import annotations

from apq_tvm.codegen.layouts.dense import FloatLayout
from apq_tvm.codegen.layouts.interleaved import (
    ROWS,
    UNIT_K,
    Field,
    InterleavedLayout,
    split_fields,
)
from apq_tvm.errors import PackError
from apq_tvm.types import Scheme

__all__ = [
    "LAYOUTS",
    "ROWS",
    "UNIT_K",
    "Field",
    "FloatLayout",
    "InterleavedLayout",
    "embedding_layout",
    "float_layout",
    "integer_layout",
    "split_fields",
]

LAYOUTS = (InterleavedLayout, FloatLayout)
"""Every layout family. A new one is a file and a line here."""


def integer_layout(name: str, scheme: Scheme) -> InterleavedLayout:
    """Read the name of a layout that holds codes of `scheme`, e.g. ``W4r8k4``.

    Raises
    ------
    PackError
        If no layout of codes has this name or it does not fit the scheme.
    """
    layout = InterleavedLayout.parse(name, scheme)
    if layout is None:
        raise PackError(f"no integer layout is called {name!r}; W{{bits}}r{{rows}}k4 is")
    return layout


def float_layout(name: str) -> FloatLayout:
    """Read the name of a layout that holds float32 weights, e.g. ``F32r16``.

    Raises
    ------
    PackError
        If no float layout has this name.
    """
    layout = FloatLayout.parse(name, None)
    if layout is None:
        raise PackError(f"no float layout is called {name!r}; F32r{{rows}} is")
    return layout


def embedding_layout(scheme: Scheme) -> InterleavedLayout:
    """Layout of an embedding table: one row per block, ``W{bits}r1k4``.

    Arrays: ``codes`` uint8 [V, Kp / 32, 4 * bits], ``scales`` float16 [V, Kp / gw, 1] and, with
    zero points, ``zeros`` uint8 of that shape.
    """
    return InterleavedLayout(scheme.bits, 1, scheme.group_size, scheme.zero_points)
