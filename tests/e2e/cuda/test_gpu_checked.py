"""Races, and reads of what nobody wrote: none in modules, and one where a barrier is taken out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.codegen.cuda.simulator import Simulator
from apq_tvm.codegen.cuda.split import DeviceCode
from apq_tvm.tensorize.cuda.functions import source
from tests.onnx_models import build, rand, save
from tests.small_llama import small_llama

BARRIERS = ("__syncthreads();", "apq_warp_meet();")
"""Of a block's threads, and of a warp's where our own function is called."""


def further(*schemes: str) -> list[Any]:
    """Schemes of `make test-all` alone."""
    return [pytest.param(scheme, marks=pytest.mark.all_cases) for scheme in schemes]


WIDTH, HEADS = 256, 4


WITHOUT = """
#include <cstdlib>
static const char *const apq_without = std::getenv("APQ_WITHOUT");
__attribute__((noinline, no_sanitize("thread"))) static bool apq_meets(int number) {
  return !apq_without || std::atoi(apq_without) != number;
}
"""
"""One build is every mutant: a compile for each would cost seconds."""


@dataclass(frozen=True)
class Leaving(Simulator):
    """A checked build that leaves out the barrier whose number is in ``APQ_WITHOUT``.

    Its text is kept in `folder`; with `only` they are those of kernels whose name begins so.
    """

    folder: Path = Path()
    only: str = ""

    def barriers(self, text: str) -> list[int]:
        """Where those stand that may be left out."""
        named = r"__global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\([^;{]*\{"
        kernels = [(found.start(), found[1]) for found in re.finditer(named, text)][::-1]

        def of(at: int) -> str:
            return next((name for begin, name in kernels if begin < at), "")

        return [at for at in barriers(text) if of(at).startswith(self.only)]

    def image(self, code: DeviceCode, sm: int) -> bytes:
        text = code.source
        (self.folder / "kernels.cu").write_text(text)
        for number, at in reversed([*enumerate(self.barriers(text))]):
            text = f"{text[:at]}if (apq_meets({number})) {text[at:]}"
        return super().image(replace(code, source=WITHOUT + text), sm)


def barriers(text: str) -> list[int]:
    """Where barriers stand: of the functions of teams, which TVM writes out for every use, once."""
    header, guard = source("team").strip(), "#ifndef APQ_TEAM"
    assert guard in header

    def repeated(at: int) -> bool:
        begin = text.rfind(guard, 0, at)
        return text.find(guard) < begin and at < begin + len(header)

    return [at for at in _all(text) if not repeated(at)]


def _all(text: str) -> Iterator[int]:
    for found in re.finditer("|".join(map(re.escape, BARRIERS)), text):
        yield found.start()


def encoder(folder: Path) -> Path:
    """A table, a normalization, attention of one layer of three, a product, and their readers."""
    nodes: list[Any] = [("Gather", "table ids", "x")]
    nodes.append(("LayerNormalization", "x scale shift", "n", {"axis": -1}))
    weights = {"table": rand(50, WIDTH), "scale": rand(WIDTH), "shift": rand(WIDTH)}
    weights["wo"] = rand(WIDTH, WIDTH, seed=9) / 16
    weights["by_heads"] = np.array([0, 0, HEADS, WIDTH // HEADS], np.int64)
    weights["flat"] = np.array([0, 0, WIDTH], np.int64)
    for seed, letter in enumerate("qkv"):
        weights[f"w{letter}"] = rand(WIDTH, WIDTH, seed=seed) / 64
        perm = (0, 2, 3, 1) if letter == "k" else (0, 2, 1, 3)
        nodes.append(("MatMul", f"n w{letter}", f"{letter}1"))
        nodes.append(("Reshape", f"{letter}1 by_heads", f"{letter}2"))
        nodes.append(("Transpose", f"{letter}2", f"{letter}3", {"perm": perm}))
    nodes += [("MatMul", "q3 k3", "s"), ("Softmax", "s", "p", {"axis": -1})]
    nodes += [("MatMul", "p v3", "a4"), ("Transpose", "a4", "a3", {"perm": (0, 2, 1, 3)})]
    nodes += [("Reshape", "a3 flat", "a"), ("MatMul", "a wo", "o"), ("Add", "o n", "y")]
    nodes += [("Softmax", "y", "z", {"axis": -1}), ("ReduceSum", "y", "total", {"keepdims": 0})]
    return save(build(nodes, {"ids": ("int64", ["b", "s"])}, "y z total", weights), folder)


RUN = """
import numpy as np
import encoder
for shape in ((1, 1), (2, 5), (1, 9), (1, 130)):
    ids = np.random.default_rng(0).integers(0, 50, shape)
    assert np.isfinite(encoder.run(ids=ids)["y"]).all()
