"""Small graphs of many operators through the whole pipeline, against ONNX Runtime.

What is tested is the join of the stages: import, Relax, schedules and the emitted C, with dynamic
dimensions wherever the operator takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apq_tvm
from apq_tvm.module import load_module
from tests.onnx_models import build, joined, save, session_of

RNG = np.random.default_rng(0)


def weight(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


X2 = {"x": ("float32", ["b", 48])}
X3 = {"x": ("float32", ["b", "s", 48])}
IMAGE = {"x": ("float32", ["b", 3, 16, 16])}
INT = {"i": ("int64", ["b", "s"])}

# name: (nodes, inputs, outputs, weights)
GRAPHS: dict[str, tuple[Any, ...]] = {
    # deberta: heads repeated by a batch that only a run knows.
    "tile": (
        [
            ("Shape", "x", "n", {"start": 0, "end": 1}),
            ("Concat", "n one two", "r", {"axis": 0}),
            ("Tile", "w r", "y"),
            ("Tile", "x r", "z"),
        ],
        X3,
        "y z",
        {"w": weight(3, 2, 4), "one": np.array([1]), "two": np.array([2])},
    ),
    # deberta: buckets of distances; a vector of conditions is read twice.
    "conditions": (
        [
            ("Shape", "i", "n", {"start": 1, "end": 2}),
            ("Squeeze", "n", "n0"),
            ("Range", "zero n0 one", "r"),
            ("Unsqueeze", "r last", "c"),
            ("Sub", "c r", "d"),
            ("Less", "d far", "a"),
            ("Greater", "d near", "b"),
            ("And", "a b", "close"),
            ("Abs", "d", "e"),
            ("Where", "close three e", "f"),
            ("LessOrEqual", "f four", "g"),
            ("Where", "g d f", "y"),
        ],
        INT,
        "y",
        {k: np.array(v) for k, v in dict(zero=0, one=1, three=3, four=4, far=8, near=-8).items()}
        | {"last": np.array([1])},
    ),
    # A value that is read twice, twenty times over: written out it has a million parts.
    "squares": (
        [
            node
            for i in range(20)
            for node in (
                ("Mul", f"{f's{i}' if i else 'x'} {f's{i}' if i else 'x'}", f"m{i}"),
                ("Sqrt", f"m{i}", f"s{i + 1}" if i < 19 else "y"),
            )
        ],
        X2,
        "y",
        {},
    ),
    "depth_to_space": (
        [
            ("DepthToSpace", "x", "y", {"blocksize": 2}),
            ("DepthToSpace", "x", "z", {"blocksize": 2, "mode": "CRD"}),
            ("SpaceToDepth", "y", "back", {"blocksize": 2}),
        ],
        {"x": ("float32", ["b", 8, "s", 6])},
        "y z back",
        {},
    ),
    # torch_geometric's nearest neighbours: distances that are out of the question.
    "infinite": (
        [
            ("Shape", "x", "n"),
            ("ConstantOfShape", "n", "y", {"value": np.array([np.inf], np.float32)}),
        ],
        X2,
        "y",
        {},
    ),
    # torch names no indices where nobody reads them.
    "topk_values": ([("TopK", "x k", "y _")], X2, "y", {"k": np.array([3])}),
    # torch's MultiheadAttention: a batch that the exporter wrote down as what it was.
    "fixed_batch": (
        [("Reshape", "x to", "a"), ("MatMul", "x a", "y")],
        {"x": ("float32", ["b", 2, 4, 4])},
        "y",
        {"to": np.array([-1, 2, 4, 4])},
    ),
    # A network that halves and doubles: positions are floats of dimensions.
    "resize_like": (
        [
            ("AveragePool", "x", "h", {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
            ("Shape", "x", "n"),
            (
                "Resize",
                "h _ _ n",
                "y",
                {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
            ),
        ],
        {"x": ("float32", ["b", 3, "s", 6])},
        "y",
        {},
    ),
    # whisper: a mask cut to a length that no other tensor of the fused function has.
    "cut_mask": (
        [
            ("Shape", "i", "n", {"start": 1, "end": 2}),
            ("LessOrEqual", "m zero", "a"),
            ("Where", "a m zero", "e"),
            ("Slice", "e none n last", "y"),
        ],
        INT | {"m": ("float32", [2, 6])},
        "y",
        {
            "zero": np.zeros((), np.float32),
            "none": np.array([0]),
            "last": np.array([1]),
        },
    ),
    "elementwise": (
        [("Add", "x c", "a"), ("Sigmoid", "a", "g"), ("Mul", "a g", "m"), ("Sqrt", "g", "y")],
        X3,
        "m y",
        {"c": weight(48)},
    ),
    "unary": (
        [("Exp", "x", "a"), ("Log", "a", "b"), ("Tanh", "b", "c"), ("Erf", "c", "y")],
        X2,
        "a y",
        {},
    ),
    "compare": (
        [
            ("Greater", "x z", "g"),
            ("Where", "g x z", "y"),
            ("IsNaN", "x", "n"),
            ("Not", "g", "h"),
            ("Less", "x nan", "l"),
            ("Not", "l", "m"),
        ],
        X2,
        "g y n h m",
        {"z": np.zeros(1, np.float32), "nan": np.full(1, np.nan, np.float32)},
    ),
    "cast": (
        [("Cast", "x", "i", {"to": 7}), ("Cast", "i", "y", {"to": 1}), ("Abs", "i", "a")],
        X2,
        "i y a",
        {},
    ),
    "reduce": (
        [
            ("ReduceMean", "x", "m", {"axes": [-1], "keepdims": 0}),
            ("ReduceMax", "x", "a", {"axes": [1]}),
            ("ReduceSum", "x axes", "s", {"keepdims": 0}),
            ("ArgMax", "x", "k", {"axis": -1}),
        ],
        X3,
        "m a s k",
        {"axes": np.array([0, 1])},
    ),
    "softmax": ([("Softmax", "x", "y"), ("LogSoftmax", "x", "z")], X3, "y z", {}),
    "softmax_inner": ([("Softmax", "x", "y", {"axis": 1})], X3, "y", {}),
    "layernorm": (
        [("LayerNormalization", "x g b", "y", {"axis": -1}), ("Gelu", "y", "z", {})],
        X3,
        "y z",
        {"g": weight(48), "b": weight(48)},
    ),
    "transpose": (
        [
            ("Reshape", "x shape", "r"),
            ("Transpose", "r", "t", {"perm": [0, 2, 1, 3]}),
            ("Transpose", "t", "y", {"perm": [3, 1, 0, 2]}),
        ],
        X3,
        "t y",
        {"shape": np.array([0, 0, 4, 12])},
    ),
    "concat_split": (
        [
            ("Split", "x parts", "p q", {"axis": -1}),
            ("Concat", "q x p", "y", {"axis": -1}),
            ("Concat", "x x", "z", {"axis": 1}),
        ],
        X3,
        "y z",
        {"parts": np.array([16, 32])},
    ),
    "slice_pad": (
        [
            ("Slice", "x starts ends axes steps", "s"),
            ("Pad", "s pads", "y", {"mode": "constant"}),
        ],
        X2,
        "s y",
        {
            "starts": np.array([3]),
            "ends": np.array([40]),
            "axes": np.array([1]),
            "steps": np.array([2]),
            "pads": np.array([0, 2, 1, 3]),
        },
    ),
    "gather": (
        [("Gather", "t i", "e"), ("Gather", "e k", "y", {"axis": 2})],
        INT,
        "e y",
        {"t": weight(50, 24), "k": np.array([3, -1, 0])},
    ),
    "embedding_norm": (
        [("Gather", "t i", "e"), ("MatMul", "e w", "m"), ("Relu", "m", "y")],
        INT,
        "y",
        {"t": weight(64, 40), "w": weight(40, 30)},
    ),
    "matmul_batched": (
        [
            ("Reshape", "x shape", "r"),
            ("Transpose", "r", "q", {"perm": [0, 2, 1, 3]}),
            ("Transpose", "r", "k", {"perm": [0, 2, 3, 1]}),
            ("MatMul", "q k", "y"),
        ],
        X3,
        "y",
        {"shape": np.array([0, 0, 3, 16])},
    ),
    "gemm": (
        [("Gemm", "x w b", "g", {"transB": 1, "alpha": 0.5}), ("Tanh", "g", "y")],
        X2,
        "y",
        {"w": weight(20, 48), "b": weight(20)},
    ),
    "two_linears": (
        [
            ("MatMul", "x w", "a"),
            ("Add", "a b", "c"),
            ("MatMul", "c v", "d"),
            ("Add", "d x", "y"),
        ],
        X3,
        "c y",
        {"w": weight(48, 96), "b": weight(96), "v": weight(96, 48)},
    ),
    # Keras: dense layers of several axes, and attention of their heads.
    "einsum": (
        [
            *(
                node
                for part in "qkv"
                for node in (
                    ("Einsum", f"x w{part}", f"h{part}", {"equation": "abc,cde->abde"}),
                    ("Add", f"h{part} b{part}", part),
                )
            ),
            ("Einsum", "k q", "scores", {"equation": "aecd,abcd->acbe"}),
            ("Softmax", "scores", "p"),
            ("Einsum", "p v", "o", {"equation": "acbe,aecd->abcd"}),
            ("Einsum", "o wo", "y", {"equation": "abcd,cde->abe"}),
        ],
        X3,
        "q y",
        {f"w{part}": weight(48, 4, 8) / 7 for part in "qkv"}
        | {f"b{part}": weight(4, 8) for part in "qkv"}
        | {"wo": weight(4, 8, 24) / 6},
    ),
    "conv": (
        [
            ("Conv", "x w b", "c", {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
            ("Relu", "c", "r"),
            ("MaxPool", "r", "p", {"kernel_shape": [2, 2], "strides": [2, 2]}),
            ("GlobalAveragePool", "p", "y"),
        ],
        IMAGE,
        "p y",
        {"w": weight(8, 3, 3, 3), "b": weight(8)},
    ),
    "batchnorm_resize": (
        [
            ("BatchNormalization", "x s b m v", "n"),
            ("Resize", "n _ scales", "y", {"mode": "nearest"}),
        ],
        IMAGE,
        "y",
        {
            "s": weight(3),
            "b": weight(3),
            "m": weight(3),
            "v": np.abs(weight(3)) + 1,
            "scales": np.array([1, 1, 2, 2], np.float32),
        },
    ),
    # The scale is one for both axes, and not the ratio of the sizes that come of it.
    "resize_policies": (
        [
            (
                "Resize",
                "x _ _ sizes",
                name,
                {"mode": mode, "axes": [2, 3], "keep_aspect_ratio_policy": policy},
            )
            for name, mode, policy in (
                ("y", "nearest", "not_larger"),
                ("z", "nearest", "not_smaller"),
                ("l", "linear", "not_larger"),
            )
        ],
        {"x": ("float32", ["b", 3, 5, 7])},
        "y z l",
        {"sizes": np.array([8, 8])},
    ),
    "scatter": (
        [("ScatterElements", "x i u", "y", {"axis": 1})],
        {"x": ("float32", [4, 48])},
        "y",
        {"i": np.array([[1, 5], [2, 3], [47, 0], [9, 8]]), "u": weight(4, 2)},
    ),
    "range_over_length": (
        [
            ("Shape", "x", "sh"),
            ("Gather", "sh one", "n"),
            ("Range", "zero n one", "r"),
            ("Gather", "t r", "p"),
            ("Add", "x p", "y"),
        ],
        X3,
        "y",
        {"one": np.array(1), "zero": np.array(0), "t": weight(64, 48)},
    ),
    "passthrough": (
        [("Identity", "x", "y"), ("Add", "c c", "k"), ("Neg", "x", "z")],
        X2,
        "y k z x",
        {"c": weight(3)},
    ),
    "scalar_output": ([("ReduceSum", "x", "y", {"keepdims": 0})], X2, "y", {}),
    "cumsum": ([("CumSum", "x axis", "y")], X2, "y", {"axis": np.array(1)}),
    "integers": (
        [("Add", "i one", "a"), ("Mul", "a a", "m"), ("Mod", "m k", "y")],
        INT,
        "m y",
        {"one": np.array(1), "k": np.array(7)},
    ),
    # Out of range too: as ONNX Runtime's static_cast has it (uint32 only where it is of one mind).
    "casts": (
        [
            ("Mul", "x huge", "h"),
            ("Mul", "x thousand", "t"),
            *(("Cast", "h", f"h{to}", {"to": to}) for to in (2, 3, 4, 5, 6, 7, 13)),
            ("Cast", "t", "t12", {"to": 12}),
            ("Div", "x none", "endless"),
            *(("Cast", "endless", f"e{to}", {"to": to}) for to in (2, 6, 13)),
        ],
        X2,
        "h2 h3 h4 h5 h6 h7 h13 t12 e2 e6 e13",
        {"huge": np.float32(1e19), "thousand": np.float32(1000), "none": np.float32(0)},
    ),
    # ONNX Runtime computes no reduction of truth values but these two.
    "truths": (
        [
            ("Greater", "x x0", "t"),
            ("Not", "t", "u"),
            ("Cast", "t", "at", {"to": 7}),
            *(
                ("ScatterElements", "t at u", f"e_{how}", {"axis": 1, "reduction": how})
                for how in ("add", "mul")
            ),
        ],
        X2,
        "e_add e_mul",
        {"x0": np.float32(0)},
    ),
    # speaker embeddings: attentive statistics, also of one element, whose variance is 0.
    "variance": (
        [
            ("Softmax", "x", "w", {"axis": 1}),
            ("Mul", "x w", "part"),
            ("ReduceSum", "part axis", "mean"),
            ("Mul", "x x", "square"),
            ("Mul", "square w", "parts"),
            ("ReduceSum", "parts axis", "power"),
            ("Pow", "mean two", "less"),
            ("Sub", "power less", "variance"),
            ("Sqrt", "variance", "y"),
            ("Mul", "mean mean", "less_"),
            ("Sub", "power less_", "variance_"),
            ("Sqrt", "variance_", "z"),
        ],
        X3,
        "y z",
        {"axis": np.array([1]), "two": np.float32(2)},
    ),
    "powers": (
        [
            ("Pow", "x three", "y"),
            ("Pow", "x four", "z"),
            ("Sub", "z y", "d"),
            ("Pow", "x minus", "m"),
            ("Pow", "x list", "l"),
        ],
        X3,
        "y z d m l",
        {
            **{"three": np.float32(3), "four": np.float32(4), "minus": np.float32(-3)},
            "list": np.array([3], np.float32),
        },
    ),
    "codes_of_nan": (
        [("Sqrt", "x", "r"), ("QuantizeLinear", "r s i", "y"), ("QuantizeLinear", "r s u", "z")],
        X2,
        "y z",
        {"s": np.float32(0.25), "i": np.int8(0), "u": np.uint8(3)},
    ),
    "whole_numbers": (
        [
            ("ReduceMean", "i axis", "mean"),
            ("Cast", "i", "narrow", {"to": 6}),
            ("ReduceMean", "narrow", "all", {"keepdims": 0}),
            ("Cast", "i", "bytes", {"to": 2}),
            ("Shrink", "bytes", "shrunk", {"lambd": 20.5, "bias": 3.0}),
        ],
        INT,
        "mean all shrunk",
        {"axis": np.array([1])},
    ),
}

SIZES = ({"b": 1, "s": 1}, {"b": 2, "s": 7}, {"b": 3, "s": 33})
# Others: 20, at b = 0 too, where ONNX Runtime ends the process with a division by zero in Einsum.
OPSETS = {"reduce": 13, "einsum": 13}


def feed(inputs: Mapping[str, tuple[str, Sequence[Any]]], sizes: Mapping[str, int]) -> Any:
    made = {}
    for name, (dtype, shape) in inputs.items():
        extents = [sizes[d] if isinstance(d, str) else d for d in shape]
        if dtype == "int64":
            made[name] = RNG.integers(0, 50, extents)
        else:
            made[name] = RNG.standard_normal(extents).astype(dtype)
    return made


@pytest.mark.parametrize("opset", sorted({20, *OPSETS.values()}))
def test_float_module_matches_onnxruntime(opset: int, tmp_path: Path) -> None:
    """Every output of every graph at every size; what is wrong is listed."""
    graphs = {name: graph for name, graph in GRAPHS.items() if OPSETS.get(name, 20) == opset}
    nodes, inputs, outputs, weights = joined(graphs)
    path = save(build(nodes, inputs, " ".join(outputs), weights, opset=opset), tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="float")
    module, session, wrong = load_module(tmp_path / "compiled"), session_of(path), []
    # Before opset 20 ONNX Runtime's reductions give empty results the shape of their input.
    for sizes in (*SIZES, *[{"b": 0, "s": 3}] * (opset == 20)):
        given = feed(inputs, sizes)
        got = module.run(given)
        assert list(got) == outputs
        for name, value in zip(outputs, session.run(outputs, given), strict=True):
            assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
            if not np.allclose(got[name], value, rtol=2e-5, atol=2e-5, equal_nan=True):
                wrong.append(f"{name} at {sizes}")
    assert not wrong, "\n".join(wrong)
