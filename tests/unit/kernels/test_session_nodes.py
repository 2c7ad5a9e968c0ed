"""Which decoders have sessions, and what stands against others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import tiny_decoder
from onnx import TensorProto, helper
from small_llama import small_llama

from apq_tvm import pipeline, sessions
from apq_tvm.errors import BadScheme
from apq_tvm.explain import explanation_lines
from apq_tvm.types import ImportedModel

Change = Callable[[onnx.GraphProto], None]


def planned(path: Path, change: Change | None = None, target: str = "znver4") -> ImportedModel:
    if change is not None:
        model = onnx.load(path)
        change(model.graph)
        onnx.save(model, path)
    return pipeline.plan(path, scheme="W8A8g32", search=False, target=target).quantized.model


def test_a_decoder_as_exporters_write_it(tmp_path: Path) -> None:
    model = planned(small_llama(tmp_path / "llama.onnx"))
    assert model.state is not None and model.stateless == ""
    assert model.state.feeds == {"input_ids": "ids"}
    assert model.state.logits == "logits" and model.state.past == "past"
    caches = [node for node in model.nodes if node.op == "apq.Cache"]
    assert [node.attrs["layout"] for node in caches] == ["keys", "rows"]
    gone = {"apq.Expand", "apq.PackKeys", "apq.PackValues"}
    assert not gone & {node.op for node in model.nodes}


def test_grouped_queries_are_fed_a_mask(tmp_path: Path) -> None:
    state = planned(tiny_decoder.write(tmp_path)).state
    assert state is not None and state.feeds == {"input_ids": "ids", "mask": "mask"}


def test_int8_caches_give_their_scales_to_attention(tmp_path: Path) -> None:
    path = small_llama(tmp_path / "llama.onnx")
    quantized = pipeline.plan(
        path, scheme="W8A8g32", search=False, target="znver4", kv="i8"
    ).quantized
    model = quantized.model
    caches = [node for node in model.nodes if node.op == "apq.Cache"]
    assert [node.attrs["dtype"] for node in caches] == ["int8", "int8"]
    (attention,) = (node for node in model.nodes if node.op == "apq.Attention")
    scales, codes = zip(*(node.outputs for node in caches), strict=True)
    assert attention.inputs[1:5] == (*codes, *scales)
    assert model.state is not None and model.state.cache == "int8"


def not_given_back(graph: onnx.GraphProto) -> None:
    graph.output.remove(next(each for each in graph.output if each.name == "present.0.key"))


def behind_what_is_new(graph: onnx.GraphProto) -> None:
    (join,) = (node for node in graph.node if "present.0.key" in node.output)
    join.input[:] = join.input[::-1]


def more_output(graph: onnx.GraphProto) -> None:
    name = next(node.input[0] for node in graph.node if "logits" in node.output)
    graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))


def other_reader(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("Neg", ["present.0.key"], ["turned"], name="turn"))
    graph.node.append(helper.make_node("Neg", ["logits"], ["last"]))
    graph.output[0].name = "last"
    graph.output.append(helper.make_tensor_value_info("turned", TensorProto.FLOAT, None))


def no_ids(graph: onnx.GraphProto) -> None:
    (node,) = (
        node for node in graph.node if "input_ids" in node.input and node.op_type == "Gather"
    )
    graph.input[0].name = "input_type_ids"
    for each in graph.node:
        each.input[:] = ["input_type_ids" if x == "input_ids" else x for x in each.input]
    assert node.input[1] == "input_type_ids"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (more_output, "outputs beside the caches are logits, "),
        (other_reader, "'turn' reads the cache 'present.0.key'"),
        (no_ids, "no input is known to hold token ids"),
        (behind_what_is_new, "is as long as the caches, but no cache"),
        (not_given_back, "is as long as the caches, but no cache"),
    ],
)
def test_what_stands_against_sessions_is_said(tmp_path: Path, change: Change, reason: str) -> None:
    model = planned(small_llama(tmp_path / "llama.onnx"), change)
    assert model.state is None and reason in model.stateless
    batch = {"dimension": "", "note": "no images"}
    report = {
        "batch": batch,
        "stateless": model.stateless,
        "target": "",
        "features": [],
        "layers": [],
    }
    assert f"no sessions: {model.stateless}" in explanation_lines(report)


STATEFUL = ("apq.Cache", "apq.Attention")


def test_gpus_have_the_same(tmp_path: Path) -> None:
    """Or, where something stands against it, attention that reads keys as they are stored."""
    path = small_llama(tmp_path / "llama.onnx")
    model, other = (planned(path, target=target) for target in ("rtx-3090", "znver4"))
    assert model.state is not None and model.state == other.state
    kept, both = ([n.op for n in made.nodes if n.op in STATEFUL] for made in (model, other))
    assert kept == both and kept.count("apq.Cache") == 2 * kept.count("apq.Attention") > 0
    model = planned(path, other_reader, target="rtx-3090")
    assert model.state is None and "'turn' reads the cache" in model.stateless
    (attention,) = (node for node in model.nodes if node.op == "apq.Attention")
    assert "orders" in attention.attrs and "apq.PackKeys" not in {n.op for n in model.nodes}


def test_gpus_read_some_types_of_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sessions.CACHES, "i9", "int9")
    assert sessions.cache_type("i9") == "int9"
    with pytest.raises(BadScheme, match=r"kv='i9' is not for GPUs, .* f32 and f16"):
        pipeline.plan(small_llama(tmp_path / "llama.onnx"), kv="i9", target="rtx-3090")


def test_types_of_caches_are_known(tmp_path: Path) -> None:
    with pytest.raises(BadScheme, match=r"kv='f8'.*f32, f16, i8"):
        pipeline.plan(small_llama(tmp_path / "llama.onnx"), kv="f8")
