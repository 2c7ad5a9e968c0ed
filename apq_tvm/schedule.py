"""``schedule``: every PrimFunc gets a schedule; what was decided is kept for the manifest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx

from apq_tvm.progress import Progress
from apq_tvm.schedules.decide import Decide, Recording
from apq_tvm.schedules.graph.lets import spill_lets
from apq_tvm.schedules.graph.rules import schedule_function, schedule_preparation
from apq_tvm.types import LoweredModel, Scheduled, ScheduledModel


def schedule(
    lowered: LoweredModel, progress: Progress, decide: Callable[[str], Decide]
) -> ScheduledModel:
    """Schedule every PrimFunc of the module.

    Parameters
    ----------
    lowered : LoweredModel
    progress : Progress
    decide : callable
        Name of a function that is no linear kernel → how its schedule is decided.

    Returns
    -------
    ScheduledModel
    """
    target = tvm.target.Target(dict(lowered.packed.plan.profile.target))
    funcs = [(gv, f) for gv, f in lowered.mod.functions.items() if isinstance(f, tirx.PrimFunc)]
    mod = tvm.IRModule(dict(lowered.mod.functions))
    made: dict[str, Scheduled] = {}
    with progress.stage("schedule", len(funcs)), target:
        for gv, func in funcs:
            scheduled, made[gv.name_hint] = _schedule(lowered, gv.name_hint, func, decide)
            mod.update_func(gv, spill_lets(scheduled))
            progress.advance(gv.name_hint)
    return ScheduledModel(lowered, mod, made)


def _schedule(
    lowered: LoweredModel, name: str, func: Any, decide_of: Callable[[str], Decide]
) -> tuple[Any, Scheduled]:
    """One function as the module holds it (names of its own), scheduled."""
    linear = lowered.linears.get(name)
    if linear is not None:
        sch = tvm.s_tir.Schedule(func)
        linear.kernel.schedule(sch, linear.choice)
        return sch.mod["main"], Scheduled(linear.kernel.name, linear.choice.decisions)
    profile, decide = lowered.packed.plan.profile, Recording(decide_of(name))
    preparation = lowered.preparations.get(name)
    if preparation is not None:
        scheduled, rule = schedule_preparation(preparation, func, profile, decide)
        return scheduled, Scheduled(rule, {**preparation.decisions, **decide.taken})
    scheduled, rule = schedule_function(func, profile, decide)
    return scheduled, Scheduled(rule, decide.taken)
