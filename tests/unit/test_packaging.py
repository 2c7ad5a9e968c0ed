"""The package list, the symlinks, the pins, and the three ways to import what the wheel holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = ("tensorize", "schedules", "codegen", "tuning_logs")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> set[str]:
    """Every folder that holds Python files, by the name it is imported under."""
    found = set()
    for top in ("apq_tvm", *TOP_LEVEL):
        for folder, names, files in os.walk(ROOT / top):
            # os.walk lists symlinked folders but does not enter them
            names[:] = [n for n in names if n != "__pycache__"]
            if any(f.endswith(".py") for f in files):
                dotted = ".".join(Path(folder).relative_to(ROOT).parts)
                found.add(dotted if top == "apq_tvm" else f"apq_tvm.{dotted}")
    return found


def test_package_list_matches_the_tree() -> None:
    # a forgotten sub-package vanishes silently from the wheel
    listed = set(project()["tool"]["setuptools"]["packages"])
    assert listed == packages_on_disk()


def test_every_package_has_an_init() -> None:
    for name in packages_on_disk():
        assert (ROOT.joinpath(*name.split("."), "__init__.py")).is_file(), name


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_symlink_and_package_dir_agree(name: str) -> None:
    link = ROOT / "apq_tvm" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert project()["tool"]["setuptools"]["package-dir"][f"apq_tvm.{name}"] == name


def test_tvm_is_pinned_exactly() -> None:
    # tvm-ffi 0.1.15 segfaults in every tensorize, and pip would pick it
    dependencies = project()["project"]["dependencies"]
    assert "apache-tvm==0.27.0.post1" in dependencies
    assert "apache-tvm-ffi==0.1.14.post1" in dependencies


def test_constraints_pin_every_dependency() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    extras = project()["project"]["optional-dependencies"]
    wanted = [*project()["project"]["dependencies"], *extras["bench"], *extras["test"]]
    names = {re.split(r"[\[=<>~ ]", w)[0].lower() for w in wanted} - {"apq-tvm"}
    assert names <= pinned, names - pinned


def test_extras_are_the_promised_ones() -> None:
    assert set(project()["project"]["optional-dependencies"]) == {
        "tune",
        "calibrate",
        "bench",
        "cuda",
        "cuda13",
        "sass",
        "report",
        "test",
    }


def python(path: Path | None, *code: str) -> str:
    """Run `code` in a fresh interpreter outside the repository; `path` is its PYTHONPATH."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, env=env, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WHERE = (
    "import apq_tvm.tensorize, apq_tvm.schedules, apq_tvm.codegen, apq_tvm.codegen.layouts",
    "import apq_tvm.tuning_logs, apq_tvm.bench",
    "print(apq_tvm.tensorize.__file__)",
)


def test_import_from_the_checkout() -> None:
    assert python(ROOT, *WHERE).startswith(str(ROOT))


def test_import_as_installed() -> None:
    # in CI an editable install, which resolves through package-dir; elsewhere it may be absent
    done = subprocess.run(
        [sys.executable, "-m", "pip", "show", "-f", "apq-tvm"], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip("apq-tvm is not installed in this environment")
    assert python(None, *WHERE)


@pytest.mark.slow
def test_wheel_holds_every_package_and_imports(tmp_path: Path) -> None:
    # a copy: setuptools builds in place, and a stale build/lib would hide what is missing
    source = tmp_path / "source"
    skip = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, source, symlinks=True, ignore=skip)
    shutil.rmtree(source / "build", ignore_errors=True)
    build = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stderr
    (wheel,) = tmp_path.glob("apq_tvm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    for package in packages_on_disk():
        folder = package.replace(".", "/")
        sources = ROOT.joinpath(*package.split(".")).glob("*.*")
        for source in sources:
            assert f"{folder}/{source.name}" in names
    for log in ROOT.glob("tuning_logs/*/*.json"):
        assert f"apq_tvm/{log.relative_to(ROOT)}" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert python(tmp_path / "site", *WHERE).startswith(str(tmp_path))
