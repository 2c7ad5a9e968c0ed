"""Sessions of decoders: caches inside the module, and the tokens that come out."""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_decoder
from numpy.testing import assert_allclose
from small_llama import CONFIG, small_llama
from tiny_decoder import whole

import apq_tvm
from apq_tvm.module import load_module

ROOT = Path(__file__).resolve().parents[3]
IDS = np.random.default_rng(0).integers(0, CONFIG.vocabulary, (2, 300))
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As exporters write it; its weights have 3 or 4 bits."""
    folder = tmp_path_factory.mktemp("sessions")
    path = small_llama(folder / "llama.onnx")
    apq_tvm.compile(path, folder / "llama_any", scheme="anyprec3-4")
    return load_module(folder / "llama_any")


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With GroupQueryAttention and a mask; caches in half the bytes."""
    folder = tmp_path_factory.mktemp("sessions")
    path = tiny_decoder.write(folder)
    apq_tvm.compile(path, folder / "grouped", scheme="W8A8g32", kv="f16")
    return load_module(folder / "grouped")


@pytest.mark.parametrize("name", ["llama", "grouped"])
def test_tokens_behind_others_give_what_all_at_once_give(
    name: str, request: pytest.FixtureRequest
) -> None:
    module, ids = request.getfixturevalue(name), IDS[:, :30]
    wanted = whole(module, ids)
    with module.session(30, batch=2) as session:
        assert_allclose(session.prefill(ids[:, :7]), wanted[:, 6], **CLOSE)
        assert_allclose(session.prefill(ids[:, 7:12], last=3), wanted[:, 9:12], **CLOSE)
        for at in range(12, 20):
            assert_allclose(session.step(ids[:, at]), wanted[:, at], **CLOSE)
        other = session.fork()
        session.rewind(5)
        assert (session.length, other.length) == (15, 20)
        assert_allclose(session.prefill(ids[:, 15:], last=15), wanted[:, 15:], **CLOSE)
        assert_allclose(other.step(ids[:, 20]), wanted[:, 20], **CLOSE)
        session.reset()
        assert session.length == 0 and session.memory()["cache"] > 0
        assert_allclose(session.step(ids[:, 0]), wanted[:, 0], **CLOSE)


@pytest.mark.parametrize("batch", [1, 2])
def test_long_prompts_are_run_in_parts(llama: Any, batch: int) -> None:
    ids = IDS[:batch]
    wanted = whole(llama, ids)
    session = llama.session(300, batch=batch)
    assert_allclose(session.prefill(ids, last=270), wanted[:, 30:], **CLOSE)
    session.reset()
    assert session.prefill(ids, last=0).shape == (batch, 0, CONFIG.vocabulary)
    assert session.length == 300


def test_what_fails_leaves_the_session_as_it_was(llama: Any) -> None:
    session = llama.session(20)
    wanted = session.prefill(IDS[0, :10])
    for wrong, text in (
        (lambda: session.prefill(IDS[0, :11]), "10 of at most 20 tokens, no room for 11"),
        (lambda: session.prefill(IDS[:, :2]), r"shape \(2, 2\), wanted \[1, tokens\]"),
        (lambda: session.prefill([]), "float64"),
        (lambda: session.prefill(np.zeros(0, int)), "there are 0 tokens"),
        (lambda: session.prefill([1, 2], last=3), "last=3: there are 2"),
        (lambda: session.step(10**9), "outside its table"),
        (lambda: session.step(1, bits=2), "bits=2"),
        (lambda: session.rewind(11), "10 tokens, of which 11"),
        (lambda: session.rewind(-1), "of which -1"),
    ):
        with pytest.raises(llama.InputError, match=text):
            wrong()
    assert session.length == 10
    session.rewind(1)
    np.testing.assert_array_equal(session.step(int(IDS[0, 9])), session.fork() and wanted)
    session.close()
    for use in (lambda: session.step(1), session.reset, session.fork, session.memory):
        with pytest.raises(llama.InputError, match="closed"):
            use()


@pytest.mark.parametrize(("tokens", "batch"), [(0, 1), (10**10, 1), (5, 0), (2**62, 1)])
def test_impossible_sessions_are_refused(llama: Any, tokens: int, batch: int) -> None:
    with pytest.raises(llama.ModuleError, match=r"1 to 999999999"):
        llama.session(tokens, batch=batch)


def test_what_is_given_must_be_what_the_model_needs(llama: Any) -> None:
    with pytest.raises(llama.InputError, match="is given nothing"):
        llama.session(5, given={"encoder": np.zeros(3)})


def test_limits_of_the_model_are_limits_of_sessions(grouped: Any) -> None:
    session = grouped.session(40)
    session.prefill(IDS[0, :32])
    with pytest.raises(grouped.InputError, match="table of 32 rows"):
        session.step(1)
    assert session.length == 32


def test_sessions_run_at_once_and_each_alone(llama: Any) -> None:
    def tokens(seed: int) -> list[int]:
        return list(llama.generate(IDS[seed % 2, seed : seed + 9], 20))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(tokens, range(8))) == [tokens(seed) for seed in range(8)]


