"""Convolutions of every kind through the whole pipeline, against ONNX Runtime.

One model of many small graphs, as in `tests.e2e.graphs.test_operators`; here each is about windows,
channels last and what is fused into the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apq_tvm
from apq_tvm.explain import explain, explanation_lines
from apq_tvm.module import load_module
from tests.onnx_models import build, joined, save, session_of

RNG = np.random.default_rng(0)


def weight(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(max(1, np.prod(shape[1:])))).astype(np.float32)


def image(*shape: int | str) -> dict[str, Any]:
    return {"x": ("float32", list(shape))}


FLAT, SMALL, WIDE = image("b", 8, 11, 9), image("b", 3, 14, 14), image("b", 48, 7, 9)
LINE, SOLID = image("b", 6, 21), image("b", 4, 5, 6, 7)
OPEN = image("b", 8, "h", "w")

NEAREST = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}

# name: (nodes, inputs, outputs, weights)
GRAPHS: dict[str, tuple[Any, ...]] = {
    "pointwise": (
        [("Conv", "x w b", "c"), ("Relu", "c", "y")],
        FLAT,
        "y",
        {"w": weight(20, 8, 1, 1), "b": weight(20)},
    ),
    "strided_pointwise": (
        [("Conv", "x w", "y", {"strides": [2, 2]})],
        FLAT,
        "y",
        {"w": weight(20, 8, 1, 1)},
    ),
    "stem": (
        [
            ("Conv", "x w b", "c", {"strides": [2, 2], "pads": [3, 3, 3, 3]}),
            ("HardSwish", "c", "y"),
        ],
        SMALL,
        "y",
        {"w": weight(16, 3, 7, 7), "b": weight(16)},
    ),
    "uneven": (
        [("Conv", "x w", "y", {"strides": [2, 3], "pads": [0, 2, 1, 0], "dilations": [2, 1]})],
        FLAT,
        "y",
        {"w": weight(5, 8, 2, 4)},
    ),
    "same_upper": (
        [("Conv", "x w", "y", {"auto_pad": "SAME_UPPER", "strides": [2, 2]})],
        FLAT,
        "y",
        {"w": weight(16, 8, 3, 2)},
    ),
    "same_lower": (
        [("Conv", "x w", "y", {"auto_pad": "SAME_LOWER", "strides": [2, 2]})],
        FLAT,
        "y",
        {"w": weight(16, 8, 2, 4)},
    ),
    "line": (
        [("Conv", "x w b", "y", {"pads": [2, 2], "dilations": [2]})],
        LINE,
        "y",
        {"w": weight(18, 6, 3), "b": weight(18)},
    ),
    "solid": (
        [("Conv", "x w", "c", {"pads": [1] * 6}), ("Relu", "c", "y")],
        SOLID,
        "y",
        {"w": weight(17, 4, 3, 3, 3)},
    ),
    "groups": (
        [("Conv", "x w b", "c", {"group": 6, "pads": [1] * 4}), ("Sigmoid", "c", "y")],
        WIDE,
        "y",
        {"w": weight(24, 8, 3, 3), "b": weight(24)},
    ),
    "wide_groups": (
        [("Conv", "x w", "y", {"group": 2})],
        WIDE,
        "y",
        {"w": weight(64, 24, 1, 1)},
    ),
    "multiplier": (
        [("Conv", "x w", "y", {"group": 8, "pads": [1] * 4})],
        FLAT,
        "y",
        {"w": weight(16, 1, 3, 3)},
    ),
    "depthwise": (
        [("Conv", "x w b", "c", {"group": 48, "pads": [1] * 4}), ("HardSwish", "c", "y")],
        WIDE,
        "y",
        {"w": weight(48, 1, 3, 3), "b": weight(48)},
    ),
    "depthwise_strided": (
        [
            ("Conv", "x w", "c", {"group": 8, "pads": [2, 1, 3, 2], "strides": [2, 1]}),
            ("Clip", "c low high", "y"),
        ],
        FLAT,
        "y",
        {"w": weight(8, 1, 5, 3), "low": np.float32(0), "high": np.float32(6)},
    ),
    "depthwise_line": (
        [("Conv", "x w", "y", {"group": 6, "dilations": [3], "pads": [9, 9]})],
        LINE,
        "y",
        {"w": weight(6, 1, 7)},
    ),
    "depthwise_solid": (
        [("Conv", "x w b", "y", {"group": 4, "pads": [1, 0, 1, 1, 1, 1]})],
        SOLID,
        "y",
        {"w": weight(4, 1, 3, 2, 3), "b": weight(4)},
    ),
    "normalised": (
        [
            ("Conv", "x w b", "c", {"pads": [1] * 4}),
            ("BatchNormalization", "c s t m v", "n"),
            ("Relu", "n", "r"),
            ("BatchNormalization", "r s t m v", "y"),
        ],
        FLAT,
        "y",
        {
            **{"w": weight(24, 8, 3, 3), "b": weight(24), "s": weight(24), "t": weight(24)},
            **{"m": weight(24), "v": np.abs(weight(24)) + 1},
        },
    ),
    "affine": (
        [
            ("Conv", "x w", "c"),
            ("Mul", "c s", "m"),
            ("Add", "t m", "a"),
            ("Div", "a two", "d"),
            ("Sub", "d t", "y"),
        ],
        FLAT,
        "y",
        {
            **{"w": weight(12, 8, 3, 3), "s": weight(12, 1, 1), "t": weight(1, 12, 1, 1)},
            "two": np.float32(2),
        },
    ),
    "residual": (
        [
            ("Conv", "x v", "p"),
            ("Conv", "p w", "c", {"pads": [1] * 4}),
            ("Relu", "c", "r"),
            ("Conv", "r w", "d", {"pads": [1] * 4}),
            ("Add", "d p", "s"),
            ("Relu", "s", "y"),
        ],
        FLAT,
        "y",
        {"v": weight(32, 8, 1, 1), "w": weight(32, 32, 3, 3)},
    ),
    "squeeze_excite": (
        [
            ("Conv", "x w", "c"),
            ("GlobalAveragePool", "c", "g"),
            ("Conv", "g u", "e"),
            ("Relu", "e", "f"),
            ("Conv", "f v", "h"),
            ("HardSigmoid", "h", "s", {"alpha": 1 / 6}),
            ("Mul", "c s", "y"),
        ],
        FLAT,
        "y",
        {"w": weight(32, 8, 1, 1), "u": weight(8, 32, 1, 1), "v": weight(32, 8, 1, 1)},
    ),
    "hard_swish_spelled": (
        [
            ("Conv", "x w", "c"),
            ("Add", "c three", "a"),
            ("Clip", "a low six", "k"),
            ("Mul", "c k", "m"),
            ("Div", "m six", "y"),
        ],
        FLAT,
        "y",
        {
            "w": weight(20, 8, 1, 1),
            "three": np.float32(3),
            "low": np.float32(0),
            "six": np.float32(6),
        },
    ),
    "max_pool": (
        [
            ("Conv", "x w", "c"),
            ("MaxPool", "c", "p", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
            ("MaxPool", "p", "y", {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
        ],
        FLAT,
        "p y",
        {"w": weight(20, 8, 1, 1)},
    ),
    "pools_of_one_channel": (
        [
            ("Conv", "x w", "c"),
            ("MaxPool", "c", "p", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
            ("AveragePool", "p", "q", {"kernel_shape": [2, 2], "pads": [1] * 4}),
            ("Conv", "q v", "y"),
        ],
        FLAT,
        "y",
        {"w": weight(1, 8, 1, 1), "v": weight(20, 1, 3, 3)},
    ),
    "average_pool": (
        [
            ("Conv", "x w", "c"),
            ("AveragePool", "c", "p", {"kernel_shape": [3, 3], "strides": [1, 2], "pads": [1] * 4}),
            (
                *("AveragePool", "p", "y"),
                {"kernel_shape": [2, 3], "pads": [1, 1, 0, 1], "count_include_pad": 1},
            ),
        ],
        FLAT,
        "y",
        {"w": weight(20, 8, 1, 1)},
    ),
    "joined": (
        [
            ("Conv", "x w", "c"),
            ("Conv", "x v", "d", {"pads": [1] * 4}),
            ("Concat", "c d x", "j", {"axis": 1}),
            ("Split", "j parts", "p q", {"axis": 1}),
            ("Conv", "q u", "e"),
            ("ReduceMean", "e axes", "y", {"keepdims": 0}),
            ("ArgMax", "p", "z", {"axis": 1, "keepdims": 0}),
        ],
        FLAT,
        "y z",
        {
            **{"w": weight(16, 8, 1, 1), "v": weight(8, 8, 3, 3), "u": weight(10, 16, 1, 1)},
            **{"parts": np.array([16, 16]), "axes": np.array([2, 3])},
        },
    ),
    "classified": (
        [
            ("Conv", "x w", "c", {"strides": [2, 2]}),
            ("Relu", "c", "r"),
            ("GlobalMaxPool", "r", "g"),
            ("Flatten", "g", "f"),
            ("Gemm", "f v", "y", {"transB": 1}),
        ],
        SMALL,
        "y",
        {"w": weight(32, 3, 3, 3), "v": weight(10, 32)},
    ),
    "padded_sliced": (
        [
            ("Conv", "x w", "c"),
            ("Pad", "c pads", "p"),
            ("Slice", "p starts ends axes", "s"),
            ("Softmax", "s", "y", {"axis": 1}),
        ],
        FLAT,
        "y",
        {
            **{"w": weight(16, 8, 1, 1), "pads": np.array([0, 1, 2, 0, 0, 0, 1, 3])},
            **{"starts": np.array([1, 2]), "ends": np.array([15, 8]), "axes": np.array([1, 3])},
        },
    ),
    "upsampled": (
        [
            ("Conv", "x w", "c"),
            ("Resize", "c _ twice", "r", {**NEAREST, "nearest_mode": "floor"}),
            ("Resize", "c _ uneven", "s", {"mode": "linear"}),
            ("Resize", "c _ _ size", "t", {"axes": [2, 3]}),
            (
                *("Resize", "c _ uneven", "a"),
                {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
            ),
            ("ConvTranspose", "c v b", "u", {"strides": [2, 2]}),
            ("Concat", "r u", "y", {"axis": 1}),
        ],
        FLAT,
        "y s t a",
        {
            **{"w": weight(16, 8, 1, 1), "v": weight(16, 12, 2, 2), "b": weight(12)},
            **{"twice": np.array([1, 1, 2, 2], np.float32), "size": np.array([7, 20])},
            "uneven": np.array([1, 1, 1.5, 0.7], np.float32),
        },
    ),
    "transposed": (
        [
            (
                *("ConvTranspose", "x w b", "c"),
                {"strides": [2, 3], "pads": [1, 0, 0, 2], "output_padding": [1, 0]},
            ),
            ("BatchNormalization", "c b b b v", "n"),
            ("Relu", "n", "y"),
            ("ConvTranspose", "c u", "z", {"dilations": [2, 1], "group": 2}),
        ],
        FLAT,
        "y z",
        {
            **{"w": weight(8, 16, 3, 4), "b": weight(16), "v": np.abs(weight(16)) + 1},
            "u": weight(16, 6, 2, 3),
        },
    ),
    "few_outputs": (
        [
            ("Conv", "x w", "c"),
            ("Conv", "c u b", "d", {"pads": [3, 0, 1, 2], "dilations": [1, 2]}),
            ("Sigmoid", "d", "y"),
            ("Conv", "c v", "z"),
            (
                *("ConvTranspose", "c t", "s"),
                {"strides": [4, 6], "dilations": [3, 4], "pads": [1, 3, 0, 2]},
            ),
            ("ConvTranspose", "c r", "q", {"strides": [2, 5]}),
        ],
        FLAT,
        "y z s q",
        {
            **{"w": weight(16, 8, 1, 1), "u": weight(3, 16, 3, 2), "b": weight(3)},
            **{"v": weight(1, 16, 5, 1), "t": weight(16, 2, 5, 7), "r": weight(16, 4, 5, 3)},
        },
    ),
    "open": (
        [
            ("Conv", "x w b", "c", {"strides": [2, 2], "pads": [1] * 4}),
            ("Relu", "c", "r"),
            ("Conv", "r d", "e", {"group": 24, "pads": [1] * 4, "strides": [2, 1]}),
            ("Conv", "e v", "f", {"pads": [0, 1, 0, 1]}),
            ("GlobalAveragePool", "f", "y"),
        ],
        OPEN,
        "f y",
        {
            "w": weight(24, 8, 3, 3),
            "b": weight(24),
            "d": weight(24, 1, 3, 3),
            "v": weight(16, 24, 1, 3),
        },
    ),
    "narrow_groups": (
        [
            ("Conv", "x w b", "c", {"group": 4, "pads": [1] * 4, "strides": [1, 2]}),
            ("Relu", "c", "r"),
            ("Conv", "r v", "y", {"group": 4, "pads": [2, 0, 1, 0], "dilations": [1, 2]}),
            ("Conv", "x u", "z", {"group": 8}),
            ("Conv", "y s b", "t", {"group": 4, "pads": [0, 3, 0, 3]}),
        ],
        OPEN,
        "y z t",
        {
            **{"w": weight(32, 2, 3, 3), "b": weight(32), "v": weight(16, 8, 3, 2)},
            **{"u": weight(32, 1, 3, 3), "s": weight(32, 4, 1, 4)},
        },
    ),
    "sampled": (
        [
            ("GridSample", "x g", "y"),
            ("GridSample", "x g", "z", {"align_corners": 1, "padding_mode": "border"}),
            ("GridSample", "x g", "q", {"padding_mode": "reflection"}),
            (
                *("RoiAlign", "x rois images", "r"),
                {"output_height": 3, "output_width": 2, "sampling_ratio": 2, "spatial_scale": 0.5},
            ),
        ],
        {**OPEN, "g": ("float32", ["b", 3, 5, 2])},
        "y z q r",
        {
            "rois": np.array([[1, 2, 9, 11], [-4, 3, 30, 9], [5, 5, 5, 5]], np.float32),
            "images": np.zeros(3, np.int64),
        },
    ),
    "open_same": (
        [
            ("Conv", "x w", "c", {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
            ("Conv", "c d", "y", {"group": 16, "auto_pad": "SAME_LOWER", "strides": [3, 2]}),
        ],
        OPEN,
        "y",
        {"w": weight(16, 8, 3, 3), "d": weight(16, 1, 4, 3)},
    ),
}

SIZES = ({"b": 1, "h": 9, "w": 12}, {"b": 3, "h": 14, "w": 7})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nodes, inputs, outputs, weights = joined(GRAPHS)
    folder = tmp_path_factory.mktemp("convolutions")
    return save(build(nodes, inputs, " ".join(outputs), weights, opset=20), folder)


def feed(sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    made = {}
    for name, (dtype, shape) in joined(GRAPHS)[1].items():
        extents = [sizes[d] if isinstance(d, str) else d for d in shape]
        made[name] = RNG.standard_normal(extents).astype(dtype)
    return made


def test_parts_of_a_run_are_runs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no working memory counts as near, a batch is one image after another, to the bit."""
    nodes = [
        ("Conv", "x w", "c", {"pads": [1] * 4}),
        ("Relu", "c", "r"),
        ("GlobalAveragePool", "r", "p"),
        ("Mul", "r p", "g"),
        ("ReduceMean", "g", "y", {"axes": [2, 3], "keepdims": 0}),
        ("Add", "x t", "z"),
    ]
    inputs = {**image("b", 3, 10, 10), "t": ("float32", [1, 3, 1, 1])}
    model = save(build(nodes, inputs, "y z", {"w": weight(17, 3, 3, 3)}), tmp_path)
    monkeypatch.setattr("apq_tvm.codegen.emit.NEAR_CACHES", 0)
    apq_tvm.compile(model, tmp_path / "parts", scheme="W8A8")
    module = load_module(tmp_path / "parts")
    x, t = RNG.standard_normal((5, 3, 10, 10), np.float32), np.ones((1, 3, 1, 1), np.float32)
    got = module.run({"x": x, "t": t})
    assert got["y"].shape == (5, 17)
    one = [module.run({"x": x[i : i + 1], "t": t}) for i in range(5)]
    backwards = module.run({"x": x[::-1], "t": t})
    for name, value in got.items():
        np.testing.assert_array_equal(value, np.concatenate([each[name] for each in one]))
        np.testing.assert_array_equal(value, backwards[name][::-1])
    assert np.allclose(got["z"], x + 1)
    assert "few entries of 'b'" in explanation_lines(explain(tmp_path / "parts"))[0]


