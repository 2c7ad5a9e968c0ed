"""Default schedules of any-precision linear layers on CPUs, and their kernel records, one a width.

What the decisions mean:

- ``ahead``: software prefetch distance in bytes of every plane (`apq_tvm.schedules.x86.gemv`);
- ``m_tiles``: tiles of rows of x that share one lookup of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from apq_tvm.codegen.layouts.planes import PlanesLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.activations.spread import quantize_spread
from apq_tvm.ops.few_rows.anyprec import (
    RUN,
    SUM_ROWS,
    planes_gemm,
    planes_gemm_strided,
    planes_gemv,
    planes_gemv_apart,
    stretches_left,
)
from apq_tvm.ops.few_rows.anyprec_task import PLANES_K, digit_suffix, parts_of, step_group
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_all_features, check_integer_acts
from apq_tvm.schedules.linear.gemm_stages import schedule_stages
from apq_tvm.schedules.linear.kernel import (
    PARALLEL_WEIGHTS,
    Choice,
    Instruction,
    LinearKernel,
    Preparation,
    prepare_activations,
)
from apq_tvm.schedules.linear.quantize import schedule_quantize, task_rows
from apq_tvm.schedules.linear.tensorized import tensorize
from apq_tvm.tensorize.meaning.planes import QUAD, ROWS, PlanesStep
from apq_tvm.tensorize.pairs.planes import PlanesInstruction
from apq_tvm.tensorize.pairs.reduce import reduce_intrinsic
from apq_tvm.types import DeviceProfile

_UNROLLED = ("load", "start", "zero", "spill", "store")

_INT32_MAX = 2**31 - 1

TURNED_ROWS = 16
"""Rows of x that turned bytes of weights are worth."""


def _layout(spec: LinearSpec) -> PlanesLayout:
    assert spec.scheme is not None
    return PlanesLayout.of(spec.scheme, spec.details)


def _step(spec: LinearSpec, instruction: PlanesInstruction, width: int) -> PlanesStep:
    """A step of `PLANES_K` columns."""
    layout = _layout(spec)
    return instruction.step(
        width, layout.tables_per_block, PLANES_K, step_group(spec), layout.divides(width)
    )


def _check(
    spec: LinearSpec, profile: DeviceProfile, instruction: PlanesInstruction, width: int
) -> None:
    check_integer_acts(spec)
    check_all_features(profile, instruction.features, instruction.vector)
    step = _step(spec, instruction, width)
    # |Σ (c + offset) x|, and |offset Σ x|; of two digits 16 times that of one, and another
    largest = 127 * (17 if step.two_digits else 1) + 2 * step.added
    columns = step_group(spec) or _layout(spec).padded_k(spec.k)
    if columns * largest * 127 > _INT32_MAX:
        raise NotApplicable(f"K={spec.k}: the sum of its products may exceed int32")


def _add_lanes(sch: Any, block: str, lanes: int, axes: int) -> None:
    *outer, lane = sch.get_loops(sch.get_sblock(block))[-axes:]
    dtype = str(sch.get(sch.get_sblock(block)).writes[0].source.dtype)
    for loop in outer:
        sch.unroll(loop)
    sch.tensorize(lane, reduce_intrinsic("add", lanes, dtype))


def _steps(choice: Choice, width: int = PLANES_K) -> list[tuple[str, PlanesStep]]:
    """(suffix of a block's name, step): of whole stretches of K and of what is left of it."""
    padded = _layout(choice.spec).padded_k(choice.spec.k)
    return [(suffix, replace(choice.plan, k=k)) for suffix, k in parts_of(padded, width)]


def _prepare(choice: Choice, turned: int = 0) -> Preparation | None:
    """As other kernels' activations, or with scales for every lane, `turned` for so many."""
    spec, scheme = choice.spec, choice.spec.scheme
    assert scheme is not None
    if not step_group(spec):
        return prepare_activations(choice)
    group, bits = scheme.act_group, scheme.act_bits
    key = f"spread{turned or ''}_k{spec.k}_g{scheme.act_group}_A{scheme.act_bits}"

    def make(decide: Decide) -> Any:
        return quantize_spread(spec.k, group, 32, task_rows(spec.k, decide), bits, turned)

    return Preparation(key, make, schedule=schedule_quantize)


def _record(
    kind: str,
    instruction: PlanesInstruction,
    width: int,
    m_tile: int,
    func: Callable[[Choice], Any],
    schedule: Callable[[Any, Choice], None],
    decisions: Mapping[str, tuple[int, ...]],
    form: str = "",
    check: Callable[[LinearSpec, DeviceProfile], None] | None = None,
    least: int = 0,
    turned: int = 0,
) -> LinearKernel:
    """The record of a kernel for M >= m_tile, or `least`, whose activations may have groups.

    `form` follows the instruction's name; `check` declines more layers; `turned` is as in
    `quantize_spread`. The plan is its step.
    """

    def declines(spec: LinearSpec, profile: DeviceProfile) -> None:
        _check(spec, profile, instruction, width)
        if check is not None:
            check(spec, profile)

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> PlanesStep:
        for name, choices in decisions.items():
            decide(name, choices)
        return _step(spec, instruction, width)

    return LinearKernel(
        kind,
        f"anyprec{width}",
        8,
        Instruction(instruction.name + form, instruction.features, ROWS),
        least or m_tile,
        check=declines,
        layout=lambda spec, _: _layout(spec),
        func=func,
        schedule=schedule,
        ask=ask,
        prepare=lambda choice: _prepare(choice, turned),
        family="anyprec",
        width=width,
        m_named=m_tile,
    )


_AHEAD = {"ahead": (4096, 2048, 8192, 0)}
_TILES = {"m_tiles": (32, 16, 64), **_AHEAD}


def gemv_kernel(instruction: PlanesInstruction, width: int) -> LinearKernel:
    """The record of the kernel for one row of x."""

    def func(choice: Choice) -> Any:
        return planes_gemv(choice.spec, _layout(choice.spec), choice.plan)

    def schedule(sch: Any, choice: Choice) -> None:
        schedule_stages(sch, _UNROLLED, choice.spec.n * choice.spec.k >= PARALLEL_WEIGHTS)
        for suffix, step in _steps(choice):
            tensorize(sch, f"dot{suffix}", instruction.dot(step, choice["ahead"]))
        _add_lanes(sch, "add", instruction.vector // 4, 2)

    return _record("gemv", instruction, width, 1, func, schedule, _AHEAD)


def check_tables(spec: LinearSpec, profile: DeviceProfile) -> None:
    """Decline what has a table of at most 32 centroids for every row."""
    if _layout(spec).cells:
        raise NotApplicable("is for tables of 128 and 256 centroids; cells are divided")


def check_cells(spec: LinearSpec, profile: DeviceProfile) -> None:
    """Decline tables that rows share, or of more than 32 centroids."""
    if not _layout(spec).cells:
        raise NotApplicable(f"is for divided cells, not for the tables of {spec.scheme}")


def apart_kernel(
    instruction: PlanesInstruction,
    width: int,
    form: str = "",
    check: Callable[[LinearSpec, DeviceProfile], None] = check_tables,
) -> LinearKernel:
    """The record of the kernel for one row of x and tables that fill the registers."""

    def func(choice: Choice) -> Any:
        return planes_gemv_apart(choice.spec, _layout(choice.spec), choice.plan)

    def schedule(sch: Any, choice: Choice) -> None:
        schedule_stages(sch, _UNROLLED, choice.spec.n * choice.spec.k >= PARALLEL_WEIGHTS)
        for suffix, step in _steps(choice, RUN):
            tensorize(sch, f"codes{suffix}", instruction.codes(step))
            dot = instruction.table_dot(step, ROWS // step.tables)
            for table in range(step.tables):
                tensorize(sch, f"dot{suffix}{table}", dot)
        _add_lanes(sch, "add", instruction.vector // 4, 2)

    return _record("gemv", instruction, width, 1, func, schedule, {}, form, check)


def gemm_kernel(instruction: PlanesInstruction, width: int, m_tile: int) -> LinearKernel:
    """The record of the kernel for M >= m_tile."""

    def func(choice: Choice) -> Any:
        spec = choice.spec
        return planes_gemm(spec, _layout(spec), choice.plan, m_tile, choice["m_tiles"])

    def schedule(sch: Any, choice: Choice) -> None:
        schedule_stages(sch, _UNROLLED)
        for suffix, step in _steps(choice):
            dot = instruction.rows(step, m_tile, SUM_ROWS)
            for digit in range(step.digits):
                name = f"{suffix}{digit_suffix(digit)}"
                lookup = instruction.lookup(step, choice["ahead"], digit)
                tensorize(sch, f"lookup{name}", lookup)
                for row in range(0, ROWS, SUM_ROWS):
                    tensorize(sch, f"dot{name}{row}", dot)
        for row in range(0, ROWS, SUM_ROWS):
            _add_lanes(sch, f"add{row}", instruction.vector // 4, 3)

    return _record("gemm", instruction, width, m_tile, func, schedule, _TILES)


def strided_kernel(instruction: PlanesInstruction, width: int, m_tile: int) -> LinearKernel:
    """The record of the kernel for M >= `TURNED_ROWS` whose lanes stay with groups."""
    lanes = instruction.vector // QUAD

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        group = step_group(spec)
        if not group or spec.scheme is None or spec.scheme.act_group > PLANES_K:
            raise NotApplicable(f"is for groups of up to {PLANES_K} activations")
        if spec.k < lanes * group:
            raise NotApplicable(f"K={spec.k} has no {lanes} groups of {group} activations")

    def func(choice: Choice) -> Any:
        spec = choice.spec
        return planes_gemm_strided(spec, _layout(spec), choice.plan, m_tile, choice["m_tiles"])

    def schedule(sch: Any, choice: Choice) -> None:
        schedule_stages(sch, _UNROLLED)
        step, span = choice.plan, lanes * choice.plan.group
        rest = _layout(choice.spec).padded_k(choice.spec.k) - choice.spec.k // span * span
        left = [(f"_left{name}", k) for name, _, k in stretches_left(rest)]
        whole = instruction.rows(replace(step, k=span, strided=True), m_tile, SUM_ROWS)
        for digit in range(step.digits):
            fine = digit_suffix(digit)
            for suffix, k in (("", PLANES_K), *left):
                mine = replace(step, k=k)
                lookup = instruction.lookup(mine, choice["ahead"], digit)
                tensorize(sch, f"lookup{suffix}{fine}", lookup)
                for row in range(0, ROWS, SUM_ROWS) if suffix else ():
                    dot = instruction.rows(mine, m_tile, SUM_ROWS)
                    tensorize(sch, f"dot{suffix}{fine}{row}", dot)
            for row in range(0, ROWS, SUM_ROWS):
                tensorize(sch, f"dot{fine}{row}", whole)
        for row in range(0, ROWS, SUM_ROWS):
            _add_lanes(sch, f"add{row}", instruction.vector // 4, 3)

    return _record(
        "gemm", instruction, width, m_tile, func, schedule, _TILES, "_strided", check,
        TURNED_ROWS, lanes,
    )  # fmt: skip
