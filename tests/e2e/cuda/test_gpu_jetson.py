"""A Jetson's module in a C program on its processor, under qemu, with a simulated GPU beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import apq_tvm
from apq_tvm.bench.module_program import ModuleProgram
from apq_tvm.codegen.cuda.simulator import Simulator, build_driver
from apq_tvm.module import load_module
from tests.e2e.arm.arm_module import WORDS, cosine, needs_qemu, words_model

CXX = "aarch64-linux-gnu-g++"


@needs_qemu
@pytest.mark.skipif(shutil.which(CXX) is None, reason=f"{CXX} not on PATH: make arm-tools")
def test_c_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUSIM_SM", "87")
    onnx, scheme = words_model(tmp_path), "W4A8g32"
    images = Simulator(CXX)
    target = "jetson-orin-nano"
    apq_tvm.compile(onnx, tmp_path / "words", target=target, scheme=scheme, images=images)
    apq_tvm.compile(onnx, tmp_path / "here", target="x86-64", scheme=scheme)
    driver = build_driver(tmp_path, CXX).parent
    feeds = {"ids": np.random.default_rng(0).integers(0, WORDS, (2, 9))}
    program = ModuleProgram(tmp_path / "words", tmp_path, driver)
    assert program.manifest["library"]["machine"] == "aarch64"
    y = program.run(feeds)["y"]
    assert program.target == target
    assert cosine(y, load_module(tmp_path / "here").run(feeds)["y"]) > 0.9999
