"""Mixtures of experts: as ONNX Runtime computes them, and with the codes that a file brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, check, ops, rand, save
from quantized_onnx import MS, pack

from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.onnx_import import import_onnx

EXPERTS, HIDDEN, INNER = 4, 32, 64
SIZES = ({"b": 1, "s": 1}, {"b": 2, "s": 3})
SWIGLU = {
    "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.7,
    "activation_beta": 1.0, "swiglu_limit": 1.5,
}  # fmt: skip


def model(op: str, words: str, weights: dict[str, Any], folder: Path, **attrs: Any) -> Path:
    """Tokens, what a router says of them, and the experts."""
    nodes = [
        ("Reshape", "x flat", "tokens"),
        ("MatMul", "tokens router", "scores"),
        (f"com.microsoft.{op}", f"x scores {words}", "y", attrs),
    ]
    flat = np.array([-1, HIDDEN], np.int64)
    held = {"flat": flat, "router": rand(HIDDEN, EXPERTS, seed=9), **weights}
    inputs = {"x": ("float32", ["b", "s", HIDDEN])}
    return save(build(nodes, inputs, "y", held, domains=MS), folder)


def floats(fused: int = 1) -> dict[str, Any]:
    """Weights and biases of two layers an expert."""
    shapes = {
        "w1": (EXPERTS, INNER * fused, HIDDEN), "b1": (EXPERTS, INNER * fused),
        "w2": (EXPERTS, HIDDEN, INNER), "b2": (EXPERTS, HIDDEN),
    }  # fmt: skip
    return {name: 0.2 * rand(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "identity", "swiglu"])
@pytest.mark.parametrize("normalize", [0, 1])
def test_mixture(tmp_path: Path, kind: str, normalize: int) -> None:
    attrs = {"activation_type": kind, "normalize_routing_weights": normalize, "k": 2}
    attrs |= SWIGLU if kind == "swiglu" else {}
    weights = floats(2 if kind == "swiglu" else 1)
    found = check(model("MoE", "w1 b1 w2 b2", weights, tmp_path, **attrs), *SIZES)
    count = ops(found)
    assert count["apq.Linear"] == 1 + EXPERTS * (3 if kind == "swiglu" else 2)
    assert count["apq.Then"] == EXPERTS


@pytest.mark.parametrize("fusion", [0, 2])
def test_gates_beside_or_below(tmp_path: Path, fusion: int) -> None:
    """What ONNX Runtime computes on GPUs alone, beside what it does everywhere."""
    attrs = {**SWIGLU, "k": 2}
    both = floats(2)
    even, odd = both["w1"][:, ::2], both["w1"][:, 1::2]
    biases = both["b1"][:, ::2], both["b1"][:, 1::2]
    words, weights = "w1 b1 w2 b2", dict(both)
    if fusion:
        weights |= {"w1": np.concatenate([even, odd], 1), "b1": np.concatenate(biases, 1)}
    else:
        words += " w3 b3"
        weights |= {"w1": even, "w3": odd, "b1": biases[0], "b3": biases[1]}
    (tmp_path / "wanted").mkdir()
    wanted = import_onnx(model("MoE", "w1 b1 w2 b2", both, tmp_path / "wanted", **attrs))
    attrs["swiglu_fusion"] = fusion
    found = import_onnx(model("MoE", words, weights, tmp_path, **attrs))
    for a, b in zip(_matrices(wanted), _matrices(found), strict=True):
        np.testing.assert_array_equal(a, b)


def _matrices(found: Any) -> list[np.ndarray]:
    layers = [node for node in found.nodes if node.op == "apq.Linear"]
    return [found.weights[node.inputs[i]] for node in layers for i in (1, 2) if node.inputs[i]]


def codes(bits: int, block: int, zeros: bool, fused: int = 2) -> tuple[str, dict[str, Any]]:
    """Inputs of QMoE behind the router's."""
    rng, weights, words = np.random.default_rng(3), dict[str, Any](), []
    last = []
    for i, (n, k) in enumerate(((INNER * fused, HIDDEN), (HIDDEN, INNER)), 1):
        blocks = k // (block or k)
        weights[f"q{i}"] = pack(rng.integers(0, 1 << bits, (EXPERTS, n, k), np.uint8), bits)
        scales = (0.1 + rng.random((EXPERTS, n, blocks))) / (1 << bits)
        weights[f"s{i}"] = (scales if block else scales[..., 0]).astype(np.float32)
        weights[f"b{i}"] = 0.2 * rand(EXPERTS, n, seed=i)
        shape = (EXPERTS, n, blocks) if block else (EXPERTS, n)
        weights[f"z{i}"] = pack(rng.integers(0, 1 << bits, shape, np.uint8), bits)
        words.append(f"q{i} s{i} b{i}")
        last.append(f"z{i}")
    if zeros:
        words.append(f"_ _ _ {' '.join(last)}")
    return " ".join(words), weights


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [0, 16, 32])
@pytest.mark.parametrize("zeros", [False, True])
def test_quantized_mixture(tmp_path: Path, bits: int, block: int, zeros: bool) -> None:
    """Of 8 bits in blocks ONNX Runtime rounds activations, and of 2 in large ones."""
    words, weights = codes(bits, block, zeros)
    attrs = {**SWIGLU, "k": 2, "expert_weight_bits": bits}
    attrs |= {"block_size": block} if block else {}
    path = model("QMoE", words, weights, tmp_path, **attrs)
    rounded = (block and bits == 8) or (block == 32 and bits == 2)
    found = check(path, *SIZES, tolerance=0.03 if rounded else 1e-5)
    assert len(found.quantized) == EXPERTS * 3


