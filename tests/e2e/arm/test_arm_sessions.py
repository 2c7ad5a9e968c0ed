"""Sessions with int8 and int4 caches on 64-bit Arm, under qemu: a library for several devices."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apq_tvm
from apq_tvm.bench.emulator import COMPILERS, EMULATORS
from apq_tvm.explain import explain
from apq_tvm.module import load_module
from tests.e2e.arm.arm_module import needs_qemu
from tests.small_llama import CONFIG, small_llama

ROOT = Path(__file__).resolve().parents[3]

pytestmark = needs_qemu


@pytest.fixture(scope="module", params=["i8", "i4"])
def llama(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[int], list[int]]:
    """A program for Arm, a prompt, and what a module of this machine makes of it."""
    folder: Path = tmp_path_factory.mktemp("arm_sessions")
    path = small_llama(folder / "llama.onnx")
    apq_tvm.compile(path, folder / "here", scheme="float", kv=request.param)
    apq_tvm.compile(path, folder / "there", scheme="float", kv=request.param, target="arm-auto")
    here: Any = load_module(folder / "here")
    ids = [int(i) for i in np.random.default_rng(0).integers(0, CONFIG.vocabulary, 21)]
    program, library = folder / "generate", folder / "there"
    source = str(ROOT / "examples" / "generate.c")
    command = [COMPILERS["aarch64"], "-static", "-DMODULE=there", f"-I{library}", source]
    end = [str(library / "libthere.a"), "-lm", "-lpthread", "-o", str(program)]
    subprocess.run([*command, *end], check=True, capture_output=True)
    return program, ids, list(here.generate(ids, 30))


@pytest.mark.parametrize("cpu", ["max", "cortex-a53"])
def test_tokens(cpu: str, llama: tuple[Path, list[int], list[int]]) -> None:
    """By sdot, and by floats."""
    program, ids, wanted = llama
    weights = str(program.parent / "there" / "weights.safetensors")
    words = [EMULATORS["aarch64"], "-cpu", cpu, str(program), weights, "30"]
    text = " ".join(map(str, ids))
    made = subprocess.run(words, input=text, capture_output=True, text=True, check=True).stdout
    assert [int(line) for line in made.split()] == wanted


def test_explanation_names_both(llama: tuple[Path, list[int], list[int]]) -> None:
    assert explain(llama[0].parent / "there")["attention"]["scores"] == ["float", "sdot"]
