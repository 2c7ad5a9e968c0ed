"""Default schedules of any-precision linear layers on CPUs, and their kernel records, one a width.

What the decisions mean:

- ``ahead``: software prefetch distance in bytes of every plane (`apq_tvm.schedules.x86.gemv`);
- ``m_tiles``: tiles of rows of x that share one lookup of the weights.
"""

from __future__ import annotations

from typing import Any, Protocol

from apq_tvm.codegen.layouts.planes import PlanesLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.activations.spread import quantize_spread
from apq_tvm.ops.few_rows.anyprec import RUN, SUM_ROWS, planes_gemm, planes_gemv, planes_gemv_apart
from apq_tvm.ops.few_rows.anyprec_task import UNIT_K, unit_group
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.task import STAGES
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.kernel import (
    Choice,
    LinearKernel,
    Preparation,
    legacy,
    prepare_activations,
)
from apq_tvm.schedules.linear.quantize import ELEMENTS_PER_TASK
from apq_tvm.tensorize.meaning.planes import ROWS, PlanesUnit
from apq_tvm.tensorize.pairs.reduce import reduce_intrinsic
from apq_tvm.types import DeviceProfile


class PlanesInstruction(Protocol):
    """How codes are looked up and multiplied.

    The methods that return names register intrinsics of `apq_tvm.tensorize.pairs.planes`.
    """

    @property
    def name(self) -> str:
        """Part of the kernels' names."""

    @property
    def vector(self) -> int:
        """Bytes of a register."""

    @property
    def offset(self) -> int:
        """What centroids are increased by."""

    @property
    def features(self) -> tuple[str, ...]:
        """LLVM features it needs, all of them."""

    def unit(self, bits: int, tables: int, k: int, group: int) -> PlanesUnit:
        """A unit for this instruction; `group` as there."""

    def dot(self, bits: int, tables: int, k: int, ahead: int, group: int) -> str:
        """Name the product of a unit with a row of x, prefetched `ahead` bytes."""

    def lookup(self, bits: int, tables: int, k: int, ahead: int) -> str:
        """Name the lookup of a unit."""

    def rows(self, m: int, rows: int, k: int, group: int) -> str:
        """Name the product of looked up bytes with rows of x."""


_UNROLLED = ("load", "start", "zero", "spill", "store")

_PARALLEL = 1 << 16
"""Weights from which on a second thread pays (`apq_tvm.schedules.x86.gemv`)."""

_INT32_MAX = 2**31 - 1


def _layout(spec: LinearSpec) -> PlanesLayout:
    assert spec.scheme is not None
    return PlanesLayout.of(spec.scheme, spec.details)


def _unit(instruction: PlanesInstruction, spec: LinearSpec, width: int) -> PlanesUnit:
    return instruction.unit(width, _layout(spec).tables_per_block, UNIT_K, unit_group(spec))


def _check(
    spec: LinearSpec, profile: DeviceProfile, instruction: PlanesInstruction, width: int
) -> None:
    scheme = spec.scheme
    if scheme is None or scheme.family != "anyprec":
        raise NotApplicable(f"is for any-precision weights, not {scheme or 'float32'}")
    if width not in scheme.widths:
        raise NotApplicable(f"is for {width} bits, not {scheme}")
    if not scheme.integer_acts:
        raise NotApplicable(f"is for integer activations, not {scheme}")
    missing = [f for f in instruction.features if f not in profile.features]
    if missing or profile.vector_bytes < instruction.vector:
        raise NotApplicable(f"needs {' and '.join(instruction.features)}; {profile.name} has not")
    # |Σ (c + offset) x|, and |offset Σ x|
    largest = 127 + 2 * instruction.offset
    columns = unit_group(spec) or _layout(spec).padded_k(spec.k)
    if columns * largest * 127 > _INT32_MAX:
        raise NotApplicable(f"K={spec.k}: the sum of its products may exceed int32")


def _schedule(sch: Any, parallel: bool) -> None:
    """Parallel tasks; every stage a vector wide, those of a tile unrolled into registers."""
    (task,) = sch.get_loops(sch.get_sblock("task"))
    if parallel:
        sch.parallel(task)
    for name in map(str, sch.get(sch.get_sblock("root")).annotations[STAGES]):
        *outer, lane = sch.get_loops(sch.get_sblock(name))
        sch.vectorize(lane)
        if name.startswith(_UNROLLED):
            for loop in outer:
                sch.unroll(loop)


def _tensorize(sch: Any, block: str, intrinsic: str, axes: int) -> None:
    sch.tensorize(sch.get_loops(sch.get_sblock(block))[-axes], intrinsic)


def _add_lanes(sch: Any, block: str, lanes: int, axes: int) -> None:
    *outer, lane = sch.get_loops(sch.get_sblock(block))[-axes:]
    dtype = str(sch.get(sch.get_sblock(block)).writes[0].source.dtype)
    for loop in outer:
        sch.unroll(loop)
    sch.tensorize(lane, reduce_intrinsic("add", lanes, dtype))


