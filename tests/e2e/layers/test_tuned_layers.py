"""Candidates of the tuner, built and run here, and what compilations make of records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.codegen.build.toolchain import find_toolchain
from apq_tvm.explain import explain, explanation_lines
from apq_tvm.module import load_module
from apq_tvm.schedules.recorded import default_of_kernel
from apq_tvm.tune.api import plan_of, tune
from apq_tvm.tune.candidates import Workshop
from apq_tvm.tune.local import Local
from apq_tvm.tune.measure import OK, WRONG, Bench
from apq_tvm.tune.program import Linker
from apq_tvm.tune.space import Point, Space, covering
from apq_tvm.tune.tasks import Task, extract
from apq_tvm.tuning_logs.records import Record, write_records
from tests.onnx_models import build, save

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def linker(tmp_path_factory: pytest.TempPathFactory) -> Linker:
    return Linker(find_toolchain(), tmp_path_factory.mktemp("linker"))


def bench_of(task: Task, linker: Linker, folder: Path) -> tuple[Bench, Space]:
    space = task.space()
    workshop = Workshop(task, folder, threads=2)
    return Bench(workshop, linker, Local(), folder, space.points[0]), space


CASES = [
    ("W4A8g32", 96, 160, 1), ("W8A8", 328, 200, 9), ("W2zA8g64", 48, 192, 4),
    ("W4A16g32", 64, 96, 3), ("anyprec3-8", 64, 128, 1), ("mixed24", 64, 192, 1),
]  # fmt: skip
MORE = [
    ("W4A8g32", 80, 160, 7), ("W8A8", 72, 96, 1), ("float", 64, 48, 5), ("nl4", 64, 96, 2),
    ("bcq2g128", 64, 256, 1), ("W2*A8", 64, 192, 6), ("cb3g64", 64, 128, 1), ("W1A2", 64, 128, 2),
    ("W4kA8", 64, 256, 1), ("W3sA8", 64, 256, 8), ("W4A4", 64, 128, 1), ("W5mA8g32", 64, 128, 9),
]  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "n", "k", "m"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.all_cases) for case in MORE)],
)
def test_a_covering_sample_of_every_space_is_right(
    scheme: str, n: int, k: int, m: int, linker: Linker, tmp_path: Path, request: Any
) -> None:
    """Of kernels for several numbers of bits each takes a third of the sample, in turns."""
    (plan,) = plan_of(None, "host", scheme, [(n, k)])
    tasks = extract(plan, [m])
    every = request.config.getoption("--all-cases")
    thirds = not every and sum(task.op == "linear" for task in tasks) > 2
    for at, task in enumerate(tasks):
        bench, space = bench_of(task, linker, tmp_path)
        points = covering(space.points)
        points = points[at % 3 :: 3] if thirds else points[: 60 if every else 6]
        wrong = [
            (trial.point.text(), trial.status, trial.why)
            for trial in bench.trials(points, rounds=1)
            if trial.status != OK
        ]
        assert not wrong, task.key


def test_a_planted_wrong_kernel_is_found(
    linker: Linker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that clips its results, under the name of a candidate."""
    (plan,) = plan_of(None, "host", "W4A8g32", [(96, 128)])
    (task,) = [t for t in extract(plan, [1]) if t.op == "linear"]
    bench, space = bench_of(task, linker, tmp_path)
    planted, scheduled = space.points[1], Workshop.scheduled

    def swapped(self: Workshop, point: Point) -> Any:
        if point != planted:
            return scheduled(self, point)
        kernel, wrong = task.kernel_named(point.kernel), replace(task.spec, activation="relu")
        return kernel.scheduled(kernel.choose(wrong, task.profile, task.decided(point)))

    monkeypatch.setattr(Workshop, "scheduled", swapped)
    made = bench.trials(space.points[1:4], rounds=1)
    assert [trial.status for trial in made] == [WRONG, OK, OK]