def test_one_session_is_not_for_two_threads(llama: Any) -> None:
    session = llama.session(6000)
    other = threading.Thread(target=session.prefill, args=(np.resize(IDS, 6000),))
    other.start()
    refused = []
    while other.is_alive():
        try:
            session.rewind(0)
        except llama.InputError as error:
            refused.append(str(error))
    other.join()
    assert refused and "another thread" in refused[0] and session.length == 6000


def test_the_most_probable_tokens(llama: Any) -> None:
    ids, wanted = list(IDS[0, :5]), []
    for _ in range(8):
        wanted.append(int(np.argmax(whole(llama, np.array([ids + wanted]))[0, -1])))
    session = llama.session(40)
    assert list(llama.generate(ids, 8, session=session)) == wanted
    assert session.length == 5 + 7
    assert list(llama.generate(ids, 8, stop={wanted[2]})) == wanted[: wanted.index(wanted[2]) + 1]
    assert list(llama.generate(ids, 30, session=llama.session(8))) == wanted[:4]
    changing = llama.generate(ids, 8, bits=lambda number: 3 + number % 2)
    assert len(list(changing)) == 8


@pytest.mark.parametrize("ahead", [1, 3, 7])
def test_drafts_change_nothing(llama: Any, ahead: int) -> None:
    plain, drafted = list(llama.generate(IDS[0, :9], 25)), llama.Drafted()
    session = llama.session(40)
    ours = llama.generate(IDS[0, :9], 25, draft=(3, ahead), drafted=drafted, session=session)
    assert list(ours) == plain
    assert session.length == 9 + 24
    assert 0 <= drafted.accepted <= drafted.guessed and 0 <= drafted.acceptance <= 1
    at = plain.index(plain[-1])
    stopped = llama.session(40)
    assert (
        list(llama.generate(IDS[0, :9], 25, draft=(3, ahead), stop=plain[-1:], session=stopped))
        == plain[: at + 1]
    )
    assert stopped.length == 9 + at


def test_drafts_are_distributed_as_what_they_check(llama: Any) -> None:
    counts = np.zeros((2, CONFIG.vocabulary))
    for number, draft in enumerate([None, (3, 2)]):
        sampler = llama.Sampler(temperature=3.0, top_k=5, seed=number)
        for _ in range(200):
            first, second = llama.generate(IDS[0, :3], 3, sampler=sampler, draft=draft), None
            *_, second = first
            counts[number, second] += 1
    assert np.abs(counts[0] - counts[1]).sum() / 2 < 0.25 * 200


def test_samplers_keep_to_their_limits(llama: Any) -> None:
    logits = np.log([0.5, 0.25, 0.15, 0.1])
    p = llama.Sampler(temperature=1.0).probabilities(logits)
    assert_allclose(p, [0.5, 0.25, 0.15, 0.1])
    for limit, kept in (
        ({"top_k": 2}, 2), ({"top_p": 0.5}, 1), ({"top_p": 0.6}, 2), ({"min_p": 0.3}, 3),
        ({"top_p": 0.0}, 1), ({"top_k": 9}, 4),
    ):  # fmt: skip
        p = llama.Sampler(temperature=1.0, **limit).probabilities(logits)
        assert np.count_nonzero(p) == kept and p.sum() == pytest.approx(1), limit
    again = [llama.Sampler(temperature=1.0, seed=3).choose(logits) for _ in range(3)]
    assert len(set(again)) == 1
    for wrong in ({"temperature": -1}, {"top_p": 2}, {"min_p": -1}, {"top_k": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            llama.Sampler(**wrong)


def test_the_same_in_c(llama: Any, tmp_path: Path) -> None:
    folder = Path(llama.__file__).parent
    program, source = tmp_path / "generate", ROOT / "examples" / "generate.c"
    places = [f"-I{folder}", f"-L{folder}", f"-Wl,-rpath,{folder}"]
    command = ["cc", "-Wall", "-Wextra", "-Werror", f"-DMODULE={folder.name}", *places, str(source)]
    subprocess.run([*command, f"-l{folder.name}", "-lm", "-o", str(program)], check=True)

    def tokens(ids: Any, *limits: str) -> subprocess.CompletedProcess[str]:
        words = [str(program), str(folder / "weights.safetensors"), "12", *limits]
        text = " ".join(map(str, ids))
        return subprocess.run(words, input=text, capture_output=True, text=True, check=False)

    wanted = list(llama.generate(IDS[0, :9], 12))
    assert [int(line) for line in tokens(IDS[0, :9]).stdout.split()] == wanted
    stopped = tokens(IDS[0, :9], "0", "0", "1", "0", str(wanted[3])).stdout.split()
    assert [int(line) for line in stopped] == wanted[: wanted.index(wanted[3]) + 1]
    assert len(tokens(IDS[0, :9], "1.5", "5", "0.9", "0.01").stdout.split()) == 12
    refused = tokens([10**6])
    assert refused.returncode == 1 and "outside its table" in refused.stderr


def test_models_without_caches_say_that_they_have_no_sessions(tmp_path: Path) -> None:
    from onnx_models import build, rand, save

    path = save(
        build([("MatMul", "x w", "y")], {"x": ("float32", ["n", 8])}, "y", {"w": rand(8, 8)}),
        tmp_path,
    )
    apq_tvm.compile(path, tmp_path / "plain")
    module = load_module(tmp_path / "plain")
    with pytest.raises(module.InputError, match="no caches"):
        module.session(5)
