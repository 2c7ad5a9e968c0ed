"""Attention whose kernel declines only when it is lowered: plain operators, and a remark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_decoder
from numpy.testing import assert_allclose
from onnx_models import build, rand, save
from small_llama import CONFIG, small_llama

import apq_tvm
import apq_tvm.lower.operators.attention as lowered
from apq_tvm.errors import NotApplicable
from apq_tvm.explain import explain, explanation_lines
from apq_tvm.formats.caches import is_coded
from apq_tvm.module import load_module

OPERATORS = {"attention": "apq.Attention", "pack_keys": "apq.PackKeys"}


def declines(*_: Any, **__: Any) -> Any:
    raise NotApplicable("its shapes are only known to a run")


def both(
    path: Path, folder: Path, patch: pytest.MonkeyPatch, *names: str, **options: Any
) -> tuple[Any, Any]:
    """A module with the kernel, and one where functions of these names decline."""
    made, every = [], lowered.cached_operators
    none = dict.fromkeys((OPERATORS[name] for name in names), declines)
    for name in ("kernel", "plain"):
        apq_tvm.compile(path, folder / name, **options)
        made.append(load_module(folder / name))
        patch.setattr(lowered, "cached_operators", lambda profile: {**every(profile), **none})
    kernel, plain = made
    for module, count in ((kernel, 1), (plain, 0)):
        told = explain(Path(module.__file__).parent)
        assert told["attention"]["kernels"] == count
        said = [line for line in explanation_lines(told) if "its shapes are only known" in line]
        assert bool(said) == (count == 0 and "attention" in names)
        assert len(told["attention"]["apart"]) == 1 - count
    return kernel, plain


@pytest.mark.parametrize(
    "kv", [pytest.param("f32", marks=pytest.mark.all_cases), "f16", "i8", "i4"]
)
def test_sessions_go_on(kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_llama(tmp_path / "llama.onnx")
    kernel, plain = both(path, tmp_path, monkeypatch, "attention", scheme="float", kv=kv)
    ids = np.random.default_rng(0).integers(0, CONFIG.vocabulary, (2, 40))
    sessions = [module.session(40, batch=2) for module in (kernel, plain)]
    for tokens in (ids[:, :21], ids[:, 21:22], ids[:, 22:]):
        want, got = (session.prefill(tokens, last=1) for session in sessions)
        assert_allclose(
            got, want, rtol=1e-4, atol=0.3 if is_coded(kv) else 1e-3
        )  # q is not rounded
    assert sessions[0].memory()["cache"] == sessions[1].memory()["cache"]


def test_masks_of_grouped_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_decoder.write(tmp_path)
    kernel, plain = both(path, tmp_path, monkeypatch, "attention", scheme="W4A32g32")
    for feeds in (tiny_decoder.feeds(1, 9, 0), tiny_decoder.feeds(2, 3, 5)):
        want, got = (module.run(feeds)["logits"] for module in (kernel, plain))
        assert_allclose(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "names",
    [
        ("attention",),
        pytest.param(("attention", "pack_keys"), marks=pytest.mark.all_cases),
        ("pack_keys",),
    ],
)
def test_softcaps_and_keys_that_are_not_packed(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of packing that declines makes the other decline by itself."""
    shapes = {"q": ["b", 6, "s", 8], "k": ["b", 2, "t", 8], "v": ["b", 2, "t", 8]}
    nodes = [("Attention", "q k v", "y", {"softcap": 2.0})]
    inputs = {name: ("float32", dims) for name, dims in shapes.items()}
    path = save(build(nodes, inputs, "y", None, 23, {}), tmp_path)
    kernel, plain = both(path, tmp_path, monkeypatch, *names)
    feeds = {"q": rand(2, 6, 5, 8), "k": rand(2, 2, 37, 8, seed=1), "v": rand(2, 2, 37, 8, seed=2)}
    assert_allclose(plain.run(feeds)["y"], kernel.run(feeds)["y"], rtol=1e-4, atol=1e-5)


def test_a_mask_whose_columns_nobody_knows(tmp_path: Path) -> None:
    """It has as many as there are keys, which only data say: a run that has not is refused."""
    shapes = {"q": ["b", 6, "s", 8], "k": ["b", 6, "t", 8], "v": ["b", 6, "t", 8]}
    inputs = {name: ("float32", dims) for name, dims in shapes.items()}
    inputs |= {"bias": ("float32", ["n"]), "keep": ("bool", ["n"])}
    nodes = [
        ("Compress", "bias keep", "row", {"axis": 0}),
        ("Transpose", "k", "kt", {"perm": (0, 1, 3, 2)}),
        ("MatMul", "q kt", "a"),
        ("Add", "a row", "c"),
        ("Softmax", "c", "p", {"axis": -1}),
        ("MatMul", "p v", "y"),
    ]
    path = save(build(nodes, inputs, "y", None, 17, {}), tmp_path)
    apq_tvm.compile(path, tmp_path / "masked")
    module: Any = load_module(tmp_path / "masked")
    feeds = {"q": rand(2, 6, 5, 8), "k": rand(2, 6, 37, 8, seed=1), "v": rand(2, 6, 37, 8, seed=2)}
    feeds |= {"bias": rand(40, seed=3), "keep": np.arange(40) > 2}
    scores = feeds["q"] @ feeds["k"].swapaxes(2, 3) + feeds["bias"][3:]
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = p / p.sum(-1, keepdims=True) @ feeds["v"]
    assert_allclose(module.run(feeds)["y"], want, rtol=1e-4, atol=1e-5)
    with pytest.raises(module.ModuleError):
        module.run({**feeds, "keep": np.arange(40) > 3})