def product(k: int, folder: Path) -> Path:
    weight = RNG.standard_normal((k, 512)).astype(np.float32)
    graph = build([("MatMul", "x w", "y")], {"x": ("float32", ["b", k])}, "y", {"w": weight})
    return save(graph, folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return product(128, tmp_path_factory.mktemp("tuned"))


def records_of(model: Path) -> list[Record]:
    """A record for one row and one for many: any decisions but the default's."""
    made = []
    for task in extract(pipeline.plan(model, scheme="W4A8g32", search=False), [1, 64]):
        if task.op == "linear":
            kernel = task.kernel_named(task.kernel)
            schedule = default_of_kernel(task.spec, kernel, task.profile)
            other = next(p for p in task.space().points[::-1] if p.kernel == task.kernel)
        else:
            workshop = Workshop(task, model.parent, 1)
            from apq_tvm.schedules.recorded import fingerprint

            schedule = fingerprint(workshop.scheduled(task.space().points[0]))
            other = task.space().points[-1]
        shape: dict[str, Any] = {}
        if task.op == "linear":
            shape = {"n": task.spec.n, "k": task.spec.k, "scheme": task.scheme, "rows": task.rows}
        made.append(
            Record(
                task.op, other.kernel, task.answers(other), schedule, **shape, ratio=1.1,
                interval=(1.05, 1.2), machine="here",
            )
        )  # fmt: skip
    return made


def test_a_compilation_uses_records(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    records = records_of(model)
    write_records(log, records)
    plain = pipeline.compile(model, tmp_path / "plain", shipped_logs=False)
    tuned = pipeline.compile(model, tmp_path / "tuned", log=log, shipped_logs=False)
    twice = (
        pipeline.compile(model, tmp_path / "again/tuned", log=log, shipped_logs=False)
        if ((tmp_path / "again").mkdir() is None)
        else None
    )
    assert twice is not None
    for name in ("libtuned.so", "libtuned.a", "weights.safetensors"):
        assert (tuned.path / name).read_bytes() == (twice.path / name).read_bytes()
    (layer,) = tuned.manifest["layers"]
    kernels = {kernel["m_min"]: kernel for kernel in layer["kernels"]}
    linear = {r.rows[0]: r for r in records if r.op == "linear"}
    assert len(linear) == 2 and 1 in linear
    for rows, record in linear.items():  # which kernel many rows have is the device's threshold
        kernel = kernels[rows]
        assert kernel["source"].startswith("record: 1.10 times the default")
        assert kernel["decisions"].items() >= dict(record.decisions).items()
        assert kernel["decisions"]["grain"] == 4
    sources = {f["name"]: f["source"] for f in tuned.manifest["functions"]}
    assert any(source.startswith("record: ") for source in sources.values())
    (layer,) = plain.manifest["layers"]
    assert {k["source"] for k in layer["kernels"]} == {"default"}
    assert "record: 1.10 times" in "\n".join(explanation_lines(explain(tuned.path)))
    for rows in (1, 2, 64, 200):
        x = RNG.standard_normal((rows, 128)).astype(np.float32)
        results = [load_module(made.path).run({"x": x})["y"] for made in (plain, tuned)]
        np.testing.assert_allclose(*results, rtol=0, atol=1e-4)


def test_a_stale_or_torn_log_is_remarked(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    (record, *_) = [r for r in records_of(model) if r.op == "linear"]
    log.write_text(record.line().replace(record.schedule, "0" * 16) + '\n{"op": "lin')
    made = pipeline.compile(model, tmp_path / "stale", log=log, shipped_logs=False)
    remarks = made.manifest["tuning"]["remarks"]
    assert len(remarks) == 2
    assert "log.json:2: not a record" in remarks[0] and "of another schedule" in remarks[1]
    assert all(k["source"] == "default" for k in made.manifest["layers"][0]["kernels"])


def test_a_model_is_tuned_and_then_compiled(tmp_path: Path) -> None:
    log, model = tmp_path / "log.json", product(64, tmp_path)
    findings = tune(model, rows=[1], trials=16, log=log, threads=1, functions=False)
    assert {finding.planned.task.op for finding in findings} == {"linear", "function"}
    assert all(trial.status == OK for finding in findings for trial in finding.trials)
    assert all(finding.record or finding.why for finding in findings)
    again = tune(model, rows=[1], trials=16, log=log, threads=1, functions=False)
    assert all(finding.resumed for finding in again)
    pipeline.compile(model, tmp_path / "tuned", log=log if log.exists() else None)