"""


MUTANTS = """
import ctypes, os
import numpy as np
for number in range({count}):
    if os.fork() == 0:
        os.environ["APQ_WITHOUT"] = str(number)
        os.dup2(os.open(f"said_{{number}}.txt", os.O_WRONLY | os.O_CREAT | os.O_EXCL), 2)
        exec({text!r})
        os._exit(0)
    os.wait()
"""
"""A process of its own for each, that loads the module itself, but neither Python nor numpy."""


def without_each(program, folder: Path, text: str, count: int) -> list[str]:
    """What `text` says on stderr without the barrier of each number."""
    done = program(folder, MUTANTS.format(count=count, text=text))
    assert done.returncode == 0, done.stderr
    return [(folder / f"said_{number}.txt").read_text() for number in range(count)]


@pytest.mark.parametrize("scheme", ["W8A8", *further("anyprec3-4", "W4zA8tg64", "float")])
def test_modules_have_no_races(program, scheme: str, tmp_path: Path) -> None:
    """At lengths around a tile, of every kind of kernel of an encoder."""
    pipeline.compile(
        encoder(tmp_path),
        tmp_path / "encoder",
        target="rtx-3090",
        scheme=scheme,
        search=False,
        images=Simulator(checked=True),
    )
    done = program(tmp_path, RUN)
    assert done.returncode == 0, done.stderr


SESSION = """
import numpy as np
import llama
ids = np.arange(260) % 40
with llama.session(260) as session:
    assert np.isfinite(session.prefill(ids[None, :259])).all()
    assert np.isfinite(session.step(ids[259:])).all()
"""


@pytest.mark.slow
@pytest.mark.parametrize("cache", further("f32", "f16"))
def test_attention_over_a_cache_needs_its_barriers(
    program, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the kernels for one query and for many, of blocks and of warps.

    On a GPU of few multiprocessors: a block passes several turns of keys.
    """
    monkeypatch.setattr("apq_tvm.schedules.cuda.operators.BLOCKS", 1 / 41)
    leaving = Leaving(checked=True, folder=tmp_path, only="cached_attention")
    options = {"target": "rtx-3090", "scheme": "float", "search": False, "kv": cache}
    path = small_llama(tmp_path / "llama.onnx")
    pipeline.compile(path, tmp_path / "llama", images=leaving, **options)
    whole = program(tmp_path, SESSION)
    assert whole.returncode == 0, whole.stderr
    text = (tmp_path / "kernels.cu").read_text()
    found = leaving.barriers(text)
    kinds = [text[at : at + 12] for at in found]
    assert kinds.count("apq_warp_mee") >= 4 and kinds.count("__syncthread") >= 6
    said = without_each(program, tmp_path, SESSION, len(found))
    for number, at in enumerate(found):
        assert "cusim: " in said[number], f"none misses the barrier at\n{text[at - 600 : at + 300]}"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A8g32", *further("W8A8", "W2A8")])
def test_every_barrier_is_needed(program, scheme: str, tmp_path: Path) -> None:
    """Without any one of them the checked build finds a race, or what nobody wrote."""
    options = {"target": "rtx-3090", "scheme": scheme, "search": False}
    leaving = Leaving(checked=True, folder=tmp_path)
    pipeline.compile(encoder(tmp_path), tmp_path / "encoder", images=leaving, **options)
    whole = program(tmp_path, RUN)
    assert whole.returncode == 0, whole.stderr
    text = (tmp_path / "kernels.cu").read_text()
    found = barriers(text)
    assert len(found) >= 7
    said = without_each(program, tmp_path, RUN, len(found))
    for number, at in enumerate(found):
        assert "cusim: " in said[number], f"none misses the barrier at\n{text[at - 600 : at + 300]}"
