"""The record of one kernel for quantized (or float) linear layers, as a device's table lists it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apq_tvm.codegen.layouts import FloatLayout, InterleavedLayout
    from apq_tvm.ops.linear import LinearSpec
    from apq_tvm.schedules.decide import Decide
    from apq_tvm.types import DeviceProfile


@dataclass(frozen=True)
class LinearKernel:
    """One way to compute ``y = act(x Wᵀ + b) + residual`` on a device.

    Parameters
    ----------
    name : str
        ``{family}_W{bits}A{act bits}_{instruction}_r{rows}[m{M tile}]``, as
        ``gemv_W4A8_maddubs_r8m1``.
    m_min, m_max : int
        Rows of x it may be called with (-1 is no limit). `m_min` is a promise the caller keeps: a
        kernel with an M tile reads that many rows. `m_max` is where a better one takes over,
        measured.
    check : callable
        Raises `NotApplicable` with the reason if the kernel cannot compute the layer on the device.
    layout : callable
        How the weights must lie; the same for every kernel of a layer on a device.
    func : callable
        The unscheduled PrimFunc, M dynamic.
    schedule : callable
        Schedules that PrimFunc in place. `decide` must answer as it did for `func`.
    bits : int or None
        Weight bits it is for, None for any or for float weights. Kernels of other bits are no
        alternative for a layer, so nobody is told why they were not chosen.
    """

    name: str
    m_min: int
    m_max: int
    check: Callable[[LinearSpec, DeviceProfile], None]
    layout: Callable[[LinearSpec, DeviceProfile], InterleavedLayout | FloatLayout]
    func: Callable[[LinearSpec, DeviceProfile, Decide], Any]
    schedule: Callable[[Any, LinearSpec, DeviceProfile, Decide], None]
    bits: int | None = None
