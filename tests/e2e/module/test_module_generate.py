"""Decoders for `bench generate`: their caches are the model's, and every contender answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import apq_tvm
from apq_tvm.bench.generate.generate import bench_generate
from apq_tvm.bench.generate.onnx import OnnxDecoder
from apq_tvm.bench.generate.ours import ModuleDecoder, module_ports
from apq_tvm.errors import BadInput
from apq_tvm.module import load_module
from tests.small_llama import small_llama

pytest.importorskip("onnxruntime")

IDS = [3, 1, 4, 15, 9]
CACHE = "past_key_values.0.key"
SAME = 1e-5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The ONNX file and the module, in float: rounding is not what is tested."""
    folder = tmp_path_factory.mktemp("generate")
    model = small_llama(folder / "llama.onnx")
    apq_tvm.compile(model, output=folder / "llama", scheme="float")
    return model, folder / "llama"


def test_tokens_one_by_one_are_a_prompt(llama: tuple[Path, Path]) -> None:
    module = load_module(llama[1])
    ours = ModuleDecoder(module, module.manifest, module_ports(llama[1]))
    theirs = OnnxDecoder(llama[0], 1, 16)
    for decoder in (ours, theirs):
        decoder.prefill(IDS[:2])
        for token in IDS[2:]:
            decoder.step(token)
        decoder.rewind(3)
        for token in IDS[3:]:
            decoder.step(token)
    whole = OnnxDecoder(llama[0], 1, 16)
    whole.prefill(IDS)
    expected = whole._caches[CACHE].numpy()
    np.testing.assert_allclose(theirs._caches[CACHE].numpy(), expected, atol=SAME)
    np.testing.assert_allclose(ours._caches[CACHE], expected, atol=SAME)
    assert ours.vocabulary == theirs.vocabulary == 40


def test_every_contender_has_its_rows(llama: tuple[Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    document = bench_generate(
        [llama[1]], prompts=[4], contexts=[3], tokens=2, against=[llama[0], broken], budget_s=0.0
    )
    rows = document["rows"]
    names = ["llama", "onnxruntime llama.onnx"]
    assert [row["name"] for row in rows] == names * 2
    assert [row["what"] for row in rows] == ["prompt", "prompt", "decode", "decode"]
    assert list(document["failed"]) == ["onnxruntime broken.onnx"]
    for row in rows:
        assert row["ms"] > 0 and row["peak_bytes"] > 0
        assert bool(row["bytes"]) == (row["what"] == "decode")
    # What both read is the same: float weights, and keys and values of three tokens.
    assert rows[2]["bytes"] == pytest.approx(rows[3]["bytes"], rel=0.05)
    assert [row["arena_bytes"] is None for row in rows[:2]] == [False, True]


def test_a_module_that_cannot_be_timed_is_refused(llama: tuple[Path, Path]) -> None:
    with pytest.raises(BadInput, match=r"no module could be timed; llama: .*id"):
        _refused(llama[1])


def _refused(module: Path) -> None:
    """A prompt that the module's limits do not allow."""
    manifest = json.loads((module / "manifest.json").read_text())
    copy = module.with_name("copy") / "llama"
    copy.mkdir(parents=True)
    for file in module.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    manifest["outputs"][0]["shape"][-1] = 1000  # its ids are then beyond its table
    (copy / "manifest.json").write_text(json.dumps(manifest))
    bench_generate([copy], prompts=[4], contexts=[], budget_s=0.0)
