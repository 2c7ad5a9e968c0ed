"""An existing output is never lost: no force, a full disk, no permission."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from apq_tvm.codegen.emit import emit
from apq_tvm.errors import OutputExists, OutputFailed
from apq_tvm.types import CompiledModule
from tests.e2e.module.helpers import (
    mixed_model,
    run_python,
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> CompiledModule:
    return emit(mixed_model(), tmp_path_factory.mktemp("errors") / "errors_module", {})


def contents(folder: Path) -> dict[str, bytes]:
    files = (f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    return {str(f.relative_to(folder)): f.read_bytes() for f in files}


def test_never_overwrites_without_force(mixed: CompiledModule) -> None:
    before = contents(mixed.path)
    with pytest.raises(OutputExists, match="errors_module exists already"):
        emit(mixed_model(), mixed.path, {})
    assert contents(mixed.path) == before


def test_force_replaces_a_module(mixed: CompiledModule, tmp_path: Path) -> None:
    output = shutil.copytree(mixed.path, tmp_path / "replaced")
    (output / "left behind").write_text("old")
    emit(mixed_model(), output, {"mark": 2}, force=True)
    assert json.loads((output / "manifest.json").read_text())["mark"] == 2
    assert not (output / "left behind").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["replaced"]


def test_force_spares_what_is_no_module(tmp_path: Path) -> None:
    output = tmp_path / "thesis"
    output.mkdir()
    (output / "chapter1.tex").write_text("years of work")
    with pytest.raises(OutputExists, match="not a compiled module"):
        emit(mixed_model(), output, {}, force=True)
    assert (output / "chapter1.tex").read_text() == "years of work"


@pytest.mark.parametrize("name", ["4bit", "mini-lm", "class", "a.b", "ünï", "apq"])
def test_names_that_do_not_import(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputFailed, match=name.split(".")[0]):
        emit(mixed_model(), tmp_path / name, {})


@pytest.mark.parametrize("limit", [100, pytest.param(4_000, marks=pytest.mark.all_cases)])
def test_disk_full_leaves_the_old_output(mixed: CompiledModule, tmp_path: Path, limit: int) -> None:
    """The weights, the first file and the largest, do not fit."""
    output = shutil.copytree(mixed.path, tmp_path / "kept")
    before = contents(output)
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[3])!r})
        import resource
        from pathlib import Path
        from tests.e2e.module.helpers import mixed_model
        from apq_tvm.codegen.emit import emit
        from apq_tvm.errors import OutputFailed
        scheduled = mixed_model()
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        try:
            emit(scheduled, Path({str(output)!r}), {{}}, force=True)
        except OutputFailed as error:
            print("OutputFailed", error)
        """
    done = run_python(code, tmp_path)
    assert done.stdout.startswith("OutputFailed"), done.stdout + done.stderr
    assert str(output) in done.stdout
    assert contents(output) == before
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("step", ["compile_sources", "link_library", "write_package"])
def test_disk_full_later(
    mixed: CompiledModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    import apq_tvm.codegen.emit as stage

    output = shutil.copytree(mixed.path, tmp_path / "kept")
    before = contents(output)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stage, step, full)
    with pytest.raises(OutputFailed, match=r"kept could not be written: No space left on device"):
        emit(mixed_model(), output, {}, force=True)
    assert contents(output) == before
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("words", ["-shared", "-c", "-r"])
def test_disk_full_in_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """A compiler that says the disk is full when it gets a certain option."""
    fake = tmp_path / "bin" / "fakecc"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" {words} "*) echo "No space left on device" >&2; exit 1;; esac\n'
        'exec cc "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    with pytest.raises(OutputFailed, match="No space left on device"):
        emit(mixed_model(), tmp_path / "full", {})
    assert [p.name for p in tmp_path.iterdir()] == ["bin"]


def test_no_permission(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFailed, match="could not be written"):
        emit(mixed_model(), tmp_path / "file" / "inside", {})
