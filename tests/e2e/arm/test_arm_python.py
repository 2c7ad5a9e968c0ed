"""A whole package imported by an aarch64 Python with numpy, under qemu-user."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from apq_tvm.bench.emulator import EMULATORS
from apq_tvm.module import load_module
from tests.e2e.arm.arm_module import WORDS, cosine, needs_qemu

PACKAGES = ("python3-numpy", "libgomp1")
_LIB = "/usr/lib/aarch64-linux-gnu"

pytestmark = [needs_qemu, pytest.mark.slow]


@pytest.fixture(scope="module")
def arm_root(request: pytest.FixtureRequest) -> Path:
    """Debian's packages for arm64, unpacked in a folder that pytest keeps; nothing is installed."""
    cache = request.config.cache
    assert cache is not None
    folder = cache.mkdir("arm_python")
    root, work = folder / "root", folder / "work"
    if root.is_dir():
        return root
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on PATH: an aarch64 Python comes from Debian's packages")
    shutil.rmtree(work, ignore_errors=True)
    for name in ("state/lists/partial", "cache/archives/partial", "root"):
        (work / name).mkdir(parents=True)
    (work / "status").touch()
    options = (
        "APT::Architecture=arm64", "APT::Architectures=arm64", "APT::Sandbox::User=root",
        f"Dir::State={work}/state", f"Dir::State::status={work}/status", f"Dir::Cache={work}/cache",
        "Debug::NoLocking=1",
    )  # fmt: skip
    apt = ["apt-get", *(word for option in options for word in ("-o", option))]
    install = [*apt, "install", "-y", "--download-only", "--no-install-recommends", *PACKAGES]
    for command in ([*apt, "update"], install):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode != 0:
            pytest.skip(f"apt-get got no packages for arm64: {done.stderr.strip()[-300:]}")
    for package in sorted((work / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(work / "root")], check=True)
    (work / "root").rename(root)
    shutil.rmtree(work)
    return root


def run_python(root: Path, code: str, folder: Path, cpu: str = "max") -> str:
    """What a program prints in the aarch64 Python, with `folder` on its path."""
    python = sorted((root / "usr" / "bin").glob("python3.[0-9]*"))[0]
    paths = f"{_LIB}/blas:{_LIB}/lapack"
    command = [
        EMULATORS["aarch64"], "-cpu", cpu, "-L", root, "-E", f"LD_LIBRARY_PATH={paths}",
        python, "-c", textwrap.dedent(code),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.all_cases
def test_package_in_an_aarch64_python(
    arm_root: Path, words: Callable[[str], Path], tmp_path: Path
) -> None:
    for target in ("host", "arm-auto", "graviton2"):
        shutil.copytree(words(target), tmp_path / words(target).name)
    ids = np.random.default_rng(0).integers(0, WORDS, (3, 7))
    np.save(tmp_path / "ids.npy", ids)
    code = """
        import numpy as np
        import auto
        ids = np.load("ids.npy")
        auto.set_num_threads(2)
        np.save("y.npy", auto.run(ids=ids)["y"])
        assert np.array_equal(auto.run(ids=ids[::-1])["y"][::-1], np.load("y.npy"))
        try:
            auto.run(ids=ids.astype(np.int32))
        except auto.InputError as error:
            assert "int32" in str(error)
        print(auto.target(), auto.num_threads(), auto.manifest["target"])
        """
    assert run_python(arm_root, code, tmp_path) == "armv8.6-i8mm 2 arm-auto"
    here = load_module(tmp_path / "here").run(ids=ids)["y"]
    assert cosine(np.load(tmp_path / "y.npy"), here) > 0.9999

    code = """
        for name in ("here", "graviton2"):
            try:
                __import__(name)
            except Exception as error:
                print(type(error).__name__, error)
        """
    wrong, lacking = run_python(arm_root, code, tmp_path, "cortex-a72").splitlines()
    assert wrong.startswith("WrongMachine here was compiled for linux on ")
    assert "this is linux on aarch64" in wrong
    assert lacking.startswith("WrongMachine libgraviton2 needs the CPU feature asim")
