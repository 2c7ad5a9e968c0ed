"""Schedules of ``W2*`` layers for few rows of x, and their kernel records, for any CPU.

The loops are those of `apq_tvm.schedules.x86.gemv`; the decisions ``streams`` and ``ahead`` mean
the same there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.codegen.layouts import BalanceLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.few_rows.balance import balance_blocking, balance_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_features
from apq_tvm.schedules.linear.gemv import schedule_gemv
from apq_tvm.schedules.linear.kernel import LinearKernel, legacy
from apq_tvm.schedules.linear.streams import choose_streams
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x for which codes are taken apart once."""

AHEADS = (4096, 0, 2048, 8192)
"""Software prefetch distances in bytes."""

_INT32_MAX = 2**31 - 1
_PARALLEL = 1 << 16


def check_balance(
    spec: LinearSpec, profile: DeviceProfile, lanes: int, features: tuple[tuple[str, ...], ...]
) -> None:
    """Decline what kernels with such vectors cannot compute on the device.

    Parameters
    ----------
    spec : LinearSpec
    profile : DeviceProfile
    lanes : int
        L of the layout.
    features : tuple of tuple of str
        LLVM features: one of every tuple is needed.

    Raises
    ------
    NotApplicable
    """
    if spec.scheme is None or spec.scheme.family != "balance":
        raise NotApplicable(f"is for W2*, not {spec.scheme or 'float32 weights'}")
    if not spec.scheme.integer_acts:
        raise NotApplicable(f"is for integer activations, not {spec.scheme}")
    for names in features:
        check_features(profile, names, lanes)
    width = BalanceLayout(lanes, spec.scheme.group_size).group_width(spec.k)
    if 2 * width * 124 * 127 > _INT32_MAX:  # codes of three digits are summed before the digits
        raise NotApplicable(
            f"K={spec.k}: {width} products of W2* codes may exceed int32; use groups"
        )


def _streams(decide: Decide, layout: BalanceLayout, spec: LinearSpec, m_tile: int) -> int:
    choices = (2, 1, 4) if m_tile == 1 and layout.lanes == 16 else (1, 2)
    return choose_streams(decide, choices, layout.row_blocks(spec.n))


def gemv_kernel(
    name: str,
    lanes: int,
    features: tuple[tuple[str, ...], ...],
    intrinsic: Callable[[int, int], str],
    m_tile: int,
    aheads: tuple[int, ...] = AHEADS,
) -> LinearKernel:
    """The record of one kernel for M >= m_tile.

    Parameters
    ----------
    name : str
        Of the instruction.
    lanes, features
        As `check_balance`.
    intrinsic : callable
        (rows of x, bytes to prefetch ahead) → registered name of the product of a unit.
    m_tile : int
    aheads : tuple of int
        Prefetch distances to try.
    """

    def layout_of(spec: LinearSpec, profile: DeviceProfile) -> BalanceLayout:
        assert spec.scheme is not None
        return BalanceLayout(lanes, spec.scheme.group_size)

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_balance(spec, profile, lanes, features)

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = layout_of(spec, profile)
        return balance_linear(spec, layout, m_tile, _streams(decide, layout, spec, m_tile))

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        layout = layout_of(spec, profile)
        streams = _streams(decide, layout, spec, m_tile)
        blocking = balance_blocking(layout, spec.n, spec.k, m_tile, streams)
        product = intrinsic(m_tile, decide("ahead", aheads))
        whole, parallel = spec.n % lanes == 0, spec.n * spec.k >= _PARALLEL
        schedule_gemv(sch, blocking, product, whole, 1, parallel)

    return legacy(
        f"gemv_W2sA8_{name}_r{3 * lanes}m{m_tile}",
        m_tile,
        -1,
        check,
        layout_of,
        func,
        schedule,
        family="balance",
    )
