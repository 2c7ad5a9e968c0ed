"""Default schedules of large-M linear layers on Arm, and their kernel records.

A task's panel of decoded weights (8 or 12 columns) stays in L1, its activations in L2; sums of a
tile stay in registers: 8 rows x 6 columns are 12 int32 and 12 float32 vectors of the 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.s_tir import ScheduleError

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout, WeightLayout
from apq_tvm.ops.activations.rows import quantize_rows
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.centred import MOST_GROUPS
from apq_tvm.ops.many_rows.centred_groups import CentredGroups, CentredTuning
from apq_tvm.ops.many_rows.panel_integers import IntegerPanel
from apq_tvm.ops.many_rows.panels import PanelFormat
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.schedules.arm.layouts import PAIRED_BITS, check_layout, in_pairs
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_integer, interleaved
from apq_tvm.schedules.linear.gemm_stages import even_block, schedule_stages
from apq_tvm.schedules.linear.kernel import (
    Choice,
    Instruction,
    LinearKernel,
    Preparation,
    zero_point,
)
from apq_tvm.schedules.linear.quantize import schedule_quantize, task_rows
from apq_tvm.tensorize.arm.decoded import decode_intrinsic
from apq_tvm.tensorize.arm.gemm import (
    SDOT,
    SMMLA,
    SMULL,
    GemmInstruction,
    centred_intrinsic,
)
from apq_tvm.tensorize.arm.gemm_panel import rows_intrinsic, scales_intrinsic
from apq_tvm.tensorize.meaning.centred import CentredTile, products
from apq_tvm.types import DeviceProfile

LANES = 4


@dataclass(frozen=True)
class TileShape:
    """Rows of x and blocks of 4 columns of a tile, and the parts it is summed in."""

    m: int
    vectors: int
    parts: int = 1

    def tile(self, k_step: int, pairs: bool) -> CentredTile:
        """A part, as micro-kernels compute it."""
        return CentredTile(self.m, self.vectors * (2 if pairs else 1) // self.parts, k_step, pairs)


_TILE_STAGES = ("load", "wait", "start", "sum", "spill")


def blocking(
    spec: LinearSpec,
    weights: CentredGroups,
    profile: DeviceProfile,
    shape: TileShape,
    decide: Decide,
    unit_k: int = UNIT_K,
) -> GemmBlocking:
    """The decisions of an integer GEMM: ``k_block``, ``k_step``, ``rows`` (of a task).

    Weights are decoded by units of `unit_k` columns.
    """
    group, kp, whole = weights.group, weights.k, weights.whole
    step = unit_k if whole else max(unit_k, group)
    # A panel takes up to half of L1, three quarters where its scales are few beside it; where sums
    # run on over a K block, it has 32 groups at most.
    assert spec.scheme is not None
    quarters = 3 if group >= 128 else 2
    most = quarters * profile.l1_bytes // (4 * LANES * shape.vectors * weights.planes)
    if spec.scheme.act_group == -1 and not whole:
        most = min(most, group * MOST_GROUPS)
    sizes = tuple(size for size in (4096, 2048, 1024) if size <= most)
    k_block = even_block(kp, step, decide("k_block", (*sizes, 512)))
    # A whole group in one stretch of code: LLVM overlaps its scales with the products around it.
    wanted = decide("k_step", (32, 64) if whole else (128, 64, 32))
    stretch = k_block if whole else group
    k_step = max(s for s in (16, 32, 64, 128) if s <= wanted and stretch % s == 0)
    if whole and kp % k_step:
        k_step = UNIT_K
    rows = decide("rows", (128, 64, 256))
    return GemmBlocking(shape.m, shape.vectors, k_step, k_block, -(-rows // shape.m))


@dataclass(frozen=True)
class GemmPlan:
    """What follows from the decisions of a GEMM with panels of centred int8."""

    panel: PanelFormat
    blocking: GemmBlocking
    tuning: CentredTuning
    tile: CentredTile
    micro: str


def schedule_centred(sch: Any, plan: GemmPlan, sve: bool) -> None:
    """Parallel tasks, tensorized panels, scales and products, sums in registers."""
    panel, pairs = plan.panel, plan.tile.pairs
    for plane, unit in enumerate(panel.units):
        decode = decode_intrinsic(unit, pairs, sve)
        tensorize(sch, f"unpack{plane}", decode, len(unit.loops(pairs)))
    schedule_stages(sch, _TILE_STAGES)
    if pairs:
        for name, source in panel.spread.items():
            tensorize(sch, f"spread_{name}", scales_intrinsic(source), 2)
        for loop in sch.get_loops(sch.get_sblock("rows_of")):
            sch.unroll(loop)
        tensorize(sch, "rows", rows_intrinsic(), 2)
    else:
        for name, loops in (("scale", 0), ("scale_minima", -2)):
            scaled = _find(sch, name)
            for loop in sch.get_loops(scaled)[loops:] if scaled is not None else ():
                sch.unroll(loop)
    sch.unroll(sch.get_loops(sch.get_sblock("vector"))[-1])
    meaning = products(plan.tile)
    loops = sum(extent > 1 for extent in (*meaning.spatial, *meaning.reduced))
    tensorize(sch, "dot", plan.micro, loops)


def _find(sch: Any, block: str) -> Any:
    """A block that only grouped schemes have."""
    try:
        return sch.get_sblock(block)
    except ScheduleError:
        return None


def tensorize(sch: Any, block: str, intrinsic: str, axes: int) -> None:
    """Replace the innermost `axes` loops around a block."""
    sch.tensorize(sch.get_loops(sch.get_sblock(block))[-axes], intrinsic)


def prepare_rows(
    spec: LinearSpec, together: int, meant: bool = False, copy: bool = False
) -> Preparation:
    """``(xq, xs, xsum, [xf])`` of `apq_tvm.ops.activations.rows`."""
    scheme = spec.scheme
    assert scheme is not None
    groups = (scheme.act_group, scheme.group_size)
    named = "_".join(f"g{group}" if group > 0 else "row" for group in groups)
    bits = "" if scheme.act_bits == 8 else f"_A{scheme.act_bits}"
    bits_of_x = scheme.act_bits

    def make(decide: Decide) -> Any:
        rows = task_rows(spec.k, decide)
        return quantize_rows(
            spec.k, *groups, 32, rows, bits_of_x, together, meant, copy, spec.asymmetric
        )

    more = ("_meant" if meant else "") + ("_copy" if copy else "")
    key = f"quantize_rows{together}_k{spec.k}_{named}{bits}{more}{zero_point(spec)}"
    return Preparation(key, make, schedule=schedule_quantize)


def _three_wide(profile: DeviceProfile) -> bool:
    """Whether slots are short and ``ldr q`` takes two: Neoverse N1 and its kin."""
    return (profile.issue_width, profile.vector_pipes, profile.in_order) == (3, 2, False)


def tuning(
    weights: CentredGroups, profile: DeviceProfile, pairs: bool, parts: int, decide: Decide
) -> CentredTuning:
    """The decisions ``stretch`` and ``loaded``."""
    # Loads that LLVM leaves unpaired take fewer registers at once: longer stretches of code then
    # need none of the stack.
    choices: tuple[int, ...] = (64, 128, 256, 32) if profile.paired_loads else (256, 128, 64, 32)
    loaded: tuple[int, ...] = (-1, 0)
    if _three_wide(profile):
        choices = (32, 64, 128, 256)
        # Slots and vector pipes are equally short; a long group hardly has starts.
        loaded = (1, 0, -1) if weights.group <= 64 else (0, 1, -1)
    if weights.planes > 1:
        # Planes read the same x, which LLVM would keep in registers from one to the next.
        choices = tuple(sorted(choices, key=lambda size: size > weights.group))
    return CentredTuning(pairs, parts, decide("stretch", choices), decide("loaded", loaded))


def _tile(instruction: GemmInstruction, m_tile: int, panel: PanelFormat) -> TileShape:
    """The tile of a kernel; grouped schemes hold an int32 and a float32 sum per element.

    12 rows that share their codes stay together.
    """
    together = panel.units[0].vectors
    if instruction is SMMLA and m_tile == 8 and not panel.weights.whole:
        return TileShape(8, 3, 2) if 3 % together == 0 else TileShape(8, 6, 4)
    return TileShape(m_tile, max(1 if instruction is SMULL else 2, together))


def panel_kernel(
    weights: str,
    instruction: GemmInstruction,
    m_tile: int,
    check: Callable[[LinearSpec, DeviceProfile], None],
    panel_of: Callable[[LinearSpec], PanelFormat],
    layout_of: Callable[[LinearSpec], WeightLayout],
    rows: int = LANES,
    **fields: Any,
) -> LinearKernel:
    """The record of one GEMM on panels of centred int8.

    Parameters
    ----------
    weights : str
        In the name.
    instruction : GemmInstruction
    m_tile : int
        Rows of x of a tile.
    check : callable
        Refuses layers.
    panel_of, layout_of : callable
        How the weights of a layer become panels, and how they lie.
    rows : int
        Of a block of that layout.
    **fields
        Of `LinearKernel`.
    """
    together = 2 if instruction.pairs else 4

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> GemmPlan:
        panel = panel_of(spec)
        shape, weights = _tile(instruction, m_tile, panel), panel.weights
        bl = blocking(spec, weights, profile, shape, decide, max(UNIT_K, panel.units[0].k))
        tuned = tuning(weights, profile, instruction.pairs, shape.parts, decide)
        tile, largest = shape.tile(bl.k_step, instruction.pairs), min(weights.largest, 128)
        micro = centred_intrinsic(instruction, tile, largest)
        return GemmPlan(panel, bl, tuned, tile, micro)

    def schedule(sch: Any, choice: Choice) -> None:
        schedule_centred(sch, choice.plan, "sve" in choice.profile.features)

    def prepare(choice: Choice) -> Preparation:
        spec, panel = choice.spec, choice.plan.panel
        copy = "outliers" in layout_of(spec).shapes(spec.n, spec.k)
        return prepare_rows(spec, together, panel.minima, copy)

    return LinearKernel(
        "gemm", weights, 8,
        Instruction(instruction.name, instruction.features, rows),
        m_tile - 1 if instruction.pairs else 1,
        check=check, layout=lambda spec, _: layout_of(spec),
        func=lambda choice: choice.plan.panel.gemm(
            choice.spec, choice.plan.blocking, choice.plan.tuning
        ),
        schedule=schedule, ask=ask, prepare=prepare, m_named=m_tile, **fields,
    )  # fmt: skip


def _integers(
    instruction: GemmInstruction,
    bits: int,
    m_tile: int,
    layout_of: Callable[[LinearSpec], InterleavedLayout],
    rows: int = LANES,
    run: int = 0,
) -> LinearKernel:
    """Of uniform integers in a layout with blocks of `rows` rows."""

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_integer(spec, profile, instruction.features, LANES)
        check_layout(spec, profile, layout_of(spec))

    return panel_kernel(
        f"W{bits}", instruction, m_tile, check,
        lambda spec: IntegerPanel(layout_of(spec), spec.k), layout_of, rows, bits=bits, run=run,
    )  # fmt: skip


def _kernels(*tiles: tuple[GemmInstruction, int]) -> tuple[LinearKernel, ...]:
    return tuple(
        _integers(instruction, bits, m_tile, lambda spec: interleaved(spec, LANES))
        for instruction, m_tile in tiles
        for bits in range(1, 9)
    )


MANY_ROWS = _kernels((SMMLA, 8), (SDOT, 4))
"""Before the kernels for few rows. Half of a pair may be missing; rows past M are computed and
dropped."""

SOME_ROWS = _kernels((SMMLA, 4), (SMULL, 4))
"""The same, after the kernels for few rows."""


PAIRED_GEMM_KERNELS: tuple[LinearKernel, ...] = tuple(
    _integers(SMMLA, bits, 8, partial(in_pairs, rows=rows), rows, 8)
    for rows in (4, 8)
    for bits in PAIRED_BITS
    if rows == 4 or bits != 3
)
"""On weights in runs of 8 k, which take no zips: before the kernels without a panel."""
