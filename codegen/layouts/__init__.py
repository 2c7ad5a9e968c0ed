"""Weight layouts: how a matrix lies in memory, with an inverse for every packer.

The numpy code here is the reference; `apq_tvm.codegen.layouts.tir` has the same transforms as
TensorIR. A layout's name appears verbatim in `KernelChoice.layout` and `PackedTensor.layout`.
"""

from __future__ import annotations

from apq_tvm.codegen.layouts.balance import BalanceLayout
from apq_tvm.codegen.layouts.bcq import BcqLayout
from apq_tvm.codegen.layouts.codebook import CodebookLayout, NonlinearLayout
from apq_tvm.codegen.layouts.codebook_quads import CodebookQuads
from apq_tvm.codegen.layouts.dense import FloatLayout
from apq_tvm.codegen.layouts.fragments import FragmentLayout
from apq_tvm.codegen.layouts.interleaved import (
    ROWS,
    Field,
    InterleavedLayout,
    split_fields,
)
from apq_tvm.codegen.layouts.layout import NARROW, Details, WeightLayout
from apq_tvm.codegen.layouts.mixed import MixedLayout
from apq_tvm.codegen.layouts.planes import PlanesLayout
from apq_tvm.codegen.layouts.spans import SpanLayout
from apq_tvm.codegen.layouts.stepped import SteppedLayout
from apq_tvm.codegen.layouts.super_records import SuperRecordsLayout
from apq_tvm.codegen.layouts.superblock import SuperBlockLayout
from apq_tvm.errors import PackError
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.types import Scheme

__all__ = [
    "LAYOUTS",
    "ROWS",
    "UNIT_K",
    "BalanceLayout",
    "BcqLayout",
    "CodebookLayout",
    "Details",
    "Field",
    "FloatLayout",
    "FragmentLayout",
    "InterleavedLayout",
    "MixedLayout",
    "NonlinearLayout",
    "PlanesLayout",
    "SpanLayout",
    "SteppedLayout",
    "SuperBlockLayout",
    "WeightLayout",
    "default_layout",
    "embedding_layout",
    "split_fields",
    "weight_layout",
]

LAYOUTS: tuple[type[WeightLayout], ...] = (
    InterleavedLayout,
    SteppedLayout,
    FragmentLayout,
    FloatLayout,
    BalanceLayout,
    BcqLayout,
    PlanesLayout,
    MixedLayout,
    CodebookQuads,
    CodebookLayout,
    NonlinearLayout,
    SuperRecordsLayout,
    SuperBlockLayout,
)
"""Every layout family. A new one is a file and a line here."""


def weight_layout(name: str, scheme: Scheme | None, details: Details = ()) -> WeightLayout:
    """Read the name of a layout.

    Parameters
    ----------
    name : str
        E.g. ``W4r8k4``.
    scheme : Scheme or None
        Of the codes it holds; None for float32 weights.
    details : tuple of (str, int)
        What `apq_tvm.formats.details` says of the tensor.

    Raises
    ------
    PackError
        If no layout has this name or it does not fit the scheme.
    """
    for layout in LAYOUTS:
        found = layout.parse(name, scheme, details)
        if found is not None:
            return found
    raise PackError(f"no layout of {scheme or 'float32'} weights is called {name!r}")


def default_layout(scheme: Scheme | None, details: Details, lanes: int) -> WeightLayout:
    """The layout of a scheme's weights for kernels whose vectors hold so many rows.

    Parameters
    ----------
    scheme : Scheme or None
        None for float32 weights.
    details : tuple of (str, int)
        What `apq_tvm.formats.details` says of the tensor.
    lanes : int
        int32 in a vector, 4, 8 or 16, by the instruction of the kernel that asks.

    Raises
    ------
    PackError
        If no layout holds such codes.
    """
    for layout in LAYOUTS:
        found = layout.choose(scheme, details, lanes)
        if found is not None:
            return found
    raise PackError(
        f"no layout holds {scheme or 'float32'} weights; their family needs one among "
        "apq_tvm.codegen.layouts.LAYOUTS"
    )


def embedding_layout(scheme: Scheme) -> WeightLayout:
    """Layout of an embedding table: one row per block, ``W{bits}r1k4``, of integers.

    Arrays: ``codes`` uint8 [V, Kp / 32, 4 * bits], ``scales`` float16 [V, Kp / gw, 1] and, with
    zero points, ``zeros`` uint8 of that shape. Tables that came in another format lie as a linear
    layer's weights in blocks of `NARROW` rows.
    """
    if scheme.family != "int":
        return default_layout(scheme, (), NARROW)
    return InterleavedLayout(scheme.bits, 1, scheme.group_size, scheme.zero_points)