def _parts(spec: LinearSpec) -> list[tuple[str, int]]:
    """(suffix of a block's name, columns): whole units and the half one at the end of K."""
    units, tail = divmod(_layout(spec).padded_k(spec.k), UNIT_K)
    return ([("", UNIT_K)] if units else []) + ([("_tail", tail)] if tail else [])


def _ahead(decide: Decide) -> int:
    return decide("ahead", (4096, 2048, 8192, 0))


def _axes(instruction: PlanesInstruction, k: int) -> int:
    return 5 if k > instruction.vector else 4


def _record(
    kind: str, instruction: PlanesInstruction, width: int, m_tile: int, func: Any, schedule: Any
) -> LinearKernel:
    """The record of a kernel for M >= m_tile, whose activations may have groups."""
    return legacy(
        f"{kind}_anyprec{width}A8_{instruction.name}_r{ROWS}m{m_tile}",
        m_tile,
        -1,
        lambda spec, profile: _check(spec, profile, instruction, width),
        lambda spec, _: _layout(spec),
        func,
        schedule,
        family="anyprec",
        width=width,
        prepare=_prepare,
    )


def _prepare(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Preparation | None:
    """As other kernels' activations, or with scales for every lane."""
    scheme = spec.scheme
    assert scheme is not None
    if not unit_group(spec):
        return prepare_activations(Choice(spec, profile, {}, {}))
    rows = max(1, ELEMENTS_PER_TASK // spec.k)
    func = quantize_spread(spec.k, scheme.act_group, 32, rows, scheme.act_bits)
    return Preparation(f"spread_k{spec.k}_g{scheme.act_group}_A{scheme.act_bits}", func)


def gemv_kernel(instruction: PlanesInstruction, width: int) -> LinearKernel:
    """The record of the kernel for one row of x."""

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        return planes_gemv(spec, _layout(spec), _unit(instruction, spec, width))

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        tables, ahead = _layout(spec).tables_per_block, _ahead(decide)
        _schedule(sch, spec.n * spec.k >= _PARALLEL)
        for suffix, k in _parts(spec):
            dot = instruction.dot(width, tables, k, ahead, unit_group(spec))
            _tensorize(sch, f"dot{suffix}", dot, _axes(instruction, k))
        _add_lanes(sch, "add", instruction.vector // 4, 2)

    return _record("gemv", instruction, width, 1, func, schedule)


class ApartInstruction(PlanesInstruction, Protocol):
    """One for kernels that put codes together first."""

    def codes(self, bits: int, k: int) -> str:
        """Name the putting together of a unit's codes."""

    def table_dot(self, bits: int, rows: int, k: int, group: int) -> str:
        """Name the product of looked up codes of rows that share a table with a row of x."""


def apart_kernel(instruction: ApartInstruction, width: int) -> LinearKernel:
    """The record of the kernel for one row of x and tables that fill the registers."""

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        return planes_gemv_apart(spec, _layout(spec), _unit(instruction, spec, width))

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        tables = _layout(spec).tables_per_block
        _schedule(sch, spec.n * spec.k >= _PARALLEL)
        runs, rest = divmod(_layout(spec).padded_k(spec.k), RUN)
        for suffix, k in ([("", RUN)] if runs else []) + ([("_tail", rest)] if rest else []):
            _tensorize(sch, f"codes{suffix}", instruction.codes(width, k), 2)
            for table in range(tables):
                dot = instruction.table_dot(width, ROWS // tables, k, unit_group(spec))
                _tensorize(sch, f"dot{suffix}{table}", dot, 5 if tables < ROWS else 4)
        _add_lanes(sch, "add", instruction.vector // 4, 2)

    return _record("gemv", instruction, width, 1, func, schedule)


def gemm_kernel(instruction: PlanesInstruction, width: int, m_tile: int) -> LinearKernel:
    """The record of the kernel for M >= m_tile."""

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        m_tiles = decide("m_tiles", (32, 16, 64))
        unit = _unit(instruction, spec, width)
        return planes_gemm(spec, _layout(spec), unit, m_tile, m_tiles)

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        decide("m_tiles", (32, 16, 64))
        tables, ahead = _layout(spec).tables_per_block, _ahead(decide)
        _schedule(sch, True)
        for suffix, k in _parts(spec):
            lookup = instruction.lookup(width, tables, k, ahead)
            _tensorize(sch, f"lookup{suffix}", lookup, 3)
            for row in range(0, ROWS, SUM_ROWS):
                dot = instruction.rows(m_tile, SUM_ROWS, k, unit_group(spec))
                _tensorize(sch, f"dot{suffix}{row}", dot, _axes(instruction, k))
        for row in range(0, ROWS, SUM_ROWS):
            _add_lanes(sch, f"add{row}", instruction.vector // 4, 3)

    return _record("gemm", instruction, width, m_tile, func, schedule)
