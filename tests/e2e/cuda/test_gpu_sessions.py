"""Sessions on a GPU give the tokens that those of a processor give, and ONNX Runtime; no races."""

from __future__ import annotations

import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tiny_decoder
from numpy.testing import assert_allclose
from onnx import TensorProto, helper
from small_llama import CONFIG, small_llama

from apq_tvm import pipeline
from apq_tvm.codegen.cuda.simulator import Simulator
from apq_tvm.module import load_module
from tests.simulated_gpu import Program

ROOT = Path(__file__).resolve().parents[3]
IDS = np.random.default_rng(0).integers(0, CONFIG.vocabulary, (2, 560))
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
HALF = {"rtol": 1e-3, "atol": 4e-3}
"""A last place may round a number of 16 bits the other way; logits are up to 30."""


def built(onnx: Path, folder: Path, name: str, scheme: str, kv: str = "f32") -> tuple[Any, Any]:
    """The module of a GPU, checked for races, and the same of this machine's processor."""
    made = []
    for target, kind in (("rtx-3090", "gpu"), ("host", "cpu")):
        images = Simulator(checked=True) if kind == "gpu" else None
        options = {"scheme": scheme, "search": False, "kv": kv, "images": images}
        pipeline.compile(onnx, folder / f"{name}_{kind}", target=target, **options)
        made.append(folder / f"{name}_{kind}")
    gpu, cpu = made
    return load_module(gpu), load_module(cpu)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions")


@pytest.fixture(scope="module")
def llama(folder: Path, gpu: None) -> tuple[Any, Any]:
    """As exporters write it, in floats: quantized activations would round differences up."""
    return built(small_llama(folder / "llama.onnx"), folder, "llama", "float")


@pytest.fixture(scope="module")
def grouped(folder: Path, gpu: None) -> tuple[Any, Any]:
    """With GroupQueryAttention and a mask; caches in half the bytes."""
    return built(tiny_decoder.write(folder), folder, "grouped", "float", "f16")


@pytest.fixture(scope="module")
def bits(folder: Path, gpu: None) -> tuple[Any, Any]:
    """Its weights have 3 or 4 bits."""
    return built(small_llama(folder / "llama.onnx"), folder, "bits", "anyprec3-4")


def walk(module: Any, ids: Any) -> list[Any]:
    """Logits of a prompt in parts, steps, of what is taken back, and of a copy."""
    found = []
    with module.session(30, batch=len(ids)) as session:
        found.append(session.prefill(ids[:, :9]))
        found.append(session.prefill(ids[:, 9:14], last=3))
        found += [session.step(ids[:, at]) for at in range(14, 18)]  # 16 keys lie side by side
        other = session.fork()
        session.rewind(5)
        assert (session.length, other.length) == (13, 18)
        found.append(session.prefill(ids[:, 13:23], last=10))
        found.append(other.step(ids[:, 18]))
        session.reset()
        assert session.length == 0
        found.append(session.prefill(ids[:, :2], last=0))
        found.append(session.step(ids[:, 2]))
    return found


