"""Compiled modules as C libraries: headers, pkg-config, CMake, static linking, exported names."""

from __future__ import annotations

import ctypes.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from apq_tvm.codegen.build.library import API_FUNCTIONS
from apq_tvm.codegen.build.toolchain import find_toolchain
from apq_tvm.codegen.emit import emit
from apq_tvm.codegen.package.folder import RUNTIME
from apq_tvm.types import CompiledModule
from tests.e2e.module.helpers import mixed_model, mixed_reference, parallel_scale, run_python

EMBED = Path(__file__).parent / "embed"
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> CompiledModule:
    return emit(mixed_model(), tmp_path_factory.mktemp("c") / "embedded", {})


def output_of(command: list[str], **env: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **env}, check=False, timeout=900
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def need(tool: str) -> str:
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not installed")
    return path


def check_output(text: str) -> None:
    x = (np.arange(16, dtype=np.float32) / 8 - 1).reshape(2, 8)
    wanted = mixed_reference(x, np.arange(6).reshape(2, 3))["y"]
    got = np.array(text.split(), np.float32).reshape(2, 24)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_pkg_config_shared(module: CompiledModule, tmp_path: Path) -> None:
    need("pkg-config")
    flags = output_of(
        ["pkg-config", "--cflags", "--libs", "embedded"], PKG_CONFIG_PATH=str(module.path)
    ).split()
    program = tmp_path / "shared"
    output_of(["cc", "-std=c11", *WARNINGS, str(EMBED / "main.c"), *flags, "-o", str(program)])
    weights = str(module.path / "weights.safetensors")
    check_output(output_of([str(program), weights], LD_LIBRARY_PATH=str(module.path)))


def test_static(module: CompiledModule, tmp_path: Path) -> None:
    need("pkg-config")
    flags = output_of(
        ["pkg-config", "--static", "--libs", "embedded"], PKG_CONFIG_PATH=str(module.path)
    ).split()
    libraries = [f for f in flags if not f.startswith("-L") and f != "-lembedded"]
    program = tmp_path / "static"
    archive = str(module.path / "libembedded.a")
    include = f"-I{module.path}"
    source = str(EMBED / "main.c")
    output_of(["cc", *WARNINGS, include, source, archive, *libraries, "-o", str(program)])
    check_output(output_of([str(program), str(module.path / "weights.safetensors")]))
    assert "embedded" not in output_of(["ldd", str(program)])


