"""Attention, rotary positions and normalisation as ONNX Runtime and opset 23 spell them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_models import build, check, only, ops, rand, run_node, save
from onnx_reference import run_reference

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import import import_onnx
from apq_tvm.onnx_import.passes.caches import find_caches
from apq_tvm.onnx_import.read import read_graph

MS = {"com.microsoft": 1}
CACHE = {"b": 1, "s": 3, "p": 5, "t": 8}  # what ONNX Runtime takes: several tokens, one sequence


def tables(rows: int, half: int) -> dict[str, np.ndarray]:
    angles = np.outer(np.arange(rows), 1 / 10 ** np.linspace(0, 1, half))
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


# Rotary positions


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("form", ["offset", "ids"])
@pytest.mark.parametrize("rank", [3, 4])
def test_contrib_rotary(tmp_path: Path, interleaved: int, form: str, rank: int) -> None:
    inputs = {
        "x": ("float32", ["b", "s", 24] if rank == 3 else ["b", 3, "s", 8]),
        "ids": ("int64", [1] if form == "offset" else ["b", "s"]),
    }
    attrs = {"interleaved": interleaved}
    nodes = [("com.microsoft.RotaryEmbedding", "x ids cos sin", "y", attrs)]
    path = save(build(nodes, inputs, "y", tables(16, 4), domains=MS), tmp_path)
    ids = np.array([4]) if form == "offset" else np.array([[3, 4, 5], [0, 9, 15]])
    x = rand(2, 3, 24) if rank == 3 else rand(2, 3, 3, 8)
    model = check(path, {"b": 2, "s": 3}, feeds={"x": x, "ids": ids})
    assert ops(model)["apq.Embedding"] == 2
    assert all(n.attrs["keep"] for n in model.nodes if n.op == "apq.Embedding")


def test_contrib_rotary_of_part_of_a_head(tmp_path: Path) -> None:
    inputs = {"x": ("float32", ["b", "s", 32]), "ids": ("int64", ["b", "s"])}
    attrs = {"num_heads": 2, "rotary_embedding_dim": 8}
    nodes = [("com.microsoft.RotaryEmbedding", "x ids cos sin", "y", attrs)]
    path = save(build(nodes, inputs, "y", tables(16, 4), domains=MS), tmp_path)
    feeds = {"x": rand(2, 3, 32), "ids": np.array([[3, 4, 5], [0, 9, 15]])}
    check(path, {"b": 2, "s": 3}, feeds=feeds)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("rank", [3, 4])
def test_onnx_rotary(tmp_path: Path, interleaved: int, ids: bool, rank: int) -> None:
    inputs = {"x": ("float32", ["b", "s", 24] if rank == 3 else ["b", 3, "s", 8])}
    feeds: dict[str, Any] = {"x": rand(2, 5, 24) if rank == 3 else rand(2, 3, 5, 8)}
    weights = tables(16, 4)
    if ids:
        inputs["ids"] = ("int64", ["b", "s"])
        feeds["ids"] = np.array([[3, 4, 5, 6, 7], [0, 9, 15, 1, 2]])
    else:
        feeds |= {name: table[:10].reshape(2, 5, 4) for name, table in weights.items()}
        inputs |= {"cos": ("float32", ["b", "s", 4]), "sin": ("float32", ["b", "s", 4])}
        weights = {}
    attrs = {"interleaved": interleaved, **({"num_heads": 3} if rank == 3 else {})}
    nodes = [("RotaryEmbedding", "x cos sin ids" if ids else "x cos sin", "y", attrs)]
    path = save(build(nodes, inputs, "y", weights, opset=23), tmp_path)
    check(path, {"b": 2, "s": 5}, feeds=feeds)


# Grouped attention


def grouped(
    folder: Path,
    attrs: Mapping[str, Any],
    *,
    packed: bool = False,
    total: str = "mask",
    extra: str = "",
    weights: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """4 query heads, 2 key heads of 16; the total is the length of an attention mask, or data."""
    wide = {"q": ("float32", ["b", "s", 128])}
    apart = {name: ("float32", ["b", "s", n]) for name, n in (("q", 64), ("k", 32), ("v", 32))}
    inputs = {
        **(wide if packed else apart),
        "pk": ("float32", ["b", 2, "p", 16]),
        "pv": ("float32", ["b", 2, "p", 16]),
        "lengths": ("int32", ["b"]),
        **({"mask": ("int64", ["b", "t"])} if total == "mask" else {"total": ("int32", [])}),
        **(more or {}),
    }
    shape = [
        ("Shape", "mask", "sizes"),
        ("Gather", "sizes one", "size"),
        ("Cast", "size", "total", {"to": 6}),
    ]
    given = "q _ _" if packed else "q k v"
    node = (
        "com.microsoft.GroupQueryAttention",
        f"{given} pk pv lengths total {extra}",
        "y ok ov",
        {"num_heads": 4, "kv_num_heads": 2, **attrs},
    )
    nodes = [*(shape if total == "mask" else []), node]
    constants = {**({"one": np.array(1)} if total == "mask" else {}), **(weights or {})}
    return save(build(nodes, inputs, "y ok ov", constants, domains=MS), folder)


def cache_feeds(sizes: Mapping[str, int], packed: bool = False, seed: int = 0) -> dict[str, Any]:
    b, s, p, t = (sizes[name] for name in "bspt")
    wide = {"q": rand(b, s, 128, seed=seed)}
    apart = {n: rand(b, s, w, seed=i) for i, (n, w) in enumerate((("q", 64), ("k", 32), ("v", 32)))}
    return {
        **(wide if packed else apart),
        "pk": rand(b, 2, p, 16, seed=3),
        "pv": rand(b, 2, p, 16, seed=4),
        "lengths": np.full(b, t - 1, np.int32),
        "mask": np.ones((b, t), np.int64),
    }


GROUPED = {
    "plain": {},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 2.0},
    "window": {"local_window_size": 3},
    "smooth": {"smooth_softmax": 1},
}


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("packed", [False, True])
def test_grouped_attention(tmp_path: Path, name: str, packed: bool) -> None:
    path = grouped(tmp_path, GROUPED[name], packed=packed)
    for sizes in (CACHE, {"b": 2, "s": 1, "p": 7, "t": 8}):
        model = check(path, sizes, feeds=cache_feeds(sizes, packed))
    assert ops(model)["apq.AppendCache"] == 2
    assert ops(model)["apq.MatMul"] == 2 and ops(model)["apq.Softmax"] == 1


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ids", [False, True])
def test_grouped_attention_with_rotary_positions(
    tmp_path: Path, interleaved: int, packed: bool, ids: bool
) -> None:
    attrs = {"do_rotary": 1, "rotary_interleaved": interleaved}
    more = {"ids": ("int64", ["b", "s"])} if ids else {}
    extra = "cos sin ids" if ids else "cos sin"
    path = grouped(tmp_path, attrs, packed=packed, extra=extra, weights=tables(16, 8), more=more)
    sizes = {"b": 1, "s": 3, "p": 5, "t": 8}
    feeds = cache_feeds(sizes, packed)
    if ids:
        feeds["ids"] = np.array([[5, 6, 7]])
    check(path, sizes, feeds=feeds)


def test_sequences_of_one_batch_stand_at_different_places(tmp_path: Path) -> None:
    path = grouped(tmp_path, {"do_rotary": 1}, extra="cos sin", weights=tables(16, 8))
    sizes = {"b": 2, "s": 1, "p": 7, "t": 8}
    feeds = cache_feeds(sizes) | {"lengths": np.array([7, 4], np.int32)}
    check(path, sizes, feeds=feeds)


def test_a_first_prompt_has_an_empty_past(tmp_path: Path) -> None:
    path = grouped(tmp_path, {"do_rotary": 1}, extra="cos sin", weights=tables(16, 8))
    sizes = {"b": 2, "s": 4, "p": 0, "t": 4}
    check(path, sizes, feeds=cache_feeds(sizes))


def test_sinks_and_a_bias(tmp_path: Path) -> None:
    more = {"bias": ("float32", [1, 4, "s", "t"])}
    extra = "_ _ _ bias sink"
    path = grouped(tmp_path, {}, extra=extra, weights={"sink": rand(4)}, more=more)
    feeds = cache_feeds(CACHE) | {"bias": rand(1, 4, 3, 8, seed=9)}
    check(path, CACHE, feeds=feeds)


def test_a_total_that_is_data_gives_past_plus_new(tmp_path: Path) -> None:
    path = grouped(tmp_path, {}, total="input")
    feeds = cache_feeds(CACHE)
    del feeds["mask"]
    model = check(path, CACHE, feeds=feeds | {"total": np.array(8, np.int32)})
    assert model.outputs[1].shape == ("b", 2, "p + s", 16)


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"k_quant_type": "PER_TENSOR"}, "quantized cache"),
        ({"sliding_window_cache": 1}, "drops old keys"),
        ({"qk_output": 1}, "qk_output"),
        ({"kv_num_heads": 3}, "does not divide num_heads=4"),
        ({"do_rotary": 1}, "cos_cache"),
    ],
)
def test_grouped_attention_that_cannot_be_compiled(
    tmp_path: Path, attrs: dict[str, Any], message: str
) -> None:
    path = grouped(tmp_path, attrs)
    with pytest.raises(UnsupportedModel, match=f"GroupQueryAttention 'n_y'.*{message}"):
        import_onnx(path)


# Caches


def test_inputs_that_are_only_joined_are_caches(tmp_path: Path) -> None:
    inputs = {
        "x": ("float32", ["b", "s", 4]),
        "past": ("float16", ["b", "p", 4]),
        "other": ("float32", ["b", "q", 4]),
    }
    nodes = [
        ("Cast", "past", "wide", {"to": 1}),
        ("Concat", "wide x", "y", {"axis": 1}),
        ("Concat", "other x", "j", {"axis": 1}),
        ("ReduceMax", "other", "top", {"axes": [1]}),
        ("Add", "j top", "z"),
        ("Neg", "x", "m"),
    ]
    path = save(build(nodes, inputs, "y z m", opset=13), tmp_path)
    check(path, {"b": 2, "s": 3, "p": 0, "q": 1})
    assert find_caches(read_graph(path)[0]) == {"past": 1}


def test_nothing_is_decided_by_the_length_of_a_cache(tmp_path: Path) -> None:
    nodes = [
        ("Concat", "past x", "y", {"axis": 0}),
        ("Shape", "past", "n"),
        ("Greater", "n zero", "some"),
        ("Where", "some one two", "z"),
    ]
    weights = {"zero": np.array([0]), "one": np.array([1.0]), "two": np.array([2.0])}
    inputs = {"x": ("float32", ["s"]), "past": ("float32", ["p"])}
    path = save(build(nodes, inputs, "y z", weights), tmp_path)
    check(path, {"s": 3, "p": 0}, {"s": 3, "p": 2})


# Multi-head attention


def multi_head(
    folder: Path,
    given: str,
    more: Mapping[str, Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
    weights: Mapping[str, Any] | None = None,
    outputs: str = "y",
    cross: bool = False,
) -> Path:
    kv = ["b", 2, "l", 8] if cross else ["b", "l", 16]
    inputs = {
        "q": ("float32", ["b", "s", 16]),
        "k": ("float32", kv),
        "v": ("float32", kv),
        **(more or {}),
    }
    node = ("com.microsoft.MultiHeadAttention", given, outputs, {"num_heads": 2, **(attrs or {})})
    return save(build([node], inputs, outputs, weights, domains=MS), folder)


LONG = {"b": 2, "s": 3, "l": 5, "p": 2, "t": 7}


@pytest.mark.parametrize("attrs", [{}, {"scale": 0.3}, {"unidirectional": 1}])
@pytest.mark.parametrize("cross", [False, True])
def test_multi_head(tmp_path: Path, attrs: dict[str, Any], cross: bool) -> None:
    path = multi_head(tmp_path, "q k v", attrs=attrs, cross=cross)
    # ONNX Runtime leaves the last query unmasked where there are more keys than queries.
    model = check(path, {**LONG, "l": 3} if "unidirectional" in attrs else LONG)
    assert ops(model)["apq.MatMul"] == 2 and ops(model)["apq.Softmax"] == 1


def test_multi_head_with_a_bias_of_the_projections(tmp_path: Path) -> None:
    path = multi_head(tmp_path, "q k v bias", weights={"bias": rand(48)})
    check(path, LONG)


@pytest.mark.parametrize("shape", [["b", "l"], ["b", "s", "l"], ["b"]])
def test_multi_head_with_a_padding_mask(tmp_path: Path, shape: list[str]) -> None:
    path = multi_head(tmp_path, "q k v _ mask", {"mask": ("int32", shape)})
    feeds = {"q": rand(2, 3, 16), "k": rand(2, 5, 16, seed=1), "v": rand(2, 5, 16, seed=2)}
    mask = np.random.default_rng(0).integers(0, 2, [LONG[d] for d in shape])
    feeds["mask"] = np.asarray(mask if len(shape) > 1 else [3, 5], np.int32)
    check(path, LONG, feeds=feeds)


def test_multi_head_with_a_past_and_everything(tmp_path: Path) -> None:
    more = {
        "bias": ("float32", ["b", 2, "s", "t"]),
        "pk": ("float32", ["b", 2, "p", 8]),
        "pv": ("float32", ["b", 2, "p", 8]),
    }
    path = multi_head(
        tmp_path, "q k v _ _ bias pk pv", more, {"unidirectional": 1}, outputs="y ok ov"
    )
    model = check(path, {**LONG, "l": 3, "t": 5})
    assert model.outputs[1].shape == ("b", 2, "l + p", 8)


def test_multi_head_packed_in_one_tensor_is_refused(tmp_path: Path) -> None:
    inputs = {"q": ("float32", ["b", "s", 2, 3, 8])}
    node = ("com.microsoft.MultiHeadAttention", "q", "y", {"num_heads": 2})
    path = save(build([node], inputs, "y", domains=MS), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"MultiHeadAttention 'n_y'.*one tensor"):
        import_onnx(path)


def test_multi_head_starts_and_ends_are_refused(tmp_path: Path) -> None:
    path = multi_head(tmp_path, "q k v _ mask", {"mask": ("int32", ["n"])})
    with pytest.raises(UnsupportedModel, match="starts and ends"):
        import_onnx(path)


# ONNX's Attention


def onnx_attention(
    folder: Path,
    given: str = "q k v",
    more: Mapping[str, Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
    rank: int = 4,
    outputs: str = "y",
    opset: int = 23,
) -> Path:
    shapes = {"q": (4, "s"), "k": (2, "l"), "v": (2, "l")}
    inputs = {
        name: ("float32", ["b", n, d, 8] if rank == 4 else ["b", d, 8 * n])
        for name, (n, d) in shapes.items()
    }
    heads = {"q_num_heads": 4, "kv_num_heads": 2} if rank == 3 else {}
    node = ("Attention", given, outputs, {**heads, **(attrs or {})})
    graph = build([node], {**inputs, **(more or {})}, outputs, opset=opset)
    return save(graph, folder)


@pytest.mark.parametrize("attrs", [{}, {"scale": 0.3}, {"is_causal": 1}, {"softcap": 1.5}])
@pytest.mark.parametrize("rank", [3, 4])
def test_attention_of_onnx(tmp_path: Path, attrs: dict[str, Any], rank: int) -> None:
    model = check(onnx_attention(tmp_path, attrs=attrs, rank=rank), LONG)
    assert ops(model)["apq.MatMul"] == 2 and ops(model)["apq.Softmax"] == 1


@pytest.mark.parametrize("kind", ["float32", "bool"])
@pytest.mark.parametrize("shape", [["s", "l"], ["b", 1, "s", "l"], ["b", 4, "s", "l"]])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_of_onnx_with_a_mask(
    tmp_path: Path, kind: str, shape: list[Any], causal: int
) -> None:
    path = onnx_attention(
        tmp_path, "q k v mask", {"mask": (kind, shape)}, {"is_causal": causal, "softcap": 3.0}
    )
    sizes = {"b": 2, "s": 3, "l": 3}
    extents = [sizes.get(d, d) for d in shape]
    mask = rand(*extents, seed=7)
    if kind == "bool":
        mask = mask > -0.5
        mask[..., 0] = True
    feeds = {n: rand(2, h, 3, 8, seed=i) for i, (n, h) in enumerate((("q", 4), ("k", 2), ("v", 2)))}
    check(path, sizes, feeds=feeds | {"mask": mask})


def test_attention_of_onnx_with_a_past(tmp_path: Path) -> None:
    more = {"pk": ("float32", ["b", 2, "p", 8]), "pv": ("float32", ["b", 2, "p", 8])}
    path = onnx_attention(tmp_path, "q k v _ pk pv", more, {"is_causal": 1}, 3, "y ok ov")
    model = check(path, {**LONG, "s": 5})
    assert model.outputs[2].shape == ("b", 2, "l + p", 8)


# Normalisation


@pytest.mark.parametrize("op", ["SimplifiedLayerNormalization", "RMSNormalization"])
def test_rms_norm(tmp_path: Path, op: str) -> None:
    inputs = {"x": ("float32", ["b", "s", 8])}
    opset = 23 if op == "RMSNormalization" else 17
    nodes = [(op, "x g", "y", {"axis": -1, "epsilon": 1e-6})]
    path = save(build(nodes, inputs, "y", {"g": rand(8)}, opset=opset), tmp_path)
    assert ops(check(path, {"b": 2, "s": 3})) == {"RMSNormalization": 1}


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("spelling", ["power", "product", "quotient"])
def test_rms_norm_in_pieces(tmp_path: Path, spelling: str, opset: int) -> None:
    """As torch.onnx.export writes a language model's norm."""
    reduce = ("ReduceMean", "q axes" if opset >= 18 else "q", "m", {"keepdims": 1})
    if opset < 18:
        reduce[3]["axes"] = [-1]
    nodes = [
        ("Mul", "x x", "q") if spelling == "product" else ("Pow", "x two", "q"),
        reduce,
        ("Add", "m eps", "e"),
        ("Sqrt", "e", "r"),
        *(
            [("Div", "x r", "n")]
            if spelling == "quotient"
            else [("Div", "one r", "i"), ("Mul", "x i", "n")]
        ),
        ("Mul", "g n", "y"),
    ]
    weights = {
        "g": rand(8),
        "eps": np.float32(1e-5),
        "two": np.float32(2),
        "one": np.float32(1),
        "axes": np.array([-1]),
    }
    read = {word for node in nodes for word in node[1].split()}
    weights = {name: array for name, array in weights.items() if name in read}
    inputs = {"x": ("float32", ["b", "s", 8])}
    model = check(save(build(nodes, inputs, "y", weights, opset), tmp_path), {"b": 2, "s": 3})
    assert ops(model) == {"RMSNormalization": 1}
    assert only(model, "RMSNormalization").attrs == {"axis": -1, "epsilon": pytest.approx(1e-5)}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", ["y", "y _ _ total"])
