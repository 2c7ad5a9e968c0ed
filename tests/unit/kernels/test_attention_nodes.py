"""Which graphs become attention over packed keys on processors, and what is said of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def test_what_stays_apart_has_a_reason(tmp_path: Path) -> None:
    shapes = {**SAME, "m": ["b", 1, "s", 1]}
    packed = found(tmp_path, [*SCORES, ("Add", "a m", "c"), *weighed("c")], shapes)
    assert "no column for each key" in packed.declined["n_p"]
    nodes = [*SCORES, ("Softmax", "a", "p", {"axis": -1}), ("MatMul", "p v", "w")]
    nodes.append(("Add", "w p", "y"))
    shapes = {"q": ["b", N, "s", 8], "k": ["b", N, 8, 8], "v": ["b", N, 8, 8]}
    assert "something else reads" in found(tmp_path, nodes, shapes).declined["n_p"]
