"""Codebooks learned on one model serve another; files that hold none are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.formats import dequantize, parse_scheme
from apq_tvm.onnx_import import import_onnx
from apq_tvm.progress import Silent
from apq_tvm.quantizers.codebook_file import (
    codebooks_for,
    learn_codebooks,
    load_codebooks,
    save_codebooks,
)
from apq_tvm.quantizers.families.codebook_learn import learn
from apq_tvm.quantizers.inputs.calibration_file import write_arrays
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.types import Scheme
from tests.onnx_models import build, save

CB2 = parse_scheme("cb2")
assert isinstance(CB2, Scheme)


def normal(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((64, 512)).astype(np.float32)


def test_learning_is_deterministic_and_ascending() -> None:
    first, second = (learn({"w": normal(0)}, CB2, None, Silent()) for _ in range(2))
    assert first.dtype == np.int8 and first.shape == (4, 4)
    assert (first == second).all() and (np.diff(first.astype(int), axis=1) >= 0).all()


def test_codebooks_of_one_model_serve_another(tmp_path: Path) -> None:
    other, own = (learn({"w": normal(seed)}, CB2, None, Silent()) for seed in (1, 2))
    path = tmp_path / "books.safetensors"
    save_codebooks(path, {"cb2": other}, "model one")
    loaded = codebooks_for(load_codebooks(path), CB2)
    assert (loaded == other).all() and loaded.dtype == np.int8
    w = normal(2)
    mine, theirs = (
        np.mean((dequantize(quantize_tensor(w, CB2, shared=books)) - w) ** 2)
        for books in (own, loaded)
    )
    assert theirs < 1.05 * mine


def test_nothing_to_learn_from() -> None:
    books = learn({"w": np.zeros((3, 32), np.float32), "v": np.ones((2, 5), np.float32)}, CB2,
                  None, Silent())  # fmt: skip
    assert books.shape == (4, 4)


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "books.safetensors"
    with pytest.raises(BadInput, match="no such codebook file"):
        load_codebooks(path)
    path.write_bytes(b"nothing")
    with pytest.raises(BadInput, match="no readable safetensors"):
        load_codebooks(path)
    books = np.zeros((4, 4), np.int8)
    write_arrays(path, {"cb2": books}, {})
    with pytest.raises(BadInput, match="is no codebook file"):
        load_codebooks(path)
    write_arrays(path, {"cb2": books}, {"apq_codebooks": "7"})
    with pytest.raises(BadInput, match="is of version 7"):
        load_codebooks(path)
    write_arrays(path, {"cb3": books}, {"apq_codebooks": "1"})
    with pytest.raises(BadInput, match=r"int8 \[4, 8\] is needed"):
        load_codebooks(path)
    with pytest.raises(BadScheme, match="no scheme with codebooks"):
        save_codebooks(path, {"nl4": books}, "")
    with pytest.raises(BadScheme, match="must ascend"):
        save_codebooks(path, {"cb2": np.int8([[3, 1, 2, 4]] * 4)}, "")
    with pytest.raises(BadInput, match="no codebooks for cb2; it has cb3"):
        codebooks_for({"cb3": books}, CB2)


def test_codebooks_of_a_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((512, 64)).astype(np.float32) for i in range(2)}
    nodes = [("MatMul", f"x w{i}", f"y{i}") for i in range(2)]
    graph = build(nodes, {"x": ("float32", ["rows", 512])}, "y0 y1", weights)
    model = import_onnx(save(graph, tmp_path))
    books = learn_codebooks(model, ("cb2", "cb3g64"))
    assert {name: book.shape for name, book in books.items()} == {"cb2": (4, 4), "cb3g64": (4, 8)}
    with pytest.raises(BadScheme, match="no scheme with codebooks"):
        learn_codebooks(model, ("nl4",))
