"""What the README lists is what there is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from apq_tvm.cli import app
from apq_tvm.formats import FORMATS, GROUP_SIZES
from apq_tvm.onnx_import import import_onnx
from apq_tvm.schedules.devices import PROFILES

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"^apq-tvm ([^#\n]+)", README.replace("\\\n", ""), re.MULTILINE)))


@pytest.mark.parametrize("name", [p.name for p in PROFILES])
def test_every_target_is_listed(name: str) -> None:
    assert f"`{name}`" in README


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_bits_per_weight_are_right(fmt) -> None:
    (row,) = [line for line in README.splitlines() if re.match(rf"\| `W{fmt.bits}` \(", line)]
    cells = row.split("|")[2:-1]
    assert len(cells) == len(GROUP_SIZES)
    for cell, group in zip(cells, GROUP_SIZES, strict=True):
        plain, zeros = re.findall(r"[\d.]+", cell)
        shown = float(zeros if fmt.zero_points else plain)
        assert shown == pytest.approx(fmt.block_bits(group) / group, abs=1e-3)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_options_exist(command: str) -> None:
    words = shlex.split(command)
    names = [w for w in words if not w.startswith("-")]
    names = names[:2] if names[0] == "bench" else names[:1]
    result = CliRunner().invoke(app, [*names, "--help"])
    assert result.exit_code == 0
    for option in (w for w in words if w.startswith("-")):
        assert option in result.output


def test_readme_names_every_command() -> None:
    assert {c.split()[0] for c in COMMANDS} == {
        "compile", "inspect", "explain", "eval", "bench", "targets", "formats", "calibrate",
        "codebooks", "report",
    }  # fmt: skip


@pytest.mark.model
def test_layers_that_are_named_are_the_demo_models(demo_onnx: Path) -> None:
    patterns = re.findall(r'layers=r"([^"]+)"', README)
    names = [node.name for node in import_onnx(demo_onnx).nodes if node.op == "apq.Linear"]
    assert patterns and names
    for pattern in patterns:
        assert any(re.search(pattern, name) for name in names), f"{pattern} matches none of {names}"


def test_folders_exist() -> None:
    root = Path(__file__).resolve().parents[2]
    tops = "apq_tvm|codegen|schedules|tensorize|tuning_logs"
    for path in re.findall(rf"`((?:{tops})/[\w/.]*)`", README):
        assert (root / path).exists() or path.endswith("/x.py"), path
