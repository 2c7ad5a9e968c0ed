"""Contexts that keep what their calls took: the same results, and every call once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import apq_tvm
from apq_tvm.bench.profile.profile import bench_profile
from apq_tvm.bench.profile.recorded import Recorder
from apq_tvm.bench.profile.runs import Bound, measure_runs, open_runner
from apq_tvm.errors import BadInput
from apq_tvm.module import read_manifest
from tests.small_llama import CONFIG, inputs, small_llama

TOKENS = 6


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    apq_tvm.compile(small_llama(folder / "llama.onnx"), output=folder / "llama", scheme="W8A8g32")
    return folder / "llama"


@pytest.fixture
def bound(llama: Path) -> Bound:
    return bind(llama)


def bind(llama: Path) -> Bound:
    manifest = read_manifest(llama)
    return Bound(open_runner(llama, manifest, 1), manifest, inputs(TOKENS))


def test_no_profile_is_kept_unless_asked_for(bound: Bound) -> None:
    bound.run()
    recorder = Recorder(bound.runner)
    with pytest.raises(BadInput, match="keeps no profile"):
        recorder.calls()
    recorder.record(True)
    assert recorder.calls() == []


def test_every_run_is_kept_whole_and_alone(llama: Path, bound: Bound) -> None:
    recorder = Recorder(bound.runner)
    recorder.record(True)
    bound.run()
    first = recorder.calls()
    bound.run()
    again = recorder.calls()
    known = set(read_manifest(llama)["graph"]["kernels"])
    assert [c.kernel for c in first] == [c.kernel for c in again]
    assert {c.kernel for c in first} <= known
    assert [c.tensors for c in first] == [c.tensors for c in again]
    ends = [at for call in again for at in (call.begin_ns, call.end_ns)]
    assert ends == sorted(ends)
    assert first[-1].end_ns <= again[0].begin_ns


def test_products_are_those_of_the_attention(bound: Bound) -> None:
    recorder = Recorder(bound.runner)
    recorder.record(True)
    bound.run()
    past = 3
    expected = CONFIG.heads * TOKENS * (past + TOKENS) * CONFIG.head_width
    found = [c.products for c in recorder.calls() if c.kernel.startswith("attention")]
    assert found == [2 * expected]


def test_results_are_the_same(llama: Path) -> None:
    results = []
    for on in (False, True):
        bound = bind(llama)
        Recorder(bound.runner).record(on)
        bound.run()
        results.append(bound.outputs["logits"].copy())
    np.testing.assert_array_equal(*results)


def test_times_sum_to_the_run(llama: Path, bound: Bound, tmp_path: Path) -> None:
    runs = measure_runs(bound, budget_s=0.0, min_rounds=3)
    assert runs.rounds == 3
    assert len(runs.calls) == len(runs.call_us)
    assert (runs.call_us > 0).all()
    np.savez(tmp_path / "in.npz", **inputs(TOKENS))
    document = bench_profile(llama, inputs=tmp_path / "in.npz", threads=1, budget_s=0.0)
    parts = document["kernels_us"] + document["between_us"] + document["rest_us"]
    assert parts == pytest.approx(document["run_us"])
    for rows in (document["kernels"], document["layers"], document["calls"]):
        assert sum(row["us"] for row in rows) == pytest.approx(document["kernels_us"])
    layers = {row["name"]: row for row in document["layers"]}
    head = layers["lm_head"]
    assert head["macs"] == TOKENS * CONFIG.width * CONFIG.vocabulary
    assert layers["model.embed_tokens"]["macs"] == 0


def test_refused_inputs_are_named(llama: Path) -> None:
    with pytest.raises(BadInput, match="how large is dimension 'past'"):
        bench_profile(llama)
    with pytest.raises(BadInput, match=r"outside its table of 40 rows.*give --inputs"):
        bench_profile(llama, dims={"past": 3}, threads=1)
