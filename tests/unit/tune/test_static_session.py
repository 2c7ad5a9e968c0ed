"""Records without a device: who may be chosen, and that they say so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from apq_tvm import pipeline
from apq_tvm.cli.main import app
from apq_tvm.errors import BuildError
from apq_tvm.tune.api import Request, Session, prepare
from apq_tvm.tune.session import Quiet
from apq_tvm.tune.space import Point
from apq_tvm.tune.static.ranking import NotRanked
from apq_tvm.tune.static.session import CHECKED, tune_static
from apq_tvm.tune.tasks import Task
from apq_tvm.tuning_logs.records import STATIC, TIMED, read_records
from tests.onnx_models import build, save


def session(log: Path, target: str = "znver4", model: Path | None = None) -> Session:
    shapes = [] if model else [(64, 128)]
    return prepare(Request(model, target, "W4A8g32", shapes, [1], None, None, {}, None, log, 2, 0))


def run(made: Session, costs: Any, right: Any) -> Any:
    return tune_static(made.planned, made.profile, made.settings, Quiet(), costs=costs, right=right)


def falling(task: Task, points: Sequence[Point]) -> list[float]:
    """The later, the cheaper."""
    return [100.0 - i for i in range(len(points))]


def test_the_cheapest_that_is_right_is_recorded_as_static(tmp_path: Path) -> None:
    log, asked = tmp_path / "log.json", dict[str, list[Point]]()

    def right(task: Task, point: Point, folder: Path) -> bool:
        asked.setdefault(task.key, []).append(point)
        return len(asked[task.key]) == 2

    made = session(log)
    findings = run(made, falling, right)
    records = read_records(log).records
    assert len(records) == sum(f.record is not None for f in findings) > 0
    for finding in findings:
        task = finding.planned.task
        if finding.record is None:
            assert "should be faster" in finding.why
            continue
        assert finding.record.how == STATIC and finding.record.kernel == asked[task.key][1].kernel
        assert finding.record.interval[0] == 1 < finding.record.ratio
        assert "not timed" in finding.record.tells() and "znver4" in finding.record.machine
        assert finding.best == asked[task.key][1]


def test_a_timed_record_wins(tmp_path: Path) -> None:
    from dataclasses import replace

    log = tmp_path / "log.json"
    run(session(log), falling, lambda *_: True)
    static = read_records(log).records[0]
    timed = replace(static, how=TIMED, ratio=1.03, interval=(1.021, 1.04), decisions={})
    assert timed.worth > static.worth
    assert max([static, timed], key=lambda record: record.worth) is timed


def test_a_module_is_compiled_by_static_records(tmp_path: Path) -> None:
    """Layers, and functions beside them; the manifest says how they came to be."""
    log = tmp_path / "log.json"
    weight = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32)
    graph = build([("MatMul", "x w", "a"), ("Softmax", "a", "y")],
                  {"x": ("float32", ["rows", 128])}, "y", {"w": weight})  # fmt: skip
    model = save(graph, tmp_path)
    run(session(log, "host", model), falling, lambda *_: True)
    kernels = {record.kernel for record in read_records(log).records}
    assert "softmax" in kernels and len(kernels) > 1
    plan = pipeline.plan(model, scheme="W4A8g32", search=False, log=log)
    manifest = pipeline.build(plan, tmp_path / "module").manifest
    assert any("not timed" in k["source"] for k in manifest["layers"][0]["kernels"])
    sources = {f["name"]: f["source"] for f in manifest["functions"]}
    assert any("softmax" in name and "not timed" in text for name, text in sources.items()), sources


@pytest.mark.parametrize(
    ("costs", "right", "why"),
    [
        (lambda task, points: [1.0] * len(points), lambda *_: True, "should be faster"),
        (lambda task, points: [0.0] * len(points), lambda *_: True, "should be faster"),
        (falling, lambda *_: False, f"none of the best {CHECKED} candidates was right"),
    ],
)
def test_nothing_is_recorded_without_reason(
    tmp_path: Path, costs: Any, right: Any, why: str
) -> None:
    findings = run(session(tmp_path / "log.json"), costs, right)
    assert findings[0].why == why or why in findings[0].why
    assert not (tmp_path / "log.json").exists()


@pytest.mark.parametrize("error", [NotRanked("nobody knows"), BuildError("no compiler")])
def test_a_task_that_cannot_be_ranked_does_not_stop_the_others(
    tmp_path: Path, error: Exception
) -> None:
    made = session(tmp_path / "log.json")
    first = made.planned[0].task.key

    def costs(task: Task, points: Sequence[Point]) -> list[float]:
        if task.key == first:
            raise error
        return falling(task, points)

    findings = run(made, costs, lambda *_: True)
    assert findings[0].why == str(error) and len(findings) == len(made.planned)
    assert any(finding.record for finding in findings[1:])


def test_the_command_says_why_not(tmp_path: Path) -> None:
    words = [
        "tune",
        "--static",
        "--shapes",
        "64x128",
        "--m",
        "1",
        "--log",
        str(tmp_path / "l.json"),
    ]
    result = CliRunner().invoke(app, [*words, "--target", "x86-64-v3"])
    assert result.exit_code == 0, result.stderr
    assert "not ranked without a device" in result.stdout
    refused = CliRunner().invoke(app, [*words, "--device", "ssh://board"])
    assert refused.exit_code == 1 and "leave --device out" in refused.stderr
