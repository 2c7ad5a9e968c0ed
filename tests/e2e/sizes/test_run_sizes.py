"""Sizes that depend on data, down to 0, through the whole pipeline, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

import apq_tvm
from apq_tvm.module import load_module
from tests.onnx_models import build, joined, save, session_of

RNG = np.random.default_rng(3)
WEIGHT = RNG.standard_normal((6, 40)).astype(np.float32)
X = {"x": ("float32", ["b", 6])}
YES = np.asarray(True)
NEAREST = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
INT64_MAX = np.iinfo(np.int64).max

ROUND = helper.make_graph(
    [
        helper.make_node("Identity", ["c"], ["again"]),
        helper.make_node("Cast", ["i"], ["f"], to=1),
        helper.make_node("Exp", ["f"], ["e"]),
    ],
    "round",
    [
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ],
    [
        helper.make_tensor_value_info("again", TensorProto.BOOL, []),
        helper.make_tensor_value_info("e", TensorProto.FLOAT, []),
    ],
)


def experts(count: int) -> list[Any]:
    """Rows that choose an expert, computed and put back: the sums are fused (`late.filled`)."""
    nodes: list[Any] = [
        ("ArgMax", "x", "best", {"axis": 1, "keepdims": 0}),
        ("Sub", "x x", "y0"),
    ]
    for i in range(count):
        nodes += [
            ("Equal", f"best id{i}", f"mine{i}"),
            ("NonZero", f"mine{i}", f"at{i}"),
            ("Transpose", f"at{i}", f"rows{i}", {"perm": [1, 0]}),
            ("GatherND", f"x rows{i}", f"given{i}"),
            ("MatMul", f"given{i} w{i}", f"made{i}"),
            ("ScatterND", f"y0 rows{i} made{i}", f"back{i}"),
            ("Add", f"y{i} back{i}", f"y{i + 1}"),
        ]
    return nodes


# name: (nodes, inputs, outputs, weights); `n`, `k` and the like are filled by `feeds`.
GRAPHS: dict[str, tuple[Any, ...]] = {
    "non_zero": (
        [
            ("NonZero", "x", "nz"),
            ("Transpose", "nz", "t", {"perm": [1, 0]}),
            ("GatherND", "x t", "v"),
            ("Add", "v one", "a"),
            ("ReduceSum", "a", "total", {"keepdims": 0}),
            ("Shape", "a", "count"),
        ],
        X,
        "nz a total count",
        {"one": np.float32(1)},
    ),
    "compress": (
        [
            ("ReduceSum", "x last", "s", {"keepdims": 0}),
            ("Greater", "s zero", "keep"),
            ("Compress", "x keep", "rows", {"axis": 0}),
            ("MatMul", "rows w", "m"),
            ("Softmax", "m", "y"),
            ("Compress", "x some", "flat"),
        ],
        X,
        "rows y flat",
        {
            "last": np.array([1]),
            "zero": np.float32(0),
            "w": WEIGHT,
            "some": np.array([True, False, True]),
        },
    ),
    "unique": (
        [
            ("Cast", "x", "i", {"to": 7}),
            ("Unique", "i", "u ui uv uc", {"sorted": 1}),
            ("Unique", "i", "v vi vv vc", {"sorted": 0}),
            ("Unique", "i", "r ri rv rc", {"axis": 0}),
            ("Unique", "x", "f", {"sorted": 1}),
        ],
        X,
        "u ui uv uc v vi vv vc r ri rv rc f",
        {},
    ),
    "top_k": (
        [("TopK", "x n", "v i", {"axis": 1}), ("TopK", "x n", "w j", {"largest": 0})],
        {**X, "n": ("int64", [1])},
        "v i w j",
        {},
    ),
    "range": (
        [
            ("Range", "zero n one", "r"),
            ("Cast", "r", "f", {"to": 1}),
            ("Mul", "f half", "y"),
            ("Range", "n zero minus", "back"),
            ("Cast", "n", "nf", {"to": 1}),
            ("Range", "start nf half", "g"),
        ],
        {"n": ("int64", [])},
        "y back g",
        {
            "zero": np.int64(0),
            "one": np.int64(1),
            "minus": np.int64(-2),
            "half": np.float32(0.5),
            "start": np.float32(-1.25),
        },
    ),
    "shapes": (
        [
            ("Concat", "n minus", "target", {"axis": 0}),
            ("ConstantOfShape", "target2", "ones"),
            ("Concat", "n six", "target2", {"axis": 0}),
            ("Reshape", "ones target3", "r"),
            ("Concat", "three n minus", "target3", {"axis": 0}),
            ("Expand", "c target2", "e"),
            ("Tile", "x n_one", "t"),
            ("Concat", "n one", "n_one", {"axis": 0}),
        ],
        {**X, "n": ("int64", [1])},
        "ones r e t",
        {
            "minus": np.array([-1]),
            "six": np.array([6]),
            "three": np.array([3]),
            "one": np.array([1]),
            "c": WEIGHT[:1, :6],
        },
    ),
    "slice_pad": (
        [
            ("Slice", "x n big axis", "from_n"),
            ("Slice", "x negative big axis", "last_n"),
            ("Neg", "n", "negative"),
            ("Slice", "x zero n axis", "to_n"),
            ("Slice", "x n lowest axis back", "backward"),
            ("Concat", "zero n zero negative", "pads", {"axis": 0}),
            ("Pad", "x pads", "moved"),
        ],
        {**X, "n": ("int64", [1])},
        "from_n last_n to_n backward moved",
        {
            "zero": np.array([0]),
            "big": np.array([INT64_MAX]),
            "lowest": np.array([-INT64_MAX]),
            "axis": np.array([1]),
            "back": np.array([-2]),
        },
    ),
    "split": (
        [
            ("Sub", "six n", "rest"),
            ("Concat", "n rest", "parts", {"axis": 0}),
            ("Split", "x parts", "p q", {"axis": 1}),
            ("ReduceMax", "q axis", "m", {"keepdims": 0}),
            ("Concat", "q p", "y", {"axis": 1}),
            ("OneHot", "ids depth values", "hot"),
            ("Add", "n one", "depth1"),
            ("Squeeze", "depth1", "depth"),
        ],
        {**X, "n": ("int64", [1])},
        "p q y hot",
        {
            "six": np.array([6]),
            "axis": np.array([1]),
            "one": np.array([1]),
            "ids": np.array([0, 2, -1]),
            "values": np.array([0, 1], np.float32),
        },
    ),
    "boxes": (
        [
            ("NonMaxSuppression", "corners scores most overlap least", "rows"),
            ("Gather", "rows two", "ids", {"axis": 1}),
            ("Gather", "corners0 ids", "kept"),
            ("Squeeze", "corners zero", "corners0"),
            ("NonMaxSuppression", "corners scores most overlap", "near", {"center_point_box": 1}),
        ],
        {"corners": ("float32", [1, 30, 4]), "scores": ("float32", [1, 2, 30])},
        "rows kept near",
        {
            "most": np.array([8]),
            "overlap": np.array([0.3], np.float32),
            "least": np.array([0.6], np.float32),
            "two": np.int64(2),
            "zero": np.array([0]),
        },
    ),
    "loop": ([("Loop", "n yes", "y", {"body": ROUND})], {"n": ("int64", [])}, "y", {"yes": YES}),
    "transposed": (
        [
            ("ConvTranspose", "v k c", "y", {"output_shape": [11, 9], "strides": [2, 2]}),
            ("TopK", "v one", "best unread", {"axis": 3}),
            ("Split", "w", "left right unread2", {"axis": 1, "num_outputs": 3}),
        ],
        {"v": ("float32", [1, 2, "b2", 4]), "w": ("float32", ["b2", 6])},
        "y best left right",
        {"k": WEIGHT[:, :12].reshape(2, 4, 3, 3), "c": WEIGHT[0, :4], "one": np.array([1])},
    ),
    "experts": (
        experts(6),
        X,
        "y6",
        {f"id{i}": np.int64(i) for i in range(6)}
        | {f"w{i}": WEIGHT[:, 6 * i : 6 * i + 6] for i in range(6)},
    ),
    "nobody": (
        [
            ("MatMul", "people w", "m"),
            ("Softmax", "m", "p"),
            ("ReduceSum", "p axes", "all"),
            ("Reshape", "p pairs", "r"),
            ("Transpose", "r", "t", {"perm": [1, 0, 2]}),
            ("Concat", "people people", "twice", {"axis": 0}),
            ("Concat", "twice row", "more", {"axis": 0}),
            ("Slice", "people one two zero", "second"),
        ],
        {"people": ("float32", ["people", 6])},
        "all t more second",
        {
            **{name: np.array([i]) for i, name in enumerate("zero one two".split())},
            "w": WEIGHT,
            "axes": np.array([0]),
            "pairs": np.array([-1, 20, 2]),
            "row": WEIGHT[:1, :6],
        },
    ),
    "resized": (
        [
            ("Add", "n one", "height"),
            ("Shape", "image", "whole"),
            ("Slice", "whole zero two", "front"),
            ("Concat", "front height three", "sizes", {"axis": 0}),
            ("Resize", "image nothing nothing sizes", "large", {"mode": "linear"}),
            ("Conv", "large kernel", "y"),
            ("Cast", "height", "factor0", {"to": 1}),
            ("Mul", "factor0 part", "factor"),
            ("Concat", "ones factor factor", "scales", {"axis": 0}),
            ("Resize", "image nothing scales", "near", NEAREST),
            ("Resize", "image nothing scales", "smooth", {"mode": "cubic"}),
        ],
        {"n": ("int64", [1]), "image": ("float32", ["b", 4, 5, 7])},
        "y near smooth",
        {
            **{name: np.array([i]) for i, name in enumerate("zero one two three".split())},
            "part": np.float32(0.45),
            "ones": np.ones(2, np.float32),
            "nothing": np.zeros(0, np.float32),
            "kernel": WEIGHT[:, :12].reshape(18, 4, 1, 1)[:6],
        },
    ),
    "as_many": (  # TVM 0.27 looked for what the dimension stands for until its stack was full
        [
            ("Slice", "x zero end zero two", "half"),
            ("Shape", "x", "rows", {"end": 1}),
            ("Squeeze", "rows", "count"),
            ("Range", "first count step", "numbers"),
            ("Mod", "numbers two", "odd"),
            ("Equal", "odd zero", "even"),
            ("Compress", "x even", "kept", {"axis": 0}),
            ("Einsum", "half kept", "y", {"equation": "id,id->i"}),
        ],
        X,
        "y",
        {
            **{"zero": np.array([0]), "two": np.array([2]), "end": np.array([INT64_MAX])},
            **{"first": np.int64(0), "step": np.int64(1)},
        },
    ),
    "twice": (
        [
            ("NonZero", "x", "nz"),
            ("Gather", "nz row", "columns", {"axis": 0}),
            ("Greater", "columns two", "right"),
            ("Compress", "columns right", "kept", {"axis": 0}),
            ("Cast", "kept", "f", {"to": 1}),
            ("Shape", "kept", "n"),
            ("ConstantOfShape", "n", "zeros"),
            ("Concat", "zeros f", "y", {"axis": 0}),
        ],
        X,
        "kept y",
        {"row": np.int64(1), "two": np.int64(2)},
    ),
}


def feed(inputs: Mapping[str, Any], batch: int, number: int, density: float) -> dict[str, Any]:
    """Inputs of which a part is 0; every integer is `number`."""
    made: dict[str, Any] = {}
    for name, (dtype, shape) in inputs.items():
        sizes = {"b": batch, "b2": 5 + batch % 2, "people": number}
        extents = [sizes.get(d, d) for d in shape]
        if dtype == "int64":
            made[name] = np.full(extents, number)
        elif name.endswith("scores"):
            made[name] = (RNG.random(extents) * density).astype(np.float32)
        else:
            full = np.abs(RNG.standard_normal(extents) * 2).astype(np.float32)
            made[name] = full * (RNG.random(extents) < density)
    return made


def test_sizes_of_data_match_onnxruntime(tmp_path: Path) -> None:
    """Everything, some and nothing selected, in one context."""
    nodes, inputs, outputs, weights = joined(GRAPHS)
    path = save(build(nodes, inputs, " ".join(outputs), weights, opset=18), tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="float", dims={"people": (0, 99)})
    module, session, wrong = load_module(tmp_path / "compiled"), session_of(path), []
    for batch, number, density in ((1, 1, 0.5), (5, 6, 1.0), (3, 3, 0.0), (4, 2, 0.4), (2, 0, 0.7)):
        given = feed(inputs, batch, number, density)
        got = module.run(given)
        for name, value in zip(outputs, session.run(outputs, given), strict=True):
            assert got[name].dtype == value.dtype, name
            same = got[name].shape == value.shape
            if not same or not np.allclose(got[name], value, rtol=2e-5, atol=2e-5):
                wrong.append(f"{name} at {batch, number, density}: {got[name].shape} {value.shape}")
    assert not wrong, "\n".join(wrong)
