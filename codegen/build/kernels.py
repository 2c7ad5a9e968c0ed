"""All kernels of a module as object files, by TVM's LLVM code generator."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tvm
from tvm.target import codegen

from apq_tvm.codegen.build.pipeline import build
from apq_tvm.codegen.build.unbuilt import unbuilt
from apq_tvm.codegen.graph.c_text import identifier

# LLVM feature → how /proc/cpuinfo spells it, for the extensions LLVM uses on its own or that
# intrinsics name. x86: Linux arch/x86/include/asm/cpufeatures.h; Arm: arch/arm64/kernel/cpuinfo.c,
# all of which runtime/machine.c knows.
CPUINFO_FLAGS = {
    "sse3": "pni",
    "ssse3": "ssse3",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "sse4a": "sse4a",
    "popcnt": "popcnt",
    "lzcnt": "abm",
    "movbe": "movbe",
    "prfchw": "3dnowprefetch",
    "bmi": "bmi1",
    "bmi2": "bmi2",
    "avx": "avx",
    "f16c": "f16c",
    "fma": "fma",
    "avx2": "avx2",
    "avxvnni": "avx_vnni",
    "gfni": "gfni",
    "vaes": "vaes",
    "vpclmulqdq": "vpclmulqdq",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512cd": "avx512cd",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512ifma": "avx512ifma",
    "avx512vbmi": "avx512vbmi",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "amx-tile": "amx_tile",
    "amx-int8": "amx_int8",
    "neon": "asimd",
    "lse": "atomics",
    "rdm": "asimdrdm",
    "complxnum": "fcma",
    "dotprod": "asimddp",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "fullfp16": "asimdhp",
    "fp16fml": "asimdfhm",
    "sha3": "sha3",
    "sve": "sve",
    "sve2": "sve2",
    "sve-bitperm": "svebitperm",
}

# Small enough to share the work among cores, large enough that an object's own overhead is lost.
_KERNELS_PER_OBJECT = 4


def cpu_flags(target: Any) -> tuple[str, ...]:
    """List what a machine must have for code built for `target` to run.

    Parameters
    ----------
    target : tvm.target.Target
        Of kind llvm.

    Returns
    -------
    tuple of str
        As ``/proc/cpuinfo`` spells them, sorted.
    """
    features = {str(f) for f in codegen.llvm_get_cpu_features(target)}
    return tuple(sorted(flag for feature, flag in CPUINFO_FLAGS.items() if feature in features))


def build_kernels(
    mod: Any,
    names: Sequence[str],
    target: Any,
    folder: Path,
    prefix: str = "",
    checked: bool = True,
    in_module: bool = False,
) -> list[Path]:
    """Compile PrimFuncs into a few object files, in parallel.

    Parameters
    ----------
    mod : tvm.IRModule
        Holds every function of `names`, scheduled.
    names : sequence of str
        Each becomes ``__tvm_ffi_{prefix}{name}``.
    target : tvm.target.Target
    folder : Path
        Receives ``{prefix}kernels_0.o`` and so on.
    prefix : str
        Tells apart kernels that are built for several targets.
    checked : bool
        Let kernels check the type, rank and dimensions of their arguments; several KB of code each.
    in_module : bool
        They will call our runtime instead of TVM's.

    Returns
    -------
    list of Path
        The object files; the same for the same kernels, however many cores there are.

    Raises
    ------
    BuildError
        A name that is not a C identifier, or TVM could not build the kernels (its message inside).
    OSError
        An object file could not be written.
    """
    for name in names:
        identifier(name)
    count = -(-len(names) // _KERNELS_PER_OBJECT)
    shares = [names[i::count] for i in range(count)]
    paths = [folder / f"{prefix}kernels_{i}.o" for i in range(count)]
    # `build` leaves the interpreter lock and keeps its state per thread.
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        options = (target, prefix, checked, in_module)
        jobs = [pool.submit(_build_object, mod, share, *options) for share in shares]
        for path, job in zip(paths, jobs, strict=True):
            path.write_bytes(job.result())
    finally:
        pool.shutdown(cancel_futures=True)  # what has not begun need not, once something failed
    return paths


def _build_object(
    mod: Any, names: Sequence[str], target: Any, prefix: str, checked: bool, in_module: bool
) -> bytes:
    """One object file. LLVM ends the process if it cannot write a file, so it gets memory."""
    functions = {
        tvm.ir.GlobalVar(prefix + n): mod[n].with_attr("global_symbol", prefix + n) for n in names
    }
    memory = os.memfd_create("apq_kernels")
    try:
        built = build(tvm.IRModule(functions), target, checked, in_module)
        built.write_to_file(f"/proc/self/fd/{memory}", "o")
        with os.fdopen(os.dup(memory), "rb") as file:
            file.seek(0)
            return file.read()
    except Exception as error:
        raise unbuilt(mod, names, error) from error
    finally:
        os.close(memory)
