"""Default schedules of integer linear layers on 64-bit Arm whose codes stand in runs of 8 k.

For cores with smmla. Unlike `apq_tvm.schedules.arm.gemm` they store no panel: codes are unpacked in
registers for every tile of x, so they are for few rows.

What the decisions mean:

- ``streams``: row blocks, side by side, that are read at once; they share the loads of x.
- ``joined``: whether one intrinsic has them all, so that long chunks go through k together (36
  MACs per cycle of W4A8g128 on V2 instead of 30). 8-bit codes are better off block by block.
- ``own``: whether every vector of sums has its own copy of what a chunk starts from
  (`apq_tvm.ops.few_rows.folded`): loads instead of copies between registers.
- ``unfolded``: whether activations stay as they are, and codes are unpacked one by one
  (`apq_tvm.tensorize.meaning.spans.fold`): 68 instead of 64 MACs per cycle of W4A8g32 with 8 rows
  of x on V1.
- ``unroll``: chunks per iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from apq_tvm.codegen.layouts import UNIT_K
from apq_tvm.ops.activations.paired import fold_alone, fold_pairs
from apq_tvm.ops.few_rows.folded import chunk_units, fold_of, folded_linear, start_copies
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.chunks import fold_preparation, schedule_chunks
from apq_tvm.schedules.arm.layouts import LANES, PAIRED_BITS, check_folded, in_pairs
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel, Preparation
from apq_tvm.schedules.linear.quantize import task_rows
from apq_tvm.tensorize.arm.paired import paired_intrinsic
from apq_tvm.tensorize.pairs.paired_dot import PairedDot
from apq_tvm.types import DeviceProfile

M_TILES = (8, 4, 2, 1)
"""Rows of x that share an unpacked weight vector."""

_STREAMS = {1: (8, 4), 2: (4, 2), 4: (2, 2), 8: (1, 1)}
"""M tile -> row blocks of 4 that are read at once, where LLVM loads vectors one by one and where it
pairs them, which takes more registers."""

_STREAMS_LONG = {1: (4, 4), 2: (4, 1), 4: (1, 1), 8: (1, 1)}
"""The same for chunks of several units, whose activations do not stay in registers."""

_STREAMS_WIDE = {1: (4, 8), 2: (4, 2), 4: (4, 4), 8: (1, 1)}
"""The same for those of 8-bit codes, which need no unpacking."""


def _halved(rows: int, m_tile: int) -> bool:
    """Whether 8 rows are two blocks: their sums with 8 rows of x would not fit the registers."""
    return rows == 8 and m_tile == 8


def _streams(
    spec: LinearSpec, profile: DeviceProfile, rows: int, m_tile: int, decide: Decide
) -> int:
    layout = in_pairs(spec, rows)
    table = _STREAMS
    if chunk_units(layout, spec.k) > 1:
        table = _STREAMS_WIDE if layout.bits == 8 else _STREAMS_LONG
    first = max(1, table[m_tile][profile.paired_loads] * LANES // rows)
    blocks = layout.row_blocks(spec.n) * (2 if _halved(rows, m_tile) else 1)
    most = max(s for s in (1, 2, 4, 8) if s <= min(first, blocks))
    return decide("streams", (most, *(s for s in (1, 2, 4, 8) if s != most and s <= blocks)))


@dataclass(frozen=True)
class _Plan:
    dot: PairedDot
    copies: int


def _ask(rows: int, m_tile: int, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> _Plan:
    layout = in_pairs(spec, rows)
    units = chunk_units(layout, spec.k)
    # A shift of every sum against one of every vector of codes: as many for 4 rows of x.
    unfolded = m_tile > 1 and decide("unfolded", (m_tile > 2, m_tile <= 2))
    fold = replace(fold_of(layout), unfolded=unfolded)
    if _halved(rows, m_tile):
        fold = replace(fold, unit=layout.half_unit)
    # Products of 8-bit codes are short of loads before they are short of slots for vectors.
    shared = layout.bits == 8 and units > 1 and m_tile in (1, 8)
    own = decide("own", (not shared, shared))
    streams = _streams(spec, profile, rows, m_tile, decide)
    joined = m_tile == 1 and units > 1 and layout.row_blocks(spec.n) % streams == 0
    joined = joined and decide("joined", (layout.bits < 8, layout.bits == 8))
    dot = PairedDot(fold, m_tile, units, streams if joined else 1, own=own)
    chunks = layout.padded_k(spec.k) // UNIT_K // units
    decide("unroll", tuple(u for u in (1, 2) if chunks % u == 0))
    return _Plan(dot, start_copies(dot, streams, own))


def _prepare(choice: Choice, rows: int) -> Preparation:
    spec, dot, copies = choice.spec, choice.plan.dot, choice.plan.copies
    layout = in_pairs(spec, rows)
    assert spec.scheme is not None
    per_token = spec.scheme.act_group == -1

    def make(decide: Decide) -> Any:
        shape = (spec.k, layout, per_token, copies, task_rows(spec.k, decide))
        if dot.in_pairs:
            return fold_pairs(*shape, dot.fold.unfolded, spec.asymmetric)
        return fold_alone(*shape, spec.asymmetric)

    name = "fold_pairs" if dot.in_pairs else "fold_alone"
    return fold_preparation(name, spec, layout, dot, copies, make)


def _schedule(sch: Any, choice: Choice) -> None:
    dot = choice.plan.dot
    schedule_chunks(sch, choice.spec, dot, paired_intrinsic(dot), choice["unroll"])


def _kernel(bits: int, rows: int, m_tile: int) -> LinearKernel:
    instruction = Instruction("smmla", ("i8mm",), rows)

    def func(choice: Choice) -> Any:
        plan, layout = choice.plan, in_pairs(choice.spec, rows)
        return folded_linear(choice.spec, layout, plan.dot, choice["streams"], plan.dot.own, True)

    return LinearKernel(
        "gemv",
        f"W{bits}",
        8,
        instruction,
        1 if m_tile == 1 else max(2, m_tile - 1),
        check=lambda spec, profile: check_folded(spec, profile, instruction, in_pairs(spec, rows)),
        layout=lambda spec, _: in_pairs(spec, rows),
        func=func,
        schedule=_schedule,
        ask=lambda spec, profile, decide: _ask(rows, m_tile, spec, profile, decide),
        prepare=lambda choice: _prepare(choice, rows),
        bits=bits,
        run=8,
        m_named=m_tile,
    )


PAIRED_KERNELS: tuple[LinearKernel, ...] = tuple(
    _kernel(bits, rows, m_tile)
    for rows in (4, 8)
    for bits in PAIRED_BITS
    for m_tile in M_TILES
    if not (_halved(rows, m_tile) and bits == 3)
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""
