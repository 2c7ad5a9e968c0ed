"""A module whose kernels use AMX asks Linux for its tiles; without them it is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, save

import apq_tvm
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.x86.profiles import tiles_given
from tests.e2e.module.helpers import run_python

pytestmark = pytest.mark.skipif(find_profile("host").arch != "x86_64", reason="AMX is of x86-64")

FILTERED = """
import ctypes, struct
code = [(0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023),
        (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(text)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, program, 0, 0) == 0
"""
"""Seccomp: arch_prctl(ARCH_REQ_XCOMP_PERM) fails by EPERM (linux/seccomp.h, linux/filter.h)."""

LOAD = """
from apq_tvm.module import load_module
module = load_module("module")
"""

RUN = """
import numpy as np
x = np.load("x.npy")
for threads in (1, 2):
    module.set_num_threads(threads)
    np.save(f"y{threads}.npy", module.run({"x": x})["y"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("amx")
    rng = np.random.default_rng(0)
    w = rng.standard_normal((96, 80)).astype(np.float32)
    x = rng.standard_normal((600, 96)).astype(np.float32)
    np.save(where / "x.npy", x)
    np.save(where / "want.npy", x @ w)
    model = build([("MatMul", "x w", "y")], {"x": ("float32", ["m", 96])}, "y", {"w": w})
    path = save(model, where)
    apq_tvm.compile(path, where / "module", scheme="W8A8", target="sapphirerapids")
    return where


def run(code: str, folder: Path) -> Any:
    return run_python(code, folder, PYTHONPATH=str(Path(apq_tvm.__file__).parents[1]))


@pytest.mark.skipif(not tiles_given(), reason="this CPU has no AMX, or Linux keeps it")
def test_a_fresh_process_has_tiles(folder: Path) -> None:
    """This one asked when it looked for its profile; another has not."""
    done = run(LOAD + RUN, folder)
    assert done.returncode == 0, done.stderr
    want = np.load(folder / "want.npy")
    for threads in (1, 2):
        y = np.load(folder / f"y{threads}.npy")
        assert np.sqrt(np.mean((y - want) ** 2)) < 0.02 * want.std()


def test_refused_tiles_are_named(folder: Path) -> None:
    done = run(FILTERED + LOAD, folder)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "needs the CPU feature a" in last and "sapphirerapids" in last
    if tiles_given():
        assert "amx_tile" in last


def test_host_is_compiled_for_without_them(folder: Path) -> None:
    code = "from apq_tvm.schedules.devices import find_profile\nprint(find_profile().features)"
    done = run(FILTERED + code, folder)
    assert done.returncode == 0, done.stderr
    assert "amx" not in done.stdout