def test_null_is_an_error(module: CompiledModule, tmp_path: Path) -> None:
    program = tmp_path / "nulls"
    sources = [f"-I{module.path}", str(EMBED / "nulls.c"), str(module.path / "libembedded.a")]
    output_of(["cc", *WARNINGS, *sources, "-lm", "-ldl", "-lpthread", "-o", str(program)])
    output_of([str(program), str(module.path / "weights.safetensors")])


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module whose kernel starts threads."""
    return emit(parallel_scale(4096, 3.0), tmp_path_factory.mktemp("c") / "scaled", {}).path


OPENMP = ("-Wl,-u,GOMP_parallel", "-lgomp")
BY_OPENMP = "2 threads of OpenMP"
# glibc cannot load libgomp into a static program: it crashed in its first run.
PROGRAMS = {
    "dynamic": ((), BY_OPENMP if ctypes.util.find_library("gomp") else "2 threads"),
    "static": (("-static",), "2 threads"),
    "static-pie": (("-static-pie", "-fPIE"), "2 threads"),
    "static with OpenMP": (("-static", *OPENMP), BY_OPENMP),
    "static-pie with OpenMP": (("-static-pie", "-fPIE", *OPENMP), BY_OPENMP),
}


def embed(scaled: Path, source: str, program: Path, *options: str) -> list[str]:
    """Build one of the programs around `scaled`; its command."""
    sources = [f"-I{scaled}", str(EMBED / source), str(scaled / "libscaled.a")]
    libraries = [*options, "-lm", "-ldl", "-lpthread"]
    output_of(["cc", *WARNINGS, *sources, *libraries, "-o", str(program)])
    return [str(program), str(scaled / "weights.safetensors")]


@pytest.mark.parametrize("kind", PROGRAMS)
def test_threads_of_a_program(kind: str, scaled: Path, tmp_path: Path) -> None:
    options, by_openmp = PROGRAMS[kind]
    for library in ("libc.a", "libgomp.a"):
        if options and output_of(["cc", f"-print-file-name={library}"]).strip() == library:
            pytest.skip(f"cc has no {library}")
    command = embed(scaled, "threads.c", tmp_path / "threads", *options)
    assert output_of(command) == "2 threads\n"
    assert output_of(command, APQ_THREADS="openmp") == f"{by_openmp}\n"


def test_threads_of_the_programs_own(scaled: Path, tmp_path: Path) -> None:
    assert output_of(embed(scaled, "hooked.c", tmp_path / "hooked")) == "done\n"


def test_unloading(scaled: Path, tmp_path: Path) -> None:
    """No thread of ours is left in code that is gone."""
    program = tmp_path / "unloaded"
    source = str(EMBED / "unloaded.c")
    output_of(["cc", *WARNINGS, f"-I{scaled}", source, "-ldl", "-o", str(program)])
    library, weights = scaled / "libscaled.so", scaled / "weights.safetensors"
    assert output_of([str(program), str(library), str(weights)]) == "done\n"


@pytest.mark.slow
def test_cmake(module: CompiledModule, tmp_path: Path) -> None:
    cmake = need("cmake")
    output_of([cmake, "-S", str(EMBED), "-B", str(tmp_path), f"-Dembedded_DIR={module.path}"])
    output_of([cmake, "--build", str(tmp_path)])
    for program in ("with_shared", "with_static"):
        weights = str(module.path / "weights.safetensors")
        check_output(output_of([str(tmp_path / program), weights]))


def test_header_compiles_as_c_and_cpp(module: CompiledModule, tmp_path: Path) -> None:
    source = tmp_path / "twice.c"
    source.write_text(
        '#include "embedded.h"\n#include "embedded.h"\nint main(void) { return 0; }\n'
    )
    strict = [*WARNINGS, "-pedantic", f"-I{module.path}", "-fsyntax-only"]
    output_of(["cc", "-std=c99", *strict, str(source)])
    if shutil.which("c++"):
        output_of(["c++", "-x", "c++", "-std=c++11", *strict, str(source)])


def test_runtime_has_no_warnings(tmp_path: Path) -> None:
    for source in sorted(RUNTIME.glob("*/*.c")):
        include = f"-I{RUNTIME / 'common'}"
        output_of(
            ["cc", "-std=c11", *WARNINGS, "-O2", include, "-c", str(source), "-o", os.devnull]
        )


def test_exports_the_api_alone(module: CompiledModule) -> None:
    wanted = sorted(f"embedded_{name}" for name in API_FUNCTIONS)
    shared = output_of(["nm", "-D", "--defined-only", str(module.path / "libembedded.so")])
    assert sorted(line.split()[-1] for line in shared.splitlines()) == wanted
    static = output_of(["nm", "-g", "--defined-only", str(module.path / "libembedded.a")])
    assert sorted(line.split()[-1] for line in static.splitlines() if " " in line) == wanted
    header = (module.path / "embedded.h").read_text()
    assert all(f"{name}(" in header for name in wanted)


def test_needs_libc_and_libm_alone(module: CompiledModule) -> None:
    text = output_of(["ldd", str(module.path / "libembedded.so")])
    libraries = {line.split()[0].split("/")[-1].split(".")[0] for line in text.splitlines()}
    assert libraries <= {"linux-vdso", "libc", "libm", "libdl", "libpthread", "ld-linux-x86-64"}


def test_two_modules_in_one_program(tmp_path: Path) -> None:
    """Static libraries of two modules do not clash, although both hold a kernel of one name."""
    for name, factor in (("first", 2.0), ("second", 5.0)):
        emit(parallel_scale(64, factor), tmp_path / name, {})
    code = '#include "first.h"\n#include "second.h"\n#include <stdio.h>\n'
    body = ""
    for name in ("first", "second"):
        body += f"""
  {{
    {name}_handle *h;
    {name}_context *c;
    float x[3 * 64], y[3 * 64];
    int64_t shape[] = {{3, 64}};
    for (int i = 0; i < 3 * 64; i++) x[i] = 1;
    DLTensor in = {{x, {{kDLCPU, 0}}, 2, {{kDLFloat, 32, 1}}, shape, NULL, 0}};
    DLTensor out = {{y, {{kDLCPU, 0}}, 2, {{kDLFloat, 32, 1}}, shape, NULL, 0}};
    if ({name}_open("{tmp_path}/{name}/weights.safetensors", &h)) return 1;
    if ({name}_context_create(h, &c) || {name}_run(c, &in, &out)) return 2;
    printf("%g\\n", (double)y[100]);
    {name}_context_destroy(c);
    {name}_close(h);
  }}"""
    source = tmp_path / "both.c"
    source.write_text(f"{code}int main(void) {{{body}\n  return 0;\n}}\n")
    program = tmp_path / "both"
    parts = [f"-I{tmp_path}/{n}" for n in ("first", "second")]
    parts += [str(tmp_path / n / f"lib{n}.a") for n in ("first", "second")]
    head = ["cc", *WARNINGS, str(source)]
    output_of([*head, *parts, "-lm", "-ldl", "-lpthread", "-o", str(program)])
    assert output_of([str(program)]).split() == ["2", "5"]


def test_musl(tmp_path: Path) -> None:
    """A module for musl runs in programs of musl, and Python says why it does not load."""
    need("musl-gcc")
    tools = find_toolchain(f"{os.uname().machine}-linux-musl")
    folder = emit(mixed_model(), tmp_path / "embedded", {}, tools=tools).path
    library = str(folder / "libembedded.so")
    assert " Shared library: [libc.so]" in output_of(["readelf", "-d", library])
    assert "GLIBC" not in output_of(["readelf", "--dyn-syms", "-V", library])
    sources = [f"-I{folder}", str(EMBED / "main.c"), str(folder / "libembedded.a")]
    for options in ((), ("-static",)):
        program = tmp_path / "with_musl"
        output_of(["musl-gcc", *WARNINGS, *options, *sources, "-lm", "-o", str(program)])
        check_output(output_of([str(program), str(folder / "weights.safetensors")]))
    message = r"is linked with the C library musl, and this Python with gnu: .*--triple"
    done = run_python("import embedded", tmp_path)
    assert re.search(f"WrongMachine: .*libembedded.so cannot be loaded: .*{message}", done.stderr)


def test_clang_builds_modules_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("clang")
    monkeypatch.setenv("CC", "clang")
    built = emit(mixed_model(), tmp_path / "by_clang", {})
    assert "clang" in built.manifest["versions"]["cc"]
