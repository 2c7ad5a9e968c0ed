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
  (`apq_tvm.tensorize.meaning.fold`): 68 instead of 64 MACs per cycle of W4A8g32 with 8 rows of x on
  V1.
- ``unroll``: chunks per iteration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from apq_tvm.ops.activations.paired import fold_alone, fold_pairs
from apq_tvm.ops.few_rows.folded import chunk_units, fold_of
from apq_tvm.ops.few_rows.paired import paired_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.layouts import LANES, PAIRED_BITS, check_folded, in_pairs
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.kernel import LinearKernel, Preparation, legacy
from apq_tvm.tensorize.arm.paired import paired_intrinsic
from apq_tvm.tensorize.pairs.paired_dot import PairedDot
from apq_tvm.types import DeviceProfile

M_TILES = (8, 4, 2, 1)
"""Rows of x that share an unpacked weight vector."""

_PARALLEL = 1 << 16
"""Weights from which on a second thread pays."""

_TASK = 16384
"""Activations in a parallel task."""


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
    paired = "+slow-paired-128" not in profile.target.get("mattr", ())
    first = max(1, table[m_tile][paired] * LANES // rows)
    blocks = layout.row_blocks(spec.n) * (2 if _halved(rows, m_tile) else 1)
    most = max(s for s in (1, 2, 4, 8) if s <= min(first, blocks))
    return decide("streams", (most, *(s for s in (1, 2, 4, 8) if s != most and s <= blocks)))


def _dot(
    spec: LinearSpec, profile: DeviceProfile, rows: int, m_tile: int, decide: Decide
) -> PairedDot:
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
    if not joined:
        return PairedDot(fold, m_tile, units, own)
    return PairedDot(fold, m_tile, units, own, streams)


def _check(spec: LinearSpec, profile: DeviceProfile, bits: int, rows: int) -> None:
    check_folded(spec, profile, bits, "i8mm", in_pairs(spec, rows))


def _prepare(
    rows: int, m_tile: int, spec: LinearSpec, profile: DeviceProfile, decide: Decide
) -> Preparation:
    layout = in_pairs(spec, rows)
    assert spec.scheme is not None
    per_token = spec.scheme.act_group == -1
    dot = _dot(spec, profile, rows, m_tile, decide)
    streams = _streams(spec, profile, rows, m_tile, decide)
    copies = streams // dot.blocks * dot.columns if dot.own else 1
    shape = (spec.k, layout, per_token, copies, max(1, _TASK // spec.k))
    func = fold_alone(*shape) if m_tile == 1 else fold_pairs(*shape, dot.fold.unfolded)
    group = f"g{layout.group_size}" if layout.group_size > 0 else "row"
    alike = dot.fold.raw and not dot.fold.shifted
    codes = f"w{dot.fold.width}" + ("" if alike else f"_W{layout.bits}")
    kind = "alone" if m_tile == 1 else "pairs"
    key = f"fold_{kind}_k{spec.k}_{group}_{codes}_x{copies}" + ("_u" if dot.fold.shifted else "")
    key += ("_t" if per_token else "") + ("_z" if dot.fold.zeros else "")
    return Preparation(key, func)


def _schedule(
    rows: int, m_tile: int, sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide
) -> None:
    """One task per bundle of row blocks; per tile of x and chunk, all streams side by side."""
    dot = _dot(spec, profile, rows, m_tile, decide)
    store, product = (sch.get_sblock(name) for name in ("store", "dot"))
    tile, bundle, stream, *row = sch.get_loops(store)
    if spec.n % dot.fold.unit.rows == 0:
        sch.vectorize(row.pop())
    sch.reorder(bundle, tile, stream)
    if spec.n * spec.k >= _PARALLEL:
        sch.parallel(bundle)
    for loop in (stream, *row):
        sch.unroll(loop)
    if m_tile > 1:
        in_rows = sch.get_sblock("rows")
        sch.compute_at(in_rows, tile, preserve_unit_loops=True)
        *outer, lane = sch.get_loops(in_rows)[-3:]
        for loop in outer:
            sch.unroll(loop)
        sch.vectorize(lane)
    sch.compute_at(product, tile, preserve_unit_loops=True)
    spatial, along = len(dot.spatial) - len(dot.beside), len(dot.reduced)
    stream, *inner = sch.get_loops(product)[-(2 + spatial + along) :]
    lanes, chunk, within = inner[:spatial], inner[spatial], inner[spatial + 1 :]
    sch.reorder(chunk, stream, *lanes, *within)
    chunks = int(sch.get(chunk).extent)
    unroll = decide("unroll", tuple(u for u in (1, 2) if chunks % u == 0))
    if unroll > 1:
        chunk, part = sch.split(chunk, [None, unroll])
        sch.unroll(part)
    init = sch.decompose_reduction(product, chunk)
    *outer, lane = sch.get_loops(init)[-(1 + spatial) :]
    for loop in outer:
        sch.unroll(loop)
    sch.vectorize(lane)
    if not dot.beside:
        sch.unroll(stream)
    sch.tensorize(stream if dot.beside else lanes[0], paired_intrinsic(dot))


def _kernel(bits: int, rows: int, m_tile: int) -> LinearKernel:
    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        streams = _streams(spec, profile, rows, m_tile, decide)
        dot = _dot(spec, profile, rows, m_tile, decide)
        return paired_linear(spec, in_pairs(spec, rows), dot, streams)

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        _schedule(rows, m_tile, sch, spec, profile, decide)

    def prepare(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Preparation:
        return _prepare(rows, m_tile, spec, profile, decide)

    return legacy(
        f"gemv_W{bits}A8_smmla_r{rows}k8m{m_tile}",
        1 if m_tile == 1 else max(2, m_tile - 1),
        -1,
        lambda spec, profile: _check(spec, profile, bits, rows),
        lambda spec, _: in_pairs(spec, rows),
        func,
        schedule,
        bits,
        prepare=prepare,
    )


PAIRED_KERNELS: tuple[LinearKernel, ...] = tuple(
    _kernel(bits, rows, m_tile)
    for rows in (4, 8)
    for bits in PAIRED_BITS
    for m_tile in M_TILES
    if not (_halved(rows, m_tile) and bits == 3)
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""
