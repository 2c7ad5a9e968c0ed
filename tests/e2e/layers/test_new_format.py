"""A new format is one file and a line: tried in a tree that has it, from weights to a module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.layers.own_tree import HERE, own_tree, replaced, run_steps

pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")

LAST = "    superblock.FAMILY,\n"
"""Line of `apq_tvm.formats.families` after which the new one comes."""


def tree_with_format(folder: Path) -> Path:
    """Links to the whole tree, the format's file, and its line in the tuple."""
    start = "from apq_tvm.formats import (\n"
    families = replaced(
        "apq_tvm/formats/families.py",
        (start, f"{start}    minifloat,\n"),
        (LAST, f"{LAST}    minifloat.FAMILY,\n"),
    )
    minifloat = {"apq_tvm/formats/minifloat.py": (HERE / "minifloat.py").read_text()}
    return own_tree(folder, families | minifloat)


@pytest.mark.all_cases
def test_a_new_format_is_a_file_and_a_line(tmp_path: Path) -> None:
    tree = tree_with_format(tmp_path / "tree")
    found = json.loads(run_steps(tree, "new_format_steps.py", tmp_path))
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