def test_stages_take_images_of_their_own_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large activations of few weights one by one, large weights for several, on all threads."""
    nodes = [
        ("Conv", "x w", "a", {"pads": [1] * 4}),
        ("Relu", "a", "b"),
        ("Conv", "b u", "c", {"strides": [5, 5]}),
        ("Add", "c c", "d"),
        ("Conv", "d v", "e"),
        ("Relu", "e", "f"),
        ("GlobalAveragePool", "f", "y"),
    ]
    weights = {"w": weight(16, 3, 3, 3), "u": weight(32, 16, 1, 1), "v": weight(512, 32, 2, 2)}
    model = save(build(nodes, image("b", 3, 10, 10), "y", weights), tmp_path)
    monkeypatch.setattr("apq_tvm.codegen.emit.NEAR_CACHES", 0)
    apq_tvm.compile(model, tmp_path / "staged", scheme="W8A8")
    module = load_module(tmp_path / "staged")
    assert module.manifest["graph"]["stages"] > 1
    x = RNG.standard_normal((7, 3, 10, 10), np.float32)
    one = np.concatenate([module.run({"x": x[i : i + 1]})["y"] for i in range(7)])
    for threads in (1, 2, 3, 8):
        module.set_num_threads(threads)
        for _ in range(2):  # the second time plans and contexts are there
            for count in (7, 2, 5):
                got = module.run({"x": x[:count]})["y"]
                np.testing.assert_allclose(got, one[:count], rtol=1e-5, atol=1e-6)
    with ThreadPoolExecutor(3) as pool:  # each with a context and threads of its own
        for got in pool.map(lambda _: module.run({"x": x})["y"], range(6)):
            np.testing.assert_allclose(got, one, rtol=1e-5, atol=1e-6)
    memory = module.memory()
    assert 0 < memory["live"] <= memory["arena"]


def test_float_images_are_convolved_where_they_lie(tmp_path: Path) -> None:
    """And a mean that counts as many everywhere."""
    nodes = [
        ("Conv", "x w b", "c", {"strides": [2, 2], "pads": [1] * 4}),
        ("Relu", "c", "r"),
        ("AveragePool", "r", "y", {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ]
    weights = {"w": weight(16, 8, 3, 3), "b": weight(16)}
    model = save(build(nodes, image("b", 8, 11, 14), "y", weights), tmp_path)
    apq_tvm.compile(model, tmp_path / "compiled", scheme="float")
    given = {"x": RNG.standard_normal((2, 8, 11, 14), np.float32)}
    (wanted,) = session_of(model).run(None, given)
    module = load_module(tmp_path / "compiled")
    np.testing.assert_allclose(module.run(given)["y"], wanted, rtol=2e-5, atol=2e-5)
    rules = {f["schedule"].rpartition("_")[2] for f in module.manifest["functions"]}
    assert {"convolution", "pool"} <= rules


@pytest.mark.all_cases
def test_float(model: Path, tmp_path: Path) -> None:
    """Every output of every graph at every size; what is wrong is listed."""
    apq_tvm.compile(model, tmp_path / "compiled", scheme="float")
    module, session, wrong = load_module(tmp_path / "compiled"), session_of(model), []
    outputs = joined(GRAPHS)[2]
    for sizes in SIZES:
        given = feed(sizes)
        got = module.run(given)
        for name, value in zip(outputs, session.run(outputs, given), strict=True):
            assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
            if not np.allclose(got[name], value, rtol=2e-5, atol=2e-5):
                wrong.append(f"{name} at {sizes}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.all_cases
def test_int8(model: Path, tmp_path: Path) -> None:
    """Weights per channel and activations per pixel: close to the float model."""
    apq_tvm.compile(model, tmp_path / "compiled", scheme="W8A8")
    module, session, wrong = load_module(tmp_path / "compiled"), session_of(model), []
    outputs = [name for name in joined(GRAPHS)[2] if name != "joined.z"]
    for sizes in SIZES:
        given = feed(sizes)
        got = module.run(given)
        for name, value in zip(outputs, session.run(outputs, given), strict=True):
            a, b = got[name].ravel().astype(np.float64), value.ravel().astype(np.float64)
            cosine = float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
            if not cosine >= 0.9995:
                wrong.append(f"{name} at {sizes}: {cosine}")
    assert not wrong, "\n".join(wrong)


def test_activations_of_one_bit(tmp_path: Path) -> None:
    """Of their sign alone a window's padding is no zero: it is as in a product with the window."""
    w, x = weight(16, 8, 3, 3), RNG.standard_normal((2, 8, 9, 9)).astype(np.float32)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    rows = windows.transpose(0, 2, 3, 4, 5, 1).reshape(2, 81, 72)  # as layers have their channels
    nodes = [("Conv", "x w", "c", {"pads": [1] * 4}), ("MatMul", "rows v", "y")]
    inputs = {**image("b", 8, 9, 9), "rows": ("float32", ["b", 81, 72])}
    weights = {"w": w, "v": w.transpose(2, 3, 1, 0).reshape(72, 16).copy()}
    model = save(build(nodes, inputs, "c y", weights), tmp_path)
    apq_tvm.compile(model, tmp_path / "signs", scheme="W4A1")
    got = load_module(tmp_path / "signs").run({"x": x, "rows": rows.copy()})
    np.testing.assert_allclose(got["c"].reshape(2, 16, 81), got["y"].swapaxes(1, 2), 1e-5, 1e-6)