def test_skip_rms_norm(tmp_path: Path, bias: bool, outputs: str) -> None:
    inputs = {name: ("float32", ["b", "s", 8]) for name in ("x", "skip")}
    given = "x skip g c" if bias else "x skip g"
    op = "com.microsoft.SkipSimplifiedLayerNormalization"
    weights = {"g": rand(8), **({"c": rand(8, seed=1)} if bias else {})}
    model = build([(op, given, "y m i total")], inputs, "y total", weights, domains=MS)
    names = ["" if word == "_" else word for word in outputs.split()]
    del model.graph.node[0].output[:]
    model.graph.node[0].output.extend(names)
    if "total" not in names:
        del model.graph.output[1]
    found = check(save(model, tmp_path), {"b": 2, "s": 3})
    assert ops(found) == {"RMSNormalization": 1, "Add": 1 + bias}


def test_fast_gelu(tmp_path: Path) -> None:
    inputs = {"x": ("float32", ["b", 8])}
    nodes = [("com.microsoft.FastGelu", "x c", "y")]
    path = save(build(nodes, inputs, "y", {"c": rand(8)}, domains=MS), tmp_path)
    assert ops(check(path, {"b": 3})) == {"Add": 1, "apq.Gelu": 1}


# What ONNX Runtime does not compute on CPUs


