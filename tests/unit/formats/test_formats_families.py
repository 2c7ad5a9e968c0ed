"""A family that only its own file knows: fitted and learned by its places, or refused by name."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from apq_tvm.codegen.layouts import default_layout
from apq_tvm.errors import BadScheme, PackError
from apq_tvm.formats import FAMILIES, Family, dequantize, parse_scheme
from apq_tvm.formats.arrays import check_array, check_codes, check_tables, group_count, spread
from apq_tvm.formats.family import level_family
from apq_tvm.formats.levels import Levels
from apq_tvm.formats.places import group_places
from apq_tvm.quantizers import quantize_tensor, registry
from apq_tvm.quantizers.feedback.gptq import layer_feedback, quantize_fed_back
from apq_tvm.quantizers.feedback.refit import refit, row_errors
from apq_tvm.quantizers.quantizer import QuantContext, Quantizer
from apq_tvm.types import LayerStats, QuantizedTensor, Scheme

N, K, GROUP = 12, 72, 32  # the last group is short


def parse(word: str) -> Scheme | None:
    scheme = Scheme(2, act_bits=32, group_size=GROUP, family="affine", weights="affine2")
    return scheme if re.fullmatch("AFFINE2A32", word) else None


def check(tensor: QuantizedTensor, name: str) -> None:
    n, k = check_codes(tensor, name)
    check_tables(tensor, name, "offsets")
    shape = (n, group_count(k, GROUP))
    check_array(f"{name}: scales", tensor.scales, "float16", shape)
    check_array(f"{name}: offsets", tensor.tables["offsets"], "float16", shape)


def decode(tensor: QuantizedTensor) -> np.ndarray:
    """scale * code + offset"""
    check(tensor, "tensor")
    scale, offset = (
        spread(array.astype(np.float32), tensor.codes.shape[1], GROUP)
        for array in (tensor.scales, tensor.tables["offsets"])
    )
    return np.asarray(scale * tensor.codes.astype(np.float32) + offset)


AFFINE = Family(
    "affine",
    "affine2A32: a scale and an offset per group of 32",
    ("affine2A32",),
    parse,
    check,
    decode,
    places=lambda tensor: [*group_places(tensor), *group_places(tensor, "offsets")],
)


def from_range(w: np.ndarray, scheme: Scheme, name: str, _: QuantContext) -> QuantizedTensor:
    """Four levels from the least to the largest weight of every group."""
    parts = [w[:, at : at + GROUP] for at in range(0, w.shape[1], GROUP)]
    low, high = (np.stack([f(p, axis=1) for p in parts], 1) for f in (np.min, np.max))
    scales, offsets = ((high - low) / 3).astype(np.float16), low.astype(np.float16)
    step, start = (spread(a.astype(np.float32), w.shape[1], GROUP) for a in (scales, offsets))
    codes = np.clip(np.rint((w - start) / step), 0, 3).astype(np.uint8)
    return QuantizedTensor(codes, scales, None, scheme, {"offsets": offsets})


def use(monkeypatch: pytest.MonkeyPatch, family: Family) -> Scheme:
    """Make a family known, as its line in the tuple does."""
    for module in ("families", "scheme"):
        monkeypatch.setattr(f"apq_tvm.formats.{module}.FAMILIES", (*FAMILIES, family))
    scheme = parse_scheme(family.examples[0])
    assert scheme is not None and scheme.family == family.name
    return scheme


@pytest.fixture
def scheme(monkeypatch: pytest.MonkeyPatch) -> Scheme:
    """Of the new family, with its quantizer."""
    monkeypatch.setattr(
        registry, "QUANTIZERS", {**registry.QUANTIZERS, "affine": Quantizer(from_range)}
    )
    return use(monkeypatch, AFFINE)


def weights(n: int = N, k: int = K) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)


def stats() -> LayerStats:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((400, K)) @ rng.standard_normal((K, K)) / K**0.5
    x = x.astype(np.float32)
    return LayerStats(np.square(x).mean(0), x.mean(0), np.abs(x).max(0), len(x), x.T @ x / len(x))


def test_error_feedback_and_refits_need_its_places_alone(scheme: Scheme) -> None:
    w, known = weights(), stats()
    assert known.hessian is not None
    plain = quantize_tensor(w, scheme)
    fed = quantize_fed_back(w, scheme, "layer", known, layer_feedback(known, K, "layer"))
    fitted = refit(w, plain, known.hessian)
    assert not np.array_equal(fitted.tables["offsets"], plain.tables["offsets"])
    errors = [row_errors(dequantize(t) - w, known.hessian).sum() for t in (plain, fitted, fed)]
    assert errors[2] < 0.6 * errors[1] < 0.6 * errors[0]


def test_learning_needs_its_places_alone(scheme: Scheme) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")
    from apq_tvm.quantizers.torch.decode import Decoder

    w = weights()
    tensor = quantize_tensor(w, scheme)
    decoder, target = Decoder(tensor, "layer"), torch.from_numpy(w)
    np.testing.assert_allclose(decoder.weight().detach().numpy(), dequantize(tensor), atol=1e-6)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        (decoder.weight() - target).square().mean().backward()
        optimizer.step()
    end = decoder.finish()
    check(end, "layer")
    before, after = (np.square(dequantize(t) - w).mean() for t in (tensor, end))
    assert after < 0.95 * before
    assert not np.array_equal(end.tables["offsets"], tensor.tables["offsets"])


def test_error_feedback_is_refused_by_name(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, replace(AFFINE, top_codes=lambda tensor: 0))
    known = stats()
    with pytest.raises(BadScheme, match=r"'layer': .* affine2A32 have no codes.*method rtn"):
        quantize_fed_back(weights(), scheme, "layer", known, layer_feedback(known, K, "layer"))


def test_what_a_family_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, w = use(monkeypatch, AFFINE), weights()
    with pytest.raises(BadScheme, match=r"affine2A32: no quantizer .* family 'affine'.*registry"):
        quantize_tensor(w, scheme)
    with pytest.raises(PackError, match="no layout holds affine2A32 weights"):
        default_layout(scheme, (), 8)


def test_learning_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")
    from apq_tvm.quantizers.torch.decode import Decoder
    from apq_tvm.quantizers.torch.ops import torch
    from apq_tvm.quantizers.torch.round import LearnedRounding

    w, eye = weights(), np.eye(K, dtype=np.float32)
    fixed = replace(AFFINE, places=lambda tensor: [])
    tensor = from_range(w, use(monkeypatch, fixed), "layer", QuantContext())
    assert refit(w, tensor, eye) is tensor
    with pytest.raises(BadScheme, match="'layer': affine2A32 has no float arrays"):
        Decoder(tensor, "layer")
    with pytest.raises(BadScheme, match=r"'layer'.*not affine2A32; use --learn finetune"):
        LearnedRounding(tensor, torch.from_numpy(w), "layer")
    use(monkeypatch, replace(AFFINE, places=lambda tensor: group_places(tensor, "scales", 16)))
    for learn in (lambda: Decoder(tensor, "layer"), lambda: refit(w, tensor, eye)):
        with pytest.raises(BadScheme, match=r"affine2A32: the places .* 'scales', .*\[12, 3\]"):
            learn()
    curved = replace(AFFINE, dequantize=lambda t: decode(replace(t, scales=np.square(t.scales))))
    use(monkeypatch, curved)
    with pytest.raises(BadScheme, match="'layer': affine2A32 is not linear in its scales"):
        Decoder(tensor, "layer")


@pytest.mark.parametrize("group", [-1, 24])
def test_levels_of_any_group_are_chosen_but_not_laid_out(
    monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """What the default layout cannot hold asks for a layout of its own."""
    levels = Levels((-4, -1, 1, 4), 0.25)
    scheme = Scheme(2, act_bits=32, group_size=group, family="lev", weights="lev2")
    parse = {"LEV2A32": scheme}.get
    use(monkeypatch, level_family("lev", "lev2A32", ("lev2A32",), parse, lambda _: levels))
    w = weights()
    tensor = quantize_tensor(w, scheme)
    assert np.square(dequantize(tensor) - w).mean() < 0.4
    scales = spread(tensor.scales.astype(np.float32), K, group)
    wanted = scales * np.array([-1, -0.25, 0.25, 1], np.float32)[tensor.codes]
    np.testing.assert_array_equal(dequantize(tensor), wanted)
    with pytest.raises(PackError, match="no layout holds lev2A32 weights"):
        default_layout(scheme, (), 8)


@pytest.mark.parametrize(
    ("values", "reason"), [((1, 0), "fall"), ((-200, 100), "do not fit a byte")]
)
def test_levels_that_nothing_could_look_up_are_refused(
    values: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Levels(values)
