"""Which graphs become attention over packed keys on processors, and what is said of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

from onnx_models import build, save

from apq_tvm.launches.packed import Packed, pack_attention, read_in_place
from apq_tvm.onnx_import import import_onnx
from apq_tvm.ops.graph.attention import attention
from tests import tiny_decoder

N, KV, H = 6, 2, 8
MS = {"com.microsoft": 1}
Nodes = list[tuple[Any, ...]]


def found(folder: Path, nodes: Nodes, inputs: Any, weights: Any = None, opset: int = 17) -> Packed:
    """What a graph that ends in ``y`` becomes."""
    shapes = {name: ("float32", dims) for name, dims in inputs.items()}
    path = save(build(nodes, shapes, "y", weights, opset, MS), folder)
    return pack_attention(import_onnx(path), attention)


def only(packed: Packed, op: str) -> Any:
    (node,) = (node for node in packed.nodes if node.op == op)
    return node


def weighed(scores: str, v: str = "v") -> Nodes:
    return [("Softmax", scores, "p", {"axis": -1}), ("MatMul", f"p {v}", "y")]


Q = {"q": ["b", N, "s", H]}
SAME = {**Q, "k": ["b", N, "t", H], "v": ["b", N, "t", H]}
SHARED = {**Q, "k": ["b", KV, "t", H], "v": ["b", KV, "t", H]}
SCORES: Nodes = [("Transpose", "k", "kt", {"perm": (0, 1, 3, 2)}), ("MatMul", "q kt", "a")]


def repeats(name: str) -> Nodes:
    """As torch.onnx writes repeat_kv."""
    return [
        ("Unsqueeze", f"{name} two", f"{name}1"),
        ("Shape", name, f"{name}_n"),
        ("Slice", f"{name}_n zero two", f"{name}_lead"),
        ("Slice", f"{name}_n two four", f"{name}_rest"),
        ("Concat", f"{name}_lead group {name}_rest", f"{name}_wide", {"axis": 0}),
        ("Expand", f"{name}1 {name}_wide", f"{name}2"),
        ("Concat", f"{name}_first all {name}_rest", f"{name}_whole", {"axis": 0}),
        ("Slice", f"{name}_n zero one", f"{name}_first"),
        ("Reshape", f"{name}2 {name}_whole", f"{name}3"),
    ]


NUMBERS = {"zero": [0], "one": [1], "two": [2], "four": [4], "group": [N // KV], "all": [N]}


def test_heads_of_their_own(tmp_path: Path) -> None:
    packed = found(tmp_path, [*SCORES, *weighed("a")], SAME)
    node = only(packed, "apq.Attention")
    assert node.inputs == ("q", "k.PackKeys", "v.PackValues") and not packed.declined
    assert only(packed, "apq.PackKeys").attrs["order"] == (2, 0, 1, 3)
    (in_place,) = (n for n in read_in_place(packed.nodes) if n.op == "apq.Attention")
    assert in_place.inputs[2] == "v" and in_place.attrs["order_values"] == (2, 0, 1, 3)


def test_repeated_heads_are_read_before_they_are_repeated(tmp_path: Path) -> None:
    nodes = [*repeats("k"), *repeats("v"), ("Transpose", "k3", "kt", {"perm": (0, 1, 3, 2)})]
    nodes.sort(key=lambda node: "_first all" in node[1] or node[0] in ("Reshape", "Transpose"))
    nodes += [("MatMul", "q kt", "a"), *weighed("a", "v3")]
    packed = found(tmp_path, nodes, SHARED, NUMBERS)
    assert only(packed, "apq.PackKeys").inputs == ("k",)
    assert only(packed, "apq.PackValues").inputs == ("v",)
    assert [node.op for node in packed.nodes] == ["apq.PackKeys", "apq.PackValues", "apq.Attention"]


def test_heads_that_torch_export_joins_with_the_batch(tmp_path: Path) -> None:
    weights = {**NUMBERS, "flat": [-1, 5, H], "apart": [2, N, H, 5]}
    weights |= {"wide": [2, KV, N // KV, 5, H], "whole": [2, N, 5, H]}
    nodes: Nodes = []
    for name in "kv":
        nodes.append(("Unsqueeze", f"{name} two", f"{name}1"))
        nodes.append(("Expand", f"{name}1 wide", f"{name}2"))
    nodes += [("Reshape", "k2 flat", "k3"), ("Transpose", "k3", "k4", {"perm": (0, 2, 1)})]
    nodes += [("Reshape", "k4 apart", "kt"), ("Reshape", "v2 whole", "v3")]
    nodes += [("MatMul", "q kt", "a"), *weighed("a", "v3")]
    weights = {name: value for name, value in weights.items() if any(name in n[1] for n in nodes)}
    shapes = {"q": [2, N, "s", H], "k": [2, KV, 5, H], "v": [2, KV, 5, H]}
    packed = found(tmp_path, nodes, shapes, weights)
    assert only(packed, "apq.PackKeys").inputs == ("k",)
    assert only(packed, "apq.PackKeys").attrs["order"] == (2, 0, 1, 3)


def test_operators_of_groups(tmp_path: Path) -> None:
    packed = pack_attention(import_onnx(tiny_decoder.write(tmp_path)), attention)
    assert only(packed, "apq.PackKeys").inputs == ("ok",)
    assert only(packed, "apq.PackValues").inputs == ("ov",)
    assert len(only(packed, "apq.Attention").inputs) == 4 and not packed.declined


@pytest.mark.parametrize("kv", (N, KV))
def test_attention_of_opset_23(tmp_path: Path, kv: int) -> None:
    shapes = {"q": ["b", N, "s", H], "k": ["b", kv, "t", H], "v": ["b", kv, "t", H]}
    packed = found(tmp_path, [("Attention", "q k v", "y", {"softcap": 2.0})], shapes, opset=23)
    attrs = only(packed, "apq.Attention").attrs
    assert attrs["softcap"] == 2.0 and attrs["scale"] == pytest.approx(H**-0.5)
    assert only(packed, "apq.PackKeys").inputs == ("k",)


def test_multi_head_attention(tmp_path: Path) -> None:
    shapes = {"q": ["b", "s", N * H], "k": ["b", "t", N * H], "v": ["b", "t", N * H]}
    nodes = [("com.microsoft.MultiHeadAttention", "q k v", "y", {"num_heads": N})]
    assert only(found(tmp_path, nodes, shapes), "apq.PackKeys").attrs["order"] == (1, 0, 2, 3)


def with_sinks(less: bool, masked: bool) -> Nodes:
    """As torch.onnx writes a score of each head behind the others, less the largest or not."""
    first: Nodes = [*SCORES, ("Mul", "a half", "c")]
    if masked:
        first += [("Add", "c m", "d")]
    first += [("Expand", "sinks wide", "s1"), ("Concat", f"{'d' if masked else 'c'} s1", "e")]
    first[-1] = (*first[-1], {"axis": -1})
    if less:
        first += [("ReduceMax", "e last", "top", {"keepdims": 1}), ("Sub", "e top", "f")]
    cut: Nodes = [("Slice", "p zero minus last", "r"), ("MatMul", "r v", "y")]
    return [*first, ("Softmax", "f" if less else "e", "p", {"axis": -1}), *cut]


SINKS = {
    "sinks": np.arange(N, dtype=np.float32).reshape(1, N, 1, 1), "half": np.float32(0.5),
    "wide": np.array([1, 1, 5, 1]), "last": np.array([3]), "zero": np.array([0]),
    "minus": np.array([-1]),
}  # fmt: skip
SUNK = {"q": [1, N, 5, H], "k": [1, N, "t", H], "v": [1, N, "t", H]}


@pytest.mark.parametrize("less", (False, True))
@pytest.mark.parametrize("masked", (False, True))
def test_sinks(tmp_path: Path, less: bool, masked: bool) -> None:
    shapes = {**SUNK, **({"m": [1, 1, 5, "t"]} if masked else {})}
    packed = found(tmp_path, with_sinks(less, masked), shapes, SINKS, opset=18)
    node = only(packed, "apq.Attention")
    assert node.attrs["sink"] and node.attrs["scale"] == 0.5
    assert len(node.inputs) == (5 if masked else 4) and not packed.declined
    assert packed.weights[node.inputs[-1]].tolist() == list(range(N))
    assert not {"Concat", "apq.Softmax", "Sub", "ReduceMax"} & {one.op for one in packed.nodes}


@pytest.mark.parametrize("attrs", [{"smooth_softmax": 1}, {"softcap": 7.0}])
def test_sinks_of_operators_of_groups(tmp_path: Path, attrs: dict[str, Any]) -> None:
    """Given, or zeros; beside a softcap."""
    heads = {"num_heads": N, "kv_num_heads": KV, **attrs}
    read = "q k v pk pv lens total" + (" _ _ _ _ sink" if "softcap" in attrs else "")
    inputs: dict[str, Any] = {"q": ("float32", ["b", "s", N * H])}
    inputs |= {name: ("float32", ["b", "s", KV * H]) for name in "kv"}
    inputs |= {name: ("float32", ["b", KV, "p", H]) for name in ("pk", "pv")}
    inputs |= {"lens": ("int32", ["b"]), "total": ("int32", [])}
    weights = {"sink": np.ones(N, np.float32)} if "softcap" in attrs else {}
    nodes = [("com.microsoft.GroupQueryAttention", read, "y nk nv", heads)]
    path = save(build(nodes, inputs, "y nk nv", weights, 20, MS), tmp_path)
    packed = pack_attention(import_onnx(path), attention)
    node = only(packed, "apq.Attention")
    assert node.attrs["sink"] and node.attrs.get("softcap", 0.0) == attrs.get("softcap", 0.0)
    assert packed.weights[node.inputs[-1]].tolist() == [float("softcap" in attrs)] * N


def test_a_column_that_is_no_sink_stays(tmp_path: Path) -> None:
    """One for each query, or that something else reads."""
    each = {**SINKS, "sinks": np.arange(N * 5, dtype=np.float32).reshape(1, N, 5, 1)}
    packed = found(tmp_path, with_sinks(False, False), SUNK, each, opset=18)
    assert "no number for each head" in packed.declined["n_p"]
    nodes = with_sinks(False, False)
    nodes[-1:] = [("MatMul", "r v", "w"), ("ReduceMax", "p last", "g"), ("Add", "w g", "y")]
    packed = found(tmp_path, nodes, SUNK, SINKS, opset=18)
    assert "something else reads" in packed.declined["n_p"]


def test_what_stays_apart_has_a_reason(tmp_path: Path) -> None:
    shapes = {**SAME, "m": ["b", 1, "s", 1]}
    packed = found(tmp_path, [*SCORES, ("Add", "a m", "c"), *weighed("c")], shapes)
    assert "no column for each key" in packed.declined["n_p"]
    nodes = [*SCORES, ("Softmax", "a", "p", {"axis": -1}), ("MatMul", "p v", "w")]
    nodes.append(("Add", "w p", "y"))
    shapes = {"q": ["b", N, "s", 8], "k": ["b", N, 8, 8], "v": ["b", N, 8, 8]}
    assert "something else reads" in found(tmp_path, nodes, shapes).declined["n_p"]
