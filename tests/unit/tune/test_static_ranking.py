"""Candidates judged without a device, and where such an order may be used. Nothing is timed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apq_tvm import pipeline, tuning_logs
from apq_tvm.bench.arm.loops import bodies
from apq_tvm.bench.arm.mca import find_analyser
from apq_tvm.bench.linear import write_model
from apq_tvm.errors import BadInput, BadLog, BadTarget, BuildError
from apq_tvm.schedules.devices import find_profile
from apq_tvm.tune.functions.graph import extract_functions
from apq_tvm.tune.local import Local
from apq_tvm.tune.space import Point
from apq_tvm.tune.static import ranking, x86
from apq_tvm.tune.static.compare import Group, agreements, compare, verdict, write_log
from apq_tvm.tune.static.correlation import kendall, ranks, spearman
from apq_tvm.tune.static.figure import StaticFigure
from apq_tvm.tune.static.ranking import Agreement, NotRanked, family_of, rank, usable
from apq_tvm.tune.tasks import Task, extract
from tests.onnx_models import build, save

HERE = os.uname().machine


def tasks_of(folder: Path, target: str, rows: Sequence[int] = (1,)) -> list[Task]:
    write_model(folder / "m.onnx", np.eye(64, 128, dtype=np.float32))
    plan = pipeline.plan(folder / "m.onnx", target=target, scheme="W4A8g32", search=False)
    return extract(plan, rows)


# ---- correlations ----


def test_ranks_share_ties() -> None:
    assert ranks([3, 1, 3, 2]).tolist() == [3.5, 1, 3.5, 2]
    assert ranks([]).tolist() == []


@pytest.mark.parametrize(
    ("a", "b", "rho", "tau"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0, 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0, -1.0),
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8, 0.6),
        ([1, 1, 2, 2], [1, 2, 1, 2], 0.0, 0.0),
        # https://en.wikipedia.org/wiki/Spearman%27s_rank_correlation_coefficient: IQ and television
        ([106, 100, 86, 101, 99, 103, 97, 113, 112, 110], [7, 27, 2, 50, 28, 29, 20, 12, 6, 17],
         -29 / 165, -1 / 9),
    ],
)  # fmt: skip
def test_correlations(a: list[float], b: list[float], rho: float, tau: float) -> None:
    assert spearman(a, b) == pytest.approx(rho)
    assert kendall(a, b) == pytest.approx(tau)


@pytest.mark.parametrize("how", [spearman, kendall])
def test_correlations_of_nothing(how: Any) -> None:
    assert math.isnan(how([1, 1, 1], [1, 2, 3])) and math.isnan(how([], []))
    with pytest.raises(ValueError):
        how([1, 2], [1])


# ---- what is executed ----

ASSEMBLY = """\t.file\t1 "." "x"
\t.text
\t.globl\tf
f:
\tmovl\t$3, %ecx  # three times
.LBB0_1:
\tdecl\t%ecx
\tjne\t.LBB0_1
\tretq
\t.section\t.rodata
table:
\t.quad\t7
"""


def test_assembly_is_split_where_it_may_jump() -> None:
    found = x86.pieces(ASSEMBLY)
    assert [[text for text, _ in piece] for piece in found.code] == [
        ["movl $3, %ecx"], ["decl %ecx", "jne .LBB0_1"], ["retq"],
    ]  # fmt: skip
    assert {function for piece in found.code for _, function in piece} == {"f"}
    assert found.places == {"f": 0, ".LBB0_1": 1}
    assert found.counted.count("apq_counts+") == 6 and ".file" not in found.counted
    ran = x86._ran(found, [1, 3, 1])
    assert [i.count for i in ran] == [1, 3, 3, 1]
    assert [x86.branch_target(i) for i in ran] == [None, None, 1, None]
    assert sorted(body.count for body in bodies(ran, x86.branch_target)) == [1, 3]


needs_mca = pytest.mark.skipif(
    HERE != "x86_64" or not Path(find_analyser.__globals__["INSTALLED"]).exists(),
    reason="no llvm-mca 22, or no x86-64",
)


@needs_mca
def test_a_kernel_is_counted_where_it_runs(tmp_path: Path) -> None:
    (linear,) = (t for t in tasks_of(tmp_path, "host") if t.op == "linear")
    judge = ranking.judge_for(linear, tmp_path)
    points = [p for p in linear.space().points if p.kernel == linear.kernel][:3]
    figures = [judge.figure(point) for point in points]
    again = [judge.figure(point) for point in points]
    assert figures == again
    for figure in figures:
        # One instruction multiplies 64 codes, and somebody has to load and unpack them.
        assert 64 * 128 / 64 < figure.instructions < 64 * 128
        assert 0 < figure.cycles < figure.cost
        assert figure.nbytes > 64 * 128 / 2


@needs_mca
def test_functions_are_counted_too(tmp_path: Path) -> None:
    nodes = [("MatMul", "x w", "a"), ("Softmax", "a", "y")]
    graph = build(nodes, {"x": ("float32", [24, 16])}, "y", {"w": np.eye(16, 40, dtype=np.float32)})
    plan = pipeline.plan(save(graph, tmp_path), target="host", scheme="W8A8", search=False)
    (task,) = extract_functions(plan, {})
    assert family_of(task, task.kernel) == "softmax"
    judge = ranking.judge_for(task, tmp_path)
    figures = [judge.figure(point) for point in task.space().points[:2]]
    assert all(figure.nbytes == 2 * 4 * 24 * 40 for figure in figures)
    assert all(24 * 40 / 16 < figure.instructions < 24 * 40 * 16 for figure in figures)


def test_code_that_this_machine_cannot_run_is_refused() -> None:
    other = "armv8-a" if HERE == "x86_64" else "x86-64"
    with pytest.raises(BadTarget, match="counted where it runs"):
        x86.check_runs_here(find_profile(other))
    if HERE == "x86_64":
        profile = find_profile("x86-64")
        lacking = replace(profile, name="dream", features=frozenset({"avx9000"}))
        with pytest.raises(BadTarget, match="lacks avx9000"):
            x86.check_runs_here(lacking)


def test_llvm_mca_is_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not found"):
        find_analyser("znver4", str(tmp_path / "none"), "x86_64")


# ---- where it is used ----


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuning_logs, "FOLDER", tmp_path / "logs")
    return tmp_path / "logs"


def test_families_without_figures_are_not_ranked(logs: Path, tmp_path: Path) -> None:
    task = tasks_of(tmp_path, "znver4")[0]
    family = family_of(task, task.kernel)
    fine, why = usable(task.profile, family)
    assert not fine and "nobody compared" in why
    with pytest.raises(NotRanked, match="nobody compared"):
        rank(task, task.space().points[:2])


@pytest.mark.parametrize(("rho", "used"), [(0.61, True), (0.6, False), (-0.9, False)])
def test_families_are_ranked_above_a_correlation(logs: Path, rho: float, used: bool) -> None:
    found = Agreement(rho, 0.5, 40, 3)
    write_log(logs / "znver5" / "static.json", "here", {"gemm int": found})
    for name in ("znver5", "znver4"):  # which borrows
        fine, why = usable(find_profile(name), "gemm int")
        assert fine == used and f"{rho:.2f} over 40 candidates" in why
        assert ("borrows it of znver5" in why) == (name == "znver4")
    assert (verdict(found) == "used") == used
    assert not usable(find_profile("znver5"), "gemv int")[0]


def test_logs_keep_families_that_were_not_compared_again(logs: Path) -> None:
    path = logs / "znver5" / "static.json"
    write_log(path, "first", {"a": Agreement(0.1, 0.1, 1, 1), "b": Agreement(0.2, 0.2, 2, 1)})
    write_log(path, "second", {"a": Agreement(0.9, 0.8, 9, 2), "c": Agreement(math.nan, 0, 1, 1)})
    log = json.loads(path.read_text())
    assert log["measured"] == "second" and list(log["families"]) == ["a", "b"]
    assert log["families"]["a"]["spearman"] == 0.9


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"measured": 3, "families": {}}', '{"measured": "x"}',
     '{"measured": "x", "families": {"a": {"spearman": "high"}}}'],
)  # fmt: skip
def test_damaged_logs_are_named(logs: Path, text: str) -> None:
    path = logs / "damaged" / "static.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    tuning_logs._read.cache_clear()
    with pytest.raises(BadLog, match=r"static\.json"):
        usable(replace(find_profile("znver5"), name="damaged"), "gemm int")
    with pytest.raises(BadLog):
        write_log(path, "x", {})


# ---- comparing, by stand-ins for the judge and the clock ----


class Invented:
    """Costs by the number of a point; some cannot be built, two are the same code."""

    def __init__(self, task: Task) -> None:
        self._points = list(task.space().points)
        self._same = StaticFigure(1, 1, 1, 3.0)

    def figure(self, point: Point) -> StaticFigure:
        number = self._points.index(point)
        if number == 1:
            raise BuildError("no")
        return self._same if number in (2, 3) else StaticFigure(1, 1, 1, float(number + 1))


def test_groups_are_compared(tmp_path: Path) -> None:
    tasks = [t for t in tasks_of(tmp_path, "znver4") if t.op == "linear"]
    asked: list[int] = []

    def times(task: Task, points: Sequence[Point], folder: Path) -> Mapping[Point, float]:
        asked.append(len(points))
        order = list(task.space().points)
        return {point: 100.0 + order.index(point) for point in points if order.index(point) != 4}

    groups = compare(tasks, Local(), most=8, times=times, judge=lambda task, _: Invented(task))
    first = groups[0]
    assert first.kernel == tasks[0].kernel and first.family == "gemv int"
    assert all(count <= 8 for count in asked) and len(first.static) <= asked[0]
    again = compare(tasks, Local(), most=8, times=times, judge=lambda task, _: Invented(task))
    assert groups == again


def group(static: Sequence[float], measured: Sequence[float], family: str = "f") -> Group:
    return Group(family, "task", "kernel", tuple(static), tuple(measured))


def test_groups_that_say_nothing_are_left_out() -> None:
    few = group([1, 2], [1, 2])
    alike = group(range(6), [100, 101, 102, 101, 100, 103])
    one = group([5] * 6, range(1, 7))
    assert "fewer than" in few.why_not and "within 3.0%" in alike.why_not
    assert "one figure" in one.why_not
    assert agreements([few, alike, one]) == {}
    assert few.described()["spearman"] is None and json.dumps(alike.described())


def test_families_are_means_weighted_by_candidates() -> None:
    right = group(range(10), range(10, 20))
    wrong = group(range(5), range(20, 15, -1))
    found = agreements([right, wrong, group(range(5), range(10, 15), "other")])
    assert found["f"] == Agreement(pytest.approx(1 / 3), pytest.approx(1 / 3), 15, 2)
    assert found["other"].spearman == pytest.approx(1)
    assert right.picked == 1 and wrong.picked == 16 / 20
