"""``bench module`` and ``bench linear --device``: results come back, an emulator's times do not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_remotes import write_fakes
from typer.testing import CliRunner

from apq_tvm import pipeline
from apq_tvm.bench.emulator import COMPILERS, EMULATORS
from apq_tvm.bench.linear import write_model
from apq_tvm.cli.main import app
from apq_tvm.errors import BadInput, BadTarget
from apq_tvm.schedules.devices import find_profile
from apq_tvm.tune.devices.errand import Done
from apq_tvm.tune.devices.module_bench import profile_of, read_samples

needs_arm = pytest.mark.skipif(
    not (shutil.which(COMPILERS["aarch64"]) and shutil.which(EMULATORS["aarch64"])),
    reason="no cross compiler for 64-bit Arm, or no qemu-user",
)


def make_module(folder: Path, target: str) -> Path:
    write_model(folder / "m.onnx", np.eye(64, 32, dtype=np.float32))
    pipeline.compile(folder / "m.onnx", folder / "tiny", target=target, scheme="W8A8")
    return folder / "tiny"


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_module(tmp_path_factory.mktemp("module"), "host")


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fakes(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))


def bench(*words: str) -> Any:
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_a_module_runs_on_several_devices(module: Path) -> None:
    words = ("module", str(module), "--device", "local,ssh://pi@board,ssh://away")
    report = json.loads(
        bench(*words, "--dims", "m=3", "--seconds", "0", "--threads", "1", "--json")
    )
    local, board, away = report["devices"]
    assert report["dims"] == {"m": 3}
    for row in (local, board):
        assert row["us"] > 0 and row["rounds"] >= 5 and row["threads"] == 1
        assert row["outputs"] == [{"name": "y", "shape": [3, 64], "finite": True}]
        assert row["error"] == "" and not row["emulated"]
    assert away["us"] is None and "Connection refused" in away["error"]
    table = bench(*words, "--dims", "m=1", "--seconds", "0", "--cold")
    assert "ssh://pi@board" in table and "Connection refused" in table


def test_no_device_at_all_is_an_error(module: Path) -> None:
    words = ["bench", "module", str(module), "--device", "ssh://away", "--dims", "m=1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1 and "Connection refused" in result.stderr


@needs_arm
def test_an_emulators_times_are_not_shown(tmp_path: Path) -> None:
    made = make_module(tmp_path, "armv8.2-dotprod")
    words = ("module", str(made), "--device", "qemu://max,local", "--dims", "m=1", "--seconds", "0")
    qemu, local = json.loads(bench(*words, "--json"))["devices"]
    assert qemu["emulated"] and qemu["us"] is None and qemu["noise"] is None
    assert qemu["outputs"][0]["finite"]
    if os.uname().machine != "aarch64":
        assert "architecture" in local["error"]
    assert "times say nothing" in bench(*words)


def test_layers_are_checked_where_they_run() -> None:
    words = ("linear", "--shape", "64x64", "--m", "1,5", "--scheme", "W8A8", "--warm")
    rows = json.loads(bench(*words, "--device", "ssh://board", "--seconds", "0", "--json"))
    assert [(row["m"], row["device"]) for row in rows] == [(1, "ssh://board"), (5, "ssh://board")]
    for row in rows:
        assert row["error"] < 0.02 and row["us"] > 0 and row["gmacs"] > 0
    assert "ssh://board" in bench(*words, "--device", "ssh://board", "--seconds", "0")


def test_gpus_are_sent_elsewhere() -> None:
    profile = find_profile("h200")
    manifest = {"target": "h200", "tvm_target": dict(profile.target)}
    with pytest.raises(BadTarget, match="bench gpu --prepare"):
        profile_of(manifest)


def test_samples_are_read() -> None:
    text = "znver5\nthreads 2\nsample 4000 2\n\nsample 9000 3\n"
    with pytest.raises(BadInput, match="no times"):
        read_samples(Done("d", False, "exit", stdout="znver5\nthreads 2\n"))
    assert read_samples(Done("d", False, "exit", stdout=text)) == (2, [2.0, 3.0])
