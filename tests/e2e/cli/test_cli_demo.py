"""The demo model through the command line: size, accuracy and ranking that docs/accuracy.md has."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentences

ROOT = Path(__file__).resolve().parents[3]
POOLED = "461"
FLOAT_OUTPUTS = ("onnx::Shape_422", POOLED)

# scheme, options, least mean cosine of the pooled output, of both outputs, largest share of bytes
PROMISES = [
    pytest.param("W4A8g32", 0.98, 0.0, 0.20, id="W4A8g32"),
    pytest.param("W4zA8g32", 0.985, 0.0, 0.20, id="W4zA8g32", marks=pytest.mark.all_cases),
    pytest.param("W8A8g32", 0.9995, 0.9995, 0.35, id="W8A8g32", marks=pytest.mark.all_cases),
    pytest.param("W8A8", 0.999, 0.999, 0.35, id="W8A8", marks=pytest.mark.all_cases),
]


def apq(*words: object, cwd: Path) -> dict[str, object]:
    command = [sys.executable, "-c", "from apq_tvm.cli.main import main; main()", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, env=env, cwd=cwd, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("scheme", "pooled", "every", "share"), PROMISES)
def test_demo_model_keeps_its_promises(
    scheme: str, pooled: float, every: float, share: float, demo_onnx: Path, tmp_path: Path
) -> None:
    report = apq("compile", demo_onnx, "-o", "minilm", "--scheme", scheme, cwd=tmp_path)
    assert report["package_bytes"] <= share * demo_onnx.stat().st_size

    texts, inputs = sentences.load()
    np.savez(tmp_path / "sentences.npz", **inputs)
    words = ("eval", "minilm", "--against", demo_onnx, "--inputs", "sentences.npz")
    outputs = apq(*words, cwd=tmp_path)["outputs"]
    assert outputs[POOLED]["cosine_mean"] >= pooled
    for name in FLOAT_OUTPUTS:
        assert outputs[name]["cosine_mean"] >= every, name
    assert outputs[POOLED]["rows"] == len(texts)
    assert outputs["onnx::Shape_422"]["rows"] == inputs["attention_mask"].sum()
    assert outputs["output"]["max_abs_error"] == 0  # the token ids, passed through

    spec = importlib.util.spec_from_file_location(
        f"demo_{scheme}", tmp_path / "minilm" / "__init__.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    embeddings = module.run(**inputs)[POOLED]
    assert sentences.ranked_first(embeddings).sum() >= 80  # of 112: 40 pairs


@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_ranking_notices_a_swapped_pair(pairs: int) -> None:
    rng = np.random.default_rng(pairs)
    first = np.eye(2 * pairs + 1)[:pairs]
    rows = np.repeat(first, 2, axis=0) + 0.01 * rng.standard_normal((2 * pairs, 2 * pairs + 1))
    assert sentences.ranked_first(rows).all()
    if pairs > 1:
        rows[[1, 3]] = rows[[3, 1]]
        assert not sentences.ranked_first(rows)[:4].any()


def test_sentences_are_enough_and_whole() -> None:
    texts, inputs = sentences.load()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    assert len(texts) >= 96 and len(set(texts)) == len(texts)
    assert (ids[:, 0] == 101).all()  # [CLS]
    for row, unmasked in zip(ids, mask, strict=True):
        length = unmasked.sum()
        assert row[length - 1] == 102  # [SEP]
        assert not row[length:].any() and not unmasked[length:].any()
    assert not (ids == 100).any()  # [UNK]
