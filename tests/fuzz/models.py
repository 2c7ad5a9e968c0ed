"""Small models whose bytes and fields the importer's fuzzer changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

from tests import control_models, recurrent_models
from tests.onnx_models import build, rand

X = {"x": ("float32", ["b", 8])}
X3 = {"x": ("float32", ["b", "s", 8])}
IMAGE = {"x": ("float32", [1, 3, 9, 9])}
I64 = np.array

MODELS: tuple[tuple[Any, ...], ...] = (
    ([("MatMul", "x w", "m"), ("Add", "m b", "a"), ("Relu", "a", "y")], X, "y",
     {"w": rand(8, 6), "b": rand(6)}),
    ([("Gemm", "x w b", "g", {"transB": 1, "alpha": 0.5}), ("Softmax", "g", "y")], X, "y",
     {"w": rand(6, 8), "b": rand(6)}),
    ([("Conv", "x w b", "c", {"pads": [1, 1, 1, 1], "strides": [2, 2], "group": 1}),
      ("MaxPool", "c", "p", {"kernel_shape": [2, 2]}), ("GlobalAveragePool", "p", "y")],
     IMAGE, "y", {"w": rand(4, 3, 3, 3), "b": rand(4)}),
    ([("Shape", "x", "n"), ("Gather", "n z", "k"), ("Unsqueeze", "k z1", "u"),
      ("Concat", "u minus", "t", {"axis": 0}), ("Reshape", "x t", "y")], X3, "y",
     {"z": I64(0), "z1": I64([0]), "minus": I64([-1])}),
    ([("Slice", "x s e a p", "i"), ("Pad", "i w", "j"), ("Tile", "j r", "k"),
      ("Expand", "k f", "y")], X, "y",
     {"s": I64([1]), "e": I64([6]), "a": I64([1]), "p": I64([2]), "w": I64([0, 1, 0, 1]),
      "r": I64([1, 3]), "f": I64([1, 15])}),
    ([("Split", "x z", "p q", {"axis": 1}), ("Transpose", "p", "t", {"perm": [1, 0]}),
      ("ReduceSum", "q a", "y", {"keepdims": 1}), ("CumSum", "t i", "u")], X, "y u",
     {"z": I64([3, 5]), "a": I64([1]), "i": I64(0)}),
    ([("QuantizeLinear", "x s z", "q"), ("DequantizeLinear", "q s z", "d"),
      ("DequantizeLinear", "c t _", "w", {"axis": 1}), ("MatMul", "d w", "y")], X, "y",
     {"s": np.float32(0.1), "z": np.uint8(3), "c": np.ones((8, 6), np.int8), "t": rand(6)}),
    ([("Resize", "x _ s", "r", {"mode": "linear"}), ("DepthToSpace", "c", "y", {"blocksize": 2}),
      ("ConvTranspose", "x v", "c", {"strides": [2, 2], "output_padding": [1, 1]})], IMAGE, "r y",
     {"s": I64([1, 1, 2, 2], np.float32), "v": rand(3, 4, 3, 3)}),
    ([("ConstantOfShape", "n", "o", {"value": I64([7])}), ("Range", "z k d", "r"),
      ("OneHot", "r k v", "h"), ("Where", "h x x", "y"), ("Cast", "o", "p", {"to": 1})],
     {"x": ("float32", [8, 8])}, "y p",
     {"n": I64([2, 3]), "z": I64(0), "k": I64(8), "d": I64(1), "v": I64([False, True])}),
    ([("LayerNormalization", "x g b", "n", {"axis": -1, "epsilon": 1e-5}), ("Gather", "t i", "e"),
      ("Einsum", "n n", "y", {"equation": "abc,adc->abd"}), ("Erf", "e", "f")], X3, "y f",
     {"g": rand(8), "b": rand(8), "t": rand(5, 4), "i": I64([[0, -1]])}),
    ([("com.microsoft.MatMulNBits", "x q s", "y",
       {"K": 32, "N": 4, "bits": 4, "block_size": 32})], {"x": ("float32", ["b", 32])}, "y",
     {"q": np.zeros((4, 1, 16), np.uint8), "s": rand(4)}),
    ([("com.microsoft.MoE", "x r w b v", "y", {"k": 2, "activation_type": "silu"}),
      ("com.microsoft.QMoE", "x r q s _ p t", "z",
       {"k": 1, "activation_type": "swiglu", "swiglu_fusion": 1, "block_size": 16})],
     {"x": ("float32", ["b", 16]), "r": ("float32", ["b", 3])}, "y z",
     {"w": rand(3, 8, 16), "b": rand(3, 8), "v": rand(3, 16, 8), "s": rand(3, 32, 1),
      "q": np.zeros((3, 32, 8), np.uint8), "p": np.zeros((3, 16, 8), np.uint8),
      "t": rand(3, 16, 1)}),
    ([("NonZero", "x", "i"), ("Transpose", "i", "t"), ("GatherND", "x t", "y"),
      ("TopK", "x k", "v n"), ("Unique", "x", "u", {"axis": 0}), ("Shape", "u", "s"),
      ("ConstantOfShape", "s", "z")], X, "y v n z", {"k": I64([3])}),
    ([("QLinearConv", "q s z w t o s z", "c", {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER"}),
      ("DequantizeLinear", "c s z", "y")],
     {"q": ("uint8", [1, 3, 9, 9])}, "y",
     {"s": np.float32(0.1), "z": np.uint8(3), "w": np.ones((3, 3, 3, 3), np.int8),
      "t": rand(3), "o": np.zeros(3, np.int8)}),
    ([("DynamicQuantizeLinear", "x", "q s z"), ("ConvInteger", "q w z", "i"),
      ("Cast", "i", "f", {"to": 1}), ("Mul", "s t", "k"), ("Mul", "f k", "y")],
     {"x": ("float32", [1, 3, 9, "w"])}, "y",
     {"w": np.ones((4, 3, 3, 3), np.uint8), "t": np.float32(0.5)}),
    ([("InstanceNormalization", "x g b", "n"), ("AveragePool", "n", "p",
       {"kernel_shape": [3, 3], "count_include_pad": 1, "ceil_mode": 1}),
      ("Flatten", "p", "f"), ("ScatterND", "f i u", "y")], IMAGE, "y",
     {"g": rand(3), "b": rand(3), "i": I64([[0, 1]]), "u": rand(1)}),
)  # fmt: skip


def _function() -> onnx.ModelProto:
    """A model with a function of its own that calls another."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    inner = [helper.make_node("Selu", ["a"], ["s"]), helper.make_node("Mul", ["s", "a"], ["r"])]
    outer = [helper.make_node("inner", ["a"], ["r"], domain="own")]
    graph = helper.make_graph(
        [helper.make_node("outer", ["x"], ["y"], domain="own", name="n_y")],
        "functions",
        [helper.make_tensor_value_info("x", 1, ["b", 8])],
        [helper.make_tensor_value_info("y", 1, None)],
    )
    functions = [
        helper.make_function("own", name, ["a"], ["r"], nodes, opsets)
        for name, nodes in (("inner", inner), ("outer", outer))
    ]
    return helper.make_model(graph, opset_imports=opsets, functions=functions)


def models() -> list[onnx.ModelProto]:
    """Every model of the corpus."""
    domains = {"com.microsoft": 1}
    plain = [build(*parts, opset=opset, domains=domains) for parts in MODELS for opset in (17, 21)]
    recurrent = [recurrent_models.joined([name]) for name in ("lstm_two", "gru", "rnn_two")]
    return [*plain, _function(), control_models.joined(), *recurrent]
