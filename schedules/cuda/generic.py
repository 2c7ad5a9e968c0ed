"""Linear kernels for any GPU and any format, with float32 x.

For one row of x a warp computes one result: its lanes take turns along K, decode their weight,
multiply, and meet by shuffles. For more rows a block of threads decodes weights for all of them
(`apq_tvm.ops.gpu.tiled`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from apq_tvm.codegen.layouts import FloatLayout, WeightLayout, default_layout
from apq_tvm.codegen.layouts.layout import SparseLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.gpu.tiled import ROWS, tiled_linear
from apq_tvm.ops.linear.interleaved import dense_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.cuda.graph import WARP
from apq_tvm.schedules.linear.checks import check_float
from apq_tvm.schedules.linear.generic import generic_kernels
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel
from apq_tvm.types import DeviceProfile

LANES = 4
"""Rows that lie side by side in the layouts, a warp each."""


def _layout(spec: LinearSpec, profile: DeviceProfile) -> WeightLayout:
    return default_layout(spec.scheme, spec.details, LANES)


def _schedule(sch: Any, choice: Choice) -> None:
    """Both forms have ``store`` over (row of x, block of rows) in some order, then the lane."""
    blocks = {str(sch.get(b).name_hint): b for b in sch.get_child_blocks(sch.get_sblock("root"))}
    store, dot = blocks["store"], blocks["dot"]
    if "decode" in blocks:
        sch.compute_inline(blocks["decode"])
    one, other, warp = sch.get_loops(store)
    for part in (dot, blocks.get("outliers")):
        if part is not None:
            sch.compute_at(part, warp, preserve_unit_loops=True)
            sch.set_scope(part, 0, "local")
    turns, lane = sch.split(sch.get_loops(dot)[-1], [None, WARP])
    sch.reorder(lane, turns)
    sch.bind(sch.fuse(one, other), "blockIdx.x")
    sch.bind(warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")


def _on_gpu(kernel: LinearKernel) -> LinearKernel:
    return replace(kernel, schedule=_schedule)


_TALL, _FEW = (64, 2), (16, 4)
"""Rows of x of a block, and groups of threads."""


def _least(width: int | None, tall: int) -> int:
    """From how many rows of x on. On an H200 (4096 x 4096) `_FEW` takes 108 us for any 16 rows, and
    a warp for each result 13 to 20 us a row of weights that are codes or in a table, 81 us where
    planes are put together (``anyprec``)."""
    if tall == _TALL[0]:
        return _FEW[0] + 1
    return 2 if width else 7


def _tiled(width: int | None, tall: int, groups: int) -> LinearKernel:
    """The kernel of so many rows of x a block for a run-time width, 0 for formats without a choice,
    None for float weights."""
    plain = width is None

    def layout(spec: LinearSpec, profile: DeviceProfile) -> WeightLayout:
        return FloatLayout(LANES) if plain else _layout(spec, profile)

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        if plain:
            check_float(spec)
        elif isinstance(_layout(spec, profile), SparseLayout):
            raise NotApplicable("multiplies no sparse part of weights")

    def func(choice: Choice) -> Any:
        return tiled_linear(
            choice.spec, layout(choice.spec, choice.profile), width or 0, tall, groups
        )

    return LinearKernel(
        "plain" if plain else "generic", "F32" if plain else f"decode{width or ''}", 0,
        Instruction("ffma", (), ROWS), _least(width, tall),
        check=check, layout=layout, func=func, schedule=lambda sch, choice: None,
        prepare=lambda choice: None, family="int" if plain else "", width=width or 0, m_named=tall,
    )  # fmt: skip


GENERIC_KERNELS: tuple[LinearKernel, ...] = (
    *(_tiled(width, *tile) for tile in (_TALL, _FEW) for width in range(9)),
    *map(_on_gpu, generic_kernels(_layout)),
)
"""For each run-time width, and for formats without a choice."""

DENSE_KERNELS: tuple[LinearKernel, ...] = (
    *(_tiled(None, *tile) for tile in (_TALL, _FEW)),
    LinearKernel(
        "plain", "F32", 0, Instruction("", (), LANES), 1,
        check=lambda spec, profile: check_float(spec),
        layout=lambda spec, profile: FloatLayout(LANES),
        func=lambda choice: dense_linear(choice.spec, FloatLayout(LANES)),
        schedule=_schedule, prepare=lambda choice: None,
    ),
)  # fmt: skip
"""Layers that stay float."""
