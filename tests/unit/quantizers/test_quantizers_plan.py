"""The plan: which layers are quantized and how, what stays float and why."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import pytest

from apq_tvm.errors import BadScheme, UnsupportedModel
from apq_tvm.formats import dequantize
from apq_tvm.quantizers import quantize, quantize_tensor
from apq_tvm.quantizers.calibrated import pooled
from apq_tvm.quantizers.feedback.error_feedback import output_error
from apq_tvm.quantizers.learn.learned import Learned
from apq_tvm.types import Calibration, ImportedModel, LayerStats, Node, Scheme, TensorSpec


def model(**weights: np.ndarray) -> ImportedModel:
    """Words and token types, two linear layers that share a weight, and a narrow one."""
    rng = np.random.default_rng(0)
    shapes = {"words": (50, 32), "types": (2, 32), "shared": (32, 32), "narrow": (8, 15)}
    arrays = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()} | weights
    nodes = (
        Node("apq.Embedding", "embed/words", ("words", "ids"), ("a",)),
        Node("apq.Embedding", "embed/types", ("types", "ids"), ("b",)),
        Node("Add", "add", ("a", "b"), ("c",)),
        Node("apq.Linear", "layer.0/query", ("c", "shared", "", ""), ("d",)),
        Node("apq.Linear", "layer.1/query", ("d", "shared", "", ""), ("e",)),
        Node("apq.Linear", "head", ("f", "narrow", "", ""), ("g",)),
    )
    ids = TensorSpec("ids", "int64", ("batch",))
    return ImportedModel("toy", 17, (ids,), (), nodes, arrays, {}, "")


def test_layers_and_tables_get_the_scheme() -> None:
    result = quantize(model(), "W4A8g32")
    assert dict(result.layers) == {
        "embed/words": "words:W4A8g32",
        "layer.0/query": "shared:W4A8g32",
        "layer.1/query": "shared:W4A8g32",
    }
    assert set(result.tensors) == set(result.layers.values())
    tensor = result.tensors["shared:W4A8g32"]
    want = quantize_tensor(result.model.weights["shared"], Scheme(4, group_size=32))
    np.testing.assert_array_equal(tensor.codes, want.codes)
    assert tensor.scheme == Scheme(4, group_size=32)


def test_what_stays_float_has_a_reason() -> None:
    notes = quantize(model(), Scheme(4, group_size=32)).notes
    assert set(notes) == {"embed/types", "head"}
    assert "2 rows" in notes["embed/types"] and "256 bytes" in notes["embed/types"]
    assert "K=15" in notes["head"]


@pytest.mark.parametrize(("factor", "size"), [(1e-9, "small"), (1e6, "large")])
def test_weights_that_no_scale_holds_stay_float(factor: float, size: str) -> None:
    """And a row of such does no harm."""
    words = np.random.default_rng(0).normal(size=(50, 32)).astype(np.float32)
    notes = quantize(model(words=words * np.float32(factor)), "W8A8").notes
    assert f"too {size} for scales" in notes["embed/words"]
    words[0] *= 1e-9
    assert "embed/words" not in quantize(model(words=words), "W8A8").notes


@pytest.mark.parametrize("scheme", (None, "float"))
def test_float_quantizes_nothing(scheme: str | None) -> None:
    result = quantize(model(), scheme)
    assert not result.tensors and not result.layers
    assert set(result.notes.values()) == {"the scheme is float"} and len(result.notes) == 5


def test_tensor_types_match_nodes_and_weights_and_the_last_one_counts() -> None:
    types = {"query": "W8A8", r"layer\.1": "float", "^words$": "W2A16g16", "embed/": "W8A16"}
    result = quantize(model(), "W4A8g32", types)
    assert dict(result.layers) == {
        "embed/words": "words:W8A16",
        "embed/types": "types:W8A16",
        "layer.0/query": "shared:W8A8",
    }
    assert result.notes["layer.1/query"] == r"asked for by 'layer\\.1'"


def test_tensor_types_reach_layers_that_stay_float_by_themselves() -> None:
    result = quantize(model(), "W4A8g32", {"head": "W8A8"})
    assert result.layers["head"] == "narrow:W8A8" and "head" not in result.notes


def test_tensor_types_quantize_single_layers_of_a_float_model() -> None:
    result = quantize(model(), "float", {"words": "W8A8"})
    assert dict(result.layers) == {"embed/words": "words:W8A8"}


def test_one_weight_under_two_schemes_is_two_tensors() -> None:
    result = quantize(model(), "W4A8g32", {r"layer\.1": "W8A8"})
    assert {"shared:W4A8g32", "shared:W8A8"} <= set(result.tensors)


def test_plain_rounding_is_worse() -> None:
    weights = model().weights["words"]
    errors = [
        (
            (dequantize(quantize(model(), "W3A8", search=s).tensors["words:W3A8"]) - weights) ** 2
        ).sum()
        for s in (False, True)
    ]
    assert errors[1] < errors[0]


class Recorder:
    """A `Progress` that remembers what it was told."""

    def __init__(self) -> None:
        self.totals: list[int | None] = []
        self.seen: list[str] = []

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        self.totals.append(total)
        return nullcontext()

    def advance(self, text: str = "") -> None:
        self.seen.append(text)


def test_progress_counts_every_tensor_once() -> None:
    recorder = Recorder()
    quantized = quantize(model(), "W4A8g32", progress=recorder)
    assert recorder.totals == [len(quantized.tensors)]
    assert [f"{name}:W4A8g32" for name in recorder.seen] == list(quantized.tensors)


@pytest.mark.parametrize(
    "types,message",
    (
        ({"nothing": "W8A8"}, "'nothing' matches no linear layer"),
        ({"^add$": "W8A8"}, "'\\^add\\$' matches no linear layer"),
        ({r"qu[aeiou]r\.y": "W8A8"}, "nearest are [^,]*query, .*; compile --dry-run"),
        ({"(": "W8A8"}, r"'\(' is no regular expression"),
        ({"query": "W9A8"}, "'W9A8'"),
    ),
)
def test_bad_tensor_types_are_refused(types: dict[str, str], message: str) -> None:
    with pytest.raises(BadScheme, match=message):
        quantize(model(), "W4A8g32", types)


def test_refusals_name_the_weight() -> None:
    with pytest.raises(BadScheme, match="W4A8g48"):
        quantize(model(), "W4A8g48")
    with pytest.raises(BadScheme, match=r"words: .*groups of 17"):
        quantize(model(), Scheme(4, group_size=17))
    with pytest.raises(UnsupportedModel, match=r"'words'.*inf"):
        hot = model(words=np.full((50, 32), np.inf, np.float32))
        quantize(hot, "W4A8g32", {"^words$|^emb": "W4A8g32"})


def test_float16_weights_are_read() -> None:
    half = np.random.default_rng(1).normal(size=(50, 32)).astype(np.float16)
    result = quantize(model(words=half), "W8A8")
    error = np.abs(dequantize(result.tensors["words:W8A8"]) - half).max()
    assert error < np.abs(half).max() / 128


def known_inputs(*kinds: int) -> Calibration:
    """Of both queries: samples that lie near a plane of their own each, by seed."""
    layers = {}
    for at, seed in enumerate(kinds):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(256, 4)) @ rng.normal(size=(4, 32)) + 0.1 * rng.normal(size=(256, 32))
        x = x.astype(np.float32)
        layers[f"layer.{at}/query"] = LayerStats(
            np.square(x).mean(0), x.mean(0), np.abs(x).max(0), 256, x.T @ x / 256
        )
    return Calibration(layers, "", "")


def test_a_shared_weight_is_judged_by_all_that_read_it() -> None:
    both = known_inputs(1, 2)

    def error(calibration: Calibration) -> float:
        result = quantize(model(), "W3A8", calibration=calibration, method="gptq")
        assert {"layer.0/query", "layer.1/query"} <= set(result.notes)
        delta = result.model.weights["shared"] - dequantize(result.tensors["shared:W3A8"])
        return sum(output_error(delta, s.hessian, s.mean_square) for s in both.layers.values())

    assert error(both) < 0.7 * min(error(known_inputs(1, 1)), error(known_inputs(2, 2)))
    least = pooled([replace(stats, importance=0.0) for stats in both.layers.values()])
    some = pooled(
        [replace(s, importance=i) for s, i in zip(both.layers.values(), (0, 1), strict=True)]
    )
    assert least.samples == 512 and some.hessian is not None
    np.testing.assert_allclose(some.hessian, both.layers["layer.1/query"].hessian)


def test_layers_that_share_a_weight_keep_what_each_learned() -> None:
    toy, scheme = model(), Scheme(4)
    own = {
        f"layer.{i}/query": quantize_tensor(toy.weights["shared"] * f, scheme)
        for i, f in enumerate((1, 2))
    }
    learned = Learned("finetune", own)
    types = {"words|types|narrow": "float"}
    result = quantize(toy, "W4A8", types, calibration=known_inputs(1, 2), method="learned",
                      learned=learned)  # fmt: skip
    for name, tensor in own.items():
        np.testing.assert_array_equal(result.tensors[result.layers[name]].scales, tensor.scales)
