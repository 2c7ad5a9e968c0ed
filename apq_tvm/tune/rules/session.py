"""``apq-tvm tune --rules``: from shapes and a scheme to rules in the device's files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

from apq_tvm.codegen.build.toolchain import find_toolchain
from apq_tvm.errors import BadInput
from apq_tvm.tune.api import Request, devices_of, plan_of
from apq_tvm.tune.program import Linker
from apq_tvm.tune.rules import ROWS, SHAPES, Answer, find_rules, write_rules
from apq_tvm.tune.rules.survey import Survey
from apq_tvm.tune.scratch import scratch_folder
from apq_tvm.tune.tasks import extract
from apq_tvm.tuning_logs import FOLDER
from apq_tvm.tuning_logs.records import LINEAR


def tune_rules(
    request: Request, device: str = "local", told: Callable[[str], None] = lambda text: None
) -> tuple[list[Answer], list[Path]]:
    """Time the kernels of a scheme, and write what the device wants otherwise.

    Parameters
    ----------
    request : Request
        Its `shapes` and `rows` are `SHAPES` and `ROWS` where it names none; rules go into the
        folder of its `log`, or that of the device.
    device : str
        As ``--device``.
    told : callable
        Told what is timed next.

    Returns
    -------
    list of Answer, list of Path
        What was found, and the files that hold the rules.

    Raises
    ------
    BadInput
        The target is a GPU or several devices, or times say nothing there.
    ApqError
        The device cannot be reached, or the files not be read or written.
    """
    shapes = request.shapes or (() if request.model else SHAPES)
    plans = plan_of(request.model, request.target, request.scheme, shapes, request.tensor_types)
    profile = plans[0].profile
    if profile.gpu is not None or profile.variants:
        raise BadInput(f"{profile.name}: rules are of one processor; GPUs have bench gpu")
    (place, *_) = devices_of(device, profile)
    place.check(sorted(profile.features))
    if not place.speed:
        raise BadInput(f"{place.name}: emulated times say nothing; no rules follow from them")
    rows = request.rows or ROWS
    tasks = [task for plan in plans for task in extract(plan, rows) if task.op == LINEAR]
    if request.model is not None and request.shapes:
        tasks = [task for task in tasks if (task.spec.n, task.spec.k) in set(request.shapes)]
    threads = request.threads or 1
    with scratch_folder() as folder:
        linker = Linker(find_toolchain(profile.triple, exact=False), folder)
        survey = Survey(place, linker, folder, threads, told=told)
        answers = find_rules([replace(task, rows=(task.m, task.m)) for task in tasks], survey)
    found = [rule for answer in answers for rule in answer.rules]
    if not found:
        return answers, []
    target = Path(request.log).parent if request.log is not None else FOLDER / profile.name
    where = f"{place.describe()}, {threads} threads, {date.today().isoformat()}: tune --rules"
    return answers, write_rules(found, target, where)
