"""A module that is compiled anew into its folder is what a process loads from then on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apq_tvm
from apq_tvm.module import load_module
from tests.onnx_models import build, save

X = np.ones((2, 8), np.float32)


def compile_anew(folder: Path, columns: int) -> Any:
    """A layer of so many columns, all of whose weights are that number; what ones give."""
    weight = np.full((8, columns), columns, np.float32)
    inputs = {"x": ("float32", ["n", 8])}
    onnx = save(build([("MatMul", "x w", "y")], inputs, "y", {"w": weight}), folder)
    apq_tvm.compile(onnx, folder / "again", scheme="float", force=True)
    return X @ weight


def test_a_folder_is_loaded_as_it_is_now(tmp_path: Path) -> None:
    loaded = []
    for columns in (3, 5, 4):
        wanted = compile_anew(tmp_path, columns)
        module = load_module(tmp_path / "again")
        assert load_module(tmp_path / "again") is module
        loaded.append((module, wanted))
    for module, wanted in loaded:  # the old ones go on beside it
        np.testing.assert_array_equal(module.run(x=X)["y"], wanted)


def test_a_package_that_is_imported_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for columns in (3, 5):
        wanted = compile_anew(tmp_path, columns)
        for name in [n for n in sys.modules if n.partition(".")[0] == "again"]:
            del sys.modules[name]
        np.testing.assert_array_equal(__import__("again").run(x=X)["y"], wanted)
