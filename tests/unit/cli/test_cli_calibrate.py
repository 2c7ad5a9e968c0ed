"""The command ``apq-tvm calibrate``, and compile's options that read its file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from typer.testing import CliRunner

from apq_tvm.cli.main import app

pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")


def call(*words: object, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("cli")
    np.savez(folder / "data.npz", input_ids=tiny_llama.ids(8, 16))
    return tiny_llama.write(folder), folder / "data.npz"


def test_calibrate_and_compile(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = files
    out = tmp_path / "c.safetensors"
    report = json.loads(call("calibrate", model, "--inputs", data, "-o", out, "--json")[0])
    assert report["layers"] == 15 and report["samples"] == 8
    _, errors = call("calibrate", model, "--inputs", data, "-o", out, code=1)
    assert "--force" in errors
    common = ("compile", model, "--dry-run", "--json", "--target", "znver3", "--calibration", out)
    plan = json.loads(
        call(*common, "--method", "gptq", "--scheme", "W4A8", "--target-bpw", "4.0")[0]
    )
    assert plan["bits_per_weight"] <= 4.0
    noted = [layer for layer in plan["layers"] if "gptq" in layer["note"]]
    assert noted and all("bits per weight" in layer["note"] for layer in noted)
    assert len({layer["scheme"] for layer in plan["layers"]}) > 1
    _, errors = call(*common, "--method", "learned", code=1)
    assert "--learn" in errors
    _, errors = call(*common, "--target-bpw", "0.5", code=1)
    assert "the smallest candidates take" in errors


def test_learn_writes_codes_that_compile_takes(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = files
    out = tmp_path / "c.safetensors"
    options = ("--learn", "abq", "--scheme", "W3A8", "--epochs", 2, "--no-weigh", "--json")
    report = json.loads(call("calibrate", model, "--inputs", data, "-o", out, *options)[0])
    assert report["learned"] == 14 and report["kind"] == "abq"
    assert [p.name for p in tmp_path.iterdir()] == [out.name]
    common = ("compile", model, "--dry-run", "--json", "--target", "znver3", "--calibration", out)
    plan = json.loads(call(*common, "--method", "learned", "--scheme", "W3A8")[0])
    learned = [layer["name"] for layer in plan["layers"] if "learned (abq)" in layer["note"]]
    assert sum(len(name.split("+")) for name in learned) == 14  # q, k and v are one
    _, errors = call(*common, "--method", "learned", "--scheme", "W4A8", code=1)
    assert "was learned as W3A8" in errors
    call("calibrate", model, "--inputs", data, "-o", tmp_path / "d", "--learn", "abq", code=2)


def test_tuning_goes_on_from_a_finished_file(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = files
    first, out = tmp_path / "first.safetensors", tmp_path / "c.safetensors"
    common = ("calibrate", model, "--inputs", data, "--rows", 2, "--epochs", 1, "--json")
    call(*common, "-o", first, "--learn", "abq", "--scheme", "W3A8", "--no-weigh")
    tune = ("--learn", "distill", "--scheme", "W3A8", "--method", "learned", "--statistics", first,
            "--rate", 0.002)  # fmt: skip
    report = json.loads(call(*common, "-o", out, *tune)[0])
    assert report["learned"] == 15 and report["kind"] == "distill" and report["samples"] == 8
    assert report["output"] == str(out)
    assert first.exists()
    call("calibrate", model, "--inputs", data, "-o", tmp_path / "d", "--statistics", first, code=2)


def test_statistics_without_learning_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = files
    call("calibrate", model, "--inputs", data, "-o", tmp_path / "c", "--statistics", data, code=2)
