"""Default schedules of integer linear layers for few rows of x on 64-bit Arm with sdot.

What the decisions mean:

- ``streams``: row blocks of 4 that are read at once; they share the loads of the activations. As
  many as leave no vector on the stack (`tests/isa/test_arm_gemv_asm.py`); on V1, where LLVM brings
  pairs of loads far forward, that is two.
- ``copies``: whether each of them has its own copy of what a chunk starts from
  (`apq_tvm.ops.few_rows.folded`). Cores with four vector pipes are out of issue slots for vectors
  before they are out of loads (V1: 43 % of the sdot peak without, 47 % with); N1 is short of slots
  of any kind (37 % with, 39 % without).
- ``ordered``: written assembly instead of LLVM's order, for cores that issue in order
  (`apq_tvm.tensorize.arm.written.in_order`): 40 % of the sdot peak of Cortex-A55 instead of 31 %.
- ``together``: whether one ``ld1`` loads four vectors of codes. N1 has three slots a cycle in
  LLVM's model and takes three for an ``ldp`` of two (41 % of the sdot peak with, 39 % without).
- ``unroll``: chunks per iteration. Scales of two chunks are one 16-byte load.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.activations.fold import fold_activations
from apq_tvm.ops.few_rows.folded import chunk_units, fold_of, folded_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.layouts import LANES, check_folded
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import interleaved
from apq_tvm.schedules.linear.kernel import LinearKernel, Preparation, legacy
from apq_tvm.tensorize.arm.fold import folded_intrinsic
from apq_tvm.tensorize.arm.written.in_order import in_order_intrinsic
from apq_tvm.tensorize.arm.written.in_order_asm import STREAMS
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x that share an unpacked weight vector; a kernel is for at least that many rows."""

_PARALLEL = 1 << 16
"""Weights from which on a second thread pays."""

_TASK = 16384
"""Activations in a parallel task."""


def _wide(profile: DeviceProfile) -> bool:
    """Four vector pipes, as far as anybody knows."""
    return profile.macs_per_cycle.get("sdot", 0) > 32


