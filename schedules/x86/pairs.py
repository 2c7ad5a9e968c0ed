"""8-bit codes by ``vpmaddubsw`` where no two neighbours exceed 152 together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from apq_tvm.errors import NotApplicable
from apq_tvm.formats.integer import PAIR_MOST, PAIR_SUM
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.pairs import PairGemm
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_integer, interleaved
from apq_tvm.schedules.linear.gemm_stages import schedule_stages
from apq_tvm.schedules.linear.kernel import Choice, LinearKernel, prepare_activations
from apq_tvm.schedules.linear.streams import M_TILES
from apq_tvm.schedules.x86 import gemv
from apq_tvm.schedules.x86.gemm import integer_blocking, panel_block
from apq_tvm.schedules.x86.instructions import VNNI, dot_record
from apq_tvm.schedules.x86.tiles import TALLEST, micro_kernel, widened_tiles
from apq_tvm.tensorize.x86.dot import PAIRS
from apq_tvm.tensorize.x86.gemm import pair_gemm_intrinsic
from apq_tvm.types import DeviceProfile

LANES = PAIRS.rows

WEIGHTS = "Wp8"
"""In names: 8-bit codes whose neighbours fit together."""

_unsigned = partial(prepare_activations, unsigned=True)


def _check(spec: LinearSpec, profile: DeviceProfile) -> None:
    check_integer(spec, profile, PAIRS.features, LANES)
    assert spec.scheme is not None
    if profile.features & VNNI:
        raise NotApplicable(f"{profile.name} has vpdpbusd, which takes any codes and is faster")
    if spec.scheme.zero_points or not spec.asymmetric:
        raise NotApplicable(f"is for activations and weights of one scale a row, not {spec.scheme}")
    if PAIR_SUM not in dict(spec.details):
        raise NotApplicable(
            f"two neighbouring codes are more than {PAIR_MOST} together: vpmaddubsw would saturate"
        )


def _ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> GemmBlocking:
    most = partial(panel_block, profile)
    return integer_blocking(spec, interleaved(spec, LANES), widened_tiles, decide, most)


def _func(choice: Choice) -> Any:
    return PairGemm(choice.spec, interleaved(choice.spec, LANES), choice.plan).build()


def _schedule(sch: Any, choice: Choice) -> None:
    schedule_stages(sch)
    micro_kernel(sch, pair_gemm_intrinsic(choice.plan.tile(LANES)))


PAIR_GEMM = LinearKernel(
    "gemm", WEIGHTS, 8, dot_record(PAIRS), TALLEST,
    check=_check, layout=lambda spec, profile: interleaved(spec, LANES),
    func=_func, schedule=_schedule, ask=_ask, bits=8,
    prepare=_unsigned,
)  # fmt: skip
"""Many rows of x."""


def _gemv(m_tile: int) -> LinearKernel:
    record = gemv.integer_kernel(PAIRS, 8, m_tile, WEIGHTS)
    return replace(record, check=_check, prepare=_unsigned)


PAIR_KERNELS = (PAIR_GEMM, *map(_gemv, M_TILES))
"""In order of preference, and before those of any codes of 8 bits."""