def against_onnx(path: Path, feeds: Mapping[str, Any]) -> None:
    """Compare with onnx's own reference evaluator."""
    model = import_onnx(path)
    names = [spec.name for spec in model.outputs]
    want = ReferenceEvaluator(onnx.load(path)).run(names, dict(feeds))
    got = run_reference(model, feeds, run_node)
    for name, value in zip(names, want, strict=True):
        np.testing.assert_allclose(got[name], value, atol=2e-5, err_msg=name)


def qkv(s: int = 3, total: int = 5) -> dict[str, Any]:
    return {"q": rand(2, 4, s, 8), "k": rand(2, 2, total, 8, seed=1), "v": rand(2, 2, total, 8)}


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_scores_at_every_stage(tmp_path: Path, mode: int) -> None:
    # onnx's evaluator gives mode 0 after the softcap; ONNX Runtime, like us, before it.
    attrs = {"qk_matmul_output_mode": mode, "softcap": 1.5 if mode else 0.0, "is_causal": 1}
    path = onnx_attention(tmp_path, attrs=attrs, outputs="y pk pv scores", opset=24)
    model = onnx.load(path)
    model.graph.node[0].output[1:3] = ["", ""]
    del model.graph.output[1:3]
    against_onnx(save(model, tmp_path), qkv())