def _streams(spec: LinearSpec, profile: DeviceProfile, m_tile: int, decide: Decide) -> int:
    fold = fold_of(interleaved(spec, LANES))
    if m_tile == 4 or (m_tile == 2 and not fold.raw):
        choices: tuple[int, ...] = (1, 2, 4)
    else:
        pairs = "+slow-paired-128" not in profile.target.get("mattr", ())
        few = fold.parts == 1 or (pairs and _wide(profile))
        choices = (2, 1, 4) if few else (4, 2, 1)
        if fold.unit.whole and fold.unit.bits > 3 and not (profile.in_order or _wide(profile)):
            choices = (1, 2, 4)  # their bytes are wanted again for codes that are split over them
    blocks = -(-spec.n // LANES)
    return decide("streams", tuple(s for s in choices if s <= blocks))


def _unroll(spec: LinearSpec, m_tile: int, chunks: int, decide: Decide) -> int:
    layout = interleaved(spec, LANES)
    fold = fold_of(layout)
    more = chunk_units(layout, spec.k) == 1 and (m_tile == 4 or (m_tile == 1 and not fold.zeros))
    choices = (2, 1) if more and fold.raw and not (layout.whole and m_tile > 1) else (1, 2)
    return decide("unroll", tuple(u for u in choices if chunks % u == 0))


def _copies(spec: LinearSpec, profile: DeviceProfile, m_tile: int, decide: Decide) -> int:
    streams = _streams(spec, profile, m_tile, decide)
    own = profile.in_order or _wide(profile)
    return decide("copies", (streams, 1) if own else (1, streams))


def _ordered(spec: LinearSpec, profile: DeviceProfile, m_tile: int, decide: Decide) -> bool:
    layout = interleaved(spec, LANES)
    fold = fold_of(layout)
    blocks = layout.row_blocks(spec.n)
    possible = m_tile == 1 and fold.parts > 1 and not fold.zeros and blocks % STREAMS == 0
    units = chunk_units(layout, spec.k)
    possible = possible and (units == 1 or fold.parts == 2)
    possible = possible and layout.group_size == UNIT_K * units < layout.padded_k(spec.k)
    possible = possible and _streams(spec, profile, m_tile, decide) == STREAMS
    if not possible or _copies(spec, profile, m_tile, decide) != STREAMS:
        return False
    return decide("ordered", (True, False) if profile.in_order else (False, True))


def _check(spec: LinearSpec, profile: DeviceProfile, bits: int) -> None:
    check_folded(spec, profile, bits, "dotprod", interleaved(spec, LANES))


def _prepare(m_tile: int, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Preparation:
    layout = interleaved(spec, LANES)
    assert spec.scheme is not None
    per_token = spec.scheme.act_group == -1
    copies = _copies(spec, profile, m_tile, decide)
    fold = fold_of(layout)
    rows = max(1, _TASK // spec.k)
    func = fold_activations(spec.k, layout, per_token, copies, rows)
    group = f"g{layout.group_size}" if layout.group_size > 0 else "row"
    alike = fold.raw and not layout.whole
    codes = f"w{fold.width}" + ("" if alike else f"_W{layout.bits}")
    key = f"fold_k{spec.k}_{group}_{codes}_x{copies}"
    key += ("_t" if per_token else "") + ("_z" if fold.zeros else "")
    return Preparation(key, func)


def _schedule(
    m_tile: int, sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide
) -> None:
    """One task per bundle of row blocks; per tile of x and chunk, all streams side by side."""
    layout = interleaved(spec, LANES)
    store, dot = (sch.get_sblock(name) for name in ("store", "dot"))
    tile, bundle, stream, *row = sch.get_loops(store)
    if spec.n % LANES == 0:
        sch.vectorize(row.pop())
    sch.reorder(bundle, tile, stream)
    if spec.n * spec.k >= _PARALLEL:
        sch.parallel(bundle)
    for loop in (stream, *row):
        sch.unroll(loop)

    sch.compute_at(dot, tile, preserve_unit_loops=True)
    units = chunk_units(layout, spec.k)
    rows, along = (2 if m_tile > 1 else 1), (3 if units > 1 else 2)
    stream, *inner = sch.get_loops(dot)[-(2 + rows + along) :]
    lanes, chunk, within = inner[:rows], inner[rows], inner[rows + 1 :]
    chunks = int(sch.get(chunk).extent)
    if _ordered(spec, profile, m_tile, decide):
        sch.reorder(stream, *lanes, chunk, *within)
        init = sch.decompose_reduction(dot, stream)
        outer, lane = sch.get_loops(init)[-2:]
        sch.unroll(outer)
        sch.vectorize(lane)
        sch.tensorize(stream, in_order_intrinsic(fold_of(layout), chunks, units))
        return
    sch.reorder(chunk, stream, *lanes, *within)
    unroll = _unroll(spec, m_tile, chunks, decide)
    if unroll > 1:
        chunk, part = sch.split(chunk, [None, unroll])
        sch.unroll(part)
    init = sch.decompose_reduction(dot, chunk)
    *outer, lane = sch.get_loops(init)[-(1 + rows) :]
    for loop in outer:
        sch.unroll(loop)
    sch.vectorize(lane)
    sch.unroll(stream)
    # For one row of x LLVM moves the loads of longer chunks up, and they do not fit the registers.
    fits = (units <= 2 or m_tile > 1) and not layout.whole
    scarce = fits and not profile.in_order and profile.macs_per_cycle.get("sdot", 0) == 32
    together = decide("together", (True, False) if scarce else (False, True))
    sch.tensorize(lanes[0], folded_intrinsic(fold_of(layout), m_tile, units, together))


def schedule_fold(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule `apq_tvm.ops.activations.fold.fold_activations`: a rule of `schedules.rules`."""
    sch = s_tir.Schedule(func)
    (task,) = sch.get_loops(sch.get_sblock("task"))
    sch.parallel(task)
    return sch.mod["main"]


def _kernel(bits: int, m_tile: int) -> LinearKernel:
    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        streams = _streams(spec, profile, m_tile, decide)
        copies = _copies(spec, profile, m_tile, decide)
        ordered = _ordered(spec, profile, m_tile, decide)
        return folded_linear(spec, interleaved(spec, LANES), m_tile, streams, copies, ordered)

    def layout(spec: LinearSpec, profile: DeviceProfile) -> InterleavedLayout:
        return interleaved(spec, LANES)

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        _schedule(m_tile, sch, spec, profile, decide)

    def prepare(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Preparation:
        return _prepare(m_tile, spec, profile, decide)

    return legacy(
        f"gemv_W{bits}A8_sdot_r{LANES}m{m_tile}",
        m_tile,
        -1,
        lambda spec, profile: _check(spec, profile, bits),
        layout,
        func,
        schedule,
        bits,
        prepare=prepare,
    )


SDOT_KERNELS: tuple[LinearKernel, ...] = tuple(
    _kernel(bits, m_tile) for bits in range(1, 9) for m_tile in M_TILES
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""
