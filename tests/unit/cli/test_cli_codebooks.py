"""``apq-tvm codebooks`` and ``compile --codebooks``: learned on one model, used on another."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from apq_tvm.cli.main import app
from apq_tvm.quantizers.codebook_file import load_codebooks
from tests.onnx_models import build, save


def model(folder: Path, seed: int, n: int, k: int) -> Path:
    w = np.random.default_rng(seed).standard_normal((k, n)).astype(np.float32)
    folder.mkdir()
    inputs = {"x": ("float32", ["rows", k])}
    return Path(save(build([("MatMul", "x w", "y")], inputs, "y", {"w": w}), folder))


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    path = folder / "books.safetensors"
    code, output = run("codebooks", model(folder / "a", 0, 64, 256), "-o", path, "--scheme", "cb2")
    assert code == 0, output
    return path


def test_file_holds_what_was_asked_for(books: Path) -> None:
    found = load_codebooks(books)
    assert {name: book.shape for name, book in found.items()} == {"cb2": (4, 4)}
    assert books.stat().st_size < 1000


def test_other_model_uses_them(books: Path, tmp_path: Path) -> None:
    other = model(tmp_path / "b", 1, 32, 128)
    words = ("compile", other, "--dry-run", "--json", "--codebooks", books)
    code, output = run(*words, "--scheme", "cb2")
    assert code == 0, output
    (layer,) = json.loads(output[output.index("{") :])["layers"]
    assert layer["scheme"] == "cb2"
    code, output = run(*words, "--scheme", "cb3")
    assert code == 1 and "no codebooks for cb3" in output and "cb2" in output


def test_refusals(books: Path, tmp_path: Path) -> None:
    first = model(tmp_path / "c", 2, 16, 64)
    assert run("codebooks", first, "-o", books)[0] == 1
    code, output = run("codebooks", first, "-o", tmp_path / "x", "--scheme", "W4A8")
    assert code == 1 and "no scheme with codebooks" in output
    missing = tmp_path / "missing"
    code, output = run("compile", first, "--dry-run", "--scheme", "cb2", "--codebooks", missing)
    assert code == 1 and "no such codebook file" in output