@pytest.mark.parametrize("causal", [0, 1])
def test_lengths_of_a_cache_outside(tmp_path: Path, causal: int) -> None:
    more = {"lengths": ("int64", ["b"])}
    path = onnx_attention(
        tmp_path, "q k v _ _ _ lengths", more, {"is_causal": causal}, outputs="y", opset=24
    )
    against_onnx(path, {**qkv(), "lengths": np.array([5, 3])})


@pytest.mark.parametrize(
    "attrs",
    [
        {"left_window_size": 1},
        {"is_causal": 1, "left_window_size": 2},
        {"left_window_size": 0, "right_window_size": 1},
    ],
)
def test_windows_of_attention(tmp_path: Path, attrs: dict[str, Any]) -> None:
    against_onnx(onnx_attention(tmp_path, attrs=attrs, opset=25), qkv(5, 5))


def test_a_mask_that_ends_before_the_keys(tmp_path: Path) -> None:
    inputs = {n: ("float32", [2, h, d, 8]) for n, h, d in (("q", 4, 3), ("k", 2, 5), ("v", 2, 5))}
    inputs["mask"] = ("bool", [3, 4])
    path = save(build([("Attention", "q k v mask", "y")], inputs, "y", opset=24), tmp_path)
    mask = rand(3, 4) > 0
    mask[1] = False  # nothing to attend to: 0, not NaN
    against_onnx(path, {**qkv(), "mask": mask})


