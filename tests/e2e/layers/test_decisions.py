"""What a tuning log would answer reaches every function, and stands in the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.module import load_module
from apq_tvm.schedules.decide import Decide, Defaults, Recorded
from tests.onnx_models import build, save

RNG = np.random.default_rng(0)
SMALL = {"task": 4096, "unroll": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weight = RNG.standard_normal((96, 48)).astype(np.float32)
    graph = build([("MatMul", "x w", "y")], {"x": ("float32", ["b", 96])}, "y", {"w": weight})
    return save(graph, tmp_path_factory.mktemp("decisions"))


def compiled(model: Path, output: Path) -> tuple[Any, dict[str, Any]]:
    """The module, and its function that prepares x."""
    made = pipeline.compile(model, output, scheme="W8A8g32")
    (found,) = [f for f in made.manifest["functions"] if "quantize_" in f["schedule"]]
    return load_module(output), found


def test_a_preparation_is_decided_by_its_key(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, before = compiled(model, tmp_path / "plain")
    asked: list[str] = []

    def decide_of(function: str, default: Any = None) -> Decide:
        asked.append(function)
        return Recorded(SMALL) if function == before["name"] else Defaults()

    monkeypatch.setattr(pipeline, "default_decisions", decide_of)
    other, after = compiled(model, tmp_path / "other")
    assert (
        asked.count(before["name"]) == 1
    )  # whoever answers for its function does for its schedule
    assert after == {**before, "decisions": {**before["decisions"], **SMALL}} != before
    x = RNG.standard_normal((200, 96)).astype(np.float32)
    assert np.array_equal(plain.run({"x": x})["y"], other.run({"x": x})["y"])


def test_alternatives_are_kept(model: Path) -> None:
    from apq_tvm.lower import lower
    from apq_tvm.pack import pack
    from apq_tvm.progress import Silent
    from apq_tvm.schedule import schedule
    from apq_tvm.schedules.devices import linear_kernels
    from apq_tvm.select import by_name

    chosen = pipeline.plan(model, scheme="W8A8g32")
    kernels = by_name(linear_kernels(chosen.profile))
    functions = []
    for answer in (Defaults(), Recorded(SMALL)):
        lowered = lower(pack(chosen, Silent()), kernels, lambda *_, answer=answer: answer)
        (key,) = lowered.preparations
        functions.append(lowered.preparations[key].func)
        made = schedule(lowered, Silent(), lambda *_: Defaults()).schedules[key]
        assert made.decisions.keys() == made.alternatives.keys() == {"task", "unroll"}
        assert all(made.decisions[name] in made.alternatives[name] for name in made.decisions)
        assert made.decisions["task"] == answer("task", made.alternatives["task"])
    assert functions[0].script() != functions[1].script()
