"""Which schedule each PrimFunc gets: our own operations by name, everything else generic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tvm

from apq_tvm.schedules.decide import Decide, Defaults
from apq_tvm.schedules.devices import device_rules, whole_schedule
from apq_tvm.schedules.graph.attention.pack_keys import schedule_pack_keys
from apq_tvm.schedules.graph.attention.tasks import schedule_attention
from apq_tvm.schedules.graph.batch_matmul import schedule_batch_matmul
from apq_tvm.schedules.graph.cache import schedule_cache
from apq_tvm.schedules.graph.coded_cache import schedule_coded_cache
from apq_tvm.schedules.graph.convolution import schedule_convolution
from apq_tvm.schedules.graph.embedding import schedule_embedding
from apq_tvm.schedules.graph.generic import schedule_generic
from apq_tvm.schedules.graph.layernorm import schedule_layernorm
from apq_tvm.schedules.graph.softmax import schedule_softmax
from apq_tvm.schedules.graph.trees import schedule_trees
from apq_tvm.schedules.graph.window_reduce import schedule_window_reduce
from apq_tvm.schedules.graph.windows import schedule_windows
from apq_tvm.schedules.linear.quantize import schedule_quantize
from apq_tvm.types import DeviceProfile

if TYPE_CHECKING:
    from apq_tvm.schedules.linear.kernel import Preparation

Rule = Callable[[Any, DeviceProfile, Decide], Any]


RULES: dict[str, Rule] = {
    "attention": schedule_attention,
    "batch_matmul": schedule_batch_matmul,
    "cache": schedule_cache,
    "coded_cache": schedule_coded_cache,
    "convolution": schedule_convolution,
    "depthwise": schedule_window_reduce,
    "embedding": schedule_embedding,
    "layernorm": schedule_layernorm,
    "layernorm_quantize_activations": schedule_quantize,
    "layernorm_quantize_group_bundles": schedule_quantize,
    "layernorm_quantize_row_bundles": schedule_quantize,
    "pack_keys": schedule_pack_keys,
    "pool": schedule_window_reduce,
    "quantize_activations": schedule_quantize,
    "quantize_group_bundles": schedule_quantize,
    "quantize_row_bundles": schedule_quantize,
    "quantize_windows": schedule_quantize,
    "softmax": schedule_softmax,
    "trees": schedule_trees,
    "windows": schedule_windows,
}
"""``apq.op`` of a PrimFunc → its schedule. Beside these are those of a device's own."""


def schedule_function(func: Any, profile: DeviceProfile, decide: Decide) -> tuple[Any, str]:
    """Schedule one PrimFunc that is no quantized linear layer.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Of `apq_tvm.ops`, or out of Relax's LegalizeOps, FuseOps and FuseTIR.
    profile : DeviceProfile
    decide : Decide

    Returns
    -------
    tvm.tirx.PrimFunc, str
        The scheduled function with its attributes kept, and the name ``inspect`` shows:
        ``x86_64_softmax``, ``generic_elementwise``, ...
    """
    op = str(func.attrs["apq.op"]) if func.attrs is not None and "apq.op" in func.attrs else ""
    if op == "dispatch":  # never runs: its variants do (`apq_tvm.lower.operators.linear`)
        return func, "dispatch"
    if func.attrs is not None and "tirx.is_scheduled" in func.attrs:  # made with its threads
        return func, f"{profile.arch}_{op}"
    whole = whole_schedule(profile)
    if whole is not None:
        scheduled, kind = whole(func, profile, decide)
        return scheduled, f"{profile.arch}_{kind}"
    rule = RULES.get(op) or device_rules(profile).get(op)
    if rule is not None:
        return rule(func, profile, decide), f"{profile.arch}_{op}"
    scheduled, kind = schedule_generic(func, profile, decide)
    return scheduled, f"generic_{kind}"


def prepared_by_default(preparation: Preparation, profile: DeviceProfile) -> Any:
    """What a kernel wants done to x, made and scheduled by the first choice of each decision."""
    default = replace(preparation, decide=Defaults())
    with tvm.target.Target(dict(profile.target)):
        return schedule_preparation(default, default.func, profile, default.decide)[0]


def schedule_preparation(
    preparation: Preparation, func: Any, profile: DeviceProfile, decide: Decide
) -> tuple[Any, str]:
    """Schedule what a kernel wants done to x, by its own schedule, as `schedule_function` does.

    Parameters
    ----------
    preparation : Preparation
    func : tvm.tirx.PrimFunc
        ``preparation.func``, as the module holds it.
    profile : DeviceProfile
    decide : Decide
    """
    if preparation.schedule is None:
        return schedule_function(func, profile, decide)
    scheduled = preparation.schedule(func, profile, decide)
    return scheduled, f"{profile.arch}_{func.attrs['apq.op']}"