@pytest.mark.parametrize("name", ["llama", "grouped"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_processor_finds_the_same(name: str, batch: int, request: Any) -> None:
    gpu, cpu = request.getfixturevalue(name)
    for found, wanted in zip(walk(gpu, IDS[:batch]), walk(cpu, IDS[:batch]), strict=True):
        assert found.shape == wanted.shape
        assert_allclose(found, wanted, **(HALF if name == "grouped" else CLOSE))
    assert gpu.manifest["session"] == cpu.manifest["session"]
    of_gpu, of_cpu = (one.session(30, batch=batch).memory() for one in (gpu, cpu))
    assert of_gpu["cache"] == of_cpu["cache"]


def test_onnx_runtime_finds_the_same(llama: tuple[Any, Any], folder: Path) -> None:
    """Of a whole text at once, what a session finds token by token behind a prompt."""
    rival = onnxruntime.InferenceSession(str(folder / "llama.onnx"))
    nothing = np.zeros((1, CONFIG.kv_heads, 0, CONFIG.head_width), np.float32)
    past = {f"past_key_values.0.{kind}": nothing for kind in ("key", "value")}
    ids = IDS[:1, :140]
    (wanted,) = rival.run(["logits"], {"input_ids": ids, **past})
    session = llama[0].session(140)
    assert_allclose(session.prefill(ids, last=140)[0, 100:], wanted[0, 100:], **CLOSE)
    session.rewind(8)
    for at in range(132, 140):
        assert_allclose(session.step(int(ids[0, at])), wanted[0, at], **CLOSE)


@pytest.mark.all_cases
def test_long_prompts_are_run_in_parts(llama: tuple[Any, Any]) -> None:
    """And the keys of what comes behind them are cut, one block of threads for each part."""
    found = []
    for module in llama:
        session = module.session(530, batch=2)
        found.append([session.prefill(IDS[:, :520], last=12)])
        found[-1] += [session.step(IDS[:, at]) for at in range(520, 522)]
        assert session.length == 522
    for ours, theirs in zip(*found, strict=True):
        assert_allclose(ours, theirs, **CLOSE)


def test_only_what_is_asked_for_is_copied(llama: tuple[Any, Any]) -> None:
    """Memory of runs: a session that never asked for all logits has no room for them."""
    few, many = (llama[0].session(30) for _ in range(2))
    few.prefill(IDS[0, :30])
    many.prefill(IDS[0, :30], last=30)
    more = 28 * CONFIG.vocabulary * 4
    assert many.memory()["arena"] >= few.memory()["arena"] + more


def test_runs_with_caches_of_the_programs_own(llama: tuple[Any, Any]) -> None:
    """`run` takes caches and gives them back, as it always did."""
    found = []
    for module in llama:
        nothing = np.zeros((1, CONFIG.kv_heads, 0, CONFIG.head_width), np.float32)
        caches = {f"past_key_values.0.{kind}": nothing for kind in ("key", "value")}
        found.append([])
        for ids in (IDS[:1, :9], IDS[:1, 9:10], IDS[:1, 10:14]):
            out = module.run({"input_ids": ids, **caches})
            caches = {name: out[name.replace("past_key_values", "present")] for name in caches}
            found[-1] += [out["logits"], *caches.values()]
    for ours, theirs in zip(*found, strict=True):
        assert_allclose(ours, theirs, **CLOSE)


def test_what_fails_leaves_the_session_as_it_was(llama: tuple[Any, Any]) -> None:
    module = llama[0]
    session = module.session(20)
    wanted = session.prefill(IDS[0, :10])
    for wrong, text in (
        (lambda: session.prefill(IDS[0, :11]), "10 of at most 20 tokens, no room for 11"),
        (lambda: session.step(10**9), "outside its table"),
        (lambda: session.rewind(11), "10 tokens, of which 11"),
        (lambda: session.step(1, bits=2), "bits=2"),
    ):
        with pytest.raises(module.InputError, match=text):
            wrong()
    assert session.length == 10
    session.rewind(1)
    assert_allclose(session.step(int(IDS[0, 9])), wanted, **CLOSE)
    session.close()
    with pytest.raises(module.InputError, match="closed"):
        session.step(1)
    for tokens, batch in ((0, 1), (10**10, 1), (5, 0)):
        with pytest.raises(module.InputError, match="1 to 999999999"):
            module.session(tokens, batch=batch)


def test_tokens_and_drafts(bits: tuple[Any, Any]) -> None:
    """Greedy text is a processor's, whatever bits guessed it, and sessions at once are apart."""
    gpu, cpu = bits
    plain = list(cpu.generate(IDS[0, :9], 12))
    assert list(gpu.generate(IDS[0, :9], 12)) == plain
    assert list(gpu.generate(IDS[0, :9], 12, draft=(3, 3))) == plain
    found: dict[int, list[int]] = {}

    def one(seed: int) -> None:
        found[seed] = list(gpu.generate(IDS[0, seed : seed + 9], 4))

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {seed: list(cpu.generate(IDS[0, seed : seed + 9], 4)) for seed in range(3)}


def with_hint(path: Path) -> Path:
    """Something that a session is given once is added to every token."""
    model = onnx.load(path)
    nodes = (node for node in model.graph.node if "input_ids" in node.input)
    (gather,) = (node for node in nodes if node.op_type == "Gather")
    made = gather.output[0]
    gather.output[0] = "plain"
    index = list(model.graph.node).index(gather) + 1
    model.graph.node.insert(index, helper.make_node("Add", ["plain", "hint"], [made]))
    value = helper.make_tensor_value_info("hint", TensorProto.FLOAT, [1, 1, CONFIG.width])
    model.graph.input.append(value)
    onnx.save(model, path.with_name("hint.onnx"))
    return path.with_name("hint.onnx")


@pytest.mark.all_cases
def test_what_is_given_once(folder: Path, gpu: None, llama: tuple[Any, Any]) -> None:
    modules = built(with_hint(folder / "llama.onnx"), folder, "hint", "float")
    hint = np.random.default_rng(5).standard_normal((1, 1, CONFIG.width)).astype(np.float32)
    found = []
    for module in modules:
        session = module.session(20, given={"hint": hint})
        found.append([session.prefill(IDS[0, :6]), session.step(3), session.fork().step(4)])
        with pytest.raises(module.InputError, match="is given hint"):
            module.session(20)
    assert_allclose(*found, **CLOSE)
    plain = llama[0].session(20).prefill(IDS[0, :6])
    assert np.abs(plain - found[0][0]).max() > 0.01


@pytest.mark.all_cases
@pytest.mark.parametrize("heads, columns", [(3, 36), (1, 128)])
def test_columns_of_many_kinds(folder: Path, gpu: None, heads: int, columns: int) -> None:
    """Heads of more columns than a warp has threads share keys, in caches of half the bytes."""
    path = small_llama(folder / "wide.onnx", replace(CONFIG, width=heads * columns, heads=heads))
    ours, theirs = built(path, folder, f"wide{columns}", "float", "f16")
    for found, wanted in zip(walk(ours, IDS[:1]), walk(theirs, IDS[:1]), strict=True):
        assert_allclose(found, wanted, **HALF)


FORKED = """
import os
import numpy as np
import llama_gpu
session = llama_gpu.session(20)
before = session.prefill(np.arange(5))
child = os.fork()
if child == 0:
    try:
        session.step(1)
    except llama_gpu.RunError as error:
        os._exit(0 if "forked" in str(error) else 3)
    os._exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert session.length == 5 and np.isfinite(session.step(1)).all()
"""


def test_a_child_is_told(program: Program, folder: Path, llama: tuple[Any, Any]) -> None:
    done = program(folder, FORKED)
    assert done.returncode == 0, done.stderr


def test_the_same_in_c(
    program: Program, bits: tuple[Any, Any], driver: Path, tmp_path: Path
) -> None:
    gpu, cpu = bits
    folder = Path(gpu.__file__).parent
    made, source = tmp_path / "generate", ROOT / "examples" / "generate.c"
    places = [f"-I{folder}", f"-L{folder}", f"-Wl,-rpath,{folder}"]
    command = ["cc", "-Wall", "-Wextra", "-Werror", f"-DMODULE={folder.name}", *places, str(source)]
    subprocess.run([*command, f"-l{folder.name}", "-lm", "-o", str(made)], check=True)
    words = [str(made), str(folder / "weights.safetensors"), "12"]
    text, env = " ".join(map(str, IDS[0, :9])), {"LD_LIBRARY_PATH": str(driver)}
    done = subprocess.run(words, input=text, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == list(cpu.generate(IDS[0, :9], 12))
