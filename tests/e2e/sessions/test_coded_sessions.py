"""Sessions with every kind of caches, codes beside floats, and what they answer to bad input."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_decoder
from numpy.testing import assert_allclose
from small_llama import CONFIG, PAST, small_llama
from tiny_decoder import whole

import apq_tvm
from apq_tvm.calibrate import calibrate
from apq_tvm.evaluation.simulate import Simulation
from apq_tvm.explain import explain, explanation_lines
from apq_tvm.formats.caches import CACHES, group_size
from apq_tvm.module import load_module
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers.guided import quantize_guided
from apq_tvm.types import QuantizedModel
from tests.simulated import relative

ROOT = Path(__file__).resolve().parents[3]
IDS = np.random.default_rng(0).integers(0, CONFIG.vocabulary, (2, 300))
KINDS = ("f32", "f16", "i8", "i4")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One model of float weights by the kind of its caches."""
    folder = tmp_path_factory.mktemp("coded_sessions")
    path = small_llama(folder / "llama.onnx")
    made = {}
    for kind in KINDS:
        apq_tvm.compile(path, folder / f"llama_{kind}", scheme="float", kv=kind)
        made[kind] = load_module(folder / f"llama_{kind}")
    return made


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With GroupQueryAttention, whose new tokens begin where lengths say."""
    folder, made = tmp_path_factory.mktemp("coded_sessions"), {}
    path = tiny_decoder.write(folder)
    for kind in ("i8", "i4"):
        apq_tvm.compile(path, folder / f"grouped_{kind}", scheme="W8A8g32", kv=kind)
        made[kind] = load_module(folder / f"grouped_{kind}")
    return made


@pytest.mark.parametrize("name", ["llama", "grouped"])
@pytest.mark.parametrize("kind", ["i8", "i4"])
def test_tokens_behind_others_give_what_all_at_once_give(
    kind: str, name: str, modules: dict[str, Any], grouped: dict[str, Any]
) -> None:
    """What is written once stays, and is what a run over everything makes of it."""
    module, ids = (grouped if name == "grouped" else modules)[kind], IDS[:, :30]
    wanted, close = whole(module, ids), {"rtol": 1e-4, "atol": 1e-4}
    with module.session(30, batch=2) as session:
        assert_allclose(session.prefill(ids[:, :7]), wanted[:, 6], **close)
        assert_allclose(session.prefill(ids[:, 7:12], last=3), wanted[:, 9:12], **close)
        for at in range(12, 20):
            assert_allclose(session.step(ids[:, at]), wanted[:, at], **close)
        other = session.fork()
        session.rewind(5)
        assert_allclose(session.prefill(ids[:, 15:], last=15), wanted[:, 15:], **close)
        assert_allclose(other.step(ids[:, 20]), wanted[:, 20], **close)
        session.reset()
        assert_allclose(session.step(ids[:, 0]), wanted[:, 0], **close)


def test_codes_cost_little(modules: dict[str, Any]) -> None:
    """Of 300 tokens in parts, and a whole run with a past of floats."""
    logits = {kind: modules[kind].session(300).prefill(IDS[0], last=300) for kind in KINDS}
    spread = np.abs(logits["f32"]).max()
    assert_allclose(logits["f16"], logits["f32"], atol=1e-3 * spread)
    for kind, most in (("i8", 2e-3), ("i4", 2e-2)):
        error = np.abs(logits[kind] - logits["f32"])
        assert 0 < error.mean() < most * spread and error.max() < 10 * most * spread, kind
    feeds: dict[str, Any] = {"input_ids": IDS[:1, 9:12]}
    rng = np.random.default_rng(1)
    for info in modules["i8"].inputs[1:]:
        shape = [1 if d == "batch" else 9 if isinstance(d, str) else d for d in info.shape]
        feeds[info.name] = rng.standard_normal(shape).astype(np.float32)
    floats = modules["f32"].run(feeds)
    for kind, most in (("i8", 2e-2), ("i4", 2e-1)):
        ours = modules[kind].run(feeds)
        assert_allclose(ours["logits"], floats["logits"], atol=most * spread)
        for name in ours:  # what runs give back is never rounded
            if name != "logits":
                np.testing.assert_array_equal(ours[name], floats[name])


@pytest.mark.parametrize("kind", ("f16", "i8", "i4"))
def test_the_simulation_says_what_a_session_gives(kind: str, modules: dict[str, Any]) -> None:
    """Of 300 tokens: what caches cost is simulated to a hundredth."""
    feeds: dict[str, Any] = {"input_ids": IDS[:1]}
    for info in modules[kind].inputs[1:]:
        shape = [1 if d == "batch" else 0 if isinstance(d, str) else d for d in info.shape]
        feeds[info.name] = np.zeros(shape, np.float32)
    path = Path(modules[kind].__file__).parents[1] / "llama.onnx"
    floats = QuantizedModel(import_onnx(path), {}, {})
    exact, simulated = (Simulation(floats, kv=k).run(feeds)["logits"][0] for k in ("f32", kind))
    found = modules[kind].session(300).prefill(IDS[0], last=300)
    cost = relative(found, exact)
    assert relative(found, simulated) < 0.01 * cost


@pytest.mark.parametrize("kind", ("i8", "i4"))
def test_centred_keys(kind: str, tmp_path: Path) -> None:
    """A calibrated module takes off keys what they share: in sessions as in the simulation."""
    path = small_llama(tmp_path / "llama.onnx", lift=3.0)
    model = import_onnx(path)
    empty = {s.name: np.zeros((2, *PAST[1:2], 0, PAST[3]), np.float32) for s in model.inputs[1:]}
    np.savez(tmp_path / "in.npz", input_ids=IDS[:, :100], **empty)
    said = calibrate(path, tmp_path / "in.npz", tmp_path / "cal", hessian=False, kv=kind)["caches"]
    assert all("keys centred" in text for text in said.values()), said
    guidance, made = apq_tvm.Guidance(tmp_path / "cal"), {}
    for name, told in (("plain", None), ("centred", guidance)):
        options = {"scheme": "W8A32g32", "kv": kind, "guidance": told}
        apq_tvm.compile(path, tmp_path / name, **options)
        made[name] = load_module(tmp_path / name)
    notes = [layer["note"] for layer in explain(tmp_path / "centred")["layers"]]
    assert sum("keys centred" in note for note in notes) == 1
    feeds: dict[str, Any] = {"input_ids": IDS[:1, 100:], **{k: v[:1] for k, v in empty.items()}}
    quantized = quantize_guided(model, "W8A32g32", {}, guidance, kv=kind)
    exact, simulated = (Simulation(quantized, kv=k).run(feeds)["logits"][0] for k in ("f32", kind))
    found = {n: m.session(200).prefill(IDS[0, 100:], last=200) for n, m in made.items()}
    cost = {name: relative(logits, exact) for name, logits in found.items()}
    assert cost["centred"] < 0.8 * cost["plain"]
    assert relative(found["centred"], simulated) < 0.01 * cost["centred"]
    with made["centred"].session(200) as session:
        session.prefill(IDS[0, 100:150])
        assert_allclose(
            session.prefill(IDS[0, 150:], last=9), found["centred"][-9:], rtol=1e-3, atol=1e-3
        )


def test_memory_and_what_is_said(modules: dict[str, Any]) -> None:
    tokens, width = 160, CONFIG.kv_heads * CONFIG.head_width
    bytes_of = {"f32": 8 * width, "f16": 4 * width, "i8": 2 * width + 8 * CONFIG.kv_heads}
    bytes_of["i4"] = width + 8 * width // group_size(CONFIG.head_width)
    for kind, module in modules.items():
        session = module.session(tokens)
        assert session.memory()["cache"] == tokens * bytes_of[kind]
    for kind, words in (
        ("i8", "caches of int8, one scale for each head and token"),
        ("i4", "caches of int4, a scale and a least for each group"),
    ):
        folder = Path(modules[kind].__file__).parent
        told = explain(folder)
        assert told["session"]["cache"] == CACHES[kind]
        assert any(words in line for line in explanation_lines(told))
        schedules = {f["name"]: f for f in modules[kind].manifest["functions"]}
        (attention,) = (f for name, f in schedules.items() if name.startswith("attention"))
        assert attention["schedule"].endswith("_attention")
        assert any(name.startswith("coded_cache") for name in schedules)


@pytest.mark.parametrize("kind", ("i8", "i4"))
def test_the_same_in_c(kind: str, modules: dict[str, Any], tmp_path: Path) -> None:
    module = modules[kind]
    folder = Path(module.__file__).parent
    program, source = tmp_path / "generate", ROOT / "examples" / "generate.c"
    places = [f"-I{folder}", f"-L{folder}", f"-Wl,-rpath,{folder}"]
    command = ["cc", "-Wall", "-Wextra", "-Werror", f"-DMODULE={folder.name}", *places, str(source)]
    subprocess.run([*command, f"-l{folder.name}", "-lm", "-o", str(program)], check=True)
    words = [str(program), str(folder / "weights.safetensors"), "40"]

    def tokens(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, input=text, capture_output=True, text=True, check=False)

    made = tokens(" ".join(map(str, IDS[0, :9]))).stdout.split()
    assert [int(line) for line in made] == list(module.generate(IDS[0, :9], 40))
    refused = tokens("1 -1 2")
    assert refused.returncode == 1 and "id -1 (token 1 of sequence 0) is no token" in refused.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_leaves_a_session_as_it_was(kind: str, modules: dict[str, Any]) -> None:
    """Of every call: numbers that C has no room for, ids that are none, sessions of others."""
    module = modules[kind]
    session, other = module.session(20), modules["i8" if kind == "f32" else "f32"].session(20)
    session.prefill(IDS[0, :9])
    wanted = session.fork().step(int(IDS[0, 9]))
    for wrong, text in (
        (lambda: session.prefill(IDS[0, :12]), "9 of at most 20 tokens, no room for 12"),
        (lambda: session.rewind(10), "9 tokens, of which 10"),
        (lambda: session.rewind(-1), "of which -1"),
        (lambda: session.rewind(2**70), "tokens=1180591620717411303424 is too large"),
        (lambda: session.rewind(-(2**64)), "too large"),
        (lambda: session.step(-1), "id -1 .* is no token"),
        (lambda: session.step(2**64 - 1), "id 18446744073709551615 is no token"),
        (lambda: session.step(CONFIG.vocabulary), "outside its table"),
        (lambda: session.step([[1], [2, 3]]), "no array"),
        (lambda: session.prefill([[1, 2], [3]]), "no array"),
        (lambda: session.prefill([1, 2.5]), "ids are of float64"),
        (lambda: session.prefill([1, None]), "ids are of object"),
        (lambda: session.step(1, bits=2**32), "bits=4294967296 is too large"),
        (lambda: session.step(1, bits=-1), "no layer of .* has bits to choose"),
        (lambda: session.prefill([1, 2], last=3), "last=3"),
        (lambda: module.session(2**64 + 5), "max_tokens=.* too large"),
        (lambda: module.session(5, batch=2**64 + 1), "batch=.* too large"),
        (lambda: list(module.generate([1], 2, session=other)), "is no session of"),
        (lambda: list(module.generate([1], 2, session="mine")), "is no session of"),
        (lambda: list(module.generate([1, 10**9], 2, session=session)), "outside its table"),
    ):
        with pytest.raises(module.InputError, match=text):
            wrong()
        assert session.length == 9
    np.testing.assert_array_equal(session.step(int(IDS[0, 9])), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_that_fails_in_its_second_part(kind: str, modules: dict[str, Any]) -> None:
    """Its first part was written behind what is there, which nobody sees."""
    session = modules[kind].session(600)
    session.prefill(IDS[0, :9])
    wanted = session.fork().prefill(IDS[0], last=5)
    bad = np.concatenate([IDS[0], [CONFIG.vocabulary]])
    with pytest.raises(modules[kind].InputError, match="outside its table"):
        session.prefill(bad)
    assert session.length == 9
    np.testing.assert_array_equal(session.prefill(IDS[0], last=5), wanted)
