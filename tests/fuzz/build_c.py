"""The C of a module and a fuzzer's target, with sanitizers, as one program."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm import pipeline
from apq_tvm.codegen import emit as stage
from apq_tvm.codegen.package.folder import runtime_sources
from apq_tvm.types import ScheduledModel, TensorSpec

HERE = Path(__file__).parent / "c"
CHECKS = "-fsanitize=address,undefined"
FLAGS = ["-std=gnu11", "-O1", "-g1", "-fno-omit-frame-pointer", "-Wno-strict-prototypes"]
# Undefined behaviour is an end; a block of more than this is not given, as at a limit of memory.
OPTIONS = {
    "ASAN_OPTIONS": "max_allocation_size_mb=256:allocator_may_return_null=1:detect_leaks=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
}


def emit_sources(scheduled: ScheduledModel, folder: Path) -> tuple[Path, Path]:
    """Emit the module ``fuzzed``; its folder, and one with its own C and its kernels' objects."""
    work = folder / "work"
    plain = stage.link_library

    def keep(tools: Any, name: str, objects: Sequence[Path], scratch: Path, output: Path) -> None:
        shutil.copytree(scratch, work)
        plain(tools, name, objects, scratch, output)

    stage.link_library = keep
    try:
        module = stage.emit(scheduled, folder / "fuzzed", {}).path
    finally:
        stage.link_library = plain
    (work / "fuzz_specs.h").write_text(_specs(scheduled))
    return module, work


def sized_model(folder: Path) -> ScheduledModel:
    """Operators whose sizes data say, as `mixed_model` has every kind of tensor."""
    from tests import onnx_models
    from tests.e2e.sizes.test_run_sizes import GRAPHS

    nodes, inputs, outputs, weights = onnx_models.joined(GRAPHS)
    model = onnx_models.build(nodes, inputs, " ".join(outputs), weights, opset=18)
    path = onnx_models.save(model, folder)
    plan = pipeline.plan(path, scheme="float")
    return pipeline.scheduled(plan)


def _specs(scheduled: ScheduledModel) -> str:
    """The tables of ``c/run_target.c``."""
    model = scheduled.lowered.packed.plan.quantized.model
    symbols: dict[int | str, int] = {}

    def row(spec: TensorSpec, shape: Sequence[int | str]) -> str:
        dims = [~symbols.setdefault(d, len(symbols)) if isinstance(d, str) else d for d in shape]
        kind = np.dtype(spec.dtype)
        code = {"f": "kDLFloat", "i": "kDLInt", "u": "kDLUInt", "b": "kDLBool"}[kind.kind]
        sizes = ", ".join(map(str, dims)) or "0"
        return f"{{{len(spec.shape)}, {code}, {8 * kind.itemsize}, {{{sizes}}}}},\n"

    inputs = "".join(row(spec, spec.shape) for spec in model.inputs)
    outputs = "".join(row(spec, ()) for spec in model.outputs)
    return f"static const spec INPUTS[] = {{\n{inputs}}}, OUTPUTS[] = {{\n{outputs}}};\n"


def has_libfuzzer() -> bool:
    """Whether clang can link its fuzzer."""
    clang = shutil.which("clang")
    if clang is None:
        return False
    found = subprocess.run(
        [clang, "-fsanitize=fuzzer", "-x", "c", "-", "-o", "/dev/null"],
        input="int LLVMFuzzerTestOneInput(const char *d, long n) { return !d && n > 0; }",
        text=True,
        capture_output=True,
        check=False,
    )
    return found.returncode == 0


def build(target: str, work: Path, program: Path, checks: Sequence[str], cc: str = "cc") -> None:
    """Compile and link ``c/TARGET.c`` with a module's sources, its runtime and its kernels."""
    sources = [HERE / f"{target}.c", *work.glob("*.c"), *runtime_sources()]
    if "fuzzer" not in "".join(checks) and target != "races":
        sources.append(HERE / "standalone.c")
    includes = [f"-I{folder}" for folder in {HERE, work, *(s.parent for s in sources)}]
    kernels = sorted(work.glob("*kernels_*.o"))
    command = [cc, *FLAGS, *checks, *includes, *sources, *kernels]
    subprocess.run([*map(str, command), "-lm", "-ldl", "-lpthread", "-o", str(program)], check=True)
