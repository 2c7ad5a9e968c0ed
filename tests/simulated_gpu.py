"""Modules for GPUs run here under the driver of `apq_tvm.codegen.cuda.simulator`."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from apq_tvm.codegen.cuda.simulator import build_driver


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of our ``libcuda.so.1``."""
    if shutil.which("g++") is None:
        pytest.skip("no g++, which makes images for the simulated GPU")
    return build_driver(tmp_path_factory.mktemp("driver")).parent


@pytest.fixture(scope="session")
def gpu(driver: Path) -> None:
    """Let modules of this process find our driver: it is loaded already when they look for it."""
    ctypes.CDLL(str(driver / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)


Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def program(driver: Path) -> Program:
    """Run Python that imports modules of a folder, on a simulated GPU as the environment says."""

    def run(
        folder: Path, text: str, env: Mapping[str, str] | None = None, with_driver: bool = True
    ) -> subprocess.CompletedProcess[str]:
        path = {"LD_LIBRARY_PATH": str(driver)} if with_driver else {}
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(text)],
            cwd=folder,
            env={**os.environ, **path, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )

    return run
