"""Functions that are no linear layers: candidates are right, and records are found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.codegen.build.toolchain import find_toolchain
from apq_tvm.schedules.devices import find_profile
from apq_tvm.tune.api import plan_of
from apq_tvm.tune.functions.graph import FunctionWorkshop, GraphTask, extract_functions
from apq_tvm.tune.local import Local
from apq_tvm.tune.measure import OK, Bench
from apq_tvm.tune.program import Linker
from apq_tvm.tune.space import covering
from apq_tvm.tune.tasks import Task
from apq_tvm.tune.verify import functions_of, verify
from apq_tvm.tuning_logs.records import Record, write_records
from tests.onnx_models import build, save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weight = np.random.default_rng(0).standard_normal((48, 40)).astype(np.float32)
    nodes = [("MatMul", "x w", "a"), ("Softmax", "a", "b"), ("Erf", "b", "y")]
    graph = build(nodes, {"x": ("float32", ["rows", 48])}, "y", {"w": weight})
    return save(graph, tmp_path_factory.mktemp("functions"))


@pytest.fixture(scope="module")
def tasks(model: Path) -> list[GraphTask]:
    (plan,) = plan_of(model, "host", "W8A8")
    return extract_functions(plan, {"rows": 24})


def test_candidates_give_what_the_plain_loops_give(tasks: list[GraphTask], tmp_path: Path) -> None:
    assert tasks and all(task.shapes[-1] == (24, 40) for task in tasks)
    linker = Linker(find_toolchain(), tmp_path)
    for task in tasks:
        points = task.space().points
        workshop = FunctionWorkshop(task, tmp_path, threads=1)
        bench = Bench(workshop, linker, Local(), tmp_path, points[0])
        assert bench.fingerprint == task.schedule
        made = bench.trials(covering(points)[1:6], rounds=1)
        assert {trial.status for trial in made} == {OK}, made


def test_a_record_of_a_function_is_used(
    model: Path, tasks: list[GraphTask], tmp_path: Path
) -> None:
    (task,) = [task for task in tasks if task.kernel == "softmax"] or tasks[:1]
    answers = task.answers(task.space().points[-1])
    assert answers
    record = Record("function", task.kernel, answers, task.schedule, interval=(1.1, 1.2))
    write_records(tmp_path / "log.json", [record])
    made = pipeline.compile(model, tmp_path / "tuned", scheme="W8A8", log=tmp_path / "log.json")
    (found,) = [f for f in made.manifest["functions"] if f["source"].startswith("record: ")]
    assert found["decisions"].items() >= dict(answers).items()


class Emulated(Local):
    """Checks, and times nothing."""

    speed = False


def test_records_of_functions_are_verified_by_their_model(
    model: Path, tasks: list[GraphTask], tmp_path: Path
) -> None:
    (softmax,) = (task for task in tasks if task.kernel == "softmax")
    record = Record("function", "softmax", {}, softmax.schedule)
    functions = functions_of(model, "host", "W8A8")
    first = next(task for task in functions if isinstance(task, Task))
    prepared = Record("function", first.name, {}, first.schedule_of(first.space().points[0]))
    old = replace(record, schedule="0" * 16)
    records = (record, prepared, old)
    made = list(verify(records, find_profile("host"), Emulated(), tmp_path, functions))
    verdicts = [(v.good, v.checked) for v in made]
    assert verdicts == [(True, True), (True, True), (False, False)], [v.why for v in made]
    assert "no softmax of the model has its schedule" in made[2].why and not made[2].bad
    (alone,) = verify([record], find_profile("host"), Emulated(), tmp_path)
    assert not alone.checked and "--model" in alone.why
