"""Temporary folders of killed tuners go, those of living ones stay."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from apq_tvm.tune.scratch import PREFIX, scratch_folder

HOLDS = """
import sys
from apq_tvm.tune.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "program").write_text("large")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_only_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    other = tmp_path / f"{PREFIX}file"
    other.write_text("no folder")
    command, pipe = [sys.executable, "-c", HOLDS], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        with scratch_folder() as mine:
            assert folder.is_dir() and mine.is_dir() and mine != folder
            with scratch_folder():  # nor does a process remove its own
                assert mine.is_dir()
        process.kill()
        process.wait()
    assert (folder / "program").exists() and not mine.exists()
    with scratch_folder():
        assert not folder.exists()
    assert list(tmp_path.iterdir()) == [other]


def test_links_are_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(kept)
    with scratch_folder():
        assert kept.is_dir()
