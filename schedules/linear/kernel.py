"""The record of one kernel for quantized (or float) linear layers, as a device's table lists it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apq_tvm.codegen.layouts import WeightLayout
    from apq_tvm.ops.linear.spec import LinearSpec
    from apq_tvm.schedules.decide import Decide
    from apq_tvm.types import DeviceProfile


@dataclass(frozen=True)
class Preparation:
    """What is done to x f32 [M, K] before a kernel reads it.

    Parameters
    ----------
    key : str
        Name of the PrimFunc. Kernels with one key, in layers that read one x, share the call.
    func : tvm.tirx.PrimFunc
        ``(x, *weights, *outputs)``, whose outputs are the kernel's first arguments. Unscheduled:
        `apq_tvm.schedules.graph.rules` knows what to do by its attribute ``apq.op``.
    weights : tuple of str
        Packed arrays of the layer that it reads too.
    """

    key: str
    func: Any
    weights: tuple[str, ...] = ()


def prepare_activations(
    spec: LinearSpec, profile: DeviceProfile, decide: Decide
) -> Preparation | None:
    """``(xq, xs, xsum)`` of `apq_tvm.ops.activations.quantize`; x itself for float activations."""
    from apq_tvm.schedules.decide import Defaults
    from apq_tvm.schedules.linear.quantize import quantize_func

    scheme = spec.scheme
    if scheme is None or not scheme.integer_acts:
        return None
    groups = (scheme.act_group, scheme.group_size)
    named = "_".join(f"g{group}" if group > 0 else "row" for group in groups)
    bits = "" if scheme.act_bits == 8 else f"_A{scheme.act_bits}"
    func = quantize_func(spec.k, *groups, profile, Defaults(), scheme.act_bits)
    return Preparation(f"quantize_k{spec.k}_{named}{bits}", func)


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
        Weight bits it is for, None for any or for float weights. Kernels of other bits or families
        are no alternative for a layer, so nobody is told why they were not chosen.
    family : str
        Of the formats it is for; ``""`` for any.
    width : int
        Bits it is for, where a scheme leaves them to be chosen at run time; else 0.
    prepare : callable
        What x needs first; None is returned where the kernel takes x as it is.
    """

    name: str
    m_min: int
    m_max: int
    check: Callable[[LinearSpec, DeviceProfile], None]
    layout: Callable[[LinearSpec, DeviceProfile], WeightLayout]
    func: Callable[[LinearSpec, DeviceProfile, Decide], Any]
    schedule: Callable[[Any, LinearSpec, DeviceProfile, Decide], None]
    bits: int | None = None
    family: str = "int"
    width: int = 0
    prepare: Callable[[LinearSpec, DeviceProfile, Decide], Preparation | None] = prepare_activations
