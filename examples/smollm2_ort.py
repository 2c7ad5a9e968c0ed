"""SmolLM2-135M as ONNX Runtime's own tools would write it: the strongest rival that it has.

``python examples/smollm2_ort.py smollm2_ort.onnx`` writes linear layers as MatMulNBits (4 bits in
blocks of 32, int8 activations; the head 8 bits), attention as GroupQueryAttention with its rotary
embedding, and RMS norms as the operators that ONNX Runtime fuses them to. The GGUF file is that of
`smollm2.find`. Weights are rounded to nearest: good for times, not for accuracy.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import smollm2
from onnx import TensorProto, helper, numpy_helper
from smollm2 import F32, Config

from apq_tvm.bench.rivals import MS_DOMAIN, matmul_nbits

BLOCK = 32
INT8_ACTIVATIONS = 4
"""Level of accuracy at which MatMulNBits rounds activations to int8."""

LONGEST = 4096
"""Positions of the rotary embedding."""


class _Writer:
    """Nodes and initializers of the graph."""

    def __init__(self, config: Config, weights: Mapping[str, F32], bits: int, head: int) -> None:
        self.config, self.weights, self.bits, self.head = config, weights, bits, head
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def constant(self, name: str, array: np.ndarray) -> str:
        """Store an array and return its name."""
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def op(self, op: str, inputs: list[str], outputs: list[str], own: bool = False, **attrs) -> str:
        """Append a node and return its first output."""
        domain = MS_DOMAIN if own else ""
        self.nodes.append(helper.make_node(op, inputs, outputs, outputs[0], domain=domain, **attrs))
        return outputs[0]

    def linear(self, x: str, name: str, out: str, bits: int) -> str:
        """``MatMulNBits`` of a weight [N, K]."""
        weight = self.weights[f"{name}.weight"]
        layer = matmul_nbits(bits, BLOCK, INT8_ACTIVATIONS).quantize(weight)
        parts = [self.constant(f"{out}.{key}", array) for key, array in layer.arrays.items()]
        n, k = weight.shape
        return self.op(
            "MatMulNBits", [x, *parts], [out], True,
            K=k, N=n, bits=bits, block_size=BLOCK, accuracy_level=INT8_ACTIVATIONS,
        )  # fmt: skip

    def norm(self, x: str, name: str) -> str:
        """RMS norm."""
        gain = self.constant(f"{name}.gain", self.weights[f"{name}.weight"])
        attrs = {"axis": -1, "epsilon": self.config.epsilon, "stash_type": 1}
        return self.op("SimplifiedLayerNormalization", [x, gain], [f"{name}.out"], **attrs)

    def skip_norm(self, x: str, y: str, name: str) -> tuple[str, str]:
        """RMS norm of a sum, and the sum."""
        gain = self.constant(f"{name}.gain", self.weights[f"{name}.weight"])
        outputs = [f"{name}.out", "", "", f"{name}.sum"]
        attrs = {"epsilon": self.config.epsilon}
        self.op("SkipSimplifiedLayerNormalization", [x, y, gain], outputs, True, **attrs)
        return outputs[0], outputs[3]

    def lengths(self) -> None:
        """What grouped queries want: the last position of each row, and the tokens in all."""
        one, axes = self.constant("one", np.array(1)), self.constant("axes", np.array([1]))
        self.op("ReduceSum", ["attention_mask", axes], ["tokens"], keepdims=0)
        self.op("Cast", [self.op("Sub", ["tokens", one], ["last"])], ["last32"], to=6)
        shape = self.op("Shape", ["attention_mask"], ["mask.shape"])
        total = self.op("Gather", [shape, one], ["total"])
        self.op("Cast", [total], ["total32"], to=TensorProto.INT32)
        half = self.config.head_width // 2
        angles = np.outer(np.arange(LONGEST), self.config.rope_base ** (-np.arange(half) / half))
        self.constant("cos", np.cos(angles).astype(np.float32))
        self.constant("sin", np.sin(angles).astype(np.float32))

    def block(self, x: str, normed: str, number: int) -> tuple[str, str]:
        """Attention and feed-forward part; the residual stream, and what is to be added to it."""
        c, at, bits = self.config, f"model.layers.{number}", self.bits
        parts = [
            self.linear(normed, f"{at}.self_attn.{p}_proj", f"{at}.{p}", bits) for p in "qkv"
        ]
        past = [f"past_key_values.{number}.{kind}" for kind in ("key", "value")]
        present = [f"present.{number}.{kind}" for kind in ("key", "value")]
        mixed = self.op(
            "GroupQueryAttention", [*parts, *past, "last32", "total32", "cos", "sin"],
            [f"{at}.attended", *present], True,
            num_heads=c.heads, kv_num_heads=c.kv_heads, do_rotary=1, scale=c.head_width**-0.5,
        )  # fmt: skip
        y = self.linear(mixed, f"{at}.self_attn.o_proj", f"{at}.o", bits)
        normed, x = self.skip_norm(x, y, f"{at}.post_attention_layernorm")
        gate = self.linear(normed, f"{at}.mlp.gate_proj", f"{at}.gate", bits)
        up = self.linear(normed, f"{at}.mlp.up_proj", f"{at}.up", bits)
        sigmoid = self.op("Sigmoid", [gate], [f"{at}.sigmoid"])
        act = self.op("Mul", [gate, sigmoid], [f"{at}.silu"])
        y = self.op("Mul", [act, up], [f"{at}.gated"])
        return x, self.linear(y, f"{at}.mlp.down_proj", f"{at}.down", bits)

    def model(self) -> onnx.ModelProto:
        """The whole model."""
        c = self.config
        self.lengths()
        table = self.constant("table", self.weights["model.embed_tokens.weight"])
        x = self.op("Gather", [table, "input_ids"], ["embedded"])
        normed = self.norm(x, "model.layers.0.input_layernorm")
        for number in range(c.layers):
            x, y = self.block(x, normed, number)
            last = number + 1 == c.layers
            after = "model.norm" if last else f"model.layers.{number + 1}.input_layernorm"
            normed, x = self.skip_norm(x, y, after)
        self.linear(normed, "model.embed_tokens", "logits", self.head)
        info, float32 = helper.make_tensor_value_info, TensorProto.FLOAT
        names = [f"{n}.{kind}" for n in range(c.layers) for kind in ("key", "value")]
        inputs = [
            info("input_ids", TensorProto.INT64, ["batch", "sequence"]),
            info("attention_mask", TensorProto.INT64, ["batch", "total"]),
        ]
        for name in names:
            shape = ["batch", c.kv_heads, "past", c.head_width]
            inputs.append(info(f"past_key_values.{name}", float32, shape))
        outputs = [info("logits", float32, ["batch", "sequence", c.vocabulary])]
        for name in names:
            shape = ["batch", c.kv_heads, "present", c.head_width]
            outputs.append(info(f"present.{name}", float32, shape))
        graph = helper.make_graph(self.nodes, "smollm2", inputs, outputs, self.initializers)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MS_DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def build(config: Config, weights: Mapping[str, F32], bits: int, head: int) -> onnx.ModelProto:
    """The model as ONNX Runtime's operators.

    Parameters
    ----------
    config : Config
    weights : mapping of str to float32
        As `smollm2.read_gguf` names them.
    bits, head : int
        Of linear layers, and of the head: 2, 4 or 8.

    Returns
    -------
    onnx.ModelProto
        ``input_ids`` int64 [batch, sequence], ``attention_mask`` int64 [batch, total] and the
        caches of `smollm2.build` -> ``logits`` and caches.
    """
    return _Writer(config, weights, bits, head).model()


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--gguf", type=Path, help="default: of the installed package")
    parser.add_argument("--bits", type=int, choices=(2, 4, 8), default=4)
    parser.add_argument("--head-bits", type=int, choices=(2, 4, 8), default=8)
    parser.add_argument("--layers", type=int, help="blocks to keep; all by default")
    options = parser.parse_args()
    config, weights = smollm2.read_gguf(options.gguf or smollm2.find())
    if options.layers:
        config = replace(config, layers=min(options.layers, config.layers))
    model = build(config, weights, options.bits, options.head_bits)
    part = options.output.with_name(f"{options.output.name}.part")
    onnx.save(model, part)
    part.replace(options.output)
    print(options.output)


if __name__ == "__main__":
    main()
