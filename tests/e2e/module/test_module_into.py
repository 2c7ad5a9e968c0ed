"""Outputs into the caller's arrays, graphs of many outputs: what a run reuses is never stale."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import apq_tvm
from apq_tvm.module import load_module
from tests.onnx_models import build, save

CACHES = 30


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """``y = 2 x`` and, for each of many caches, what a step adds to it."""
    folder = tmp_path_factory.mktemp("caches")
    nodes: list[Any] = [("Add", "x x", "y")]
    inputs: dict[str, Any] = {"x": ("float32", ["n", 3])}
    outputs = ["y"]
    for i in range(CACHES):
        inputs[f"past{i}"] = ("float32", ["past", 100])
        nodes += [("Concat", f"past{i} step", f"cat{i}", {"axis": 0})]
        nodes += [("Neg", f"cat{i}", f"now{i}"), ("Neg", f"past{i}", f"old{i}")]
        outputs += [f"now{i}", f"old{i}"]
    inputs["step"] = ("float32", [1, 100])
    model = save(build(nodes, inputs, " ".join(outputs)), folder)
    apq_tvm.compile(model, folder / "caches", scheme="float", target="host")
    return load_module(folder / "caches")


def feeds(past: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"x": (2, 3), "step": (1, 100)} | {f"past{i}": (past, 100) for i in range(CACHES)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def check(results: dict[str, Any], given: dict[str, Any]) -> None:
    np.testing.assert_array_equal(results["y"], 2 * given["x"])
    assert len(results) == 2 * CACHES + 1
    for i in range(CACHES):
        past = given[f"past{i}"]
        np.testing.assert_array_equal(results[f"old{i}"], -past)
        np.testing.assert_array_equal(results[f"now{i}"], -np.concatenate([past, given["step"]]))


def test_caches_that_grow(caches: ModuleType) -> None:
    """Small ones and large ones, also back again; results of before stay as they were."""
    before = []
    for past in (1, 2, 3, 19, 20, 21, 22, 200, 201, 2, 1):
        given = feeds(past, past)
        before.append((caches.run(given), given))
    for results, given in before:
        check(results, given)


def test_strides_come_and_go(caches: ModuleType) -> None:
    given = feeds(4)
    turned = {name: np.asfortranarray(array) for name, array in given.items()}
    for some in (given, turned, given, {**given, "past3": turned["past3"]}, given):
        check(caches.run(some), given)
    wide = np.ascontiguousarray(np.repeat(given["past7"], 2, axis=1))
    check(caches.run(given | {"past7": wide[:, ::2]}), given)


@pytest.mark.parametrize("past", [2, 100])
def test_results_are_reused(past: int, caches: ModuleType) -> None:
    results = caches.run(feeds(past))
    kept = dict(results)
    for seed in (1, 2):
        again = caches.run(feeds(past, seed), into=results)
        assert all(again[name] is kept[name] for name in kept)
        check(again, feeds(past, seed))
    check(caches.run(feeds(past)), feeds(past))  # into fresh memory again
    check(again, feeds(past, 2))


def test_into_some(caches: ModuleType) -> None:
    block = np.zeros(1 + 4 * 200, np.uint8)
    odd = block[1:].view(np.float32).reshape(2, 100)  # not even aligned to its items
    mine = {"old3": odd, "y": np.empty((2, 3), np.float32)}
    results = caches.run(feeds(2), into=mine)
    assert results["old3"] is odd
    assert results["y"] is mine["y"]
    assert list(results) == [info.name for info in caches.outputs]
    check(results, feeds(2))


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


UNFIT = {
    "dtype": (lambda: np.empty((2, 100)), "'old1' has dtype float64, wanted float32"),
    "shape": (lambda: np.empty((3, 100), np.float32), "has shape (3, 100), wanted (2, 100)"),
    "strided": (lambda: np.empty((100, 2), np.float32).T, "'old1' is not contiguous"),
    "read-only": (lambda: read_only(np.empty((2, 100), np.float32)), "'old1' is read-only"),
    "list": (lambda: [[0.0] * 100] * 2, "'old1' is a list, wanted a numpy array"),
}


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("every", [True, False])
def test_arrays_that_do_not_fit(case: str, every: bool, caches: ModuleType) -> None:
    make, message = UNFIT[case]
    into = {**(caches.run(feeds(2)) if every else {}), "old1": make()}
    with pytest.raises(caches.InputError) as caught:
        caches.run(feeds(2), into=into)
    assert str(caught.value).startswith("into: the array of output 'old1' ")
    assert message in str(caught.value)
    check(caches.run(feeds(2)), feeds(2))


def test_arrays_that_are_in_use(caches: ModuleType) -> None:
    given, results = feeds(2), caches.run(feeds(2))
    for into in ({"old1": given["past1"]}, {**results, "old1": given["past1"]}):
        with pytest.raises(caches.InputError, match="'old1' is an input too"):
            caches.run(given, into=into)
    for into in ({"old1": results["old1"], "old2": results["old1"]}, {**results}):
        into["old2"] = results["old1"]
        with pytest.raises(caches.InputError, match="output 'old2' is output 'old1' too"):
            caches.run(given, into=into)
    with pytest.raises(caches.InputError, match="unknown output: z; there are y, now0"):
        caches.run(given, into={"z": results["y"]})


def test_sizes_that_data_tell(tmp_path: Path) -> None:
    model = save(build([("NonZero", "x", "where")], {"x": ("float32", ["n"])}, "where"), tmp_path)
    apq_tvm.compile(model, tmp_path / "nonzero", scheme="float", target="host")
    module = load_module(tmp_path / "nonzero")
    x = np.array([0, 1, 2], np.float32)
    results = module.run(x=x)
    np.testing.assert_array_equal(results["where"], [[1, 2]])
    with pytest.raises(module.InputError, match="'where' cannot be given: its shape depends"):
        module.run(x=x, into=results)