def test_heads_normalised_inside_grouped_attention(tmp_path: Path) -> None:
    weights = {"qn": rand(16), "kn": rand(16, seed=1)}
    fused = grouped(tmp_path, {}, extra="_ _ _ _ _ _ _ qn kn", weights=weights)
    feeds = cache_feeds(CACHE)
    got = run_reference(import_onnx(fused), feeds, run_node)
    inside = {
        name: feeds[name].reshape(1, 3, -1, 16)
        / np.sqrt((feeds[name].reshape(1, 3, -1, 16) ** 2).mean(-1, keepdims=True) + 1e-6)
        * weights[f"{name}n"]
        for name in ("q", "k")
    }
    plain = grouped(tmp_path, {})
    feeds |= {name: value.reshape(1, 3, -1) for name, value in inside.items()}
    want = run_reference(import_onnx(plain), feeds, run_node)
    np.testing.assert_allclose(got["y"], want["y"], atol=1e-5)


def test_grouped_attention_in_both_directions(tmp_path: Path) -> None:
    path = grouped(tmp_path, {"causal": 0})
    model = import_onnx(path)
    feeds = cache_feeds(CACHE)
    got = run_reference(model, feeds, run_node)
    q = feeds["q"].reshape(1, 3, 4, 16).transpose(0, 2, 1, 3)
    k, v = (got[name].repeat(2, axis=1) for name in ("ok", "ov"))
    scores = q @ k.transpose(0, 1, 3, 2) / 4
    p = np.exp(scores - scores.max(-1, keepdims=True))
    y = (p / p.sum(-1, keepdims=True)) @ v
    np.testing.assert_allclose(got["y"], y.transpose(0, 2, 1, 3).reshape(1, 3, 64), atol=1e-5)


@pytest.mark.parametrize("width", [47, 64])
def test_multi_head_with_a_bias_of_another_width(tmp_path: Path, width: int) -> None:
    path = multi_head(tmp_path, "q k v bias", weights={"bias": rand(width)})
    with pytest.raises(UnsupportedModel, match=rf"has {width} entries for 16 \+ 16 \+ 16"):
        import_onnx(path)
