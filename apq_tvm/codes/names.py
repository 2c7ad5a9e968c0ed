"""What weights of a model are called: in ONNX files by Hugging Face's names, and in GGUF files.

GGUF's names are those of llama.cpp (gguf-py, constants.py, TENSOR_NAMES): ``blk.3.attn_q.weight``.
An exporter may drop a weight's name (``onnx::MatMul_17``) and keep that of its node
(``/model/layers.3/self_attn/q_proj/MatMul``): both are looked at by the same words.
"""

from __future__ import annotations

import re

_LAYER = re.compile(r"(?:layers?|blocks?|blk|h)[._/](\d+)(?=[._/])")

PARTS: tuple[tuple[str, str], ...] = (
    (r"qkv_proj|query_key_value|c_attn|wqkv|attn_qkv", "attn_qkv"),
    (r"q_proj|self/query|self\.query|q_lin|attn_q(?![a-z_])|wq(?![a-z])", "attn_q"),
    (r"k_proj|self/key|self\.key|k_lin|attn_k(?![a-z_])|wk(?![a-z])", "attn_k"),
    (r"v_proj|self/value|self\.value|v_lin|attn_v(?![a-z_])|wv(?![a-z])", "attn_v"),
    (r"o_proj|out_proj|attn[./]c_proj|attention[./]output[./]dense|attn_output|wo(?![a-z])",
     "attn_output"),
    (r"gate_up_proj", "ffn_gate_up"),
    (r"gate_proj|ffn_gate(?![a-z_])|mlp[./]w1|feed_forward[./]w1", "ffn_gate"),
    (r"up_proj|c_fc|fc1|intermediate[./]dense|ffn_up|mlp[./]w3|feed_forward[./]w3", "ffn_up"),
    (r"down_proj|mlp[./]c_proj|fc2|output[./]dense|ffn_down|mlp[./]w2|feed_forward[./]w2",
     "ffn_down"),
)  # fmt: skip
"""Words in the name of a weight inside a layer → GGUF's name of it; the first that fits counts."""

JOINED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up": ("ffn_gate", "ffn_up"),
}
"""Weights that one of the two sides may have side by side."""

_MODULES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""The same by Hugging Face's names."""

_TABLE = re.compile(r"embed_tokens|wte|word_embeddings|tok_embeddings|token_embd")
_HEAD = re.compile(r"lm_head|embed_out|output_projection|^/?output(?:[./]|$)")


def gguf_names(name: str) -> list[tuple[str, ...]]:
    """What a weight may be called in a GGUF file, the likeliest first; several are its parts.

    >>> gguf_names("model.layers.3.self_attn.q_proj.weight")[0]
    ('blk.3.attn_q.weight',)
    >>> gguf_names("/model/layers.0/mlp/gate_up_proj/MatMul")[-1]
    ('blk.0.ffn_gate.weight', 'blk.0.ffn_up.weight')
    """
    layer = _LAYER.search(name)
    if layer is None:
        if _HEAD.search(name):
            return [("output.weight",), ("token_embd.weight",)]
        return [("token_embd.weight",)] if _TABLE.search(name) else []
    rest = name[layer.end() :].lower()
    part = next((gguf for words, gguf in PARTS if re.search(words, rest)), None)
    if part is None:
        return []
    found: list[tuple[str, ...]] = [(f"blk.{layer[1]}.{part}.weight",)]
    if part in JOINED:
        found.append(tuple(f"blk.{layer[1]}.{each}.weight" for each in JOINED[part]))
    return found


def whole_of(name: str) -> tuple[str, int, int] | None:
    """The weight of GGUF that another may lie in, as which part, and of how many.

    >>> whole_of("blk.2.attn_k.weight")
    ('blk.2.attn_qkv.weight', 1, 3)
    """
    for whole, parts in JOINED.items():
        for index, part in enumerate(parts):
            if name.endswith(f".{part}.weight"):
                return name.replace(f".{part}.", f".{whole}."), index, len(parts)
    return None


def module_names(name: str) -> list[tuple[str, ...]]:
    """What a weight may be called in a file of Hugging Face's names, without its last word.

    >>> module_names("/model/layers.3/self_attn/q_proj/MatMul")[0]
    ('model.layers.3.self_attn.q_proj',)
    """
    dotted = name.strip("/").replace("/", ".")
    plain = re.sub(r"(\.(MatMul|Gemm)(_\d+)?)?(\.q?weight\b.*)?\Z", "", dotted)
    bare = re.sub(r"^model\.", "", plain)
    found: list[tuple[str, ...]] = [
        (plain,),
        (f"model.{bare}",),
        (bare,),
        (plain.replace(".attn.", ".self_attn."),),
    ]
    for whole, parts in _MODULES.items():
        if plain.endswith(f".{whole}"):
            found.append(tuple(plain.removesuffix(whole) + part for part in parts))
    return list(dict.fromkeys(found))
