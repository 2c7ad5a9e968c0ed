"""``schedule``: every PrimFunc gets a schedule, and its name is kept for ``inspect``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import s_tir, tirx

from apq_tvm.progress import Progress
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.graph.lets import spill_lets
from apq_tvm.schedules.graph.rules import schedule_function
from apq_tvm.types import LoweredModel, ScheduledModel


def schedule(
    lowered: LoweredModel, decide: Callable[[str, Any], Any], progress: Progress
) -> ScheduledModel:
    """Schedule every PrimFunc of the module.

    Parameters
    ----------
    lowered : LoweredModel
    decide : callable
        ``(kernel name, LinearSpec) -> Decide``; must answer as it did for `lower`.
    progress : Progress

    Returns
    -------
    ScheduledModel
    """
    profile = lowered.packed.plan.profile
    target = tvm.target.Target(dict(profile.target))
    funcs = [(gv, f) for gv, f in lowered.mod.functions.items() if isinstance(f, tirx.PrimFunc)]
    mod = tvm.IRModule(dict(lowered.mod.functions))
    names: dict[str, str] = {}
    with progress.stage("schedule", len(funcs)), target:
        for gv, func in funcs:
            linear = lowered.linears.get(gv.name_hint)
            if linear is not None:
                sch = s_tir.Schedule(func)
                name = linear.kernel.name
                linear.kernel.schedule(sch, linear.spec, profile, decide(name, linear.spec))
                scheduled = sch.mod["main"]
            else:
                scheduled, name = schedule_function(func, profile, Defaults())
            mod.update_func(gv, spill_lets(scheduled))
            names[gv.name_hint] = name
            progress.advance(gv.name_hint)
    return ScheduledModel(lowered, mod, names)
