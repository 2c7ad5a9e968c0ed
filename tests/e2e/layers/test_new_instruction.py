"""A new device is a row, a new instruction a file and a line: tried in a tree that has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.layers.own_tree import HERE, own_tree, replaced, run_steps


@pytest.mark.all_cases
@pytest.mark.isa("avx2")
def test_a_new_device_is_a_row_and_an_instruction_a_file_and_a_line(tmp_path: Path) -> None:
    row = '    replace(_profile("x86-64-v3", _AVX2, 32, 256, 4, _PSABI), name="toycore"),\n'
    last, first = '    _profile("x86-64", ()', "        *BITSERIAL_KERNELS,\n"
    start = "    from apq_tvm.schedules.x86.lut import LUT_KERNELS\n"
    profiles = replaced(
        "apq_tvm/schedules/x86/profiles.py",
        (last, row + last),
        (start, f"{start}    from apq_tvm.schedules.x86.toy_dot import TOY_KERNELS\n"),
        (first, f"        *TOY_KERNELS,\n{first}"),
    )
    toy = {"apq_tvm/schedules/x86/toy_dot.py": (HERE / "toy_dot.py").read_text()}
    tree = own_tree(tmp_path / "tree", profiles | toy)
    found = json.loads(run_steps(tree, "new_instruction_steps.py", tmp_path))
    assert found["home"].startswith(str(tree))
    assert found["kernels"] == ["gemv_W4A8_toydot_r8m1"]
    assert found["error"] < 0.02
