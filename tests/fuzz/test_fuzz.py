"""Every fuzzer for some seconds (all cases), what they found, and threads under TSan."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.module.helpers import mixed_model, parallel_scale
from tests.fuzz.build_c import CHECKS, HERE, OPTIONS, build, emit_sources, sized_model
from tests.fuzz.importer import _plain

SECONDS = 10

# Inputs that once were findings, by target.
FOUND = {
    # An output at an odd address and none staged before it: 0 was added to NULL.
    "run": [b"", bytes([2, 2, 4, 4])],
    "sizes": [b""],
    "load": [b"", bytes([1, 0, 0, 0, 0, 0, 0, 0, 0, 0])],
}


def check(command: list[str], **env: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.all_cases
@pytest.mark.parametrize("target", FOUND)
def test_module_under_sanitizers(target: str, tmp_path: Path) -> None:
    scheduled = sized_model(tmp_path) if target == "sizes" else mixed_model()
    module, work = emit_sources(scheduled, tmp_path)
    program = tmp_path / target
    build("load_target" if target == "load" else "run_target", work, program, [CHECKS])
    env = {**OPTIONS, "FUZZ_WEIGHTS": str(module / "weights.safetensors")}
    files = []
    for i, data in enumerate(FOUND[target]):
        files.append(tmp_path / f"found{i}")
        files[-1].write_bytes(data)
    check([str(program), "unused", "0", *map(str, files)], **env)
    assert "inputs" in check([str(program), str(tmp_path / "last"), str(SECONDS)], **env)


@pytest.mark.all_cases
def test_importer(tmp_path: Path) -> None:
    assert _plain(SECONDS, tmp_path) == 0


@pytest.mark.all_cases
@pytest.mark.parametrize("threads", ["", "openmp"])
def test_threads_do_not_race(threads: str, tmp_path: Path) -> None:
    """One handle in four threads under TSan; OpenMP's teams are threads that TSan understands."""
    # TSan needs its shadow memory where randomized addresses may already be.
    fixed = ["setarch", os.uname().machine, "-R"]
    if subprocess.run([*fixed, "true"], capture_output=True, check=False).returncode:
        pytest.skip("addresses cannot be fixed here (setarch -R)")
    module, work = emit_sources(parallel_scale(4096, 3.0), tmp_path)
    thread = ["-fsanitize=thread"]
    env = {"TSAN_OPTIONS": "halt_on_error=1", "APQ_THREADS": threads}
    if threads == "openmp":
        shim = ["cc", "-O1", "-g", *thread, "-shared", "-fPIC", str(HERE / "gomp.c")]
        subprocess.run([*shim, "-o", str(tmp_path / "libgomp.so.1"), "-lpthread"], check=True)
        env["LD_LIBRARY_PATH"] = str(tmp_path)
    build("races", work, tmp_path / "races", thread)
    weights = str(module / "weights.safetensors")
    assert check([*fixed, str(tmp_path / "races"), weights], **env) == "done\n"