def test_other_weights_than_the_router_chose_by(tmp_path: Path) -> None:
    words, weights = codes(4, 16, zeros=False)
    weights["shares"] = np.abs(rand(6, EXPERTS))
    attrs = {**SWIGLU, "k": 2, "block_size": 16, "normalize_routing_weights": 1}
    check(model("QMoE", f"{words}{' _' * 6} shares", weights, tmp_path, **attrs), SIZES[1])


REFUSED = {
    "sparse": ({"use_sparse_mixer": 1}, "use_sparse_mixer"),
    "activation": ({"activation_type": "tanh"}, "'tanh'.*relu"),
    "too many": ({"k": 5}, "k is 5, of 4 experts"),
    "none": ({"k": 0}, "k is 0, of 4 experts"),
    "no gates": ({"activation_type": "swiglu"}, "needs fc3"),
    "fusion": ({"activation_type": "swiglu", "swiglu_fusion": 7}, "7"),
    "sizes": ({"activation_type": "swiglu", "swiglu_fusion": 1}, r"not floats \[4, 128, 32\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mixtures_that_are_refused(tmp_path: Path, case: str) -> None:
    attrs, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=f"MoE 'n_y': .*{message}"):
        import_onnx(model("MoE", "w1 b1 w2 b2", floats(), tmp_path, **attrs))


def test_layers_that_are_missing(tmp_path: Path) -> None:
    for words, message in (("_ b1 w2 b2", "fc1 is missing"), ("w1 b1 _ b2", "'' is no constant")):
        with pytest.raises(UnsupportedModel, match=message):
            import_onnx(model("MoE", words, floats(), tmp_path, k=2))


def test_codes_of_other_sizes(tmp_path: Path) -> None:
    words, weights = codes(4, 16, zeros=False)
    attrs = {**SWIGLU, "block_size": 16}
    short = {**weights, "s1": weights["s1"][:, 1:]}
    with pytest.raises(ImportFailed, match="QMoE 'n_y': its scales 's1'"):
        import_onnx(model("QMoE", words, short, tmp_path, **attrs))
    with pytest.raises(UnsupportedModel, match="quant_type is 'fp4'"):
        import_onnx(model("QMoE", words, weights, tmp_path, **attrs, quant_type="fp4"))
    with pytest.raises(UnsupportedModel, match="blocks of 24 do not divide"):
        import_onnx(model("QMoE", words, weights, tmp_path, **{**attrs, "block_size": 24}))
