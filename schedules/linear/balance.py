"""Schedules of ``W2*`` layers for few rows of x, and their kernel records, for any CPU.

The loops are those of `apq_tvm.schedules.x86.gemv`; the decisions ``streams`` and ``ahead`` mean
the same there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.codegen.layouts import BalanceLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.few_rows.balance import balance_linear
from apq_tvm.ops.linear.nest import Blocking
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_features, check_integer_acts
from apq_tvm.schedules.linear.gemv import schedule_gemv
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel
from apq_tvm.schedules.linear.streams import AHEADS, choose_streams
from apq_tvm.types import DeviceProfile

_INT32_MAX = 2**31 - 1


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
    assert spec.scheme is not None
    check_integer_acts(spec)
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


def layout_of(spec: LinearSpec, lanes: int) -> BalanceLayout:
    """The layout of a ``W2*`` layer for vectors of so many lanes."""
    assert spec.scheme is not None
    return BalanceLayout(lanes, spec.scheme.group_size)


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

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Blocking:
        layout = layout_of(spec, lanes)
        streams = _streams(decide, layout, spec, m_tile)
        decide("ahead", aheads)
        return Blocking.of(layout, spec.n, spec.k, m_tile, streams)

    def func(choice: Choice) -> Any:
        return balance_linear(choice.spec, layout_of(choice.spec, lanes), choice.plan)

    def schedule(sch: Any, choice: Choice) -> None:
        chosen, whole = intrinsic(m_tile, choice["ahead"]), choice.spec.n % lanes == 0
        schedule_gemv(sch, choice, choice.plan, chosen, whole)

    return LinearKernel(
        "gemv",
        "W2star",
        8,
        Instruction(name, tuple(f for names in features for f in names), 3 * lanes),
        m_tile,
        check=lambda spec, profile: check_balance(spec, profile, lanes, features),
        layout=lambda spec, profile: layout_of(spec, lanes),
        func=func,
        schedule=schedule,
        ask=ask,
        family="balance",
        m_named=m_tile,
    )
