"""`bench static-model`: whole modules, kernel by kernel."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx_models import build, save
from typer.testing import CliRunner

import apq_tvm
from apq_tvm.bench.arm.mca import find_analyser
from apq_tvm.bench.arm.module import RUNTIME, bench_static_module
from apq_tvm.bench.trace import INSTALL, QEMU
from apq_tvm.cli.main import app
from apq_tvm.errors import ApqError, BadInput, BadTarget
from apq_tvm.schedules.devices import find_profile, linear_kernels
from tests.e2e.arm.arm_module import needs_qemu


def _lacking() -> str:
    if shutil.which(QEMU) is None:
        return f"{QEMU} is not on PATH: {INSTALL}"
    try:
        find_analyser("neoverse-n1")
    except ApqError as error:
        return str(error)
    return ""


pytestmark = [needs_qemu, pytest.mark.skipif(bool(_lacking()), reason=_lacking())]


@pytest.mark.all_cases
def test_cycles_of_kernels_add_up(words: Callable[[str], Path], tmp_path: Path) -> None:
    module = words("graviton2")
    for length in (9, 18):
        np.savez(tmp_path / f"{length}.npz", ids=np.arange(length).reshape(1, length))
    command = ["bench", "static-model", str(module), "--json", "--inputs"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "9.npz")])
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    rows = {row["kernel"]: row for row in report["kernels"]}
    assert (report["target"], report["dims"]) == ("graviton2", {"ids": [1, 9]})
    counted = sum(row["instructions"] for row in rows.values())
    assert counted == pytest.approx(report["judged_share"] * report["instructions"])
    assert 0.98 < report["judged_share"] <= 1
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    cycles = [row["cycles"] for row in report["kernels"]]
    assert cycles == sorted(cycles, reverse=True) and sum(cycles) == report["cycles"]
    fours = tuple(k.name for k in linear_kernels(find_profile("graviton2")) if k.weights == "W4")
    linear = [function for function in rows if function.startswith(fours)]
    assert linear and {"attention", "embedding", RUNTIME} < set(rows)
    # An sdot has 16 products; the smallest layer is 64x64.
    assert all(rows[name]["instructions"] > 9 * 64 * 64 / 16 for name in linear)
    longer = bench_static_module(module, inputs=tmp_path / "18.npz")
    assert longer["instructions"] > 1.5 * report["instructions"]


@pytest.mark.all_cases
def test_modules_that_cannot_be_judged_are_refused(
    words: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(BadTarget, match="time it with bench model"):
        bench_static_module(words("host"))
    model = save(build([("Relu", "x", "y")], {"x": ("float32", [4])}, "y"), tmp_path)
    apq_tvm.compile(model, tmp_path / "many", target="arm-auto")
    with pytest.raises(BadTarget, match="arm-auto is for many cores"):
        bench_static_module(tmp_path / "many")
    with pytest.raises(BadInput, match="no such folder"):
        bench_static_module(tmp_path / "none")
    with pytest.raises(BadInput, match=r"outside its table of 40 rows.*give some with --inputs"):
        bench_static_module(words("graviton2"), dims={"length": 9})
