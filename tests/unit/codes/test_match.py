"""Which matrix is which weight: names, shapes, values, the order of rows, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from apq_tvm.codes import keep_codes
from apq_tvm.codes.names import gguf_names, module_names
from apq_tvm.errors import BadInput
from apq_tvm.formats import dequantize
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers.guided import Guidance, quantize_guided
from apq_tvm.types import ImportedModel
from tests.cases.gguf_files import encode, llama, meaning, random_blocks, write
from tests.onnx_models import build
from tests.unit import tiny_llama

CONFIG = tiny_llama.CONFIG
HEADS = CONFIG.heads, CONFIG.kv_heads


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImportedModel:
    return tiny_llama.load(tmp_path_factory.mktemp("llama"))


def floats(model: ImportedModel) -> dict[str, Any]:
    """The matrices by Hugging Face's names, [N, K]."""
    found = {}
    for node in model.nodes:
        if node.op == "apq.Linear" and node.name != "lm_head":
            found[f"{node.name}.weight"] = np.asarray(model.weights[node.inputs[1]])
    found["model.embed_tokens.weight"] = np.asarray(model.weights["model.embed_tokens.weight"])
    return found


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0"])
def test_a_whole_model_has_its_codes(model: ImportedModel, kind: str, tmp_path: Path) -> None:
    path = llama(tmp_path / "a.gguf", floats(model), *HEADS, kind)
    kept = keep_codes(model, path)
    assert not kept.missing
    linear = [node for node in model.nodes if node.op == "apq.Linear"]
    for node in linear:
        weight = node.inputs[1]
        tensor = kept.model.quantized[weight]
        wanted = meaning(kind, encode(kind, model.weights[weight]))  # no row was moved
        np.testing.assert_array_equal(dequantize(tensor), wanted, err_msg=node.name)
        np.testing.assert_array_equal(kept.model.weights[weight], wanted)
    note = kept.model.notes[linear[0].inputs[1]]
    assert note == f"codes of a.gguf (blk.0.attn_q.weight, {kind})"


def test_names_do_not_matter_where_values_tell(model: ImportedModel, tmp_path: Path) -> None:
    path = llama(tmp_path / "a.gguf", floats(model), *HEADS)
    names: dict[str, str] = {w: f"onnx::MatMul_{i}" for i, w in enumerate(model.weights)}
    nodes = tuple(
        replace(n, name=f"n{i}", inputs=tuple(names.get(x, x) for x in n.inputs))
        for i, n in enumerate(model.nodes)
    )
    weights = {names[name]: value for name, value in model.weights.items()}
    kept = keep_codes(replace(model, nodes=nodes, weights=weights, notes={}), path)
    # Rows of q and k are in pairs: their first and last are where they were, which finds them.
    assert not kept.missing


