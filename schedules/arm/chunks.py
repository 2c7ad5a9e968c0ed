"""What the schedules of kernels with folded activations share: by lane and in pairs of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import s_tir

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.kernel import PARALLEL_WEIGHTS, Preparation, zero_point
from apq_tvm.tensorize.meaning.spans.folded_rows import FoldedRows
from apq_tvm.tensorize.pairs.folded_dot import FoldedDot
from apq_tvm.types import DeviceProfile


def fold_preparation(
    name: str,
    spec: LinearSpec,
    layout: InterleavedLayout,
    dot: FoldedDot,
    copies: int,
    make: Callable[[Decide], Any],
) -> Preparation:
    """The record of the function `name`, which folds x for the weights of a layout."""
    assert spec.scheme is not None
    group = f"g{layout.group_size}" if layout.group_size > 0 else "row"
    key = f"{name}_k{spec.k}_{group}_W{layout.bits}_x{copies}"
    key += "_u" if dot.fold.shifted else ""
    key += ("_t" if spec.scheme.act_group == -1 else "") + ("_z" if dot.fold.zeros else "")
    key += zero_point(spec)
    padded, width = layout.padded_k(spec.k), layout.group_width(spec.k)
    per_token, chunk = spec.scheme.act_group == -1, UNIT_K * dot.units
    rows = FoldedRows(
        dot.fold, padded, padded if per_token else width, chunk, bool(spec.asymmetric)
    )
    return Preparation(key, make, schedule=schedule_fold, folded=None if rows.plain else rows)


def schedule_fold(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule a PrimFunc of `apq_tvm.ops.activations.fold`."""
    sch = s_tir.Schedule(func)
    (task,) = sch.get_loops(sch.get_sblock("task"))
    sch.parallel(task)
    return sch.mod["main"]


def schedule_chunks(
    sch: Any,
    spec: LinearSpec,
    dot: FoldedDot,
    intrinsic: str,
    unroll: int = 1,
) -> None:
    """One task per bundle of row blocks; per tile of x and chunk, all streams side by side.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
    spec : LinearSpec
    dot : FoldedDot
    intrinsic : str
        Of one chunk, of one stream or of all.
    unroll : int
        Chunks per iteration.
    """
    store, product = (sch.get_sblock(name) for name in ("store", "dot"))
    tile, bundle, stream, *row = sch.get_loops(store)
    if spec.n % dot.fold.unit.rows == 0:
        sch.vectorize(row.pop())
    sch.reorder(bundle, tile, stream)
    if spec.n * spec.k >= PARALLEL_WEIGHTS:
        sch.parallel(bundle)
    for loop in (stream, *row):
        sch.unroll(loop)
    if dot.in_pairs:
        in_rows = sch.get_sblock("rows")
        sch.compute_at(in_rows, tile, preserve_unit_loops=True)
        *outer, lane = sch.get_loops(in_rows)[-3:]
        for loop in outer:
            sch.unroll(loop)
        sch.vectorize(lane)
    axes = len(sch.get_loops(product)) - len((tile, bundle))
    spatial = len(dot.spatial) - len(dot.beside)
    sch.compute_at(product, tile, preserve_unit_loops=True)
    stream, *inner = sch.get_loops(product)[-axes:]
    lanes, chunk, within = inner[:spatial], inner[spatial], inner[spatial + 1 :]
    sch.reorder(chunk, stream, *lanes, *within)
    if unroll > 1:
        chunk, part = sch.split(chunk, [None, unroll])
        sch.unroll(part)
    init = sch.decompose_reduction(product, chunk)
    *outer, lane = sch.get_loops(init)[-(1 + spatial) :]
    for loop in (*outer, *(() if dot.beside else (stream,))):
        sch.unroll(loop)
    sch.vectorize(lane)
    sch.tensorize(stream if dot.beside else lanes[0], intrinsic)
