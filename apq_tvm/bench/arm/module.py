"""Where a module for 64-bit Arm spends its cycles, without Arm: kernel by kernel.

The whole module runs under qemu-user, on one thread and warmed up; qemu counts every instruction,
and llvm-mca judges the pieces of code as for single kernels (`apq_tvm.bench.arm.static`).
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from apq_tvm.bench.arm.cost import judge
from apq_tvm.bench.arm.layer import emulated_cpu
from apq_tvm.bench.arm.mca import Analyser, find_analyser
from apq_tvm.bench.arm.static import judged_profile
from apq_tvm.bench.model import one_call
from apq_tvm.bench.module_program import ModuleProgram
from apq_tvm.bench.trace import Instruction, Symbol, check_tools, executed, symbols
from apq_tvm.errors import BadInput, BadTarget
from apq_tvm.module import ports, read_manifest
from apq_tvm.progress import Progress, Silent
from apq_tvm.types import AnyPath, Array

RUNTIME = "runtime and C library"
"""All functions that are no kernels, together."""

_KERNEL = re.compile(r"(?:__tvm_ffi_)?(.+?)_compute_|__tvm_ffi_(.+)")


def bench_static_module(
    module: AnyPath,
    *,
    batch: int = 1,
    seq: int = 128,
    dims: Mapping[str, int] | None = None,
    inputs: AnyPath | None = None,
    bits: int = 0,
    mca: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Judge a whole compiled module for a core that is not here.

    Parameters
    ----------
    module : str or path
        Folder of a module compiled for one 64-bit Arm core.
    batch, seq : int
        Sizes of symbolic dimensions by their names (`apq_tvm.bench.model.resolve_dims`).
    dims : mapping of str to int, optional
        Sizes of other symbolic dimensions.
    inputs : str or path, optional
        npz of inputs instead of made-up ones; the first call in it is run.
    bits : int
        Width chosen at run time, 0 for what the module starts with.
    mca : str
        llvm-mca, if not the usual one.
    progress : Progress, optional

    Returns
    -------
    dict
        ``module, target, model, dims, instructions, judged_share, cycles`` and ``kernels``, the
        most expensive first, with ``kernel, instructions, cycles, share`` each. `share` is of the
        cycles, `judged_share` that of the instructions that cycles are known of (the linker's jumps
        belong to no function).

    Raises
    ------
    ApqError
        The module is for another kind of machine, inputs do not fit, or qemu, the cross compiler or
        llvm-mca is missing.
    """
    progress = progress or Silent()
    manifest = read_manifest(module)
    if manifest["tvm_target"].get("mtriple", "").split("-")[0] != "aarch64":
        raise BadTarget(f"{module} is for {manifest['target']}; time it with bench model")
    profile = judged_profile(manifest["target"])
    check_tools()
    analyser = find_analyser(str(profile.target["mcpu"]), mca)
    sizes, call = one_call(ports(module, manifest), batch, seq, dims, inputs)
    with progress.stage("static", 2), tempfile.TemporaryDirectory(prefix="apq-static-") as name:
        progress.advance("run")
        program, cpu = ModuleProgram(Path(module), Path(name)), emulated_cpu(profile)
        _check_call(program, call, cpu, bits, made_up=inputs is None)
        counted = program.trace(call, cpu, bits)
        progress.advance("judge")
        code = executed(program.path, _whole(symbols(program.path)), counted)
        rows = _rows(code, analyser)
    cycles = sum(row["cycles"] for row in rows)
    return {
        "module": str(module),
        "target": profile.name,
        "model": analyser.model(),
        "dims": sizes or {key: list(array.shape) for key, array in call.items()},
        "instructions": counted.instructions,
        "judged_share": sum(row["instructions"] for row in rows) / counted.instructions,
        "cycles": cycles,
        "kernels": [row | {"share": row["cycles"] / cycles} for row in rows],
    }


def _check_call(
    program: ModuleProgram, call: Mapping[str, Array], cpu: str, bits: int, made_up: bool
) -> None:
    """Run the module once, so that refused inputs are reported as such."""
    try:
        program.run(call, cpu, bits)
    except BadInput as error:
        hint = "; made-up inputs do not fit this model, give some with --inputs" if made_up else ""
        raise BadInput(f"{error}{hint}") from error


def _whole(found: Sequence[Symbol]) -> list[Symbol]:
    """Functions with all code up to the next one: bodies of parallel loops have no names."""
    first: dict[int, Symbol] = {}
    for symbol in found:
        first.setdefault(symbol.address, symbol)
    starts = [*sorted(first), max(s.address + s.size for s in found)]
    return [Symbol(first[start].name, start, end - start) for start, end in pairwise(starts)]


def _rows(code: Sequence[Instruction], analyser: Analyser) -> list[dict[str, Any]]:
    """Instructions and cycles of every kernel."""
    by_kernel: dict[str, list[Instruction]] = defaultdict(list)
    for instruction in code:
        match = _KERNEL.fullmatch(instruction.function)
        by_kernel[(match[1] or match[2]) if match else RUNTIME].append(instruction)
    rows = []
    for kernel, own in by_kernel.items():
        count = sum(instruction.count for instruction in own)
        cycles = judge(count, own, analyser).cycles
        rows.append({"kernel": kernel, "instructions": count, "cycles": cycles})
    return sorted(rows, key=lambda row: -row["cycles"])
