"""From C sources and the kernels' object file to ``lib<name>.so`` and ``lib<name>.a``.

Everything is first linked into one relocatable object whose internal names are made local, so that
any number of modules can be linked into one program or loaded into one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from apq_tvm.codegen.build.toolchain import Toolchain, run
from apq_tvm.errors import BuildError

# What the module's own runtime provides of TVM's; any other symbol of TVM's runtime that kernels
# call means an operation that needs TVM.
_PROVIDED = frozenset(
    {
        "TVMFFIErrorSetRaisedFromCStrParts",
        "__TVMBackendAllocWorkspace",
        "__TVMBackendFreeWorkspace",
        "__TVMBackendParallelLaunch",
        "__TVMFFIEnvModLookupFromImports",
        "__TVMFFIFunctionCall",
        "__TVMFFIHandleInitOnce",
        "__tvm_ffi__library_ctx",
    }
)
_C_FLAGS = ("-std=c11", "-fPIC", "-fwrapv", "-pthread", "-ffunction-sections")
LARGE_SOURCE = 1 << 18
"""Bytes, of a graph of some hundred kernels in one function: gcc 12 takes 36 s at -O2 for one of a
thousand and 14 s at -Og."""
_LINK_FLAGS = ("-Wl,--no-undefined", "-Wl,-z,relro", "-Wl,-z,noexecstack", "-Wl,-s")
# What templates/module.h.in declares.
API_FUNCTIONS = (
    "close",
    "context_create",
    "context_destroy",
    "device_alloc",
    "device_free",
    "device_name",
    "device_read",
    "device_write",
    "has_openmp",
    "input_rank",
    "last_error",
    "memory",
    "num_devices",
    "num_threads",
    "open",
    "open_on",
    "output_rank",
    "output_shape",
    "output_shapes",
    "result",
    "run",
    "session_context",
    "session_create",
    "session_destroy",
    "session_fork",
    "session_length",
    "session_memory",
    "session_rewind",
    "session_run",
    "session_width",
    "set_num_threads",
    "set_parallel",
    "precision",
    "profile",
    "set_precision",
    "set_profile",
    "set_stream",
    "stream",
    "run_bits",
    "verify",
    "target",
    "version",
)


def check_kernels(tools: Toolchain, kernels: Sequence[Path]) -> None:
    """Refuse kernels that call into TVM's runtime beyond what the module's own runtime provides.

    Raises
    ------
    BuildError
        Naming the functions.
    """
    foreign = set()
    if not kernels:
        return
    # Every line begins with its file's path, which may spell anything, a line's end too.
    printed = run([tools.nm, "-A", *map(str, kernels)])
    for path in kernels:
        printed = printed.replace(f"{path}:", "")
    for line in printed.splitlines():
        kind, symbol = line.split()[-2:]
        own = symbol in _PROVIDED or (kind in "TtW" and symbol.startswith("__tvm_ffi_"))
        if ("TVM" in symbol or "tvm" in symbol) and kind in "UVWvw" and not own:
            foreign.add(symbol)
    if foreign:
        raise BuildError(f"kernels call TVM runtime functions: {', '.join(sorted(foreign))}")


@contextmanager
def compile_sources(
    tools: Toolchain, sources: Sequence[Path], work: Path, folders: Sequence[str] = ()
) -> Iterator[Callable[[], list[Path]]]:
    """Compile C files while the body runs; nothing writes into `work` any more when it is left.

    Parameters
    ----------
    tools : Toolchain
    sources : sequence of Path
        Their folders are searched for headers.
    work : Path
        Folder of the object files.
    folders : sequence of str
        More to search, for what the assembler includes too.

    Yields
    ------
    callable
        Waits for the compiler and returns the object files, or raises BuildError with its output.
    """
    parents = sorted({str(s.parent) for s in sources})
    includes = [f"-I{folder}" for folder in (*parents, *folders)]
    includes += [f"-Wa,-I,{folder}" for folder in folders]
    objects = [work / f"{source.stem}.o" for source in sources]
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        jobs = [
            pool.submit(
                run, [*tools.cc, *_flags(source), *includes, "-c", str(source), "-o", str(o)]
            )
            for source, o in zip(sources, objects, strict=True)
        ]

        def wait() -> list[Path]:
            for job in jobs:
                job.result()
            return objects

        yield wait
    finally:
        pool.shutdown(cancel_futures=True)


def _flags(source: Path) -> tuple[str, ...]:
    """Of a graph what is between two kernels takes no time, unless loops of little ones repeat it.

    A graph of 30 kernels is compiled in a third of the time at -Og, and 180 small operators ran
    in 35.4 us instead of 35.8; 500 steps of an LSTM of 32 took 418 us instead of 319.
    """
    text = source.read_bytes()
    quick = source.name.startswith("graph_") and b"\n  for (" not in text
    return ("-Og" if quick or len(text) > LARGE_SOURCE else "-O2", *_C_FLAGS)


def link_library(
    tools: Toolchain, name: str, objects: Sequence[Path], work: Path, output: Path
) -> None:
    """Link object files into the shared and the static library.

    Parameters
    ----------
    tools : Toolchain
    name : str
        Exported are ``{name}_{function}`` for `API_FUNCTIONS` and nothing else.
    objects : sequence of Path
    work : Path
        Folder for intermediate files.
    output : Path
        Folder that receives ``lib{name}.so`` and ``lib{name}.a``.

    Raises
    ------
    BuildError
        The linker failed; its output is in the message.
    """
    whole, local = work / f"{name}_all.o", work / f"{name}.o"
    run([*tools.cc, "-nostdlib", "-r", *map(str, objects), "-o", str(whole)])
    keep = [f"--keep-global-symbol={name}_{function}" for function in API_FUNCTIONS]
    run([tools.objcopy, "--strip-debug", *keep, str(whole), str(local)])
    flags = ["-shared", f"-Wl,-soname,lib{name}.so", *_LINK_FLAGS, *tools.link_flags]
    shared = output / f"lib{name}.so"
    run([*tools.cc, *flags, str(local), *tools.link_libraries, "-o", str(shared)])
    run([tools.ar, "rcsD", str(output / f"lib{name}.a"), str(local)])
