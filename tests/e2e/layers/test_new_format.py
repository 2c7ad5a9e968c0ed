"""A new format is one file and a line: tried in a tree that has it, from weights to a module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

LAST = "    superblock.FAMILY,\n"
"""Line of `apq_tvm.formats.families` after which the new one comes."""


def tree_with_format(folder: Path) -> Path:
    """Links to the whole tree, the format's file, and its line in the tuple."""
    home = folder / "apq_tvm"
    (home / "formats").mkdir(parents=True)
    for part in (home, home / "formats"):
        for path in (ROOT / part.relative_to(folder)).iterdir():
            if path.name not in ("formats", "families.py", "__pycache__"):
                (part / path.name).symlink_to(path)
    (home / "formats" / "minifloat.py").symlink_to(HERE / "minifloat.py")
    text = (ROOT / "apq_tvm" / "formats" / "families.py").read_text()
    assert text.count(LAST) == 1
    text = text.replace("from apq_tvm.formats import ", "from apq_tvm.formats import minifloat, ")
    text = text.replace(LAST, f"{LAST}    minifloat.FAMILY,\n")
    (home / "formats" / "families.py").write_text(text)
    return folder


@pytest.mark.all_cases
def test_a_new_format_is_a_file_and_a_line(tmp_path: Path) -> None:
    tree = tree_with_format(tmp_path / "tree")
    homes = (tree, ROOT, ROOT / "examples", ROOT / "tests", ROOT / "tests" / "unit")
    path = os.pathsep.join(map(str, homes))
    done = subprocess.run(
        [sys.executable, HERE / "new_format_steps.py", tmp_path],
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["home"].startswith(str(tree))
    matrix, codes, module = found["matrix"], found["codes"], found["module"]
    assert matrix["bits"] == 4.5
    for before, after in (matrix["rtn"], matrix["refit"]):
        assert after < 0.95 * before
    assert codes["gptq"] < codes["rtn"]
    assert max(codes["finetune"], codes["distill"]) < codes["gptq"]
    assert "on an even grid" in codes["abq"] and "not fp4; use --learn finetune" in codes["abq"]
    assert "generic_decode" in module["kernels"]
    assert module["layout"].startswith("fp4g32r")
    assert max(module["errors"]) < 1e-5
