"""Attention in one kernel: against numpy, with every kind of mask, order of axes and length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.codegen.cuda.simulator import Simulator
from apq_tvm.launches import join
from apq_tvm.module import load_module
from apq_tvm.onnx_import import import_onnx
from apq_tvm.schedules.cuda.operators import OPERATORS
from apq_tvm.types import QuantizedModel
from tests.onnx_models import build, rand, save

ORDERS = {
    "bsh": (0, 2, 1, 3),  # [batch, sequence, heads, columns]
    "bhs": (0, 1, 2, 3),
}
CASES = {
    # name: order of q, of k and v, of the result; mask; columns of a head
    "plain": ("bsh", "bsh", "bsh", "", 32),
    "padding": ("bsh", "bhs", "bhs", "b11t", 8),
    "causal": ("bhs", "bhs", "bsh", "11st", 64),
    "whole": ("bhs", "bsh", "bhs", "bhst", 36),
    "wide": ("bsh", "bsh", "bsh", "11st", 132),
}
HEADS = 2


def model(folder: Path) -> Path:
    """All cases side by side; k and v have another length than q."""
    nodes, inputs = [], {}
    for name, (order_q, order_k, order_y, mask, width) in CASES.items():
        for letter, order in (("q", order_q), ("k", order_k), ("v", order_k)):
            length = "s" if letter == "q" else "t"
            dims = {"b": "b", "h": HEADS, "s": length}
            inputs[f"{name}_{letter}"] = ("float32", [*(dims[d] for d in order), width])
        turned = {"perm": (0, 2, 1, 3)}
        q, k, v = f"{name}_q", f"{name}_k", f"{name}_v"
        if order_q == "bsh":
            nodes.append(("Transpose", q, q := f"{name}_qt", turned))
        if order_k == "bsh":
            nodes.append(("Transpose", v, v := f"{name}_vt", turned))
            nodes.append(("Transpose", k, f"{name}_kt", {"perm": (0, 2, 3, 1)}))
        else:
            nodes.append(("Transpose", k, f"{name}_kt", {"perm": (0, 1, 3, 2)}))
        nodes.append(("MatMul", f"{q} {name}_kt", f"{name}_raw"))
        nodes.append(("Mul", f"{name}_raw scale", f"{name}_scaled"))
        scores = f"{name}_scaled"
        if mask:
            dims = {"b": "b", "h": HEADS, "s": "s", "t": "t", "1": 1}
            inputs[f"{name}_mask"] = ("float32", [dims[d] for d in mask])
            nodes.append(("Add", f"{scores} {name}_mask", scores := f"{name}_masked"))
        nodes.append(("Softmax", scores, f"{name}_p", {"axis": -1}))
        y = f"{name}_y" if order_y == "bhs" else f"{name}_yt"
        nodes.append(("MatMul", f"{name}_p {v}", y))
        if order_y == "bsh":
            nodes.append(("Transpose", y, f"{name}_y", turned))
    weights = {"scale": np.array(0.25, np.float32)}
    return save(build(nodes, inputs, " ".join(f"{name}_y" for name in CASES), weights), folder)


def feeds_of(batch: int, rows: int, keys: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    feeds = {}
    for name, (order_q, order_k, _, mask, width) in CASES.items():
        for letter, order in (("q", order_q), ("k", order_k), ("v", order_k)):
            sizes = {"b": batch, "h": HEADS, "s": rows if letter == "q" else keys}
            shape = (*(sizes[d] for d in order), width)
            feeds[f"{name}_{letter}"] = rng.standard_normal(shape).astype(np.float32)
        if mask:
            sizes = {"b": batch, "h": HEADS, "s": rows, "t": keys, "1": 1}
            hidden = rng.random([sizes[d] for d in mask]) < 0.5
            hidden[..., -1] = False
            feeds[f"{name}_mask"] = np.where(hidden, -np.inf, 0.0).astype(np.float32)
    return feeds


def expected(feeds: dict[str, np.ndarray], name: str) -> np.ndarray:
    order_q, order_k, order_y, mask, _ = CASES[name]
    q = feeds[f"{name}_q"].astype(np.float64).transpose(ORDERS[order_q])
    k, v = (feeds[f"{name}_{x}"].astype(np.float64).transpose(ORDERS[order_k]) for x in "kv")
    scores = q @ k.swapaxes(-1, -2) * 0.25
    if mask:
        scores = scores + feeds[f"{name}_mask"]
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ v).transpose(ORDERS[order_y])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attention")
    module = pipeline.compile(
        model(folder),
        folder / "attend",
        target="rtx-3090",
        scheme="float",
        images=Simulator(checked=True),
    )
    kinds = [entry["schedule"] for entry in module.manifest["functions"]]
    assert kinds.count("cuda_attention") == len(CASES), kinds
    return folder


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 5), (1, 8, 32), (1, 9, 129), (2, 17, 300)])
def test_agrees_with_numpy(folder: Path, gpu: None, sizes: tuple[int, int, int]) -> None:
    feeds = feeds_of(*sizes)
    found = load_module(folder / "attend").run(feeds)
    for name in CASES:
        np.testing.assert_allclose(found[f"{name}_y"], expected(feeds, name), atol=1e-5)


def test_rows_without_a_key_are_nan_and_alone_so(folder: Path, gpu: None) -> None:
    """As in ONNX Runtime; infinite and undefined values stay in their rows and columns."""
    feeds = feeds_of(1, 9, 40)
    feeds["causal_mask"][..., 3, :] = -np.inf
    feeds["causal_q"][0, 1, 5, 0] = np.nan
    feeds["plain_v"][0, 7, 1, 4] = np.inf
    found, module = {}, load_module(folder / "attend")
    found = module.run(feeds)
    wanted = expected(feeds, "causal")
    assert np.isnan(wanted[0, 3]).all() and np.isnan(wanted[0, 5, 1]).all()
    np.testing.assert_allclose(found["causal_y"], wanted, atol=1e-5)
    np.testing.assert_allclose(found["plain_y"], expected(feeds, "plain"), atol=1e-5)


def test_what_is_read_twice_stays_apart(tmp_path: Path) -> None:
    """Probabilities that are outputs, and heads that are too wide."""
    nodes = [("MatMul", "q k", "s"), ("Softmax", "s", "p"), ("MatMul", "p v", "y")]
    for outputs, width in (("y p", 16), ("y", 260), ("y", 18)):
        shapes = {"q": [2, "s", width], "k": [2, width, "t"], "v": [2, "t", 16]}
        inputs = {name: ("float32", shape) for name, shape in shapes.items()}
        imported = import_onnx(save(build(nodes, inputs, outputs, {}), tmp_path))
        joined = join(QuantizedModel(imported, {}, {}), OPERATORS)
        assert [node.op for node in joined.model.nodes].count("apq.Attention") == 0


def test_siblings_of_several_schemes_stay_apart(gpu: None, tmp_path: Path) -> None:
    """q, k and v are one layer where their formats are one, and the results agree."""
    nodes, weights, width = [], {"shape": np.array([0, 0, 2, 32], np.int64)}, 64
    for seed, letter in enumerate("qkv"):
        weights[f"w{letter}"] = rand(width, width, seed=seed) / 64
        weights[f"b{letter}"] = rand(width, seed=seed + 5)
        nodes.append(("MatMul", f"x w{letter}", f"{letter}0", {}))
        nodes.append(("Add", f"{letter}0 b{letter}" if letter != "k" else "k0 zero", f"{letter}1"))
        nodes.append(("Reshape", f"{letter}1 shape", f"{letter}2"))
        perm = (0, 2, 3, 1) if letter == "k" else (0, 2, 1, 3)
        nodes.append(("Transpose", f"{letter}2", f"{letter}3", {"perm": perm}))
    nodes += [("MatMul", "q3 k3", "s"), ("Softmax", "s", "p", {"axis": -1})]
    nodes += [("MatMul", "p v3", "y4"), ("Transpose", "y4", "y", {"perm": (0, 2, 1, 3)})]
    weights["zero"] = np.zeros(width, np.float32)
    onnx = save(build(nodes, {"x": ("float32", ["b", "s", width])}, "y", weights), tmp_path)
    x, found = np.random.default_rng(0).standard_normal((2, 11, width), np.float32), {}
    for name, target, types in (
        ("cpu", "x86-64", {}),
        ("one", "rtx-3090", {}),
        ("two", "rtx-3090", {"n_k0": "W8A8g32"}),
    ):
        options = {"tensor_types": types, "scheme": "W4A8g32", "search": False}
        images = None if target == "x86-64" else Simulator(checked=True)
        module = pipeline.compile(onnx, tmp_path / name, target=target, images=images, **options)
        layers = [layer["name"] for layer in module.manifest["layers"]]
        found[name] = load_module(tmp_path / name).run(x=x)["y"], layers
    assert [len(found[name][1]) for name in ("cpu", "one", "two")] == [3, 1, 3]
    assert found["one"][1] == ["n_q0+n_k0+n_v0"]
    np.testing.assert_allclose(found["one"][0], found["cpu"][0], atol=1e-4)
    assert 0 < np.abs(found["two"][0] - found["one"][0]).max() < 1
