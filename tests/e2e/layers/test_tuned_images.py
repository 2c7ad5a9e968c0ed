"""Layers of windows, depthwise kernels, convolutions, attention: candidates and records."""

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
from apq_tvm.schedules.decide import Recorded
from apq_tvm.schedules.linear.kernel import windows_func
from apq_tvm.schedules.recorded import fingerprint
from apq_tvm.tune.api import plan_of, tune
from apq_tvm.tune.functions.graph import FunctionWorkshop, GraphTask, extract_functions
from apq_tvm.tune.functions.windows import WindowsTask, WindowsWorkshop
from apq_tvm.tune.local import Local
from apq_tvm.tune.measure import OK, WRONG, Bench
from apq_tvm.tune.program import Linker
from apq_tvm.tune.session import workshop_of
from apq_tvm.tune.space import Point, covering
from apq_tvm.tuning_logs.records import Record, write_records
from tests.onnx_models import build, save

RNG = np.random.default_rng(0)


def weight(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def net(folder: Path) -> Path:
    """A stem, a wide layer, a depthwise one, pools and a grouped layer of an image of any size."""
    nodes: list[Any] = [
        ("Conv", "x w b", "a", {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
        ("Relu", "a", "c"),
        ("Conv", "c d e", "f", {"pads": [1, 1, 1, 1], "group": 32}),
        ("MaxPool", "f", "g", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("Conv", "g h", "i", {"pads": [1, 1, 1, 1]}),
        ("AveragePool", "i", "y", {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}),
    ]
    weights = {
        "w": weight(32, 3, 3, 3), "b": weight(32, 1)[:, 0], "d": weight(32, 1, 3, 3),
        "e": weight(32, 1)[:, 0], "h": weight(48, 32, 3, 3),
    }  # fmt: skip
    graph = build(nodes, {"x": ("float32", ["n", 3, 24, 28])}, "y", weights)
    return save(graph, folder)


def attentive(folder: Path) -> Path:
    """Two heads of 16 columns with a mask."""
    nodes: list[Any] = []
    weights: dict[str, Any] = {"scale": np.float32(0.25)}
    for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        weights[f"w{name}"] = weight(32, 32)
        nodes += [
            ("MatMul", f"x w{name}", f"{name}0"),
            ("Reshape", f"{name}0 shape", f"{name}1"),
            ("Transpose", f"{name}1", name, {"perm": perm}),
        ]
    weights |= {"shape": np.array([0, 0, 2, 16]), "back": np.array([0, 0, 32])}
    nodes += [
        ("MatMul", "q k", "s0"), ("Mul", "s0 scale", "s1"), ("Add", "s1 mask", "s2"),
        ("Softmax", "s2", "p", {"axis": -1}), ("MatMul", "p v", "o0"),
        ("Transpose", "o0", "o1", {"perm": [0, 2, 1, 3]}), ("Reshape", "o1 back", "o"),
        ("MatMul", "o wq", "y"),
    ]  # fmt: skip
    inputs = {"x": ("float32", ["b", "s", 32]), "mask": ("float32", ["b", 1, "s", "s"])}
    return save(build(nodes, inputs, "y", weights), folder)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return net(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return attentive(tmp_path_factory.mktemp("attention"))


def tasks_of(model: Path, scheme: str, target: str = "host", **sizes: int) -> list[Any]:
    (plan,) = plan_of(model, target, scheme)
    return extract_functions(plan, sizes)


def all_right(tasks: list[Any], folder: Path, most: int, threads: int = 2) -> None:
    linker = Linker(find_toolchain(), folder)
    for task in tasks:
        points = task.space().points
        bench = Bench(workshop_of(task, folder, threads), linker, Local(), folder, points[0])
        made = bench.trials(covering(points)[:most], rounds=1)
        wrong = [(t.point.text(), t.status, t.why) for t in made if t.status != OK]
        assert not wrong, task.key


@pytest.mark.parametrize(
    "scheme",
    ["W8A8", *(pytest.param(s, marks=pytest.mark.all_cases) for s in ("W4A8g32", "float"))],
)
def test_candidates_of_a_net_are_right(
    scheme: str, images: Path, tmp_path: Path, request: Any
) -> None:
    tasks = tasks_of(images, scheme, n=2)
    kernels = {task.kernel for task in tasks if isinstance(task, GraphTask)}
    assert {"depthwise", "pool"} <= kernels
    gathered = [task for task in tasks if isinstance(task, WindowsTask)]
    assert bool(gathered) == (scheme != "float") == ("convolution" not in kernels)
    assert all(task.image[0] == 2 for task in gathered)
    all_right(tasks, tmp_path, 60 if request.config.getoption("--all-cases") else 5)


def test_candidates_of_attention_are_right(sentences: Path, tmp_path: Path, request: Any) -> None:
    most = 60 if request.config.getoption("--all-cases") else 7
    for sizes in ({"b": 2, "s": 70}, {"b": 1, "s": 1}, {}):
        tasks = tasks_of(sentences, "W8A8", **sizes)
        kernels = {task.kernel: task for task in tasks}
        assert {"attention", "pack_keys"} <= set(kernels)
        assert kernels["attention"].shapes[1][0] == -(-sizes.get("s", 128) // 16)
        all_right([kernels["attention"], kernels["pack_keys"]], tmp_path, most)


def test_a_planted_wrong_rounding_of_windows_is_found(
    images: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Codes of 7 bits in the place of 8, right in themselves, under the name of a candidate."""
    task = next(
        t for t in tasks_of(images, "W4A8g32", n=1)
        if isinstance(t, WindowsTask) and len(t.space().points) > 3
    )  # fmt: skip
    points, scheduled, made = task.space().points, WindowsWorkshop.scheduled, task.made
    assert made is not None and made.geometry is not None
    shape = ("d0", *task.image[1:])
    coarse = windows_func((32, 32), 7, False, False, shape, made.geometry, (0, task.image[-1]))

    def planted(self: Any, point: Point) -> Any:
        if point != points[1]:
            return scheduled(self, point)
        return task.prepared(replace(made, make=coarse), task.decided(point))[0]

    monkeypatch.setattr(WindowsWorkshop, "scheduled", planted)
    bench = Bench(
        WindowsWorkshop(task, tmp_path, 1), Linker(find_toolchain(), tmp_path), Local(), tmp_path,
        points[0],
    )  # fmt: skip
    tried = bench.trials(points[1:3], rounds=1)
    assert [trial.status for trial in tried] == [WRONG, OK]


def other_record(task: Any) -> Record:
    """Any decisions but the default's."""
    answers = task.answers(task.space().points[-1])
    assert answers
    name = task.name if isinstance(task, WindowsTask) else task.kernel
    default = workshop_of(task, Path("/nowhere"), 1).scheduled(task.space().points[0])
    return Record("function", name, answers, fingerprint(default), interval=(1.1, 1.2), ratio=1.15)


@pytest.mark.parametrize("kind", ["images", pytest.param("sentences", marks=pytest.mark.all_cases)])
def test_records_are_used_and_change_no_result(kind: str, tmp_path: Path, request: Any) -> None:
    model = request.getfixturevalue(kind)
    tasks = [t for t in tasks_of(model, "W4A8g32", n=1) if len(t.space().points) > 1]
    wanted = {"images": {"depthwise", "pool"}, "sentences": {"attention", "pack_keys"}}[kind]
    mine = [t for t in tasks if isinstance(t, WindowsTask) or t.kernel in wanted]
    assert wanted <= {t.kernel for t in mine}
    assert any(isinstance(t, WindowsTask) for t in mine) == (kind == "images")
    write_records(tmp_path / "log.json", [other_record(task) for task in mine])
    plain = pipeline.compile(model, tmp_path / "plain", scheme="W4A8g32", shipped_logs=False)
    tuned = pipeline.compile(
        model, tmp_path / "tuned", scheme="W4A8g32", log=tmp_path / "log.json", shipped_logs=False
    )
    found = [f for f in tuned.manifest["functions"] if f["source"].startswith("record: ")]
    assert len(found) >= len(mine)
    assert not [f for f in plain.manifest["functions"] if f["source"].startswith("record: ")]
    lines = explanation_lines(explain(tuned.path))
    assert sum("record: 1.15 times the default" in line for line in lines) >= len(mine)
    assert not any("record: " in line for line in explanation_lines(explain(plain.path)))
    if kind == "images":
        feeds = {"x": RNG.standard_normal((2, 3, 24, 28)).astype(np.float32)}
    else:
        mask = np.where(np.tri(37) > 0, 0, -np.inf).astype(np.float32)
        feeds = {
            "x": RNG.standard_normal((2, 37, 32)).astype(np.float32),
            "mask": np.broadcast_to(mask, (2, 1, 37, 37)).copy(),
        }
    results = [load_module(made.path).run(feeds)["y"] for made in (plain, tuned)]
    np.testing.assert_allclose(*results, rtol=0, atol=2e-4 * float(np.abs(results[0]).max()))


@pytest.mark.all_cases  # a minute
def test_a_net_is_tuned(images: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    wanted: dict[str, Any] = {
        "scheme": "W4A8g32", "rows": [1], "trials": 1, "threads": 1, "log": log, "dims": {"n": 1},
    }  # fmt: skip
    findings = tune(images, **wanted)
    kinds = {type(finding.planned.task) for finding in findings}
    assert {GraphTask, WindowsTask} <= kinds
    assert all(trial.status == OK for finding in findings for trial in finding.trials)
    assert all(finding.resumed for finding in tune(images, **wanted))


def test_every_candidate_of_attention_is_another_program(sentences: Path) -> None:
    """What is decided is what the schedule takes: no two points of the space are one."""
    tasks = {task.kernel: task for task in tasks_of(sentences, "W8A8")}
    for name in ("attention", "pack_keys"):
        points = tasks[name].space().points
        seen = {fingerprint(tasks[name].scheduled(Recorded(dict(p.decisions)))) for p in points}
        assert len(seen) == len(points) > 1
    assert isinstance(FunctionWorkshop.loose, float)
