"""Operators that draw numbers: as they say they are distributed, and the same in every run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx_models import build, save
from onnx_reference import run_reference

from apq_tvm.onnx_import import import_onnx

X = {"x": ("float32", ["b", 100])}
SHARES = np.float32([0.2, 0.3, 0.5])


def drawn(nodes: list, tmp_path: Path, x: np.ndarray) -> list[np.ndarray]:
    names = " ".join(node[2] for node in nodes)
    model = import_onnx(save(build(nodes, X, names, opset=15), tmp_path))
    first, second = (list(run_reference(model, {"x": x}).values()) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    return first


def test_normal_numbers(tmp_path: Path) -> None:
    nodes = [
        ("RandomNormalLike", "x", "a", {"mean": 1.0, "scale": 2.0}),
        ("RandomNormalLike", "x", "b"),
        ("RandomNormalLike", "x", "c", {"seed": 3.0}),
        ("RandomNormal", "", "d", {"shape": [100, 100], "dtype": 10}),
    ]
    a, *others = drawn(nodes, tmp_path, np.zeros((100, 100), np.float32))
    every = np.stack([(a - 1) / 2, *others]).reshape(4, -1)
    assert others[-1].dtype == np.float16
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        np.testing.assert_allclose((every**power).mean(1), moment, atol=0.25)
    np.testing.assert_allclose(np.corrcoef(every), np.eye(4), atol=0.05)
    for lag in (1, 2, 3, 8, 100, 128, 256):  # neighbours, rows
        assert abs((every[:, lag:] * every[:, :-lag]).mean()) < 0.05


def test_uniform_numbers_and_choices(tmp_path: Path) -> None:
    nodes = [
        ("RandomUniformLike", "x", "a", {"low": -1.0, "high": 3.0}),
        ("RandomUniform", "", "b", {"shape": [50]}),
        ("Bernoulli", "x", "c"),
    ]
    a, b, c = drawn(nodes, tmp_path, np.full((100, 100), 0.3, np.float32))
    assert -1 < a.min() < -0.99 and 2.99 < a.max() < 3 and b.shape == (50,)
    np.testing.assert_allclose(np.histogram(a, 10)[0], 1000, atol=150)
    assert set(np.unique(c)) == {0, 1} and abs(c.mean() - 0.3) < 0.03


def test_classes_are_drawn_by_their_probabilities(tmp_path: Path) -> None:
    x = np.full((20, 100), -1e9, np.float32)
    x[:, :3] = np.log(SHARES)
    (y,) = drawn([("Multinomial", "x", "y", {"sample_size": 500})], tmp_path, x)
    assert y.shape == (20, 500) and y.dtype == np.int32
    np.testing.assert_allclose(np.bincount(y.ravel()) / y.size, SHARES, atol=0.02)
