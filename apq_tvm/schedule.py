"""``schedule``: every PrimFunc gets a schedule; what was decided is kept for the manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tvm
from tvm import tirx

from apq_tvm.errors import ApqError, UnsupportedModel, fixed_sizes, gist
from apq_tvm.progress import Progress
from apq_tvm.schedules.decide import Decide, DecideOf, Defaults, Recording
from apq_tvm.schedules.graph.exprs import signature
from apq_tvm.schedules.graph.rewrites.lets import spill_lets
from apq_tvm.schedules.graph.rules import schedule_function, schedule_preparation
from apq_tvm.schedules.recorded import LAYER, fingerprint
from apq_tvm.types import DeviceProfile, LoweredModel, Scheduled, ScheduledModel

if TYPE_CHECKING:
    from apq_tvm.schedules.linear.kernel import Preparation


def schedule(lowered: LoweredModel, progress: Progress, decide: DecideOf) -> ScheduledModel:
    """Schedule every PrimFunc of the module.

    Parameters
    ----------
    lowered : LoweredModel
    progress : Progress
    decide : DecideOf
        For functions that are neither linear kernels nor preparations: those were decided when they
        were lowered.

    Returns
    -------
    ScheduledModel
        What was decided for functions that are equal but for their layer's name, such as gathers,
        is there under the name of the first.

    Raises
    ------
    UnsupportedModel
        TVM refuses a schedule; the message has the function, and the layer it is of.
    """
    profile = lowered.packed.plan.profile
    target, gpu = tvm.target.Target(dict(profile.target)), profile.gpu is not None
    funcs = [(gv, f) for gv, f in lowered.mod.functions.items() if isinstance(f, tirx.PrimFunc)]
    mod = tvm.IRModule(dict(lowered.mod.functions))
    made: dict[str, Scheduled] = {}
    alike: dict[str, Any] = {}
    with progress.stage("schedule", len(funcs)), target:
        for gv, func in funcs:
            name = gv.name_hint
            decided = name in lowered.linears or name in lowered.preparations
            key = name if decided else fingerprint(func)
            try:
                if key not in alike:
                    scheduled, made[name] = _schedule(lowered, name, func, decide)
                    alike[key] = scheduled if gpu else spill_lets(scheduled)
                mod.update_func(gv, _of_layer(alike[key], func))
            except ApqError:
                raise
            except Exception as error:  # TVM's own errors have no base
                message = _refused(lowered, name, func, error)
                raise UnsupportedModel(message) from error
            progress.advance(name)
    return ScheduledModel(lowered, mod, made)


def _schedule(
    lowered: LoweredModel, name: str, func: Any, decide_of: DecideOf
) -> tuple[Any, Scheduled]:
    """One function as the module holds it (names of its own), scheduled."""
    linear = lowered.linears.get(name)
    if linear is not None:
        choice = linear.choice
        source = linear.planned.source if linear.planned is not None else ""
        made = Scheduled(linear.kernel.name, choice.decisions, choice.alternatives, source)
        return linear.kernel.scheduled(choice, func), made
    profile, preparation = lowered.packed.plan.profile, lowered.preparations.get(name)
    if preparation is not None:
        return _prepared(preparation, func, profile)
    answers = decide_of(operation(func), lambda: schedule_function(func, profile, Defaults())[0])
    decide = Recording(answers)
    scheduled, rule = schedule_function(func, profile, decide)
    return scheduled, Scheduled(rule, decide.taken, decide.alternatives, source_of(answers))


def _of_layer(scheduled: Any, func: Any) -> Any:
    """A scheduled function with the layer's name that errors have of another, which is like it."""
    if LAYER not in (func.attrs or {}):
        return scheduled
    return scheduled.with_attr(LAYER, func.attrs[LAYER])


def _refused(lowered: LoweredModel, name: str, func: Any, error: Exception) -> str:
    model, linear = lowered.packed.plan.quantized.model, lowered.linears.get(name)
    remedy = fixed_sizes(spec.shape for spec in model.inputs)
    where = f"{model.name}, layer {linear.layer}" if linear is not None else model.name
    if linear is not None and linear.choice.spec.scheme is not None:
        remedy = f"a layer in float may help (--tensor-type NAME=float), or {remedy}"
    return f"{where}: TVM cannot schedule {name} ({signature(func)}): {gist(error)}; {remedy}"


def _prepared(preparation: Preparation, func: Any, profile: DeviceProfile) -> tuple[Any, Scheduled]:
    """What is done to x: the same one answers for its function and for its schedule."""
    first, decide = preparation.made[1], Recording(preparation.decide)
    scheduled, rule = schedule_preparation(preparation, func, profile, decide)
    taken = {**first.taken, **decide.taken}
    alternatives = {**first.alternatives, **decide.alternatives}
    return scheduled, Scheduled(rule, taken, alternatives, source_of(preparation.decide))


def operation(func: Any) -> str:
    """What the tuner's records call a function: its operation, ``"generic"`` without one."""
    attrs = func.attrs or {}
    return str(attrs["apq.op"]) if "apq.op" in attrs else "generic"


def source_of(decide: Decide) -> str:
    """The record that answers, ``""`` for defaults."""
    return str(getattr(decide, "source", ""))
