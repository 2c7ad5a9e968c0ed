"""The graph in torch computes what ONNX Runtime computes, and has the right gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import tiny_decoder
import tiny_llama
from onnx_models import build, rand, save

from apq_tvm.errors import BadInput, UnsupportedModel
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers.learn.blocks import find_blocks

torch = pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")

TOLERANCE = 1e-4


def compare(path: Path, feeds: dict[str, np.ndarray]) -> None:
    from apq_tvm.quantizers.torch.graph import TorchGraph

    graph = TorchGraph(import_onnx(path))
    with torch.no_grad():
        ours = graph.run(feeds)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    for name, reference in zip(names, session.run(names, feeds), strict=True):
        np.testing.assert_allclose(ours[name].numpy(), reference, rtol=TOLERANCE, atol=TOLERANCE)


def test_demo_model_agrees_with_onnxruntime(demo_onnx: Path) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 30000, (3, 20))
    mask = (np.arange(20) < np.array([[20], [13], [1]])).astype(np.int64)
    compare(demo_onnx, {"input_ids": ids, "attention_mask": mask})


def test_language_model_agrees_with_onnxruntime(tmp_path: Path) -> None:
    path = tiny_llama.write(tmp_path)
    for shape in ((1, 1), (2, 11)):
        compare(path, {"input_ids": tiny_llama.ids(*shape)})


def test_operators_agree_with_onnxruntime(tmp_path: Path) -> None:
    """What exporters of transformers write, beside the two models above."""
    nodes = [
        ("Split", "x", "a b", {"axis": 2}),
        ("Pow", "a two", "a2"),
        ("Clip", "b low high", "bc"),
        ("Max", "a2 bc", "top"),
        ("Min", "top a", "m"),
        ("Softplus", "m", "sp"),
        ("ReduceMax", "x", "peak", {"axes": [1]}),
        ("Squeeze", "peak second", "flat"),
        ("CumSum", "x one", "running"),
        ("Trilu", "x", "lower", {"upper": 0}),
        ("LogSoftmax", "x", "logs", {"axis": -1}),
        ("Softmax", "x", "shares", {"axis": 1}),
        ("Where", "test x logs", "chosen"),
        ("Less", "x logs", "less"),
        ("Not", "less", "test"),
        ("Flatten", "x", "rows", {"axis": 2}),
        ("Gemm", "rows g bias", "gemm", {"transB": 1, "alpha": 0.5, "beta": 2.0}),
        ("Elu", "x", "elu", {"alpha": 0.7}),
        ("ReduceL1", "x", "norm1", {"axes": [1]}),
        ("ReduceL2", "elu", "norm2", {"axes": [-1], "keepdims": 0}),
        ("ReduceSumSquare", "x", "squares", {"axes": [0, 2]}),
    ]
    order = [n for n in nodes if n[0] != "Where"] + [n for n in nodes if n[0] == "Where"]
    weights = {
        "two": np.float32(2),
        "low": np.float32(-0.5),
        "high": np.float32(0.5),
        "one": np.array(1),
        "second": np.array([1]),
        "g": rand(5, 6, seed=2),
        "bias": rand(5, seed=3),
    }
    outputs = "sp flat running lower chosen shares gemm norm1 norm2 squares"
    model = build(order, {"x": ("float32", ["n", 4, 6])}, outputs, weights)
    compare(save(model, tmp_path), {"x": rand(3, 4, 6, seed=1)})


@pytest.mark.parametrize(("batch", "new", "past"), [(2, 5, 0), (1, 5, 3), (2, 1, 3)])
def test_packed_codes_and_a_cache_agree_with_onnxruntime(
    tmp_path: Path, batch: int, new: int, past: int
) -> None:
    compare(tiny_decoder.write(tmp_path), tiny_decoder.feeds(batch, new, past))


ROUNDED = {
    "tensor": ((), {}),
    "axis": ((6,), {"axis": 1}),
    "blocks": ((3, 2), {"axis": 1, "block_size": 4}),
}


@pytest.mark.parametrize("along", ROUNDED)
def test_rounded_activations_agree_with_onnxruntime(tmp_path: Path, along: str) -> None:
    shape, attrs = ROUNDED[along]
    scale = 0.02 + np.random.default_rng(0).random(shape) / 20
    weights = {"s": np.asarray(scale, np.float32), "z": np.full(shape, 3, np.int8)}
    nodes = [
        ("QuantizeLinear", "x s z", "q", attrs),
        ("DequantizeLinear", "q s z", "d", attrs),
    ]
    model = build(nodes, {"x": ("float32", [3, 6])}, "q d", weights, opset=21)
    compare(save(model, tmp_path), {"x": 6 * rand(3, 6)})


def test_gradients_pass_rounded_activations(tmp_path: Path) -> None:
    """Else no layer before a QuantizeLinear would be calibrated."""
    from apq_tvm.quantizers.inputs.statistics import collect, finish

    nodes = [
        ("MatMul", "x w", "h"),
        ("QuantizeLinear", "h s z", "q"),
        ("DequantizeLinear", "q s z", "d"),
        ("Tanh", "d", "t"),
        ("MatMul", "t v", "y"),
    ]
    weights = {"w": rand(32, 16), "v": rand(16, 8), "s": np.float32(0.1), "z": np.uint8(128)}
    path = save(build(nodes, {"x": ("float32", ["n", 32])}, "y", weights), tmp_path)
    compare(path, {"x": rand(40, 32)})
    model = import_onnx(path)
    calls = [{"x": rand(40, 32, seed=seed)} for seed in range(3)]
    layers = finish(model, collect(model, calls)).layers
    assert len(layers) == 2 and all(stats.importance > 0 for stats in layers.values())


def test_unknown_operators_are_refused_by_name(tmp_path: Path) -> None:
    from apq_tvm.quantizers.torch.graph import TorchGraph

    model = build([("Hardmax", "x", "y")], {"x": ("float32", ["n", 4, 9])}, "y")
    with pytest.raises(UnsupportedModel, match="Hardmax: 'n_y'"):
        TorchGraph(import_onnx(save(model, tmp_path)))


def test_gradients_agree_with_differences(tmp_path: Path) -> None:
    from apq_tvm.quantizers.torch.graph import TorchGraph

    model = tiny_llama.load(tmp_path)
    graph = TorchGraph(model)
    graph.weights = {
        name: w.double() if w.is_floating_point() else w for name, w in graph.weights.items()
    }
    ids = tiny_llama.ids(1, 7)
    direction = torch.from_numpy(np.random.default_rng(3).standard_normal((1, 7, 48)))

    def result(name: str, weight: object) -> object:
        values, symbols = graph.begin({"input_ids": ids})
        out = graph.run_nodes(model.nodes, values, symbols, ["logits"], weights={name: weight})
        return (out["logits"] * direction).sum()

    for node in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
        name = next(n.inputs[1] for n in model.nodes if n.name == node)
        weight = graph.weights[name].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(result(name, weight), weight)
        for at in ((0, 0), (3, 5)):
            step = torch.zeros_like(weight)
            step[at] = 1e-5
            with torch.no_grad():
                slope = (result(name, weight + step) - result(name, weight - step)) / 2e-5
            assert float(gradient[at]) == pytest.approx(float(slope), rel=1e-4, abs=1e-6)


def test_blocks_are_cut_at_residuals(tmp_path: Path) -> None:
    from apq_tvm.quantizers.torch.graph import TorchGraph

    model = tiny_llama.load(tmp_path)
    blocks = find_blocks(model)
    assert [b.down for b in blocks] == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    assert [len(b.layers) for b in blocks] == [7, 7]
    assert [len(b.attention) for b in blocks] == [1, 1]
    # Running blocks one after another is running the model.
    graph = TorchGraph(model)
    feeds = {"input_ids": tiny_llama.ids(2, 9)}
    with torch.no_grad():
        whole = graph.run(feeds)["logits"]
        values, symbols = graph.begin(feeds)
        for block in blocks:
            values = graph.run_nodes(block.nodes, values, symbols, block.live)
        done = {id(node) for block in blocks for node in block.nodes}
        rest = [node for node in model.nodes if id(node) not in done]
        last = graph.run_nodes(rest, values, symbols, ["logits"])["logits"]
    torch.testing.assert_close(last, whole)


def test_blocks_of_the_demo_model(demo_onnx: Path) -> None:
    blocks = find_blocks(import_onnx(demo_onnx))
    assert [len(b.layers) for b in blocks] == [6, 6, 6]
    assert all("output/dense" in b.down and len(b.attention) == 1 for b in blocks)


def test_a_model_without_residuals_is_one_block(tmp_path: Path) -> None:
    model = build(
        [("MatMul", "x w", "h"), ("Relu", "h", "r"), ("MatMul", "r v", "y")],
        {"x": ("float32", ["n", 16])},
        "y",
        {"w": rand(16, 16), "v": rand(16, 4)},
    )
    imported = import_onnx(save(model, tmp_path))
    (block,) = find_blocks(imported)
    assert block.output == "y" and len(block.layers) == 2
    assert find_blocks(replace(imported, nodes=())) == ()


@pytest.mark.parametrize("wrong", (5, -6, 2**40))
def test_ids_that_a_table_has_no_row_for(wrong: int) -> None:
    from apq_tvm.quantizers.torch.ops import OPS

    table, ids = torch.arange(10.0).reshape(5, 2), torch.tensor([[0, -5], [4, wrong]])
    assert OPS["apq.Embedding"]({}, table, ids[:1]).tolist() == [[[0, 1], [0, 1]]]
    with pytest.raises(BadInput, match=f"id {wrong} is outside of a table of 5 rows"):
        OPS["apq.Embedding"]({}, table, ids)
