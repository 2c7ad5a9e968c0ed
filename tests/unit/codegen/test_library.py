"""What kernels may call outside themselves, on object files of C functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from apq_tvm.codegen.build import library
from apq_tvm.codegen.build.library import LARGE_SOURCE, check_kernels, compile_sources
from apq_tvm.codegen.build.toolchain import Toolchain, find_toolchain, run
from apq_tvm.errors import BuildError
from apq_tvm.schedules.devices import find_profile


@pytest.fixture
def tools() -> Toolchain:
    return find_toolchain(str(find_profile("host").target["mtriple"]))


def build(tools: Toolchain, folder: Path, *callees: str) -> list[Path]:
    """One object file a called function, in a folder whose name spells TVM's, and lines of nm."""
    folder = folder / "apq.5d2tvmv3\n U TVMother: b"
    folder.mkdir()
    objects = []
    for callee in callees:
        source = folder / f"{callee}.c"
        source.write_text(
            f"extern int {callee}(void);\nint of_{callee}(void) {{ return {callee}(); }}\n"
        )
        objects.append(source.with_suffix(".o"))
        run([*tools.cc, "-c", str(source), "-o", str(objects[-1])])
    return objects


def test_what_the_module_provides(tools: Toolchain, tmp_path: Path) -> None:
    check_kernels(tools, build(tools, tmp_path, "__TVMBackendParallelLaunch", "expf"))


def test_no_kernels_call_nothing(tools: Toolchain) -> None:
    check_kernels(tools, [])


def test_runtime_functions_are_named(tools: Toolchain, tmp_path: Path) -> None:
    objects = build(tools, tmp_path, "TVMFFIFunctionCall", "expf", "TVMBackendGetFuncFromEnv")
    with pytest.raises(BuildError, match=r": TVMBackendGetFuncFromEnv, TVMFFIFunctionCall$"):
        check_kernels(tools, objects)


def test_graphs_are_compiled_with_less_effort(
    tools: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless loops repeat what is between their kernels."""
    commands: list[list[str]] = []
    monkeypatch.setattr(library, "run", commands.append)
    texts = {
        "module.c": "int x;",
        "graph_0.c": "int y;\n",
        "graph_1.c": "{\n  for (int64_t i0 = 0; i0 < (9); i0++) {\n",
        "graph_2.c": "\n  for (int64_t i0 = 0;" + " " * LARGE_SOURCE,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    with compile_sources(tools, [tmp_path / name for name in texts], tmp_path) as wait:
        wait()
    efforts = {Path(c[-3]).name: [word for word in c if word.startswith("-O")] for c in commands}
    assert efforts == {
        "module.c": ["-O2"],
        "graph_0.c": ["-Og"],
        "graph_1.c": ["-O2"],
        "graph_2.c": ["-Og"],
    }