def test_another_model_is_refused_by_name(model: ImportedModel, tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    other = {name: rng.standard_normal(w.shape) for name, w in floats(model).items()}
    path = llama(tmp_path / "a.gguf", other, *HEADS)
    with pytest.raises(BadInput, match=r"a\.gguf is of another model: 0 of 15 .*token_embd.* away"):
        keep_codes(model, path)
    sizes = {name: rng.standard_normal((64, 64)) for name in other}
    with pytest.raises(BadInput, match=r"any weight of tiny; is it of another model.* it is 64x64"):
        keep_codes(model, llama(tmp_path / "b.gguf", sizes, *HEADS))


def test_layers_without_codes_get_the_scheme(model: ImportedModel, tmp_path: Path) -> None:
    weights = floats(model)
    del weights["model.layers.1.mlp.up_proj.weight"]
    path = llama(tmp_path / "a.gguf", weights, *HEADS, "Q4_1")
    quantized = quantize_guided(model, "W3A16g32", {"o_proj": "W2A8g32"}, Guidance(codes=path))
    schemes = {name: str(quantized.tensors[key].scheme) for name, key in quantized.layers.items()}
    assert schemes["model.layers.1.mlp.up_proj"] == "W3A16g32"
    assert schemes["model.layers.0.mlp.up_proj"] == schemes["lm_head"] == "W4mA16g32"
    assert schemes["model.layers.0.self_attn.o_proj"] == "W2A8g32"  # the user's word counts
    assert "no codes in a.gguf" in quantized.notes["model.layers.1.mlp.up_proj"]
    assert "codes of a.gguf" in quantized.notes["model.layers.0.mlp.up_proj"]


def one_layer(folder: Path, weight: Any, name: str = "model.layers.0.mlp.up_proj.weight") -> Any:
    """A model of one product, with its weight turned over as exporters have it."""
    nodes = [("MatMul", f"x {name}", "y")]
    inputs = {"x": ("float32", ["rows", weight.shape[1]])}
    made = build(nodes, inputs, "y", {name: np.ascontiguousarray(weight.T)})
    onnx.save(made, folder / "one.onnx")
    return import_onnx(folder / "one.onnx")


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_kept(kind: str, tmp_path: Path) -> None:
    raw = random_blocks(kind, 24, 512)
    model = one_layer(tmp_path, meaning(kind, raw).astype(np.float32))
    path = write(tmp_path / "a.gguf", {"blk.0.ffn_up.weight": (kind, raw)})
    quantized = quantize_guided(model, "W4A8g32", {}, Guidance(codes=path))
    (tensor,) = quantized.tensors.values()
    np.testing.assert_array_equal(dequantize(tensor), meaning(kind, raw))


def test_floats_of_the_file_stay_float(tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
    half = w.astype(np.float16).view(np.uint8).reshape(24, -1)
    path = write(tmp_path / "a.gguf", {"blk.0.ffn_up.weight": ("F16", half)})
    quantized = quantize_guided(one_layer(tmp_path, w), "W4A8g32", {}, Guidance(codes=path))
    assert not quantized.layers
    assert list(quantized.notes.values()) == ["float in a.gguf (blk.0.ffn_up.weight, F16)"]


def test_types_that_nobody_reads_are_named(model: ImportedModel, tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((24, 256)).astype(np.float32)
    blocks = np.zeros((24, 136), np.uint8)
    path = write(tmp_path / "a.gguf", {"blk.0.ffn_up.weight": ("IQ4_XS", blocks)})
    with pytest.raises(
        BadInput, match=r"has no codes for any weight of one.*ffn_up.*IQ4_XS is not"
    ):
        keep_codes(one_layer(tmp_path, w), path)  # nothing at all can be kept
    weights = floats(model)
    path = llama(tmp_path / "b.gguf", weights, *HEADS)
    data = path.read_bytes()
    at = data.index(b"blk.0.ffn_up.weight") + 19 + 4 + 16
    path.write_bytes(data[:at] + (39).to_bytes(4, "little") + data[at + 4 :])
    missing = keep_codes(model, path).missing
    assert list(missing) == ["model.layers.0.mlp.up_proj"]
    assert "MXFP4 is not read" in missing["model.layers.0.mlp.up_proj"]


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32)
    raw = encode("Q8_0", w)
    raw[7, 1] = 0x7C  # an infinite scale of a row that is not compared
    path = write(tmp_path / "a.gguf", {"blk.0.ffn_up.weight": ("Q8_0", raw)})
    with pytest.raises(BadInput, match=r"blk.0.ffn_up.weight, Q8_0 of a.gguf.*not finite"):
        keep_codes(one_layer(tmp_path, w), path)


def side_by_side(kinds: tuple[str, str, str]) -> tuple[Any, Mapping[str, Any]]:
    rng = np.random.default_rng(0)
    parts = {
        name: rng.standard_normal((rows, 64)).astype(np.float32)
        for name, rows in (("attn_q", 64), ("attn_k", 32), ("attn_v", 32))
    }
    tensors = {
        f"blk.0.{name}.weight": (kind, encode(kind, w))
        for (name, w), kind in zip(parts.items(), kinds, strict=True)
    }
    return np.concatenate(list(parts.values())), tensors


def test_parts_are_put_side_by_side(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    whole, tensors = side_by_side(("Q8_0",) * 3)
    model = one_layer(tmp_path, whole, name)
    kept = keep_codes(model, write(tmp_path / "a.gguf", tensors))
    (weight,) = kept.model.quantized
    wanted = meaning("Q8_0", encode("Q8_0", whole))
    np.testing.assert_array_equal(dequantize(kept.model.quantized[weight]), wanted)
    _, tensors = side_by_side(("Q8_0", "Q8_0", "Q4_1"))
    with pytest.raises(BadInput, match=r"any weight of one.* are of several kinds"):
        keep_codes(model, write(tmp_path / "b.gguf", tensors))


@pytest.mark.parametrize(("part", "rows"), [("q", (0, 64)), ("k", (64, 96)), ("v", (96, 128))])
def test_wholes_are_cut_apart(part: str, rows: tuple[int, int], tmp_path: Path) -> None:
    whole, _ = side_by_side(("Q8_0",) * 3)
    raw = encode("Q8_0", whole)
    name = f"model.layers.0.self_attn.{part}_proj.weight"
    model = one_layer(tmp_path, whole[slice(*rows)], name)
    path = write(tmp_path / "a.gguf", {"blk.0.attn_qkv.weight": ("Q8_0", raw)})
    (tensor,) = keep_codes(model, path).model.quantized.values()
    np.testing.assert_array_equal(dequantize(tensor), meaning("Q8_0", raw[slice(*rows)]))


@pytest.mark.parametrize(
    ("name", "gguf"),
    [
        ("model.layers.12.self_attn.k_proj.weight", "blk.12.attn_k.weight"),
        ("/model/layers.3/attn/o_proj/MatMul", "blk.3.attn_output.weight"),
        ("/transformer/h.4/mlp/c_proj/MatMul", "blk.4.ffn_down.weight"),
        ("bert.encoder.layer.1.attention.self.query.weight", "blk.1.attn_q.weight"),
        ("bert.encoder.layer.1.attention.output.dense.weight", "blk.1.attn_output.weight"),
        ("bert.encoder.layer.1.output.dense.weight", "blk.1.ffn_down.weight"),
        ("/model/embed_tokens/Gather", "token_embd.weight"),
        ("/lm_head/MatMul", "output.weight"),
        ("blk.7.ffn_gate.weight", "blk.7.ffn_gate.weight"),
    ],
)
def test_names_of_gguf(name: str, gguf: str) -> None:
    assert gguf_names(name)[0] == (gguf,)


def test_names_that_say_nothing() -> None:
    assert gguf_names("onnx::MatMul_17") == gguf_names("model.layers.0.norm.weight") == []
    assert ("model.layers.0.mlp.up_proj",) in module_names("/model/layers.0/mlp/up_proj/MatMul")
